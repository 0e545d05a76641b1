use std::os::unix::fs::FileExt as _;

use vm_memory::Bytes;

use super::*;

/// Reason for which memory is refused, without what wraps it.
fn cause(refused: Result<GuestMem, MemoryError>) -> Arc<MemoryError> {
    match refused.unwrap_err() {
        MemoryError::Unusable(why) => why,
        why => Arc::new(why),
    }
}

fn memfd(seal: bool) -> File {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
    file.set_len(1 << 20).unwrap();
    if seal {
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    }
    file
}

fn region(size: u64) -> VhostUserMemoryRegion {
    VhostUserMemoryRegion {
        guest_phys_addr: 0x1_0000,
        memory_size: size,
        user_addr: 0x7f00_0000_0000,
        mmap_offset: 0,
    }
}

#[test]
fn sealed_memory_is_mapped_and_translated() {
    let mem = GuestMem::map(&[region(1 << 20)], vec![memfd(true)], Trust::None).unwrap();
    assert_eq!(mem.translate(0x7f00_0000_0010), Some(GuestAddress(0x1_0010)));
    assert_eq!(mem.translate(0x7f00_0010_0000), None);
    assert_eq!(mem.translate(0x7eff_ffff_ffff), None);
}

#[test]
fn truncatable_and_blocking_memory_is_refused() {
    let refused = GuestMem::map(&[region(1 << 20)], vec![memfd(false)], Trust::None);
    assert!(matches!(*cause(refused), MemoryError::Unsealed));
    // Larger than the file.
    assert!(matches!(
        GuestMem::map(&[region(1 << 21)], vec![memfd(true)], Trust::None),
        Err(MemoryError::Map { .. })
    ));
    // Of no file system that holds a guest's memory.
    let disk = File::open("/proc/version").unwrap();
    let refused = GuestMem::map(&[region(4096)], vec![disk], Trust::None);
    assert!(matches!(*cause(refused), MemoryError::FileSystem(_)));
    assert!(matches!(GuestMem::map(&[], Vec::new(), Trust::None), Err(MemoryError::Regions(_))));
}

/// A ring that pins so many bytes; `None` on a kernel without.
fn pinner(test: &str, most: u64) -> Option<Arc<Pinner>> {
    let pinner = Pinner::new(rtvirtio_units::Bytes(most), 0);
    if pinner.is_err() {
        rtvirtio_testkit::skip(test, "this kernel registers no buffers with io_uring");
    }
    pinner.ok().map(Arc::new)
}

#[test]
fn memory_beyond_the_configuration_is_not_touched() {
    let Some(pinner) = pinner("memory_beyond_the_configuration_is_not_touched", 2 << 20) else { return };
    let sized = |len| {
        let file = memfd(false);
        file.set_len(len).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        file
    };
    let allocated = |file: &File| rustix::fs::fstat(file).unwrap().st_blocks;
    let large = sized(4 << 20);
    let mem = GuestMem::map(&[region(4 << 20)], vec![large.try_clone().unwrap()], Trust::None).unwrap();
    let report = mem.pin(&pinner);
    let (left, why) = report.left.unwrap();
    assert!((report.pinned, left) == (0, 4 << 20) && matches!(*why, PinError::Size { .. }), "{why}");
    assert!(allocated(&large) == 0 && mem.pins().is_none());
    drop(mem);
    // A part that was pinned before there was too much stays pinned, and small ones never are.
    let mem = GuestMem::map(&[region(2 << 20)], vec![sized(2 << 20)], Trust::None).unwrap();
    assert!(mem.pin(&pinner).left.is_none());
    let slot = |at: u64, size| VhostUserMemoryRegion { guest_phys_addr: at, user_addr: at, ..region(size) };
    let mem = mem.with_region(&slot(1 << 30, 1 << 20), &sized(1 << 20), Trust::None).unwrap();
    let report = mem.pin(&pinner);
    assert!(report.pinned == 2 << 20 && report.left.is_none(), "{report:?}");
    let mem = mem.with_region(&slot(1 << 31, 4 << 20), &large, Trust::None).unwrap();
    let report = mem.pin(&pinner);
    assert_eq!((report.pinned, report.left.map(|left| left.0)), (2 << 20, Some(4 << 20)));
    assert!(allocated(&large) == 0 && mem.pins().is_some());
}

