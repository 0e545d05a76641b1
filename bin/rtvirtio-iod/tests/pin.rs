//! Guest memory that is pinned (`pin = "1GiB"`): requests use registered buffers, and where it
//! cannot be pinned they go as without the key.
//!
//! Disk `a` pins, and disk `b` does not unless the test says so.

mod common;

use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use common::{
    Iod, Neighbour, change_under_load, completion, disk, pattern, program, read, request, two_disks,
    with_keys, write,
};
use rtvirtio_domain_client::{Client, ClientQueue, Options, SharedMemory};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::skip;
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;

/// Requests of up to 128 KiB.
const LARGE: Options = Options { size: 1_024, buffer: 128 << 10, ..Options::DEFAULT };

const PIN: &str = "pin = \"1GiB\"\n";

struct Bed {
    dir: tempfile::TempDir,
    iod: Iod,
}

impl Bed {
    /// `None` on a kernel that cannot do it, which the process has to say.
    fn new(test: &str, keys_of_a: &str, keys_of_b: &str, limit: Option<u64>) -> Option<Self> {
        let dir = disk(64);
        let both = with_keys(&two_disks(dir.path(), 64, ""), "a", keys_of_a);
        let both = with_keys(&both, "b", keys_of_b);
        let mut command = program();
        command.stderr(Stdio::piped());
        if let Some(limit) = limit {
            let lower = move || {
                // A user's process: without the capability, and with a limit.
                let capability = rustix::thread::CapabilitySet::IPC_LOCK;
                let _ = rustix::thread::remove_capability_from_bounding_set(capability);
                let limit = rustix::process::Rlimit { current: Some(limit), maximum: Some(limit) };
                Ok(rustix::process::setrlimit(rustix::process::Resource::Memlock, limit)?)
            };
            // SAFETY: only makes system calls.
            unsafe { command.pre_exec(lower) };
        }
        let iod = Iod::with_command(dir.path(), &both, &mut command).unwrap();
        let bed = Self { dir, iod };
        if rtvirtio_engine::engine::can_pin() {
            return Some(bed);
        }
        let (_, log) = bed.iod.end();
        assert!(log.contains("`pin` has no effect here"), "{log}");
        skip(test, "io_uring of this kernel takes no registered buffers over (Linux 6.13)");
        None
    }

    fn socket(&self, disk: &str) -> PathBuf {
        self.dir.path().join(disk)
    }

