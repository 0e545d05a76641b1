use proptest::prelude::*;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use super::*;

// Shared with the fuzzers.
#[path = "../../../fuzz/src/rings.rs"]
mod rings;

const LIMITS: Limits = Limits { size: 1 << 20, read_only: false, discard: true };
const NEXT: u16 = 1;
const WRITE: u16 = 2;

fn memory() -> GuestMemoryMmap<()> {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
}

fn header(mem: &GuestMemoryMmap<()>, at: u64, kind: u32, priority: u32, sector: u64) {
    mem.write_obj(kind, GuestAddress(at)).unwrap();
    mem.write_obj(priority, GuestAddress(at + 4)).unwrap();
    mem.write_obj(sector, GuestAddress(at + 8)).unwrap();
}

/// Puts a chain of (address, length, writable) into a queue and parses it.
fn read(
    mem: &GuestMemoryMmap<()>,
    parts: &[(u64, u32, bool)],
    limits: &Limits,
) -> (Result<Parsed, Malformed>, Vec<Segment>) {
    let rings = rings::Rings::new(mem, 64);
    let last = parts.len() - 1;
    for (i, (addr, len, writable)) in parts.iter().enumerate() {
        let flags = if *writable { WRITE } else { 0 } | if i < last { NEXT } else { 0 };
        rings.describe(i as u16, Descriptor::new(*addr, *len, flags, i as u16 + 1));
    }
    rings.offer(&[0]);
    let mut queue = rings.queue();
    assert!(queue.is_valid(mem));
    let chain = queue.iter(mem).unwrap().next().unwrap();
    let head = chain.head_index();
    let mut segments = Segments::default();
    let parsed = parse(mem, chain, limits, &mut segments);
    // A resubmitted request parses the same after a restart.
    let mut again = Segments::default();
    let chain = chain_at(mem, GuestAddress(queue.desc_table()), queue.size(), head);
    assert_eq!(parse(mem, chain, limits, &mut again), parsed);
    assert_eq!(again[..], segments[..]);
    (parsed, segments.to_vec())
}

const H: u64 = 0x2_0000;
const D: u64 = 0x3_0000;
const S: u64 = 0x4_0000;

#[test]
fn a_linux_read_is_parsed() {
    let mem = memory();
    header(&mem, H, 0, 1 << 13, 8);
    let (parsed, segments) =
        read(&mem, &[(H, 16, false), (D, 4096, true), (D + 8192, 512, true), (S, 1, true)], &LIMITS);
    assert_eq!(
        parsed,
        Ok(Parsed::Io {
            op: Op::Read,
            offset: 4096,
            len: 4608,
            priority: 1 << 13,
            unmap: false,
            status: GuestAddress(S)
        })
    );
    assert_eq!(
        segments,
        [Segment { addr: GuestAddress(D), len: 4096 }, Segment { addr: GuestAddress(D + 8192), len: 512 }]
    );
}

#[test]
fn any_framing_is_parsed() {
    let mem = memory();
    header(&mem, H, 1, 0, 0);
    // The header in two parts, data behind the second.
    let (parsed, segments) = read(&mem, &[(H, 10, false), (H + 10, 6 + 512, false), (S, 1, true)], &LIMITS);
    assert!(matches!(parsed, Ok(Parsed::Io { op: Op::Write, len: 512, .. })), "{parsed:?}");
    assert_eq!(segments, [Segment { addr: GuestAddress(H + 16), len: 512 }]);
    // The status byte behind the data.
    header(&mem, H, 0, 0, 0);
    let (parsed, segments) = read(&mem, &[(H, 16, false), (D, 513, true)], &LIMITS);
    assert!(
        matches!(parsed, Ok(Parsed::Io { op: Op::Read, len: 512, status, .. }) if status == GuestAddress(D + 512))
    );
    assert_eq!(segments, [Segment { addr: GuestAddress(D), len: 512 }]);
}

#[test]
fn requests_beyond_the_disk_or_in_partial_sectors_fail() {
    let mem = memory();
    let error = |parsed| matches!(parsed, Ok(Parsed::Refused { why, .. }) if why.code() == IO_ERROR);
    for (sector, len) in [(2047, 1024), (u64::MAX, 512), (1 << 55, 512), (0, 511), (2048, 512)] {
        header(&mem, H, 0, 0, sector);
        let (parsed, _) = read(&mem, &[(H, 16, false), (D, len, true), (S, 1, true)], &LIMITS);
        assert!(error(parsed), "{sector} {len}: {parsed:?}");
    }
    // Writes with writable data, and writes to a read-only disk.
    header(&mem, H, 1, 0, 0);
    assert!(error(read(&mem, &[(H, 16, false), (D, 512, true), (S, 1, true)], &LIMITS).0));
    let limits = Limits { read_only: true, ..LIMITS };
    assert!(error(read(&mem, &[(H, 16, false), (D, 512, false), (S, 1, true)], &limits).0));
    header(&mem, H, 0, 0, 0);
    assert!(error(read(&mem, &[(H, 16, false), (D, 512, false), (S, 1, true)], &LIMITS).0));
}

