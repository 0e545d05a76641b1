//! Operations that a QEMU can repeat without end leave no kernel objects, descriptors, memory or
//! log lines behind.
//!
//! Long form: `RTVIRTIO_REPEAT=100000 cargo test --release -p rtvirtio-iod --test repeat --
//! --nocapture`.

mod common;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::time::{Duration, Instant};

use common::resources::Resources;
use common::{AttackedDomain, Neighbour, accept_all, completion, connect, read, request, settle};
use rtvirtio_domain_client::Client;
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

/// How often the steps are tried while other programs open files.
const ATTEMPTS: usize = 6;

/// Most memory that a disk may keep after any number of repetitions, in bytes: its tables and
/// histograms in full. About 100 000 are measured.
const MOST_GROWN: i64 = 1 << 20;

/// Repetitions of each step.
fn repetitions() -> usize {
    std::env::var("RTVIRTIO_REPEAT").ok().and_then(|n| n.parse().ok()).unwrap_or(1_500)
}

impl AttackedDomain {
    /// Repeats a step on one connection while a neighbour works. Resources are counted after the
    /// connection has ended.
    fn repeat(&mut self, name: &str, mut step: impl FnMut(&mut Client, usize)) {
        let socket = self.dir.path().join("a");
        self.repeat_on(name, |n| {
            let mut client = connect(&socket);
            (0..n).for_each(|i| step(&mut client, i));
        });
    }

    fn repeat_on(&mut self, name: &str, mut steps: impl FnMut(usize)) {
        // What a step leaves behind it leaves each time. Other programs of the machine open files
        // too, but not each time.
        for attempt in (0..ATTEMPTS).rev() {
            if self.leaves_no_files(name, &mut steps) {
                return;
            }
            assert!(attempt > 0, "{name}: files stay, in each of {ATTEMPTS} attempts");
        }
    }

    /// Whether no more files are open on this machine after the steps than before. Everything else
    /// is asserted.
    fn leaves_no_files(&mut self, name: &str, steps: &mut dyn FnMut(usize)) -> bool {
        let n = repetitions();
        // One connection first: memory that is kept after the first use does not count.
        let socket = self.dir.path().join("a");
        drop(connect(&socket));
        let neighbour = Neighbour::start(self.dir.path().join("b"));
        std::thread::sleep(Duration::from_millis(100));
        let before = Resources::of(self.iod.pid());
        steps(n);
        // After RCU grace periods in the kernel.
        std::thread::sleep(Duration::from_millis(500));
        let mut after = Resources::of(self.iod.pid());
        for _ in 0..20 {
            // Other processes open files too.
            if after.files - before.files < n as i64 / 20 {
                break;
            }
            std::thread::sleep(Duration::from_millis(250));
            after = Resources::of(self.iod.pid());
        }
        let pairs = neighbour.measured();
        eprintln!(
            "{name}, {n} times: io_uring requests {:?} -> {:?}, files {} -> {}, descriptors {} -> {}, \
             resident {} -> {} KiB, threads {} -> {}; neighbour: {pairs:?}",
            before.requests,
            after.requests,
            before.files,
            after.files,
            before.descriptors,
            after.descriptors,
            before.resident_kib,
            after.resident_kib,
            before.threads,
            after.threads,
        );
        assert!(self.iod.is_alive(), "{name}: the domain died");
        assert!(pairs.n > 0, "{name}: the neighbour got nothing");
        let few = n as i64 / 10;
        if let (Some(before), Some(after)) = (before.requests, after.requests) {
            assert!(after - before < few.max(200), "{name}: {} requests stay", after - before);
        }
        assert_eq!(after.descriptors, before.descriptors, "{name}: descriptors stay");
        // A write to an eventfd may get a kernel worker, one for each queue at most, which ends
        // after some seconds.
        assert!(after.threads - before.threads <= 2, "{name}: threads stay");
        let grown = (after.resident_kib - before.resident_kib) * 1_024;
        assert!(grown < MOST_GROWN, "{name}: {grown} bytes stay for the disk");
        let mut next = connect(&socket);
        assert_eq!(request(&mut next, &read(0, 4_096), None).0, 0, "{name}: the disk is lost");
        after.files - before.files < few.max(200)
    }
}

/// A full call descriptor: a write to it waits for a reader.
fn full() -> EventFd {
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, &0xffff_ffff_ffff_fffe_u64.to_ne_bytes()).unwrap();
    // SAFETY: the descriptor is ours and open, and its ownership moves.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

fn kick() -> EventFd {
    EventFd::new(0).unwrap()
}

