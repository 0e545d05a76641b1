//! Attacks by a guest or by a compromised QEMU, and their effect on its neighbour.
//!
//! Each attack runs through the real socket, while another disk of the I/O domain is in use.
//! Afterwards the process is alive, the neighbour has every completion, correct, and the attacker's
//! disk can be used by the next connection.

mod common;
#[path = "../../../fuzz/src/qemu.rs"]
mod qemu;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{AttackedDomain, Iod, Neighbour, connect, read, request, until};
use rtvirtio_domain_client::{Client, Options, SharedMemory};
use rtvirtio_testkit::HANG;
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

impl AttackedDomain {
    /// Runs an attack while the neighbour works, and checks both afterwards. A control run without
    /// the attack, as long as the attack but at most a second, shows the stalls of the host.
    fn attack(&mut self, name: &str, attack: impl FnOnce(&Path)) {
        let neighbour = Neighbour::start(self.socket("b"));
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        attack(&self.socket("a"));
        let took = begin.elapsed();
        std::thread::sleep(Duration::from_millis(50));
        let with = neighbour.measured();
        assert!(self.iod.is_alive(), "{name}: the domain died");
        assert!(with.n > 0, "{name}: the neighbour got nothing");
        // A neighbour that an attack stops stays stopped. How long it waits is printed, not judged.
        assert!(with.longest < HANG, "{name}: the neighbour waited {:?}", with.longest);
        let mut next = Client::connect(&self.socket("a"), Options::default()).expect(name);
        assert_eq!(request(&mut next, &read(0, 4_096), None).0, 0, "{name}: the disk is lost");
        drop(next);
        let neighbour = Neighbour::start(self.socket("b"));
        std::thread::sleep(took.min(Duration::from_secs(1)) + Duration::from_millis(100));
        let without = neighbour.measured();
        eprintln!("{name}: the neighbour's pairs with {with:?}, without {without:?}");
    }
}

/// Invalid and oversized chains.
#[test]
fn malformed_chains() {
    let mut place = AttackedDomain::new();
    place.attack("malformed chains", |socket| {
        let mut client = connect(socket);
        let mem = Arc::clone(&client.mem);
        let queue = &mut client.queues[0];
        let guest = |offset: usize| SharedMemory::BASE + offset as u64;
        let (header, data, table) = (queue.data(0), queue.data(1), queue.data(2));
        mem.write(header, &[0; 16]);
        let outside = guest(mem.len()) + 4_096;
        let chains: &[&[(u64, u32, u16, u16)]] = &[
            // Cycles: of one descriptor, of two, and with a status.
            &[(guest(header), 16, NEXT, 0)],
            &[(guest(header), 16, NEXT, 1), (guest(data), 4_096, NEXT | WRITE, 0)],
            &[(guest(header), 16, NEXT, 1), (guest(data), 1, NEXT | WRITE, 1)],
            // Next descriptors beyond the table.
            &[(guest(header), 16, NEXT, 60_000)],
            // Outside of memory: header, data, status; at the very end of addresses.
            &[(outside, 16, NEXT, 1), (guest(data), 1, WRITE, 0)],
            &[(guest(header), 16, NEXT, 1), (outside, 4_096, NEXT | WRITE, 2), (guest(data), 1, WRITE, 0)],
            &[(guest(header), 16, NEXT, 1), (guest(data), 512, NEXT | WRITE, 2), (outside, 1, WRITE, 0)],
            &[(guest(header), 16, NEXT, 1), (u64::MAX - 8, 512, NEXT | WRITE, 2), (u64::MAX, 1, WRITE, 0)],
            // Across the end of memory.
            &[
                (guest(header), 16, NEXT, 1),
                (guest(mem.len()) - 512, 4_096, NEXT | WRITE, 2),
                (guest(data), 1, WRITE, 0),
            ],
            // No status, no header, empty.
            &[(guest(header), 16, 0, 0)],
            &[(guest(data), 1, WRITE, 0)],
            &[(guest(header), 0, 0, 0)],
            &[(guest(header), 15, NEXT, 1), (guest(data), 1, WRITE, 0)],
            // Oversized: 4 GiB of data, twice.
            &[
                (guest(header), 16, NEXT, 1),
                (guest(data), u32::MAX, NEXT | WRITE, 2),
                (guest(data), u32::MAX, NEXT | WRITE, 3),
                (guest(data), 1, WRITE, 0),
            ],
            // Writable before readable descriptors.
            &[(guest(data), 1, NEXT | WRITE, 1), (guest(header), 16, 0, 0)],
            // Indirect tables: odd length, empty, oversized, recursive, outside.
            &[(guest(table), 17, INDIRECT, 0)],
            &[(guest(table), 0, INDIRECT, 0)],
            &[(guest(table), !15, INDIRECT, 0)],
            &[(guest(table), 64, INDIRECT, 0)],
            &[(outside, 64, INDIRECT, 0)],
        ];
        // An indirect table that contains an indirect descriptor.
        mem.write(table, &guest(table).to_le_bytes());
        mem.write(table + 8, &64u32.to_le_bytes());
        mem.write(table + 12, &INDIRECT.to_le_bytes());
        let mut answered = 0;
        for (done, chain) in chains.iter().enumerate() {
            for (i, (address, len, flags, next)) in chain.iter().enumerate() {
                queue.write_descriptor_raw(i as u16, *address, *len, *flags, *next);
            }
            for _ in 0..20 {
                queue.add_avail(0);
            }
            queue.notify().unwrap();
            // Each chain is completed, also an invalid one.
            let begin = Instant::now();
            while answered < 20 * (done as u64 + 1) && begin.elapsed() < HANG {
                answered += u64::from(queue.pop_used_raw().is_some());
            }
        }
        // And once only.
        std::thread::sleep(Duration::from_millis(20));
        while queue.pop_used_raw().is_some() {
            answered += 1;
        }
        assert_eq!(answered, 20 * chains.len() as u64);
    });
}

