//! Front ends that are trusted with their memory (`trust = true`), and memory in slots.
//!
//! Disk `a` trusts its front end, disk `b` does not.

mod common;

use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{AttackedDomain, Neighbour, change_under_load, completion, read, request, settle, write};
use rtvirtio_domain_client::{Client, Options, SharedMemory};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;
use vhost::VhostBackend as _;
use vhost::vhost_user::{VhostUserFrontend as _, VhostUserProtocolFeatures};
use vmm_sys_util::eventfd::EventFd;

/// Region size of libblkio's rings.
const ODD: usize = 0x3b10;

fn bed() -> AttackedDomain {
    AttackedDomain::with("trust = true\n")
}

/// Connects with memory that cannot be sealed, as DPDK and libblkio do.
fn unsealed(socket: &Path, slot: usize) -> Result<Client, rtvirtio_domain_client::ClientError> {
    Client::connect(socket, Options { sealed: false, slot, ..Options::default() })
}

/// Writes 64 blocks, each of its own bytes, and reads them back.
fn check_data(client: &mut Client, seed: u64) {
    for n in 0..64_u64 {
        let data: Vec<u8> = (0..4_096_u64).map(|i| (i * 7 + n + seed) as u8).collect();
        assert_eq!(request(client, &write(n * 8, 4_096), Some(&data)).0, 0, "block {n}");
        let (status, got) = request(client, &read(n * 8, 4_096), None);
        assert!(status == 0 && got == data, "block {n}: status {status}");
    }
}

#[test]
fn memory_without_a_seal_is_taken_from_a_trusted_front_end_only() {
    let bed = bed();
    check_data(&mut unsealed(&bed.socket("a"), 0).unwrap(), 1);
    assert_eq!((&bed.iod.disk("a")["trusted"], &bed.iod.disk("b")["trusted"]), (&true.into(), &false.into()));
    for slot in [0, 1 << 16] {
        assert!(unsealed(&bed.socket("b"), slot).is_err());
        let refused = bed.iod.disk("b")["refused"]["why"].as_str().unwrap().to_owned();
        assert!(refused.contains("F_SEAL_SHRINK") && refused.contains("`trust = true`"), "{refused}");
    }
}

#[test]
fn slots_of_any_size_hold_rings_and_data() {
    let bed = bed();
    // 48 regions; rings and buffers lie across their borders.
    check_data(&mut unsealed(&bed.socket("a"), ODD).unwrap(), 2);
    // Whole pages of sealed memory need no trust: 180 regions.
    let pages = Options { slot: 4_096, ..Options::default() };
    check_data(&mut Client::connect(&bed.socket("b"), pages).unwrap(), 3);
    let odd = Options { slot: ODD, ..Options::default() };
    assert!(Client::connect(&bed.socket("b"), odd).is_err());
    let refused = bed.iod.disk("b")["refused"]["why"].as_str().unwrap().to_owned();
    assert!(refused.contains("on a page"), "{refused}");
}

#[test]
fn slots_come_and_go_under_load() {
    let bed = bed();
    let options = Options { slot: 1 << 16, ..Options::default() };
    let mut client = Client::connect(&bed.socket("b"), options).unwrap();
    let mem = Arc::clone(&client.mem);
    let more = SharedMemory::new(1 << 20, true).unwrap();
    let mut region = more.region(0, more.len());
    region.guest_phys_addr = 1 << 40;
    for round in 0..100 {
        change_under_load(&mut client, round, |client| {
            client.raw().add_mem_region(&region).unwrap();
            client.raw().remove_mem_region(&region).unwrap();
        });
    }
    // The slots with the rings go and come back: the queue stands still meanwhile, and goes on.
    let rings = mem.region(0, 1 << 16);
    client.raw().remove_mem_region(&rings).unwrap();
    assert!(client.raw().remove_mem_region(&rings).is_err(), "it is gone already");
    let slot = client.queues[0].push(&read(0, 4_096)).unwrap();
    client.queues[0].kick.write(1).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!client.queues[0].has_used());
    client.raw().add_mem_region(&rings).unwrap();
    let done = completion(&mut client.queues[0]).expect("an answer");
    assert_eq!((done.slot, done.status), (slot, 0));
    check_data(&mut client, 5);
}

