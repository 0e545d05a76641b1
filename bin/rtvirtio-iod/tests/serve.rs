//! The process serves its configuration, and reports what it cannot serve.

mod common;

use std::time::Duration;

use common::{
    FLUSH, Iod, completion, deallocate, disk, pattern, program, range, read, request, two_disks, until,
    with_keys, write,
};
use rtvirtio_domain_client::load::{Plan, Stream, run};
use rtvirtio_domain_client::{BlkRequest, Client, Options, SharedMemory};

const BIG: Options = Options { size: 256, buffer: 1 << 20, ..Options::DEFAULT };

#[test]
fn written_data_is_read_back_by_its_own_guest_only() {
    let dir = disk(64);
    let iod = Iod::start(dir.path(), &two_disks(dir.path(), 64, "quantum = \"64KiB\""));
    let mut a = Client::connect(&dir.path().join("a"), BIG).unwrap();
    let mut b = Client::connect(&dir.path().join("b"), BIG).unwrap();
    assert_eq!((a.capacity, b.capacity), (32 << 20, 32 << 20));
    // From one sector to sixteen pieces, at offsets in both halves.
    for (i, (sector, len)) in
        [(0, 512), (7, 4_096), (128, 65_536), (1_001, 66_048), (4_096, 1 << 20)].into_iter().enumerate()
    {
        let (ours, theirs) = (pattern(i as u64, len as usize), pattern(99 + i as u64, len as usize));
        assert_eq!(request(&mut a, &write(sector, len), Some(&ours)).0, 0);
        assert_eq!(request(&mut b, &write(sector, len), Some(&theirs)).0, 0);
        assert_eq!(request(&mut a, &read(sector, len), None), (0, ours.clone()));
        assert_eq!(request(&mut b, &read(sector, len), None), (0, theirs));
        // A completed flush is on the device: the file has the same bytes.
        assert_eq!(request(&mut a, &FLUSH, None).0, 0);
        let file = std::fs::read(dir.path().join("disk")).unwrap();
        let at = sector as usize * 512;
        assert_eq!(&file[at..at + len as usize], ours);
    }
    // The end of a disk's part is the end of the disk.
    let last = (32 << 20) / 512;
    assert_eq!(request(&mut a, &read(last - 8, 4_096), None).0, 0);
    assert_eq!(request(&mut a, &read(last - 7, 4_096), None).0, 1);
    assert_eq!(request(&mut a, &write(last, 512), Some(&[0; 512])).0, 1);
    let (status, id) = request(&mut a, &BlkRequest { kind: 8, priority: 0, sector: 0, len: 20 }, None);
    assert_eq!((status, &id[..2]), (0, &b"a\0"[..]));
    let status = iod.status();
    assert!(status.contains("\"name\":\"a\"") && status.contains("\"attached\":true"), "{status}");
}

/// Zeroed and discarded ranges read as zeroes, and adjacent bytes stay.
#[test]
fn zeroes_and_discards() {
    let dir = disk(64);
    let _iod = Iod::start(dir.path(), &two_disks(dir.path(), 64, ""));
    let mut a = Client::connect(&dir.path().join("a"), BIG).unwrap();
    let data = pattern(3, 1 << 20);
    for (kind, flags) in [(13, 0), (13, 1), (11, 0)] {
        assert_eq!(request(&mut a, &write(0, 1 << 20), Some(&data)).0, 0);
        let (status, _) = request(&mut a, &deallocate(kind), Some(&range(8, 1_600, flags)));
        if status == 2 {
            eprintln!("kind {kind}: the file system of this machine does not do it");
            continue;
        }
        assert_eq!(status, 0, "kind {kind}, flags {flags}");
        let (status, got) = request(&mut a, &read(0, 1 << 20), None);
        assert_eq!(status, 0);
        let (from, to) = (8 * 512, 1_608 * 512);
        assert!(got[from..to].iter().all(|b| *b == 0), "kind {kind}, flags {flags}");
        assert!(got[..from] == data[..from] && got[to..] == data[to..]);
    }
    // Ranges beyond the end are refused.
    assert_ne!(request(&mut a, &deallocate(13), Some(&range(65_535, 2, 0))).0, 0);
}

/// Guest memory that is not aligned for direct I/O.
#[test]
fn unaligned_memory_is_served_too() {
    let dir = disk(8);
    let _iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let mut a = Client::connect(&dir.path().join("a"), BIG).unwrap();
    let mem = std::sync::Arc::clone(&a.mem);
    let data = pattern(5, 4_096);
    for (kind, direction) in [(1u32, 0u16), (0, 2)] {
        let queue = &mut a.queues[0];
        let at = queue.data(0) + 131;
        mem.write(queue.data(1), &kind.to_le_bytes());
        mem.write(queue.data(1) + 4, &[0; 12]);
        mem.write(at, &if kind == 1 { data.clone() } else { vec![0; 4_096] });
        let guest = |offset: usize| SharedMemory::BASE + offset as u64;
        queue.write_descriptor_raw(0, guest(queue.data(1)), 16, 1, 1);
        queue.write_descriptor_raw(1, guest(at), 1_000, 1 | direction, 2);
        queue.write_descriptor_raw(2, guest(at + 1_000), 3_096, 1 | direction, 3);
        queue.write_descriptor_raw(3, guest(queue.data(2)), 1, 2, 0);
        queue.add_avail(0);
        queue.notify().unwrap();
        until("a completion", || queue.pop_used_raw());
        assert_eq!(mem.byte(queue.data(2)), 0);
        assert_eq!(mem.read(at, 4_096), data);
    }
}

