//! The log of written pages, with the messages that QEMU sends while it migrates a guest.

mod common;

use std::collections::BTreeSet;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    AttackedDomain, FLUSH, Neighbour, accept_all, begin_log, completion, connect, read, request, settle,
    start_at, until, write,
};
use rtvirtio_domain_client::{BlkRequest, Client, DirtyPages, Options, SharedMemory};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend as _, VhostUserDirtyLogRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const PAGE: usize = 4_096;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

fn page(offset: usize) -> usize {
    offset / PAGE * PAGE
}

/// The pages of a buffer.
fn pages(offset: usize, len: usize) -> BTreeSet<usize> {
    (page(offset)..offset + len).step_by(PAGE).collect()
}

/// The pages that a completion writes: the status byte's and the used ring's, which is in one.
fn completed(client: &Client, slot: u16) -> BTreeSet<usize> {
    let queue = &client.queues[0];
    let (_, _, used) = queue.ring_offsets();
    [page(queue.header(slot) + 16), used].into()
}

fn taken(log: &DirtyPages) -> BTreeSet<usize> {
    log.take().into_iter().collect()
}

#[test]
fn exactly_the_written_pages_are_marked() {
    let place = AttackedDomain::new();
    let mut client = connect(&place.socket("a"));
    let log = DirtyPages::covering(&client.mem).unwrap();
    client.share_log(&log).unwrap();
    assert_eq!(request(&mut client, &read(0, 65_536), None).0, 0);
    assert_eq!(taken(&log), BTreeSet::new(), "shared, and not in use");
    client.set_logging(true).unwrap();
    for (ask, written) in [
        (read(0, 16_384), 16_384),
        (read(8, 512), 512),
        (write(0, 16_384), 0),
        (FLUSH, 0),
        // The serial number, and a read beyond the disk.
        (BlkRequest { kind: 8, priority: 0, sector: 0, len: 20 }, 20),
        (read(1 << 40, 4_096), 0),
    ] {
        settle(&mut client);
        let _ = log.take();
        let slot = client.queues[0].push(&ask).unwrap();
        client.queues[0].notify().unwrap();
        assert_eq!(completion(&mut client.queues[0]).unwrap().slot, slot);
        settle(&mut client);
        let data = pages(client.queues[0].data(slot), written);
        let expected: BTreeSet<usize> = completed(&client, slot).union(&data).copied().collect();
        assert_eq!(taken(&log), expected, "{ask:?}");
    }
    // A buffer that direct I/O does not take, across pages.
    let mem = Arc::clone(&client.mem);
    let queue = &mut client.queues[0];
    let (header, data) = (queue.header(0), queue.data(0) + PAGE - 100);
    let guest = |offset: usize| SharedMemory::BASE + offset as u64;
    mem.write(header, &[0; 16]);
    queue.write_descriptor_raw(0, guest(header), 16, NEXT, 1);
    queue.write_descriptor_raw(1, guest(data), 8_192, NEXT | WRITE, 2);
    queue.write_descriptor_raw(2, guest(header + 16), 1, WRITE, 0);
    queue.add_avail(0);
    queue.notify().unwrap();
    assert_eq!(completion(queue).unwrap().status, 0);
    settle(&mut client);
    let expected: BTreeSet<usize> = completed(&client, 0).union(&pages(data, 8_192)).copied().collect();
    assert_eq!(expected.len(), 5);
    assert_eq!(taken(&log), expected);
    // A migration that is cancelled, and the next one with another log.
    client.set_logging(false).unwrap();
    // The queue that was started again asked for a kick.
    let _ = log.take();
    assert_eq!(request(&mut client, &read(0, 65_536), None).0, 0);
    assert_eq!(taken(&log), BTreeSet::new());
    let next = begin_log(&mut client);
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    assert!(!next.take().is_empty());
    assert_eq!(taken(&log), BTreeSet::new());
}

/// A driver that starts anew during a migration: QEMU shares another log after it has started the
/// queues, and what they have written before that is in it too.
#[test]
fn what_is_written_before_another_log_is_shared_is_in_that() {
    let place = AttackedDomain::new();
    let mut client = connect(&place.socket("a"));
    let _first = begin_log(&mut client);
    let second = DirtyPages::covering(&client.mem).unwrap();
    let slot = client.queues[0].push(&read(0, 16_384)).unwrap();
    client.queues[0].notify().unwrap();
    assert_eq!(completion(&mut client.queues[0]).map(|answer| answer.status), Some(0));
    client.share_log(&second).unwrap();
    let marked = taken(&second);
    let written = pages(client.queues[0].data(slot), 16_384);
    for page in written.union(&completed(&client, slot)) {
        assert!(marked.contains(page), "{page:#x}: {marked:?}");
    }
}