#[test]
fn malformed_chains_are_reported() {
    let mem = memory();
    header(&mem, H, 0, 0, 0);
    let of = |parts: &[(u64, u32, bool)]| read(&mem, parts, &LIMITS).0.unwrap_err();
    assert_eq!(of(&[(H, 16, false), (D, 512, false)]), Malformed::NoStatus);
    assert_eq!(of(&[(H, 16, false), (S, 0, true)]), Malformed::NoStatus);
    assert_eq!(of(&[(S, 1, true), (H, 16, false)]), Malformed::Order);
    assert_eq!(of(&[(H, 15, false), (S, 1, true)]), Malformed::Header);
    assert_eq!(of(&[(1 << 40, 16, false), (S, 1, true)]), Malformed::Memory);
    assert_eq!(of(&[(H, 16, false), (u64::MAX, 2, true)]), Malformed::Memory);
}

#[test]
fn flush_get_id_and_unknown_types() {
    let mem = memory();
    header(&mem, H, 4, 2 << 13, 0);
    assert!(matches!(
        read(&mem, &[(H, 16, false), (S, 1, true)], &LIMITS).0,
        Ok(Parsed::Io { op: Op::Flush, len: 0, priority: 0x4000, .. })
    ));
    header(&mem, H, 8, 0, 0);
    let (parsed, segments) = read(&mem, &[(H, 16, false), (D, 20, true), (S, 1, true)], &LIMITS);
    assert!(matches!(parsed, Ok(Parsed::Id { .. })));
    assert_eq!(segments.len(), 1);
    header(&mem, H, 99, 0, 0);
    assert!(matches!(
        read(&mem, &[(H, 16, false), (S, 1, true)], &LIMITS).0,
        Ok(Parsed::Refused { why: Refused::Unsupported, .. })
    ));
}

/// Firmware sets the flag of barriers, a legacy feature, in every type (SLOF).
#[test]
fn the_barrier_flag_of_a_type_asks_for_nothing() {
    let mem = memory();
    let of = |kind: u32, writable| {
        header(&mem, H, kind | 1 << 31, 1, 8);
        read(&mem, &[(H, 16, false), (D, 512, writable), (S, 1, true)], &LIMITS).0.unwrap()
    };
    assert!(matches!(of(0, true), Parsed::Io { op: Op::Read, offset: 4_096, len: 512, .. }));
    assert!(matches!(of(1, false), Parsed::Io { op: Op::Write, offset: 4_096, len: 512, .. }));
    assert!(matches!(of(8, true), Parsed::Id { .. }));
    assert!(matches!(of(99, true), Parsed::Refused { why: Refused::Unsupported, .. }));
}

/// Ranges outside of the shared memory are counted apart from those outside of the disk.
#[test]
fn requests_outside_of_the_memory_are_known_as_such() {
    let mem = memory();
    header(&mem, H, 0, 0, 0);
    let of = |parts: &[(u64, u32, bool)]| read(&mem, parts, &LIMITS).0;
    let far = 1 << 40;
    let refused = of(&[(H, 16, false), (far, 512, true), (S, 1, true)]);
    assert!(matches!(refused, Ok(Parsed::Refused { why: Refused::OutsideMemory, .. })), "{refused:?}");
    // Without a status byte the device is not accessed.
    assert_eq!(of(&[(H, 16, false), (D, 512, true), (far, 1, true)]), Err(Malformed::Memory));
    assert_eq!(of(&[(far, 16, false), (D, 512, true), (S, 1, true)]), Err(Malformed::Memory));
    header(&mem, H, 0, 0, 1 << 30);
    let refused = of(&[(H, 16, false), (D, 512, true), (S, 1, true)]);
    assert!(matches!(refused, Ok(Parsed::Refused { why: Refused::OutsideDisk, .. })), "{refused:?}");
}