#[test]
fn a_region_that_could_not_be_pinned_is_not_tried_again() {
    let name = "a_region_that_could_not_be_pinned_is_not_tried_again";
    let Some(pinner) = pinner(name, 1 << 30) else { return };
    let file = memfd(false);
    file.set_len(2 << 20).unwrap();
    let map = || GuestMem::map(&[region(2 << 20)], vec![file.try_clone().unwrap()], Trust::Full).unwrap();
    let mem = map();
    file.set_len(0).unwrap();
    for _ in 0..2 {
        let (left, why) = mem.pin(&pinner).left.unwrap();
        assert!(left == 2 << 20 && matches!(*why, PinError::Populate(_)), "{why}");
        file.set_len(2 << 20).unwrap();
    }
    drop(mem);
    assert_eq!(map().pin(&pinner).pinned, 2 << 20, "sent anew");
}

#[test]
fn a_devices_memory_is_left_out_and_a_guests_is_not() {
    let of_device = VhostUserMemoryRegion {
        guest_phys_addr: 0xf000_0000,
        memory_size: 4_096,
        user_addr: 0x7e00_0000_0000,
        mmap_offset: 0,
    };
    let both = [region(1 << 20), of_device];
    let mem = GuestMem::map(&both, vec![memfd(true), memfd(false)], Trust::None).unwrap();
    let [left_out] = mem.left_out() else { panic!("{:?}", mem.left_out()) };
    assert!(left_out.to_string().contains("4096 bytes at 0xf0000000"), "{left_out}");
    let text = left_out.to_string();
    assert!(text.contains("seal=on") && text.contains("memory-backend-file"), "with the remedy: {text}");
    assert_eq!(mem.translate(0x7e00_0000_0000), None);
    assert!(mem.translate(0x7f00_0000_0000).is_some());
    // What is left would not be the guest's memory.
    let refused = GuestMem::map(&both, vec![memfd(false), memfd(true)], Trust::None);
    assert!(matches!(*cause(refused), MemoryError::Unsealed));
}

/// A file on tmpfs that is no memfd.
fn tmpfs_file(len: u64) -> Option<File> {
    let dir = std::path::Path::new("/dev/shm");
    let file = tempfile::tempfile_in(dir).ok()?;
    file.set_len(len).unwrap();
    let kind = rustix::fs::fstatfs(&file).unwrap().f_type as i64;
    (kind == TMPFS).then_some(file)
}

fn at(base: u64, size: u64, offset: u64) -> VhostUserMemoryRegion {
    VhostUserMemoryRegion {
        guest_phys_addr: base,
        memory_size: size,
        user_addr: 0x7f00_0000_0000 + base,
        mmap_offset: offset,
    }
}

#[test]
fn a_trusted_front_end_may_have_memory_without_a_seal() {
    let mem = GuestMem::map(&[region(1 << 20)], vec![memfd(false)], Trust::Full).unwrap();
    mem.mem.write_obj(7_u32, GuestAddress(0x1_0000)).unwrap();
    assert!(!mem.is_lost());
    for trust in [Trust::None, Trust::HugePages] {
        let refused = GuestMem::map(&[region(1 << 20)], vec![memfd(false)], trust);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("F_SEAL_SHRINK") && text.contains("`trust = true`"), "{text}");
    }
    // A disk's file may make the engine wait, whoever is trusted.
    let disk = File::open("/proc/version").unwrap();
    let refused = GuestMem::map(&[region(4096)], vec![disk], Trust::Full);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("tmpfs and hugetlbfs") && text.contains("`trust = true`"), "{text}");
    let Some(file) = tmpfs_file(1 << 20) else {
        return rtvirtio_testkit::skip("a_trusted_front_end_may_have_memory", "/dev/shm is no tmpfs");
    };
    let copy = file.try_clone().unwrap();
    let refused = GuestMem::map(&[region(1 << 20)], vec![copy], Trust::HugePages);
    assert!(matches!(*cause(refused), MemoryError::Unsealed));
    assert!(GuestMem::map(&[region(1 << 20)], vec![file], Trust::Full).is_ok());
}