/// A process that was killed may have put a completion into the ring and not into the log.
#[test]
fn the_used_ring_of_a_queue_that_starts_is_marked() {
    let place = AttackedDomain::new();
    // Of so many descriptors that the threshold of kicks is on another page than the index.
    let options = Options { size: 512, ..Options::default() };
    let mut client = Client::connect(&place.socket("a"), options).unwrap();
    let log = begin_log(&mut client);
    settle(&mut client);
    let _ = log.take();
    settle(&mut client);
    let (_, _, used) = client.queues[0].ring_offsets();
    assert!(taken(&log).contains(&page(used)));
}

/// Requests that a previous process has fetched and not completed, more than this one fetches at
/// once: all are answered before their guest goes on elsewhere, because the memory of requests in
/// flight does not come along.
#[test]
fn requests_of_a_previous_process_are_answered_before_their_guest_moves() {
    let place = AttackedDomain::with("depth = 2\nread_cap = { requests = \"20/s\" }\n");
    let mut client = connect(&place.socket("a"));
    accept_all(&mut client);
    assert_eq!(client.stop_queue(0).unwrap(), 0);
    let size = client.queues[0].size();
    let (made, file) = client.raw().get_inflight_fd(&VhostUserInflight::new(0, 0, 1, size)).unwrap();
    // As a killed process leaves it: the version, the number of descriptors, then of each request
    // a flag and its place in the order.
    let put = |bytes: &[u8], at: u64| file.write_all_at(bytes, at).unwrap();
    put(&1_u16.to_ne_bytes(), 8);
    put(&size.to_ne_bytes(), 10);
    for i in 0..8_u64 {
        let slot = client.queues[0].push(&read(i * 8, 4_096)).unwrap();
        // Each request takes three descriptors.
        let at = 16 + 16 * 3 * u64::from(slot);
        put(&[1], at);
        put(&i.to_ne_bytes(), at + 8);
    }
    let _log = begin_log(&mut client);
    client.raw().set_inflight_fd(&made, file.as_raw_fd()).unwrap();
    start_at(&mut client, 8);
    assert_eq!(client.stop_queue(0).unwrap(), 8);
    let answers: Vec<u8> =
        std::iter::from_fn(|| client.queues[0].pop_used()).map(|answer| answer.status).collect();
    assert_eq!(answers, [0; 8]);
}

/// Where a guest arrives, requests that it has made before are served without another kick, and it
/// is signalled once whatever it waits for: signals of the other side may have been lost.
#[test]
fn a_queue_that_starts_is_looked_at_and_signals_its_guest() {
    let place = AttackedDomain::new();
    let mut client = connect(&place.socket("a"));
    let await_signal = |call: &EventFd| until("a signal", || call.read().ok());
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    let call = client.queues[0].call.try_clone().unwrap();
    for pending in [0, 4] {
        assert_eq!(client.stop_queue(0).unwrap(), 1);
        // All that the stopped queue signals is signalled before the answer.
        while call.read().is_ok() {}
        for i in 0..pending {
            client.queues[0].push(&read(i * 8, 4_096)).unwrap();
        }
        // As QEMU: another descriptor first, and that of the guest when the queue runs.
        let before = EventFd::new(EFD_NONBLOCK).unwrap();
        client.raw().set_vring_call(0, &before).unwrap();
        start_at(&mut client, 1);
        for _ in 0..pending {
            assert_eq!(completion(&mut client.queues[0]).map(|answer| answer.status), Some(0));
        }
        await_signal(&before);
        client.raw().set_vring_call(0, &call).unwrap();
        await_signal(&call);
    }
}

/// A guest whose available ring is older than the index at which its queue goes on, as where its
/// last page has not come along, waits for ever: that is said.
#[test]
fn an_available_ring_that_is_older_than_its_index_is_reported() {
    let AttackedDomain { iod, dir } = AttackedDomain::new();
    let mut client = connect(&dir.path().join("a"));
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    assert_eq!(client.stop_queue(0).unwrap(), 1);
    start_at(&mut client, 4);
    drop(client);
    let text = iod.end_well();
    assert!(text.contains("ends 3 requests before"), "{text}");
}

