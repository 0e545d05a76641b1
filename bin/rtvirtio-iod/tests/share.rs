//! Effects of valid but excessive load on a neighbour: each attack with a control run.
//!
//! Figures are printed; assertions do not depend on a quiet machine. To measure on an idle machine:
//! `cargo test --release -p rtvirtio-iod --test share -- --nocapture --test-threads=1`.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{AttackedDomain, FLUSH, Iod, Neighbour, deallocate, disk, range, read, request, two_disks};
use rtvirtio_domain_client::{Client, Options, SharedMemory};
use rtvirtio_testkit::HANG;

/// Duration of each run: `RTVIRTIO_SHARE_SECONDS`, or one second.
fn length() -> Duration {
    let seconds = std::env::var("RTVIRTIO_SHARE_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(1.0))
}

/// The neighbour without the attack, and with it.
fn compare(name: &str, socket: &Path, control: impl FnOnce(), attack: impl FnOnce()) {
    let measure = |run: &mut dyn FnMut()| {
        let neighbour = Neighbour::start(socket.to_owned());
        std::thread::sleep(Duration::from_millis(100));
        run();
        neighbour.measured()
    };
    let (mut control, mut attack) = (Some(control), Some(attack));
    let without = measure(&mut || control.take().expect("once")());
    let with = measure(&mut || attack.take().expect("once")());
    eprintln!("{name}: without {without:?}, with {with:?}");
    assert!(with.n > 0, "{name}: the neighbour got nothing");
    // A neighbour that an attack stops stays stopped. How long it waits is printed, not judged.
    assert!(with.longest < HANG, "{name}: the neighbour waited {:?}", with.longest);
}

/// Runs attackers in threads, for the duration of a run.
fn in_threads(n: usize, attacker: impl Fn(usize, &AtomicBool) + Send + Sync + 'static) {
    let stop = Arc::new(AtomicBool::new(false));
    let attacker = Arc::new(attacker);
    let threads: Vec<_> = (0..n)
        .map(|i| {
            let (stop, attacker) = (Arc::clone(&stop), Arc::clone(&attacker));
            std::thread::spawn(move || attacker(i, &stop))
        })
        .collect();
    std::thread::sleep(length());
    stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|t| t.join().expect("an attacker"));
}