#[test]
fn only_the_region_is_reached_and_not_the_pages_around_it() {
    let file = memfd(true);
    let bytes: Vec<u8> = (0..0x6000_u32).map(|i| (i % 251) as u8).collect();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    let odd = at(0x8_0010, 0x3b10, 0x1230);
    for trust in [Trust::None, Trust::HugePages] {
        let refused = GuestMem::map(&[odd], vec![file.try_clone().unwrap()], trust).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("on a page") && text.contains("`trust = true`"), "{text}");
    }
    let mem = GuestMem::map(&[odd], vec![file.try_clone().unwrap()], Trust::Full).unwrap();
    let mut all = vec![0; 0x3b10];
    mem.mem.read_slice(&mut all, GuestAddress(0x8_0010)).unwrap();
    assert_eq!(all[..], bytes[0x1230..0x1230 + 0x3b10]);
    mem.mem.write_slice(&[9; 16], GuestAddress(0x8_0010 + 0x3b00)).unwrap();
    let mut last = [0; 17];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut last, 0x1230 + 0x3b00).unwrap();
    assert_eq!((&last[..16], last[16]), (&[9; 16][..], bytes[0x1230 + 0x3b10]));
    // Bytes of the same pages before and behind it are in no guest's memory.
    for outside in [0x8_000f, 0x8_0010 + 0x3b10] {
        assert!(mem.mem.read_obj::<u8>(GuestAddress(outside)).is_err(), "{outside:#x}");
    }
    let across = mem.mem.read_slice(&mut [0; 32], GuestAddress(0x8_0010 + 0x3b00));
    assert!(across.is_err());
    let user = 0x7f00_0000_0000 + 0x8_0010;
    assert_eq!(mem.translate(user + 5), Some(GuestAddress(0x8_0015)));
    assert_eq!(mem.translate(user + 0x3b10), None);
}

#[test]
fn slots_come_and_go_and_the_others_stay() {
    let file = memfd(true);
    let mut mem = GuestMem::empty();
    for i in (0..200_u64).rev() {
        // A hole of a page behind each.
        mem = mem.with_region(&at(i * 0x2000, 0x1000, i * 0x1000), &file, Trust::None).unwrap();
    }
    for i in 0..200_u64 {
        mem.mem.write_obj(i, GuestAddress(i * 0x2000 + 8)).unwrap();
        assert_eq!(mem.translate(0x7f00_0000_0000 + i * 0x2000), Some(GuestAddress(i * 0x2000)));
        assert!(mem.mem.read_obj::<u64>(GuestAddress(i * 0x2000 + 0x1000)).is_err());
    }
    // No region may lie on another one, and none is lost by trying.
    let refused = mem.with_region(&at(0x2800, 0x1000, 0), &file, Trust::None);
    assert!(matches!(refused, Err(MemoryError::Map { .. } | MemoryError::Regions(_))));
    let refused = mem.with_region(&at(0x2000, 0x1000, 0), &file, Trust::None);
    assert!(matches!(refused, Err(MemoryError::Regions(_))));
    let before = mem;
    let after = before.without_region(&at(0x2000, 0x1000, 0)).unwrap();
    assert!(after.mem.read_obj::<u64>(GuestAddress(0x2008)).is_err());
    assert_eq!(after.translate(0x7f00_0000_2000), None);
    assert_eq!(after.mem.read_obj::<u64>(GuestAddress(0x4008)).unwrap(), 2);
    // A request that has the former table reads on.
    assert_eq!(before.mem.read_obj::<u64>(GuestAddress(0x2008)).unwrap(), 1);
    let unknown = after.without_region(&at(0x2000, 0x1000, 0));
    assert!(matches!(unknown, Err(MemoryError::Unknown { .. })));
    // Another size, or another address of the front end, is another region.
    assert!(after.without_region(&at(0x4000, 0x2000, 0)).is_err());
}

#[test]
fn slots_have_a_limit() {
    let file = memfd(true);
    let mut mem = GuestMem::empty();
    for i in 0..MEMORY_SLOTS as u64 {
        mem = mem.with_region(&at(i * 0x2000, 0x1000, 0), &file, Trust::None).unwrap();
    }
    let one_more = mem.with_region(&at(1 << 40, 0x1000, 0), &file, Trust::None);
    assert!(matches!(one_more, Err(MemoryError::Slots(_))));
    let mem = mem.without_region(&at(0, 0x1000, 0)).unwrap();
    assert!(mem.with_region(&at(1 << 40, 0x1000, 0), &file, Trust::None).is_ok());
}