/// A queue is disabled and enabled, or stopped and started, with a full call descriptor.
#[test]
fn full_call_descriptors() {
    let mut place = AttackedDomain::new();
    let call = full();
    place.repeat("enable and disable with a full call", |client, i| {
        if i == 0 {
            client.raw().set_vring_call(0, &call).unwrap();
        }
        settle(client);
    });
    place.repeat("a fresh full call each time", |client, _| {
        client.raw().set_vring_call(0, &full()).unwrap();
        settle(client);
    });
    place.repeat("fresh full calls for a queue that runs", |client, _| {
        client.raw().set_vring_call(0, &full()).unwrap();
    });
    place.repeat("a full call that is emptied each time", |client, _| {
        let call = full();
        client.raw().set_vring_call(0, &call).unwrap();
        client.raw().set_vring_enable(0, false).unwrap();
        call.read().unwrap();
        client.raw().set_vring_enable(0, true).unwrap();
    });
}

/// A queue is stopped and started while its kick descriptors are kicked.
#[test]
fn kicks_of_queues_that_stop() {
    let mut place = AttackedDomain::new();
    place.repeat("stop and start with a fresh kick that is kicked", |client, _| {
        let (kick, call) = (kick(), client.queues[0].call.try_clone().unwrap());
        kick.write(1).unwrap();
        client.raw().get_vring_base(0).unwrap();
        client.raw().set_vring_call(0, &call).unwrap();
        client.raw().set_vring_kick(0, &kick).unwrap();
        kick.write(1).unwrap();
    });
    place.repeat("another kick for a queue that runs", |client, _| {
        let kick = kick();
        kick.write(1).unwrap();
        client.raw().set_vring_kick(0, &kick).unwrap();
        kick.write(1).unwrap();
    });
    // Another thread kicks without a pause.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let storm = EventFd::new(0).unwrap();
    let (stopped, kicks) = (std::sync::Arc::clone(&stop), storm.try_clone().unwrap());
    let thread = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let _ = kicks.write(1);
            let _ = kicks.read();
        }
    });
    place.repeat("enable and disable while another thread kicks", |client, i| {
        if i == 0 {
            client.raw().set_vring_kick(0, &storm).unwrap();
        }
        settle(client);
    });
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    thread.join().unwrap();
}

/// Memory tables, in-flight memory and ring addresses are replaced, with requests in flight.
#[test]
fn replaced_memory() {
    let mut place = AttackedDomain::new();
    place.repeat("set the memory table", |client, _| {
        let region = client.mem.region(0, client.mem.len());
        let _ = client.queues[0].push(&read(0, 4_096));
        client.queues[0].notify().unwrap();
        client.raw().set_mem_table(&[region]).unwrap();
        assert_eq!(completion(&mut client.queues[0]).map(|a| a.status), Some(0));
    });
    place.repeat("set ring addresses", |client, _| {
        let addresses = client.ring_addresses(0);
        client.raw().set_vring_addr(0, &addresses).unwrap();
    });
    place.repeat("get and set in-flight memory", |client, i| {
        if i == 0 {
            accept_all(client);
        }
        let wanted = vhost::vhost_user::message::VhostUserInflight::new(0, 0, 1, 256);
        let (made, file) = client.raw().get_inflight_fd(&wanted).unwrap();
        client.raw().set_inflight_fd(&made, file.as_raw_fd()).unwrap();
    });
}

/// Refused messages leave nothing behind but a bounded number of log lines.
#[test]
fn messages_that_are_refused() {
    let begin = Instant::now();
    let mut place = AttackedDomain::new();
    let zero = File::open("/dev/zero").unwrap().into_raw_fd();
    // SAFETY: the descriptor is ours and open, and its ownership moves.
    let zero = unsafe { EventFd::from_raw_fd(zero) };
    place.repeat("messages that are refused", |client, i| match i % 4 {
        0 => assert!(client.raw().set_vring_num(0, 3).is_err()),
        1 => assert!(client.raw().set_vring_kick(0, &zero).is_err()),
        // Without an accepted size it is not served any more.
        2 => assert!(client.raw().set_vring_enable(0, true).is_err()),
        _ => {
            let whole = client.mem.region(0, client.mem.len());
            let region = VhostUserMemoryRegionInfo { guest_phys_addr: 0, memory_size: 1 << 40, ..whole };
            assert!(client.raw().set_mem_table(&[region]).is_err());
        }
    });
    let stderr = place.iod.end_well();
    let lines = stderr.lines().count();
    eprintln!("the log has {lines} lines");
    // 20 at once, one per 2 s after that, and the lines of the start.
    let most = 100 + begin.elapsed().as_secs() / 2;
    assert!((lines as u64) < most, "{lines} lines, at most {most}");
}

/// A QEMU connects and disconnects, with requests in flight and a full call descriptor.
#[test]
fn connections() {
    let mut place = AttackedDomain::new();
    let socket = place.dir.path().join("a");
    let call = full();
    place.repeat_on("connect and disconnect", |n| {
        // Each is eleven messages, a mapping and the commands of two queues.
        for i in 0..n / 5 {
            let mut client = connect(&socket);
            if i % 2 == 0 {
                client.raw().set_vring_call(0, &call).unwrap();
            }
            let _ = client.queues[0].push(&read(0, 4_096));
            client.queues[0].notify().unwrap();
        }
    });
}