/// Requests that were fetched before logging began, and complete after it.
#[test]
fn requests_in_flight_when_logging_begins_are_marked() {
    let place = AttackedDomain::with("read_cap = { requests = \"40/s\" }\n");
    let mut client = connect(&place.socket("a"));
    let slots: Vec<u16> = (0..40).map(|i| client.queues[0].push(&read(i * 8, 4_096)).unwrap()).collect();
    client.queues[0].notify().unwrap();
    let first = completion(&mut client.queues[0]).unwrap();
    assert_eq!(first.status, 0);
    let log = begin_log(&mut client);
    // What completed before this need not be marked.
    let mut before: BTreeSet<u16> = [first.slot].into();
    while let Some(done) = client.queues[0].pop_used() {
        before.insert(done.slot);
    }
    // Stopped in the middle: it waits for what it has fetched, and says exactly where it is.
    let base = client.stop_queue(0).unwrap() as usize;
    let marked = taken(&log);
    let mut later = 0;
    while let Some(done) = client.queues[0].pop_used() {
        assert_eq!(done.status, 0);
        later += 1;
        for page in pages(client.queues[0].data(done.slot), 4_096).union(&completed(&client, done.slot)) {
            assert!(marked.contains(page), "slot {}: {page:#x}", done.slot);
        }
    }
    assert_eq!(before.len() + later, base);
    assert!(base <= slots.len());
    assert!(later > 0, "all requests completed before logging began");
}

/// A copy of the memory that is made as QEMU makes it is equal to it at the end.
#[test]
fn a_copy_that_follows_the_log_is_exact() {
    let place = AttackedDomain::new();
    let mut client = connect(&place.socket("a"));
    for i in 0..64u64 {
        let data: Vec<u8> = (0..65_536u32).map(|at| (u64::from(at / 512) ^ (i * 7)) as u8).collect();
        assert_eq!(request(&mut client, &write(i * 128, 65_536), Some(&data)).0, 0);
    }
    let log = begin_log(&mut client);
    let mem = Arc::clone(&client.mem);
    let mut copy = mem.read(0, mem.len());
    let follow = |copy: &mut Vec<u8>| {
        for at in log.take() {
            copy[at..at + PAGE].copy_from_slice(&mem.read(at, PAGE));
        }
    };
    let (begin, mut i, mut done, mut outstanding) = (Instant::now(), 0u64, 0u64, 0);
    while done < 2_000 && begin.elapsed() < HANG {
        while outstanding < 32 {
            client.queues[0].push(&read(i * 8 % 8_192, 4_096 * (1 + i as u32 % 16))).unwrap();
            (i, outstanding) = (i + 1, outstanding + 1);
        }
        client.queues[0].notify().unwrap();
        while let Some(answer) = client.queues[0].pop_used() {
            assert_eq!(answer.status, 0);
            (done, outstanding) = (done + 1, outstanding - 1);
        }
        follow(&mut copy);
    }
    assert!(done >= 2_000, "{done} requests");
    // What was fetched is completed; the rest is the target's.
    let base = client.stop_queue(0).unwrap();
    done += std::iter::from_fn(|| client.queues[0].pop_used()).count() as u64;
    assert_eq!(u64::from(base), 64 + done);
    assert!(done <= i);
    follow(&mut copy);
    // The driver writes descriptors, its ring and headers; the device all else.
    let (_, _, used) = client.queues[0].ring_offsets();
    let (status, data) = (client.queues[0].header(0), client.queues[0].data(0));
    for at in (used..status).chain(data..mem.len()).step_by(PAGE) {
        assert!(copy[at..at + PAGE] == mem.read(at, PAGE)[..], "the page at {at:#x} differs");
    }
}