    /// Bytes that the kernel counts as pinned by the process.
    fn pinned(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.iod.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    /// Waits until as much is pinned: the end of a connection is handled after the client's.
    fn wait_pinned(&self, bytes: u64) {
        wait_for(&format!("{bytes} pinned bytes"), || self.pinned() == bytes);
    }
}

/// Writes blocks of several sizes, and reads them back.
fn check_data(client: &mut Client, seed: u64) {
    check_sizes(client, seed, &[512, 4_096, 65_536, 128 << 10]);
}

fn check_sizes(client: &mut Client, seed: u64, sizes: &[u32]) {
    for (i, len) in (0..).zip(sizes.iter().copied()) {
        let data = pattern(seed + i, len as usize);
        let sector = i * 512 + seed % 8;
        assert_eq!(request(client, &write(sector, len), Some(&data)).0, 0, "{len} bytes");
        let (status, got) = request(client, &read(sector, len), None);
        assert!(status == 0 && got == data, "{len} bytes: status {status}");
    }
}

#[test]
fn pinned_memory_holds_the_same_data_and_is_given_back() {
    let Some(bed) = Bed::new("pinned_memory_holds_the_same_data", PIN, "", None) else { return };
    assert_eq!(bed.pinned(), 0);
    let mut plain = Client::connect(&bed.socket("b"), LARGE).unwrap();
    check_data(&mut plain, 1);
    assert_eq!(bed.pinned(), 0, "memory of a disk without the key");
    for round in 0..3 {
        let mut client = Client::connect(&bed.socket("a"), LARGE).unwrap();
        assert_eq!(bed.pinned(), client.mem.len().next_multiple_of(4_096) as u64);
        check_data(&mut client, round);
        // What was written is in the file.
        let data = pattern(round + 3, 128 << 10);
        let file = std::fs::read(bed.dir.path().join("disk")).unwrap();
        let at = (3 * 512 + round as usize) * 512;
        assert!(file[at..at + data.len()] == data[..]);
        drop(client);
        bed.wait_pinned(0);
    }
    check_data(&mut plain, 9);
    let disk = bed.iod.disk("a");
    assert!(disk["refused"].is_null(), "a success is no refusal: {disk}");
    let (_, log) = bed.iod.end();
    assert!(log.contains("a: ") && log.contains("of its guest's memory are pinned"), "{log}");
}

/// A front end makes this process allocate no more than the file says.
#[test]
fn memory_beyond_the_key_is_not_touched() {
    let name = "memory_beyond_the_key_is_not_touched";
    let Some(bed) = Bed::new(name, "pin = \"16MiB\"\n", "", None) else { return };
    let mut client = Client::connect(&bed.socket("a"), LARGE).unwrap();
    // SAFETY: the descriptor is open as long as the memory is.
    let file = unsafe { BorrowedFd::borrow_raw(client.mem.fd()) };
    let allocated = || rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512;
    assert!(allocated() < 16 << 20, "{}", allocated());
    assert_eq!(bed.pinned(), 0);
    check_data(&mut client, 6);
    drop(client);
    let (_, log) = bed.iod.end();
    let text = "a: 0B of its guest's memory are pinned, and ";
    assert!(log.lines().any(|l| l.contains(text) && l.ends_with("`pin` is 16MiB")), "{log}");
}

/// Requests do use the registered buffers: pages that the front end takes from its guest are the
/// buffers' even so, and what is read goes there. The documentation of `pin` warns of it.
#[test]
fn what_a_front_end_gives_back_is_lost_to_its_own_guest_only() {
    let name = "what_a_front_end_gives_back_is_lost_to_its_own_guest_only";
    let Some(bed) = Bed::new(name, PIN, "", None) else { return };
    for (disk, is_pinned) in [("a", true), ("b", false)] {
        let mut client = Client::connect(&bed.socket(disk), LARGE).unwrap();
        let data = pattern(1, 4_096);
        assert_eq!(request(&mut client, &write(0, 4_096), Some(&data)).0, 0);
        let slot = client.queues[0].push(&read(0, 4_096)).unwrap();
        let at = client.queues[0].data(slot);
        // SAFETY: the descriptor is open as long as the memory is.
        let file = unsafe { BorrowedFd::borrow_raw(client.mem.fd()) };
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, punch, at as u64, 4_096).unwrap();
        client.queues[0].notify().unwrap();
        let done = completion(&mut client.queues[0]).expect("an answer");
        assert_eq!(done.status, 0);
        let got = client.mem.read(at, 4_096);
        assert_eq!(got == data, !is_pinned, "disk {disk}");
        assert!(!is_pinned || got.iter().all(|byte| *byte == 0));
        // A connection with other memory is as before.
        drop(client);
        check_data(&mut Client::connect(&bed.socket(disk), LARGE).unwrap(), 2);
    }
}

#[test]
fn tables_change_under_load() {
    let Some(bed) = Bed::new("tables_change_under_load", PIN, "", None) else { return };
    let neighbour = Neighbour::start(bed.socket("b"));
    for slot in [0, 2 << 20] {
        let options = Options { size: 1_024, buffer: 16_384, slot, ..Options::default() };
        let mut client = Client::connect(&bed.socket("a"), options).unwrap();
        let whole = client.mem.region(0, client.mem.len());
        let own = bed.pinned();
        // The last region of several is too small to be pinned.
        assert!(own >= (client.mem.len() - slot) as u64, "{own} of {}, {slot}", client.mem.len());
        let more = SharedMemory::new(2 << 20, true).unwrap();
        let mut region = more.region(0, more.len());
        region.guest_phys_addr = 1 << 40;
        for round in 0..60 {
            change_under_load(&mut client, round, |client| {
                if slot > 0 {
                    client.raw().add_mem_region(&region).unwrap();
                    assert_eq!(bed.pinned(), own + more.len() as u64);
                    client.raw().remove_mem_region(&region).unwrap();
                } else {
                    client.raw().set_mem_table(&[whole, region]).unwrap();
                    assert_eq!(bed.pinned(), own + more.len() as u64);
                    client.raw().set_mem_table(&[whole]).unwrap();
                }
                assert_eq!(bed.pinned(), own, "what is gone is not pinned any more");
            });
        }
        // Tables that are refused leave all as it is.
        let mut overlapping = region;
        overlapping.guest_phys_addr = whole.guest_phys_addr + 4_096;
        let mut beyond = region;
        beyond.memory_size += 4_096;
        for wrong in [overlapping, beyond] {
            let refused = match slot {
                0 => client.raw().set_mem_table(&[whole, wrong]).is_err(),
                _ => client.raw().add_mem_region(&wrong).is_err(),
            };
            assert!(refused);
            assert_eq!(bed.pinned(), own);
        }
        drop(client);
        bed.wait_pinned(0);
    }
    assert!(neighbour.end().0 > 0);
}