/// An attacker's disk `a` of 1 GiB, and a neighbour's, `b`, of 64 MiB, with keys of the device and
/// of `b`.
fn large_and_small(device: &str, b: &str) -> (tempfile::TempDir, Iod) {
    let dir = disk(1);
    let d = dir.path().display();
    for (name, mib) in [("large", 1_024), ("small", 64)] {
        std::fs::File::create(dir.path().join(name)).unwrap().set_len(mib << 20).unwrap();
    }
    let config = format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n{device}\
         [[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{d}/large\"\n\
         [[device.disk]]\nname = \"b\"\nsocket = \"{d}/b\"\npath = \"{d}/small\"\n{b}"
    );
    let iod = Iod::start(dir.path(), &config);
    (dir, iod)
}

/// Discards and zeroing, 128 MiB each, 32 outstanding, while a neighbour has a reservation of 40 %
/// and a deadline of 20 ms.
#[test]
fn a_flood_of_discards() {
    let cost = "cost = { read = { base = \"60us\", per_mib = \"1ms\" }, write = { base = \"60us\", per_mib = \"1ms\" } }\n";
    let reserve = "reserve = { share = \"40%\", burst = \"1ms\", deadline = \"20ms\" }\n";
    let (dir, mut iod) = large_and_small(cost, reserve);
    let socket = dir.path().join("a");
    for (name, kinds) in [("discards", [11, 11]), ("zeroing", [13, 13]), ("zeroing and discards", [13, 11])] {
        let socket = socket.clone();
        // Allocates ranges to discard.
        let zero = |from: u64| range(from, 128 << 11, 0);
        let mut fill = Client::connect(&socket, Options::default()).unwrap();
        for i in 0..8 {
            assert_eq!(request(&mut fill, &deallocate(13), Some(&zero(i * (128 << 11)))).0, 0);
        }
        drop(fill);
        let attack = move || {
            in_threads(1, move |_, stop| {
                let mut client = Client::connect(&socket, Options::default()).unwrap();
                let queue = &mut client.queues[0];
                let mut i = 0u64;
                let mut outstanding = 0;
                while !stop.load(Ordering::Relaxed) {
                    while outstanding < 32 {
                        let range = range(i / 2 % 8 * (128 << 11), 128 << 11, 0);
                        if queue.push_with(&deallocate(kinds[i as usize % 2]), &range).is_none() {
                            break;
                        }
                        (i, outstanding) = (i + 1, outstanding + 1);
                    }
                    queue.notify().unwrap();
                    while queue.pop_used().is_some() {
                        outstanding -= 1;
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                eprintln!("{name}: {} requests of 128 MiB were answered", i - outstanding);
            });
        };
        compare(name, &dir.path().join("b"), || std::thread::sleep(length()), attack);
        assert!(iod.is_alive());
    }
    eprintln!("{}", iod.status());
}

/// Requests that complete at once, by 8 VMs with 4 queues each, of 64 disks. The control run uses
/// as many CPUs.
#[test]
fn a_flood_of_requests_that_cost_no_device_time() {
    let dir = disk(64);
    let d = dir.path().display();
    let mut config = "[[device]]\nname = \"d\"\nwindow = 4\n".to_owned();
    for i in 0..64 {
        config += &format!(
            "[[device.disk]]\nname = \"vm{i}\"\nsocket = \"{d}/{i}\"\npath = \"{d}/disk\"\noffset = \"{i}MiB\"\nsize = \"1MiB\"\nqueues = 4\n"
        );
    }
    let mut iod = Iod::start(dir.path(), &config);
    let at = dir.path().to_owned();
    // One thread for all of them, which only adds requests: it uses one CPU, and the engine the
    // other.
    let attacker = move |_: usize, stop: &AtomicBool| {
        let options = Options { queues: 4, size: 256, ..Options::default() };
        let mut clients: Vec<Client> =
            (0..8).map(|i| Client::connect(&at.join(i.to_string()), options).unwrap()).collect();
        let guest = |offset: usize| SharedMemory::BASE + offset as u64;
        let mut counts = vec![[(0u64, 0u64); 4]; 8];
        for client in &mut clients {
            let mem = Arc::clone(&client.mem);
            for queue in &mut client.queues {
                // Get id: header, 20 bytes, status.
                mem.write(queue.data(0), &[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
                queue.write_descriptor_raw(0, guest(queue.data(0)), 16, 1, 1);
                queue.write_descriptor_raw(1, guest(queue.data(1)), 20, 3, 2);
                queue.write_descriptor_raw(2, guest(queue.data(2)), 1, 2, 0);
            }
        }
        let completed = |counts: &[[(u64, u64); 4]]| -> Vec<u64> {
            counts.iter().map(|c| c.iter().map(|(_, completed)| completed).sum()).collect()
        };
        let begin = Instant::now();
        // Throttled VMs come last, but each of them has its turn.
        let served = |counts: &[[(u64, u64); 4]]| completed(counts).iter().all(|n| *n > 50);
        while !stop.load(Ordering::Relaxed) || !served(&counts) && begin.elapsed() < HANG {
            for (client, counts) in clients.iter_mut().zip(&mut counts) {
                for (queue, (offered, completed)) in client.queues.iter_mut().zip(counts) {
                    while queue.pop_used_raw().is_some() {
                        *completed += 1;
                    }
                    while *offered - *completed < 250 {
                        queue.add_avail(0);
                        *offered += 1;
                    }
                    queue.kick.write(1).unwrap();
                }
            }
        }
        eprintln!("completed for each attacker: {:?}", completed(&counts));
        assert!(served(&counts), "{:?}", completed(&counts));
    };
    let busy = |_: usize, stop: &AtomicBool| {
        while !stop.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    };
    compare(
        "requests that cost no device time",
        &dir.path().join("63"),
        || in_threads(1, busy),
        || in_threads(1, attacker),
    );
    assert!(iod.is_alive());
    let mut next = Client::connect(&dir.path().join("0"), Options::default()).unwrap();
    assert_eq!(request(&mut next, &read(0, 4_096), None).0, 0);
}

/// Reads into unmapped guest memory: they never reach the device.
#[test]
fn a_flood_of_requests_that_cannot_be_carried_out() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    let mut place = AttackedDomain::new();
    let socket = place.socket("a");
    let attack = move || {
        in_threads(1, move |_, stop| {
            let options = Options { size: 256, ..Options::default() };
            let mut client = Client::connect(&socket, options).unwrap();
            let mem = Arc::clone(&client.mem);
            let queue = &mut client.queues[0];
            let (header, status) = (queue.data(0), queue.data(1));
            mem.write(header, &[0; 16]);
            let guest = |offset: usize| SharedMemory::BASE + offset as u64;
            // The whole disk at once: 512 pieces.
            queue.write_descriptor_raw(0, guest(header), 16, NEXT, 1);
            queue.write_descriptor_raw(1, 1 << 60, 32 << 20, NEXT | WRITE, 2);
            queue.write_descriptor_raw(2, guest(status), 1, WRITE, 0);
            let (mut offered, mut answered) = (0u64, 0u64);
            while !stop.load(Ordering::Relaxed) {
                while offered - answered < 256 {
                    queue.add_avail(0);
                    offered += 1;
                }
                queue.notify().unwrap();
                while queue.pop_used_raw().is_some() {
                    answered += 1;
                }
            }
            eprintln!("{answered} of them were answered");
        });
    };
    let control = || std::thread::sleep(length());
    compare("requests that cannot be carried out", &place.socket("b"), control, attack);
    assert!(place.iod.is_alive());
}

/// A full window, a flush and a discard are in flight at once: each has a slot.
#[test]
fn window_flush_and_discard_in_flight_at_once() {
    let dir = disk(64);
    let config = two_disks(dir.path(), 64, "").replace("window = 4", "window = 1");
    let mut iod = Iod::start(dir.path(), &config);
    let mut clients =
        ["a", "b"].map(|name| Client::connect(&dir.path().join(name), Options::default()).unwrap());
    for _ in 0..200 {
        for client in &mut clients {
            let queue = &mut client.queues[0];
            for i in 0..4 {
                queue.push(&common::write(i * 8, 4_096)).unwrap();
            }
            queue.push(&FLUSH).unwrap();
            queue.push_with(&deallocate(11), &range(0, 64, 0)).unwrap();
        }
        for client in &mut clients {
            client.queues[0].notify().unwrap();
        }
        for client in &mut clients {
            for _ in 0..6 {
                assert_eq!(common::completion(&mut client.queues[0]).map(|a| a.status), Some(0));
            }
        }
    }
    assert!(iod.is_alive());
}

/// A queue with hours of discards stops at once, and so does the I/O domain: a rebooting guest does
/// not wait.
#[test]
fn discards_do_not_hold_up_a_stop() {
    use vhost::VhostBackend;
    let (dir, iod) = large_and_small("discard_share = \"1%\"\n", "");
    let neighbour = Neighbour::start(dir.path().join("b"));
    let push = |client: &mut Client, kind: u32| {
        let queue = &mut client.queues[0];
        while queue.push_with(&deallocate(kind), &range(0, 1 << 21, 0)).is_some() {}
        queue.notify().unwrap();
        std::thread::sleep(Duration::from_millis(100));
    };
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    push(&mut client, 11);
    let begin = Instant::now();
    client.raw().get_vring_base(0).unwrap();
    let stopped = begin.elapsed();
    let done =
        std::iter::from_fn(|| client.queues[0].pop_used()).inspect(|a| assert_eq!(a.status, 0)).count();
    // More than a hundred of 1 GiB each, at one percent of the time: hours.
    assert!(done > 100 && stopped < HANG, "{done} after {stopped:?}");
    // Zeroing is not a hint: the queue waits for it, but the end of the I/O domain does not.
    drop(client);
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    push(&mut client, 13);
    let waits = std::thread::spawn(move || client.raw().get_vring_base(0).is_err());
    std::thread::sleep(Duration::from_millis(100));
    assert!(neighbour.end().0 > 0);
    let begin = Instant::now();
    iod.end_well();
    eprintln!("stopped after {stopped:?}, the domain ended after {:?}", begin.elapsed());
    assert!(begin.elapsed() < HANG, "{:?}", begin.elapsed());
    assert!(waits.join().unwrap(), "the domain ended under it");
}