/// Never more than the cap, and the cap is what limits. That all of it is used holds in virtual
/// time (`core/sched`, the bucket's tests), and on a real machine it is a benchmark:
/// `rtvirtio-bench iod`.
#[test]
fn a_cap_is_kept_and_used() {
    let dir = disk(8);
    let config = with_keys(&two_disks(dir.path(), 8, ""), "a", "read_cap = { requests = \"400/s\" }\n");
    let iod = Iod::start(dir.path(), &config);
    let mut clients = [Client::connect(&dir.path().join("a"), Options::default()).unwrap()];
    let flood = Stream::reads("flood", 32, 4 << 20);
    let plan =
        Plan { warm_up: Duration::from_millis(500), length: Duration::from_secs(2), seed: 1, spin: false };
    let n = run(&mut clients, std::slice::from_ref(&flood), &plan).unwrap().remove(0).n;
    assert!(n > 0 && n <= 801 + 32, "{n}");
    let disk = iod.disk("a");
    assert!(disk["read"]["cap_hits"].as_u64().unwrap() > 0, "{disk}");
}

/// Missed kicks and late completions: every request completes.
#[test]
fn all_requests_of_many_queues_complete() {
    let dir = disk(64);
    let config = with_keys(&two_disks(dir.path(), 64, ""), "b", "queues = 4\ndepth = 40\n");
    let _iod = Iod::start(dir.path(), &config);
    let mut client =
        Client::connect(&dir.path().join("b"), Options { queues: 4, ..Options::default() }).unwrap();
    let (mut asked, mut back) = (0, 0);
    while back < 20_000 {
        for queue in &mut client.queues {
            // More requests than the VM's depth: the rest waits in the ring.
            for _ in 0..7 {
                if asked < 20_000 && queue.push(&read((asked * 8) % 60_000, 4_096)).is_some() {
                    asked += 1;
                }
            }
            queue.notify().unwrap();
            while let Some(answer) = queue.pop_used() {
                assert_eq!(answer.status, 0);
                back += 1;
            }
        }
        if asked == 20_000 && back < asked {
            for queue in &mut client.queues {
                while queue.free_slots() < usize::from(queue.size() / 3) {
                    assert_eq!(completion(queue).expect("an answer").status, 0);
                    back += 1;
                }
            }
        }
    }
    assert_eq!(asked, back);
}

#[test]
fn a_second_start_is_refused() {
    let dir = disk(8);
    let good = two_disks(dir.path(), 8, "");
    let _first = Iod::start(dir.path(), &good);
    let stderr = Iod::try_start(dir.path(), &good).err().expect("it does not start");
    assert!(stderr.contains("another"), "{stderr}");
    let help = program().arg("--help").output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("EXAMPLES"));
}

/// A truncated file is an I/O error for its guest only.
#[test]
fn a_truncated_disk_is_an_error_of_its_own_guest() {
    let (dir, other) = (disk(8), disk(8));
    let (d, o) = (dir.path().display(), other.path().display());
    let config = format!(
        "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{d}/disk\"\n\
         [[device.disk]]\nname = \"b\"\nsocket = \"{d}/b\"\npath = \"{o}/disk\"\n"
    );
    let _iod = Iod::start(dir.path(), &config);
    let mut a = Client::connect(&dir.path().join("a"), BIG).unwrap();
    let mut b = Client::connect(&dir.path().join("b"), BIG).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("disk")).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    assert_eq!(request(&mut a, &read(8_192, 4_096), None).0, 1);
    assert_eq!(request(&mut b, &read(8_192, 4_096), None).0, 0);
}

/// The examples are valid, and the document shows the same text.
#[test]
fn the_examples_are_valid() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let example = root.join("examples/iod/two-vms.toml");
    rtvirtio_domain_config::File::load(&example).unwrap();
    let text = std::fs::read_to_string(example).unwrap();
    let shown = std::fs::read_to_string(root.join("docs/reference/iod-toml.md")).unwrap();
    let (_, body) = text.split_once('\n').unwrap();
    assert!(shown.contains(body), "docs/reference/iod-toml.md shows the example as it is");
}

/// A flush holds no place in the window, but a slot in the engine: with a window of one, no request
/// is lost alongside it.
#[test]
fn flushes_of_both_vms_with_a_window_of_one() {
    let dir = disk(16);
    let config = two_disks(dir.path(), 16, "").replace("window = 4", "window = 1");
    let _iod = Iod::start(dir.path(), &config);
    let vms: Vec<_> = ["a", "b"]
        .into_iter()
        .map(|name| {
            let mut client = Client::connect(&dir.path().join(name), Options::default()).unwrap();
            std::thread::spawn(move || {
                // Moves the whole client: dropping its connection closes the disk.
                let client = &mut client;
                let queue = &mut client.queues[0];
                for round in 0..200_u64 {
                    // A write first, so that the flush has work; the second flush waits for the
                    // first.
                    for ask in [write(round % 8 * 8, 4_096), FLUSH, FLUSH, read(round % 8 * 8, 4_096)] {
                        queue.push(&ask).unwrap();
                    }
                    queue.notify().unwrap();
                    for _ in 0..4 {
                        let status = completion(queue).map(|answer| answer.status);
                        assert_eq!(status, Some(0), "{name}, round {round}");
                    }
                }
            })
        })
        .collect();
    for vm in vms {
        vm.join().unwrap();
    }
}