/// Corrupted rings.
#[test]
fn broken_rings() {
    let mut place = AttackedDomain::new();
    place.attack("an available index that jumps", |socket| {
        let mut client = connect(socket);
        for index in [10_000, 3, 60_000] {
            client.queues[0].set_avail_index(index);
            client.queues[0].kick.write(1).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    place.attack("heads that do not exist, and one head many times", |socket| {
        let mut client = connect(socket);
        let queue = &mut client.queues[0];
        for head in [60_000u16, 0, 0, 0, 255, 256] {
            for _ in 0..30 {
                queue.add_avail(head);
            }
            queue.notify().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    place.attack("an unread used ring", |socket| {
        let mut client = connect(socket);
        let queue = &mut client.queues[0];
        let slot = queue.push(&read(0, 4_096)).unwrap();
        for _ in 0..2_000 {
            // The same request repeatedly, completed or not.
            queue.add_avail(slot * 3);
            queue.kick.write(1).unwrap();
        }
    });
}

#[test]
fn storms() {
    let mut place = AttackedDomain::new();
    place.attack("a million kicks for nothing", |socket| {
        let client = connect(socket);
        for _ in 0..1_000_000 {
            client.queues[0].kick.write(1).unwrap();
        }
    });
    place.attack("connections that come and go, with requests under way", |socket| {
        for i in 0..60 {
            let mut client = connect(socket);
            while client.queues[0].push(&read(i * 128, 65_536)).is_some() {}
            client.queues[0].notify().unwrap();
        }
    });
    place.attack("queues that are stopped and started with requests under way", |socket| {
        let mut client = connect(socket);
        for _ in 0..100 {
            for _ in 0..4 {
                let _ = client.queues[0].push(&read(0, 65_536));
            }
            client.queues[0].notify().unwrap();
            client.raw().get_vring_base(0).unwrap();
            while client.queues[0].pop_used().is_some() {}
            let kick = client.queues[0].kick.try_clone().unwrap();
            let call = client.queues[0].call.try_clone().unwrap();
            client.raw().set_vring_call(0, &call).unwrap();
            client.raw().set_vring_kick(0, &kick).unwrap();
        }
    });
}

/// A front end takes a queue to have as many descriptors as it has asked for, whatever it is
/// answered: on another number its writes would be completed and not carried out.
#[test]
fn a_queue_without_an_accepted_size_is_not_served() {
    let mut place = AttackedDomain::new();
    let disk = place.dir.path().join("disk");
    let cases = [
        (Some(2_048), true, "queue 0 of 2048 descriptors"),
        (Some(2_048), false, "queue 0 of 2048 descriptors"),
        (Some(3), true, "queue 0 of 3 descriptors"),
        (Some(0), true, "queue 0 of 0 descriptors"),
        (None, true, "no number of descriptors was accepted"),
    ];
    for (i, (num, replies, why)) in (1..).zip(cases) {
        let options = Options { size: 256, started: false, ..Options::default() };
        let mut client = Client::connect(&place.socket("a"), options).unwrap();
        let addresses = client.ring_addresses(0);
        let [kick, call] = [&client.queues[0].kick, &client.queues[0].call].map(|fd| fd.try_clone().unwrap());
        let raw = client.raw();
        if !replies {
            raw.set_hdr_flags(VhostUserHeaderFlag::empty());
        }
        if let Some(num) = num {
            // A right one before it is forgotten.
            raw.set_vring_num(0, 256).unwrap();
            assert_eq!(raw.set_vring_num(0, num).is_err(), replies, "{num}");
        }
        raw.set_vring_addr(0, &addresses).unwrap();
        raw.set_vring_base(0, 0).unwrap();
        raw.set_vring_call(0, &call).unwrap();
        raw.set_vring_kick(0, &kick).unwrap();
        assert_eq!(raw.set_vring_enable(0, true).is_err(), replies, "{num:?}: the answer to ENABLE");
        raw.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let old = std::fs::read(&disk).unwrap()[..512].to_vec();
        let data = vec![i as u8; 512];
        client.queues[0].push_with(&common::write(0, 512), &data).unwrap();
        client.queues[0].notify().unwrap();
        // The answer is that of the thread that has read all messages before it.
        assert!(client.raw().get_features().is_ok());
        let seen = place.iod.disk("a");
        assert_eq!((&seen["attached"], &seen["connected"]), (&false.into(), &true.into()), "{num:?}: {seen}");
        let said = seen["refused"]["why"].as_str().unwrap();
        assert!(said.contains("no number of descriptors was accepted"), "{num:?}: {said}");
        assert!(seen["refused"]["count"].as_u64().unwrap() > u64::from(num.is_some()), "{why}: {seen}");
        assert_eq!(client.queues[0].pop_used_raw(), None, "{num:?}: it is served");
        assert_eq!(std::fs::read(&disk).unwrap()[..512], old, "{num:?}: nothing is written");
        // With a right one it is served, and what waits is carried out.
        client.raw().set_vring_num(0, 256).unwrap();
        let answer = common::completion(&mut client.queues[0]).unwrap();
        assert_eq!((answer.status, std::fs::read(&disk).unwrap()[..512] == data), (0, true), "{num:?}");
        // Another one for a queue that is served stops it.
        assert!(client.raw().set_vring_num(0, 128).is_err());
        assert_eq!(place.iod.disk("a")["attached"], false, "{num:?}");
    }
    assert!(place.iod.is_alive());
    let (_, log) = place.iod.end();
    for (_, _, why) in cases {
        assert!(log.contains(why), "{why} is not in the log: {log}");
    }
}

/// A request that is answered with an error is in a counter, by its reason, and in the trace.
#[test]
fn requests_that_are_refused_are_counted_by_reason() {
    let dir = common::disk(64);
    let more = common::two_disks(dir.path(), 64, "");
    let iod = Iod::start(dir.path(), &more.replacen("size", "read_only = true\nshared = true\nsize", 1));
    let mut trace = UnixStream::connect(dir.path().join("ctl")).unwrap();
    writeln!(trace, "{{\"command\": \"trace\"}}").unwrap();
    let mut lines = BufReader::new(trace.try_clone().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("trace"));
    let mut client = connect(&dir.path().join("b"));
    let outside = SharedMemory::BASE + client.mem.len() as u64 + 4_096;
    let chain = |client: &mut Client, kind: u32, sector: u64, parts: &[(Option<u64>, u32, u16)]| {
        let mem = Arc::clone(&client.mem);
        let queue = &mut client.queues[0];
        let (header, data) = (queue.data(0), queue.data(1));
        mem.write(header, &[kind.to_le_bytes(), [0; 4]].concat());
        mem.write(header + 8, &sector.to_le_bytes());
        let guest = |offset: usize| SharedMemory::BASE + offset as u64;
        queue.write_descriptor_raw(0, guest(header), 16, NEXT, 1);
        for (i, (address, len, flags)) in (1..).zip(parts) {
            let next = if usize::from(i) < parts.len() { NEXT } else { 0 };
            let at = address.unwrap_or(guest(data) + 4_096 * u64::from(i));
            queue.write_descriptor_raw(i, at, *len, flags | next, i + 1);
        }
        queue.add_avail(0);
        queue.notify().unwrap();
        until("a completion", || queue.pop_used_raw());
    };
    let status = (None, 1, WRITE);
    // Data, header's neighbour and status outside of the memory.
    chain(&mut client, 0, 0, &[(Some(outside), 4_096, WRITE), status]);
    chain(&mut client, 1, 0, &[(Some(outside), 4_096, 0), status]);
    chain(&mut client, 0, 0, &[(None, 512, WRITE), (Some(outside), 1, WRITE)]);
    chain(&mut client, 0, 1 << 40, &[(None, 512, WRITE), status]);
    chain(&mut client, 77, 0, &[(None, 512, WRITE), status]);
    chain(&mut client, 13, 0, &[(None, 32, 0), status]);
    chain(&mut client, 0, 0, &[(None, 511, WRITE), status]);
    chain(&mut client, 0, 0, &[(None, 512, 0), status]);
    chain(&mut client, 0, 0, &[(None, 512, WRITE)]);
    let mut reader = connect(&dir.path().join("a"));
    chain(&mut reader, 1, 0, &[(None, 512, 0), status]);
    let seen = iod.status_json();
    let of = |vm: usize, key: &str| seen["vms"][vm]["refused_requests"][key].as_u64().unwrap();
    let counts =
        ["outside_memory", "outside_disk", "read_only", "unsupported", "invalid"].map(|key| of(1, key));
    assert_eq!(counts, [3, 1, 0, 2, 3], "{seen:#}");
    assert_eq!((of(0, "read_only"), of(0, "outside_memory")), (1, 0), "{seen:#}");
    // Of these only the one without a place for its status is no request.
    let vm = &seen["vms"][1];
    assert_eq!((&vm["malformed"], &vm["errors"], &vm["broken"]), (&1.into(), &0.into(), &0.into()), "{vm:#}");
    assert!(vm["last_error"].is_null(), "{vm:#}");
    // Events are sent some time after their requests: the end of the trace is not to come first.
    trace.set_read_timeout(Some(HANG)).unwrap();
    let mut reasons = Vec::new();
    while reasons.len() < 10 {
        let event: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        reasons.extend(event["refused"].as_str().map(|why| (why.to_owned(), event["status"].clone())));
    }
    let count = |why: &str| reasons.iter().filter(|(reason, _)| reason == why).count();
    let counts = ["outside_memory", "unsupported", "invalid", "read_only"].map(count);
    assert_eq!(counts, [3, 2, 3, 1], "{reasons:?}");
    let is_right =
        |(why, code): &(String, serde_json::Value)| *code == if why == "unsupported" { 2 } else { 1 };
    assert!(reasons.iter().all(is_right), "{reasons:?}");
}

/// Invalid messages of a compromised QEMU.
#[test]
fn a_lying_frontend() {
    let mut place = AttackedDomain::new();
    place.attack("memory that can be cut off", |socket| {
        let e = Client::connect(socket, Options { sealed: false, ..Options::default() });
        assert!(e.is_err(), "unsealed memory is refused");
    });
    place.attack("memory that is cut off although it was sealed", |socket| {
        let client = connect(socket);
        let file = format!("/proc/self/fd/{}", client.mem.fd());
        // The seal holds.
        assert!(File::options().write(true).open(file).and_then(|f| f.set_len(0)).is_err());
    });
    place.attack("rings outside of memory", |socket| {
        let mut client = connect(socket);
        for address in [0, u64::MAX - 64, client.mem.address() + client.mem.len() as u64 - 8] {
            let lie = VringConfigData {
                desc_table_addr: address & !15,
                used_ring_addr: address & !3,
                avail_ring_addr: address & !1,
                ..client.ring_addresses(0)
            };
            let _ = client.raw().set_vring_addr(0, &lie);
        }
    });
    place.attack("memory regions that overlap or are not there", |socket| {
        let mut client = connect(socket);
        let region = |address: u64, size: u64| VhostUserMemoryRegionInfo {
            guest_phys_addr: address,
            memory_size: size,
            userspace_addr: client.mem.address(),
            mmap_offset: 0,
            mmap_handle: client.mem.fd(),
        };
        let (len, far) = (client.mem.len() as u64, 1 << 40);
        let lies = [
            // A ring across such a border would be mapped but not contiguous.
            vec![region(1 << 20, 0x1001), region((1 << 20) + 0x1001, 0x1000)],
            vec![region(0, len), region(4_096, len)],
            vec![region(0, far)],
            vec![region(u64::MAX - 4_095, 4_096)],
        ];
        for regions in lies {
            let _ = client.raw().set_mem_table(&regions);
        }
    });
    place.attack("bytes that are no messages", |socket| {
        for seed in 0u64..40 {
            let mut stream = UnixStream::connect(socket).unwrap();
            let bytes: Vec<u8> =
                (0..600u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect();
            let _ = stream.write_all(&bytes[..(seed as usize * 15).max(1)]);
        }
        // Half a message and then silence: it blocks its own disk only.
        let mut stream = UnixStream::connect(socket).unwrap();
        let _ = stream.write_all(&[1, 0, 0, 0, 1]);
        std::thread::sleep(Duration::from_millis(200));
    });
}

/// Messages that are refused are logged. A full disk or a closed pipe as log ends neither the
/// process nor a disk.
#[test]
fn a_log_that_cannot_be_written() {
    let (closed, reader) = UnixStream::pair().unwrap();
    drop(reader);
    let full = File::options().write(true).open("/dev/full").unwrap();
    for (what, log) in
        [("a full disk", Stdio::from(full)), ("a reader that has gone", Stdio::from(OwnedFd::from(closed)))]
    {
        let dir = common::disk(64);
        let iod = Iod::with_log(dir.path(), &common::two_disks(dir.path(), 64, ""), log);
        let iod = iod.unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut place = AttackedDomain { dir, iod };
        place.attack(what, |socket| {
            for _ in 0..30 {
                let mut stream = UnixStream::connect(socket).unwrap();
                let _ = stream.write_all(&[0xff; 64]);
            }
        });
        let status = place.iod.status_json();
        assert!(status.to_string().contains("\"why\":"), "{what}: nothing was refused: {status}");
    }
}

/// Only eventfds are accepted for kick and call: a file is readable for ever, a full pipe blocks.
#[test]
fn descriptors_that_are_no_eventfds() {
    use std::os::fd::{FromRawFd, IntoRawFd};
    let mut place = AttackedDomain::new();
    place.attack("a file and a pipe as kick and call", |socket| {
        for path in ["/dev/zero", "/dev/null", "/proc/self/exe"] {
            let mut client = connect(socket);
            let fd = File::open(path).unwrap().into_raw_fd();
            // SAFETY: the descriptor is ours and open, without another owner.
            let fake = unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(fd) };
            assert!(client.raw().set_vring_kick(0, &fake).is_err(), "{path} as kick");
            // One frontend at a time.
            drop(client);
            let mut client = connect(socket);
            assert!(client.raw().set_vring_call(0, &fake).is_err(), "{path} as call");
        }
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut client = connect(socket);
        // SAFETY: as above.
        let fake = unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(writer.into_raw_fd()) };
        assert!(client.raw().set_vring_call(0, &fake).is_err(), "a pipe as call");
        drop(reader);
    });
}

/// The fuzzer's message corpus against the sandboxed process, where an unforeseen system call ends
/// it.
#[test]
fn the_fuzzers_messages() {
    let mut place = AttackedDomain::new();
    place.attack("messages of a fuzzer", |socket| {
        let kinds = qemu::descriptors();
        replay::replay("messages", |input| qemu::say(socket, &kinds, input));
    });
}