#[test]
fn a_front_end_that_leaves_with_requests_in_flight_leaves_nothing_pinned() {
    let name = "a_front_end_that_leaves_with_requests_in_flight";
    let Some(mut bed) = Bed::new(name, "pin = \"1GiB\"\ntrust = true\n", "", None) else { return };
    let neighbour = Neighbour::start(bed.socket("b"));
    for round in 0..30_u64 {
        let options = Options { size: 1_024, buffer: 8_192, sealed: false, ..Options::default() };
        let mut client = Client::connect(&bed.socket("a"), options).unwrap();
        for n in 0..64 {
            let ask = if n % 2 == 0 { read(n * 8, 4_096) } else { write(n * 8, 4_096) };
            client.queues[0].push(&ask).unwrap();
        }
        client.queues[0].notify().unwrap();
        if round % 3 == 0 {
            // Cut off under the requests: the memory is the kernel's until they have completed.
            let mem = Arc::clone(&client.mem);
            mem.truncate().unwrap();
        }
        drop(client);
    }
    bed.wait_pinned(0);
    assert!(bed.iod.is_alive());
    check_data(&mut Client::connect(&bed.socket("a"), LARGE).unwrap(), 4);
    assert!(neighbour.end().0 > 0);
}

#[test]
fn memory_beyond_the_limit_is_not_pinned_and_served_even_so() {
    // Below what one has, and between what one and both have; all below the limit of this process.
    let small = Options { size: 1_024, buffer: 8_192, ..Options::default() };
    let one = ClientQueue::bytes(small.size, small.buffer).next_multiple_of(4_096) as u64;
    for limit in [64 << 10, one + one / 2] {
        let keys = PIN;
        let name = "memory_beyond_the_limit_is_not_pinned";
        let Some(bed) = Bed::new(name, keys, keys, Some(limit)) else { return };
        let mut a = Client::connect(&bed.socket("a"), small).unwrap();
        check_sizes(&mut a, 1, &[512, 8_192]);
        let mut b = Client::connect(&bed.socket("b"), small).unwrap();
        check_sizes(&mut b, 2, &[512, 8_192]);
        check_sizes(&mut a, 3, &[512, 8_192]);
        assert_eq!(bed.pinned(), if limit > one { one } else { 0 });
        drop((a, b));
        bed.wait_pinned(0);
        // What was given back can be used again.
        let mut b = Client::connect(&bed.socket("b"), small).unwrap();
        check_sizes(&mut b, 5, &[512, 8_192]);
        assert_eq!(bed.pinned(), if limit > one { one } else { 0 });
        drop(b);
        let (_, log) = bed.iod.end();
        let told = |disk: &str| {
            let text = format!("{disk}: 0B of its guest's memory are pinned, and ");
            log.lines().any(|l| l.contains(&text) && l.ends_with("raise LimitMEMLOCK"))
        };
        assert_eq!((told("a"), told("b")), (limit < one, true), "{log}");
    }
}

/// A ring that pins is made at the start only, and the file and the log say so.
#[test]
fn the_key_acts_from_a_start_on() {
    let Some(bed) = Bed::new("the_key_acts_from_a_start_on", PIN, "", None) else { return };
    let all = std::fs::read_to_string(bed.dir.path().join("iod.toml")).unwrap();
    let (_, text) = all.split_once('\n').unwrap();
    common::configure(bed.dir.path(), &with_keys(text, "b", PIN));
    let refused = bed.iod.reload(false);
    assert!(refused["error"].as_str().is_some_and(|e| e.contains("pin")), "{refused}");
    // Attached later: served without.
    let (without_b, _) = text.split_at(text.rfind("[[device.disk]]").unwrap());
    common::configure(bed.dir.path(), without_b);
    assert!(bed.iod.reload(false)["changed"].is_array());
    common::configure(bed.dir.path(), &with_keys(text, "b", PIN));
    let reply = bed.iod.reload(false);
    assert!(reply["changed"].is_array(), "{reply}");
    check_data(&mut Client::connect(&bed.socket("b"), LARGE).unwrap(), 1);
    assert_eq!(bed.pinned(), 0);
    let (_, log) = bed.iod.end();
    assert!(log.contains("b: `pin` acts from the next start"), "{log}");
    assert!(log.contains("disk \"a\": with `pin` all memory") && log.contains("balloon"), "{log}");
}