/// Logs that cannot be used end the connection, and nothing else.
#[test]
fn invalid_logs_are_refused() {
    let mut place = AttackedDomain::new();
    let socket = place.socket("a");
    let neighbour = Neighbour::start(place.socket("b"));
    let full = DirtyPages::new(4_096, true).unwrap();
    let unsealed = DirtyPages::new(4_096, false).unwrap();
    let disk = std::fs::File::open(place.dir.path().join("disk")).unwrap();
    let region = |log: &DirtyPages, size, offset| VhostUserDirtyLogRegion {
        mmap_size: size,
        mmap_offset: offset,
        ..log.region()
    };
    let of_disk = VhostUserDirtyLogRegion { mmap_handle: disk.as_raw_fd(), ..region(&full, 4_096, 0) };
    for (why, log) in [
        ("too few bits", region(&full, 32, 0)),
        ("no bits", region(&full, 0, 0)),
        ("beyond its file", region(&full, 8_192, 0)),
        ("an offset beyond its file", region(&full, 4_096, u64::MAX - 100)),
        ("more than a guest has", region(&full, u64::MAX, 0)),
        ("no seal", region(&unsealed, 4_096, 0)),
        ("a file on a disk", of_disk),
    ] {
        let mut client = connect(&socket);
        assert!(client.raw().set_log_base(0, Some(log)).is_err(), "{why}");
        assert!(client.raw_is_closed(), "{why}");
        assert!(place.iod.is_alive(), "{why}");
    }
    // An offset within a page is as good as any.
    let mut client = connect(&socket);
    client.raw().set_log_base(0, Some(region(&full, 2_048, 1_001))).unwrap();
    client.set_logging(true).unwrap();
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    // A used ring is logged where it is.
    let (_, _, used) = client.queues[0].ring_offsets();
    let mut addresses = client.ring_addresses(0);
    (addresses.flags, addresses.log_addr) = (1, Some(SharedMemory::BASE + used as u64 + 4_096));
    assert!(client.raw().set_vring_addr(0, &addresses).is_err());
    client.set_logging(true).unwrap();
    // More memory than the log in use is for.
    let more = SharedMemory::new(1 << 20, true).unwrap();
    let mut far = more.region(0, 1 << 20);
    far.guest_phys_addr = 1 << 40;
    let table = [client.mem.region(0, client.mem.len()), far];
    assert!(client.raw().set_mem_table(&table).is_err());
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0, "the old table stays");
    client.set_logging(false).unwrap();
    client.raw().set_mem_table(&table).unwrap();
    assert!(neighbour.end().0 > 0);
    drop(client);
    let AttackedDomain { iod, dir } = place;
    let text = iod.end_well();
    drop(dir);
    for words in ["needs", "can be truncated", "ends beyond its file", "is to be logged"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

/// A trusted front end may truncate its log. Its own queue ends with that.
#[test]
fn a_log_that_is_truncated_ends_its_queue_only() {
    let mut place = AttackedDomain::with("trust = true\n");
    let neighbour = Neighbour::start(place.socket("b"));
    let mut client = connect(&place.socket("a"));
    let end = (SharedMemory::BASE as usize + client.mem.len()).div_ceil(8 * PAGE);
    let log = DirtyPages::new(end, false).unwrap();
    client.share_log(&log).unwrap();
    client.set_logging(true).unwrap();
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    log.truncate().unwrap();
    wait_for("the end of its queue", || {
        if client.queues[0].free_slots() > 0 {
            client.queues[0].push(&read(0, 4_096)).unwrap();
            client.queues[0].notify().unwrap();
        }
        place.iod.disk("a")["broken"] == 1
    });
    assert!(place.iod.is_alive());
    assert!(neighbour.end().0 > 0);
    drop(client);
    assert_eq!(request(&mut connect(&place.socket("a")), &read(0, 4_096), None).0, 0);
}

/// Requests per second with and without logging, in turn. The figures are printed; an assertion on
/// them would depend on a quiet machine.
#[test]
fn the_cost_of_logging() {
    let place = AttackedDomain::with("cached = true\n");
    let mut client = connect(&place.socket("a"));
    let log = DirtyPages::covering(&client.mem).unwrap();
    client.share_log(&log).unwrap();
    let mut rates = [Vec::new(), Vec::new()];
    for turn in 0..16 {
        client.set_logging(turn % 2 == 1).unwrap();
        let (begin, mut i, mut done, mut outstanding) = (Instant::now(), 0u64, 0u64, 0);
        while begin.elapsed() < Duration::from_millis(100) || outstanding > 0 {
            while outstanding < 16 && begin.elapsed() < Duration::from_millis(100) {
                client.queues[0].push(&read(i % 4_096 * 8, 4_096)).unwrap();
                (i, outstanding) = (i + 1, outstanding + 1);
            }
            client.queues[0].notify().unwrap();
            while client.queues[0].pop_used().is_some() {
                (done, outstanding) = (done + 1, outstanding - 1);
            }
            assert!(begin.elapsed() < HANG);
        }
        rates[turn % 2].push((done as f64 / begin.elapsed().as_secs_f64()) as u64);
    }
    let [without, with] = rates.map(|mut rates| {
        rates.sort_unstable();
        rates
    });
    eprintln!("requests/s without logging {without:?}, with {with:?}");
    assert!(without[0] > 0 && with[0] > 0);
}
