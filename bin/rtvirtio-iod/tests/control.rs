//! The control socket and the end of the process, under load.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Iod, Neighbour, disk, read, request, two_disks, until, with_keys};
use rtvirtio_domain_client::{BlkRequest, Client, Options};
use rtvirtio_testkit::HANG;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<u64> =
        stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().filter_map(|f| f.parse().ok()).collect();
    // utime and stime are fields 14 and 15 of proc_pid_stat(5); the state is not a number and is
    // skipped.
    Duration::from_millis((fields[10] + fields[11]) * 10)
}

/// Silent and slow connections do not delay replies to others.
#[test]
fn idle_and_slow_peers() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let control = dir.path().join("ctl");
    let idle: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&control).unwrap()).collect();
    assert!(iod.status().contains("\"vms\""));
    let mut slow: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&control).unwrap()).collect();
    for _ in 0..10 {
        for stream in &mut slow {
            let _ = stream.write_all(b"x");
        }
        assert!(iod.status().contains("\"vms\""));
    }
    drop((idle, slow));
    // A trace is handed to its own thread, and still works.
    let mut trace = UnixStream::connect(&control).unwrap();
    trace.write_all(b"{\"command\": \"trace\", \"for_ms\": 50}\n").unwrap();
    let lines: Vec<String> = BufReader::new(trace).lines().map(Result::unwrap).collect();
    assert!(lines.first().is_some_and(|l| l.contains("\"trace\"")), "{lines:?}");
    assert!(lines.last().is_some_and(|l| l.contains("\"end\"")), "{lines:?}");
}

/// A process without a free descriptor does not spin, and replies again when it has one.
#[test]
fn out_of_descriptors() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let pid = Pid::from_raw(iod.pid() as i32).unwrap();
    let open = std::fs::read_dir(format!("/proc/{}/fd", iod.pid())).unwrap().count() as u64;
    // The process raises its limit to its maximum, which is ours.
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let before = prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(open), maximum }).unwrap();
    let control = dir.path().join("ctl");
    let mut waiting = UnixStream::connect(&control).unwrap();
    waiting.write_all(b"{\"command\": \"status\"}\n").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let (begin, used) = (Instant::now(), processor_time(iod.pid()));
    std::thread::sleep(Duration::from_secs(2));
    let share = (processor_time(iod.pid()) - used).as_secs_f64() / begin.elapsed().as_secs_f64();
    eprintln!("without a descriptor: {:.1} % of a CPU", share * 100.0);
    // A loop without a pause uses a whole CPU.
    assert!(share < 0.3, "{share}");
    prlimit(Some(pid), Resource::Nofile, before).unwrap();
    let mut line = String::new();
    BufReader::new(waiting).read_line(&mut line).unwrap();
    assert!(line.contains("\"vms\""), "{line}");
}

/// Many disks with idle guests end without a signal of their own. How long it takes is printed.
#[test]
fn sixty_four_disks_end_at_once() {
    let dir = disk(64);
    let d = dir.path().display();
    let mut config = "[[device]]\nname = \"d\"\nwindow = 4\n".to_owned();
    for i in 0..64 {
        config += &format!(
            "[[device.disk]]\nname = \"vm{i}\"\nsocket = \"{d}/{i}\"\npath = \"{d}/disk\"\noffset = \"{i}MiB\"\nsize = \"1MiB\"\ndepth = 4\n"
        );
    }
    let iod = Iod::start(dir.path(), &config);
    let small = Options { size: 16, ..Options::default() };
    let clients: Vec<Client> =
        (0..32).map(|i| Client::connect(&dir.path().join(i.to_string()), small).unwrap()).collect();
    let begin = Instant::now();
    iod.end_well();
    let took = begin.elapsed();
    eprintln!("64 disks, 32 with a guest, end after {took:?}");
    assert!(took < HANG, "{took:?}");
    drop(clients);
}

/// What raises a VM's vCPUs is signalled for real-time requests, of the disks that were asked for.
#[test]
fn completions_of_urgent_requests_are_signalled() {
    let dir = disk(8);
    let ceiling = "guest_priority = { ceiling = \"real-time\" }\n";
    let config = with_keys(&with_keys(&two_disks(dir.path(), 8, ""), "a", ceiling), "b", ceiling);
    let iod = Iod::start(dir.path(), &config);
    let options = Options { buffer: 65_536, ..Options::default() };
    let mut a = Client::connect(&dir.path().join("a"), options).unwrap();
    let mut b = Client::connect(&dir.path().join("b"), options).unwrap();
    let a_signals = || iod.disk("a")["urgent_signals"].clone();
    assert_eq!(iod.disk("a")["peer"], std::process::id());
    assert!(a_signals().is_null(), "nobody has asked");
    let eventfd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let line = r#"{"command": "signal_urgent", "disks": ["a"]}"#;
    let unknown = iod.ask(r#"{"command": "signal_urgent", "disks": ["a", "c"]}"#, &[eventfd.as_fd()]);
    assert!(unknown.contains("there is no disk \\\"c\\\""), "{unknown}");
    assert!(a_signals().is_null(), "all or none");
    let two = iod.ask(line, &[eventfd.as_fd(), eventfd.as_fd()]);
    assert!(two.contains("one eventfd"), "{two}");
    assert!(iod.ask(line, &[eventfd.as_fd()]).contains("signalled"));
    let signals = || {
        let mut count = [0; 8];
        rustix::io::read(&eventfd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    let urgent = BlkRequest { priority: 1 << 13 | 4, ..read(0, 4_096) };
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    assert_eq!(request(&mut b, &urgent, None).0, 0);
    assert_eq!(signals(), 0, "not urgent, and not of this disk");
    assert_eq!(request(&mut a, &urgent, None).0, 0);
    assert_eq!(signals(), 1, "before the guest is notified");
    assert_eq!(a_signals(), 1);
    assert!(iod.ask(line, &[]).contains("signalled"), "no more of them");
    assert_eq!(request(&mut a, &urgent, None).0, 0);
    assert!(signals() == 0 && a_signals().is_null());
}

/// With one piece at the device at a time each VM waits for the other, and the status says so.
#[test]
fn who_waits_for_whom_is_counted() {
    let dir = disk(16);
    let config = two_disks(dir.path(), 16, "").replace("window = 4", "window = 1");
    let iod = Iod::start(dir.path(), &config);
    let waits = |vm: &str| iod.disk(vm)["waits"].clone();
    assert_eq!(waits("a")["neighbours"], serde_json::json!([]), "nobody has sent anything");
    let both = ["a", "b"].map(|socket| Neighbour::start(dir.path().join(socket)));
    for (vm, other) in [("a", "b"), ("b", "a")] {
        let has_waited = |waits: &serde_json::Value| !waits["neighbours"].as_array().unwrap().is_empty();
        let found = until("a wait for the other", || Some(waits(vm)).filter(has_waited));
        let (for_other, queued) = (found["neighbours"][0]["ns"].as_u64(), found["queued_ns"].as_u64());
        assert_eq!(found["neighbours"][0]["name"], other);
        assert!(for_other > Some(0) && for_other <= queued, "{found}");
    }
    both.into_iter().for_each(|neighbour| assert!(neighbour.end().0 > 0));
}