#[test]
fn a_front_end_has_a_limited_number_of_slots() {
    let bed = bed();
    let options = Options { slot: 1 << 20, ..Options::default() };
    let mut client = Client::connect(&bed.socket("b"), options).unwrap();
    let most = client.raw().get_max_mem_slots().unwrap();
    assert_eq!(most, 509);
    let more = SharedMemory::new(1 << 20, true).unwrap();
    let at = |n: u64| {
        let mut region = more.region(0, 4_096);
        region.guest_phys_addr = (1 << 40) + n * 8_192;
        region
    };
    for n in 1..most {
        client.raw().add_mem_region(&at(n)).unwrap();
    }
    assert!(client.raw().add_mem_region(&at(most)).is_err());
    check_data(&mut client, 6);
    drop(client);
    // No descriptor of them is left, and the next connection has as many.
    let open = std::fs::read_dir(format!("/proc/{}/fd", bed.iod.pid())).unwrap().count();
    assert!(open < 100, "{open} descriptors");
    check_data(&mut Client::connect(&bed.socket("b"), options).unwrap(), 7);
}

#[test]
fn memory_that_is_cut_off_costs_its_own_queue_only() {
    let mut bed = bed();
    let neighbour = Neighbour::start(bed.socket("b"));
    for round in 1..=3_u64 {
        let mut client = unsealed(&bed.socket("a"), 0).unwrap();
        check_data(&mut client, round);
        for n in 0..32 {
            client.queues[0].push(&read(n * 8, 4_096)).unwrap();
        }
        client.mem.truncate().unwrap();
        client.queues[0].kick.write(1).unwrap();
        wait_for("the end of its queue", || bed.iod.disk("a")["broken"] == round);
        assert!(bed.iod.is_alive());
    }
    assert!(neighbour.end().0 > 0);
    check_data(&mut unsealed(&bed.socket("a"), 0).unwrap(), 9);
    let log = bed.iod.end_well();
    assert!(log.contains("a: its front end took memory away"), "{log}");
}

/// A descriptor as the front end's crate wants it.
fn as_eventfd(fd: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open, and without another owner.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

#[test]
fn a_pipe_kicks_and_a_socket_is_called() {
    let bed = bed();
    let mut client = unsealed(&bed.socket("a"), 0).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut kick = std::fs::File::from(writer);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(HANG)).unwrap();
    client.raw().set_vring_kick(0, &as_eventfd(reader)).unwrap();
    client.raw().set_vring_call(0, &as_eventfd(theirs.into())).unwrap();
    client.raw().set_vring_enable(0, true).unwrap();
    for n in 0..64 {
        let data = vec![n as u8 + 1; 4_096];
        client.queues[0].push_with(&write(n * 8, 4_096), &data).unwrap();
        kick.write_all(&1_u64.to_ne_bytes()).unwrap();
        client.queues[0].enable_call();
        let done = completion(&mut client.queues[0]).expect("an answer");
        assert_eq!(done.status, 0, "request {n}");
    }
    (&ours).read_exact(&mut [0; 8]).expect("a call");
    // More kicks than a pipe holds, all for nothing: they are read, so that the last one counts.
    rustix::fs::fcntl_setfl(&kick, rustix::fs::OFlags::NONBLOCK).unwrap();
    let begin = Instant::now();
    let mut sent = 0;
    while sent < 20_000 && begin.elapsed() < HANG {
        // Fewer bytes than PIPE_BUF: all of them, or none.
        match kick.write_all(&1_u64.to_ne_bytes()) {
            Ok(()) => sent += 1,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    assert_eq!(sent, 20_000, "the pipe stays full: descriptor {}", kick.as_raw_fd());
    client.queues[0].push(&read(0, 4_096)).unwrap();
    kick.write_all(&1_u64.to_ne_bytes()).unwrap();
    let done = completion(&mut client.queues[0]).expect("an answer");
    assert_eq!(done.status, 0);
    // The ends go: a kick is no more, and a call leads nowhere (EPIPE, and no signal).
    drop(kick);
    drop(ours);
    client.queues[0].push(&read(0, 4_096)).unwrap();
    settle(&mut client);
    let done = completion(&mut client.queues[0]).expect("an answer");
    assert_eq!(done.status, 0);
    drop(client);
    check_data(&mut unsealed(&bed.socket("a"), 0).unwrap(), 8);
    let offered = unsealed(&bed.socket("a"), 0).unwrap().raw().get_protocol_features();
    assert!(offered.is_ok_and(|of| of.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)));
}