#[test]
fn memory_as_large_as_ram_is_never_left_out() {
    let (ram, small, large) = (memfd(true), memfd(false), memfd(false));
    large.set_len(64 << 20).unwrap();
    let ok = at(0, 1 << 20, 0);
    let mem = GuestMem::empty().with_region(&ok, &ram, Trust::None).unwrap();
    let dimm = at(1 << 32, 64 << 20, 0);
    let text = mem.with_region(&dimm, &large, Trust::None).unwrap_err().to_string();
    assert!(text.contains("67108864 bytes at 0x100000000") && text.contains("F_SEAL_SHRINK"), "{text}");
    let device = at(1 << 33, 1 << 16, 0);
    let with_device = mem.with_region(&device, &small, Trust::None).unwrap();
    assert_eq!(with_device.left_out().len(), 1);
    assert!(with_device.mem.read_obj::<u8>(GuestAddress(1 << 33)).is_err());
    assert!(with_device.without_region(&device).unwrap().left_out().is_empty());
    // Nothing else can be used: no guest's memory is there.
    let alone = GuestMem::empty().with_region(&device, &small, Trust::None);
    assert!(matches!(*cause(alone), MemoryError::Unsealed));
    // As one table, too.
    let big = memfd(true);
    big.set_len(128 << 20).unwrap();
    let regions = [at(0, 128 << 20, 0), dimm];
    let refused = GuestMem::map(&regions, vec![big, large], Trust::None);
    assert!(matches!(refused, Err(MemoryError::TooLarge { size, .. }) if size == 64 << 20));
}

#[test]
fn memory_that_is_taken_away_is_noticed_and_ends_nothing() {
    let (file, other) = (memfd(false), memfd(false));
    let copy = file.try_clone().unwrap();
    let mem = GuestMem::map(&[region(1 << 20)], vec![copy], Trust::Full).unwrap();
    let neighbour = GuestMem::map(&[region(1 << 20)], vec![other], Trust::Full).unwrap();
    for each in [&mem, &neighbour] {
        each.mem.write_obj(7_u64, GuestAddress(0x1_2000)).unwrap();
    }
    file.set_len(0).unwrap();
    assert!(!mem.is_lost(), "nobody has looked at it");
    assert_eq!(mem.mem.read_obj::<u64>(GuestAddress(0x1_2000)).unwrap(), 0);
    assert!(mem.is_lost());
    mem.mem.write_obj(8_u64, GuestAddress(0x1_2000)).unwrap();
    assert!(!neighbour.is_lost());
    assert_eq!(neighbour.mem.read_obj::<u64>(GuestAddress(0x1_2000)).unwrap(), 7);
    // The place is another mapping's afterwards.
    drop(mem);
    let next = GuestMem::map(&[region(1 << 20)], vec![memfd(false)], Trust::Full).unwrap();
    assert!(!next.is_lost());
}

/// A sparse file may be larger than the addresses of a process, which all VMs share.
#[test]
fn the_addresses_that_one_vm_may_take_have_a_limit() {
    const TIB: u64 = 1 << 40;
    let file = memfd(true);
    file.set_len(24 * TIB).unwrap();
    let map = |size: u64| GuestMem::empty().with_region(&at(0, size, 0), &file, Trust::None);
    let first = map(24 * TIB).unwrap();
    // Each has its own TiB, whatever the others have.
    let refused = map(24 * TIB).unwrap_err();
    assert!(matches!(&refused, MemoryError::Slots(text) if text.contains("1 TiB in any case")), "{refused}");
    let second = map(TIB).unwrap();
    assert!(second.with_region(&at(TIB, 16 * TIB, 0), &file, Trust::None).is_err());
    drop(first);
    drop(second.with_region(&at(TIB, 16 * TIB, 0), &file, Trust::None).unwrap());
    drop(map(24 * TIB).unwrap());
}

/// Pages that this process has marked in a log are marked in the one that replaces it.
#[test]
fn marks_of_a_replaced_log_are_kept() {
    let files = [memfd(true), memfd(true)];
    let map = |file: &File, size| Arc::new(LogMemory::map(file, size, 0, Trust::None).unwrap());
    let new = map(&files[1], 1 << 19);
    let log = DirtyLog::default();
    assert!(log.replace(Some(map(&files[0], 1 << 20))).is_none());
    // The last one is beyond the new log.
    for address in [5 * PAGE, (1 << 27) + PAGE, 20 << 30] {
        log.mark(address, 1);
    }
    // Of another process, in a part without marks of this one.
    files[0].write_all_at(&[1], 8_192).unwrap();
    let old = log.replace(Some(Arc::clone(&new))).unwrap();
    log.mark(6 * PAGE, 1);
    new.add_marks_of(&old);
    let mut bytes = vec![0_u8; 1 << 20];
    files[1].read_exact_at(&mut bytes, 0).unwrap();
    let marked: Vec<(usize, u8)> = bytes.into_iter().enumerate().filter(|(_, bits)| *bits != 0).collect();
    assert_eq!(marked, [(0, 0b110_0000), (4_096, 0b10)]);
}