#[test]
fn discards_and_zeroes() {
    let mem = memory();
    let discard = |kind, sector: u64, sectors: u32, flags: u32, limits: &Limits| {
        header(&mem, H, kind, 0, 0);
        mem.write_obj(sector, GuestAddress(D)).unwrap();
        mem.write_obj(sectors, GuestAddress(D + 8)).unwrap();
        mem.write_obj(flags, GuestAddress(D + 12)).unwrap();
        read(&mem, &[(H, 16, false), (D, 16, false), (S, 1, true)], limits).0.unwrap()
    };
    assert!(matches!(
        discard(11, 8, 16, 0, &LIMITS),
        Parsed::Io { op: Op::Discard, offset: 4096, len: 8192, unmap: false, .. }
    ));
    assert!(matches!(
        discard(13, 0, 1, 1, &LIMITS),
        Parsed::Io { op: Op::WriteZeroes, len: 512, unmap: true, .. }
    ));
    assert!(matches!(discard(11, 0, 1, 1, &LIMITS), Parsed::Refused { why: Refused::Unsupported, .. }));
    assert!(matches!(discard(13, 0, 4096, 0, &LIMITS), Parsed::Refused { why: Refused::OutsideDisk, .. }));
    assert!(matches!(discard(13, 0, u32::MAX, 0, &LIMITS), Parsed::Refused { why: Refused::Invalid, .. }));
    let none = Limits { discard: false, ..LIMITS };
    assert!(matches!(discard(11, 0, 1, 0, &none), Parsed::Refused { why: Refused::Unsupported, .. }));
    // Two ranges exceed the offered limit; a part of one is none.
    for kind in [11, 13] {
        header(&mem, H, kind, 0, 0);
        let of = |len| match read(&mem, &[(H, 16, false), (D, len, false), (S, 1, true)], &LIMITS).0 {
            Ok(Parsed::Refused { why, .. }) => why.code(),
            other => panic!("{len}: {other:?}"),
        };
        assert_eq!([32, 17, 15].map(of), [UNSUPPORTED, UNSUPPORTED, IO_ERROR]);
        let none = read(&mem, &[(H, 16, false), (S, 1, true)], &LIMITS).0;
        assert!(matches!(none, Ok(Parsed::Refused { why: Refused::Invalid, .. })), "{none:?}");
    }
}

#[test]
fn the_configuration_space_matches_the_disk() {
    let c = config_space(&LIMITS, 4, [4096; 2]);
    assert_eq!(u64::from_le_bytes(c[0..8].try_into().unwrap()), 2048);
    assert_eq!(u32::from_le_bytes(c[12..16].try_into().unwrap()), 126);
    assert_eq!(u32::from_le_bytes(c[20..24].try_into().unwrap()), 4096);
    assert_eq!(u16::from_le_bytes(c[34..36].try_into().unwrap()), 4);
    assert_eq!(c[24..28], [0, 0, 1, 0]);
    // Blocks of 512 bytes on those of 4096: 8 of them, and discards of whole ones.
    let c = config_space(&LIMITS, 4, [512, 4096]);
    assert_eq!(u32::from_le_bytes(c[20..24].try_into().unwrap()), 512);
    assert_eq!(c[24..28], [3, 0, 8, 0]);
    assert_eq!(u32::from_le_bytes(c[44..48].try_into().unwrap()), 8);
}

proptest! {
    /// For all inputs: no panic, no more segments than offered, no range beyond the disk.
    #[test]
    fn any_chain_is_completed_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 64),
        parts in prop::collection::vec((0u64..0x11_0000, prop_oneof![0u32..70_000, any::<u32>()], any::<bool>()), 1..60),
        aimed in any::<bool>(),
    ) {
        let mem = memory();
        mem.write_slice(&bytes, GuestAddress(H)).unwrap();
        let mut parts = parts;
        if aimed {
            parts[0] = (H, 16, false);
            let kind = [0u32, 1, 4, 8, 11, 13][usize::from(bytes[0]) % 6];
            mem.write_obj(kind, GuestAddress(H)).unwrap();
            mem.write_obj(u64::from(bytes[9]) << 3, GuestAddress(H + 8)).unwrap();
        }
        let (parsed, segments) = read(&mem, &parts, &LIMITS);
        prop_assert!(segments.len() <= SEGMENTS);
        if let Ok(Parsed::Io { op, offset, len, .. }) = parsed {
            prop_assert!(offset + len <= LIMITS.size && len % SECTOR == 0);
            if op.moves_data() {
                prop_assert_eq!(len, segments.iter().map(|s| u64::from(s.len)).sum::<u64>());
            } else {
                prop_assert!(segments.is_empty() || op == Op::Flush);
            }
        }
    }
}

/// Hundreds of adjacent regions, as memory slots allow: each segment of a request could walk all.
#[test]
fn data_over_more_regions_than_a_request_needs_is_refused() {
    let page = |i: u64| (GuestAddress(i * 4096), 4096);
    let pages: Vec<_> = (0..SLICES as u64 + 1).map(page).collect();
    let mem = GuestMemoryMmap::<()>::from_ranges(&pages).unwrap();
    let segment = |pages: usize| Segment { addr: GuestAddress(0), len: pages as u32 * 4096 };
    assert_eq!(check_segments(&mem, &[segment(SLICES)]), Ok(()));
    assert_eq!(check_segments(&mem, &[segment(SLICES + 1)]), Err(Refused::Invalid));
    assert_eq!(check_segments(&mem, &[segment(SLICES / 2 + 1); 2]), Err(Refused::Invalid));
    assert_eq!(check_segments(&mem, &[segment(SLICES + 2)]), Err(Refused::Invalid));
    let beyond = Segment { addr: GuestAddress((SLICES as u64 + 1) * 4096), len: 1 };
    assert_eq!(check_segments(&mem, &[beyond]), Err(Refused::OutsideMemory));
}
