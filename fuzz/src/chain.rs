//! Descriptor chains: bytes become a descriptor table, heads and memory; the real parser reads
//! every chain, on guest memory, behind rings that the input fills.
//!
//! Layout of the input: flags, number of descriptors, number of heads; descriptors of 11 bytes
//! (address, length, flags, next); heads; the rest is memory from [`DATA`] on.

use std::sync::{Mutex, MutexGuard, OnceLock};

use rtvirtio_engine::blk::{Limits, Parsed, SECTOR, SEGMENTS, Segments, chain_at, parse};
use rtvirtio_engine::memory::{GuestMem, Memory};
use rtvirtio_sched::Op;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::rings::Rings;

/// Bytes of guest memory.
const MEMORY: usize = 0x4_0000;
/// Address of the input's rest, behind the rings.
const DATA: u64 = 0x1_0000;
/// Descriptors of the queue: enough for chains longer than the offered limit.
const QUEUE: u16 = 256;
const LIMITS: Limits = Limits { size: 1 << 20, read_only: false, discard: true };

/// Zeroed memory, mapped once: mapping takes longer than parsing a chain.
fn memory() -> MutexGuard<'static, Memory> {
    static MEM: OnceLock<Mutex<Memory>> = OnceLock::new();
    // Two regions with a hole between them, for chains that end in it.
    let regions = [(GuestAddress(0), MEMORY), (GuestAddress(0x10_0000), 0x1000)];
    let mem = MEM.get_or_init(|| Mutex::new(GuestMem::anonymous(&regions).expect("two regions of memory")));
    let mem = mem.lock().expect("memory");
    for (at, len) in regions {
        mem.write_slice(&ZEROES[..len], at).expect("within memory");
    }
    mem
}

static ZEROES: [u8; MEMORY] = [0; MEMORY];

/// Parses all chains of an input.
///
/// # Panics
/// The parser accepts a range beyond the disk or the offered limits, or parses a resubmitted chain
/// differently.
pub fn play(data: &[u8]) {
    let [flags, descriptors, heads, rest @ ..] = data else { return };
    let mem = &*memory();
    let limits = Limits { read_only: flags & 1 != 0, discard: flags & 2 != 0, ..LIMITS };
    let rings = Rings::new(mem, QUEUE);
    let (table, rest) = rest.split_at((usize::from(*descriptors) * 11).min(rest.len()));
    for (i, d) in table.chunks_exact(11).enumerate() {
        // Small addresses are in memory; the last byte moves them to the ends of the address space.
        let low = u64::from(u32::from_le_bytes([d[0], d[1], d[2], d[3] & 0x3f]));
        let addr = match d[3] >> 6 {
            3 => u64::MAX - low,
            2 => 0x10_0000 + (low & 0x1fff),
            _ => low & 0x7_ffff,
        };
        let len = u32::from_le_bytes([d[4], d[5], d[6], d[7]]);
        let next = u16::from_le_bytes([d[9], d[10]]);
        rings.describe(i as u16, Descriptor::new(addr, len, u16::from(d[8]), next));
    }
    let (heads, rest) = rest.split_at(usize::from(*heads).min(rest.len()));
    let rest = &rest[..rest.len().min(MEMORY - DATA as usize)];
    mem.write_slice(rest, GuestAddress(DATA)).expect("within memory");
    let heads: Vec<u16> = heads.iter().take(usize::from(QUEUE)).map(|h| u16::from(*h)).collect();
    rings.offer(&heads);
    let mut queue = rings.queue();
    assert!(queue.is_valid(mem));
    let mut segments = Segments::default();
    let mut again = Segments::default();
    for _ in 0..heads.len() {
        let Some(chain) = queue.iter(mem).ok().and_then(|mut chains| chains.next()) else { break };
        let head = chain.head_index();
        let parsed = parse(mem, chain, &limits, &mut segments);
        let chain = chain_at(mem, GuestAddress(queue.desc_table()), queue.size(), head);
        assert_eq!(parse(mem, chain, &limits, &mut again), parsed, "made again after a restart");
        assert_eq!(again[..], segments[..]);
        assert!(segments.len() <= SEGMENTS);
        if let Ok(Parsed::Io { op, offset, len, .. }) = parsed {
            assert!(offset.checked_add(len).is_some_and(|end| end <= limits.size) && len % SECTOR == 0);
            assert!(!limits.read_only || matches!(op, Op::Read | Op::Flush));
            if op.moves_data() {
                assert_eq!(len, segments.iter().map(|s| u64::from(s.len)).sum::<u64>());
            }
            // The engine's use of them: an unmapped address is an error, never a panic.
            for s in segments.iter() {
                let found = GuestMemoryBackend::get_slices(mem, s.addr, s.len as usize);
                let _ = found.take_while(Result::is_ok).count();
            }
        }
        let _ = queue.add_used(mem, head, 0);
    }
}
