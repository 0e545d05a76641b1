//! Traces of requests.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use common::{FLUSH, Iod, disk, read, request, two_disks, with_keys, write};
use rtvirtio_domain_client::load::{Plan, Stream, run};
use rtvirtio_domain_client::{BlkRequest, Client, Options};
use serde_json::Value;

/// A connection that listens to a trace.
struct Listener {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Listener {
    /// Asks for a trace; the first line is the reply.
    fn ask(dir: &Path, request: &str) -> (Self, Value) {
        let stream = UnixStream::connect(dir.join("ctl")).unwrap();
        // A silent I/O domain fails the test instead of blocking it.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        writeln!(&stream, "{request}").unwrap();
        let lines = BufReader::new(stream.try_clone().unwrap());
        let mut listener = Self { stream, lines };
        let first = listener.line().expect("an answer");
        (listener, first)
    }

    fn start(dir: &Path) -> Self {
        // The previous listener may still be attached.
        for _ in 0..500 {
            let (listener, first) = Self::ask(dir, r#"{"command": "trace"}"#);
            if first["trace"]["devices"] == 1 {
                return listener;
            }
            assert!(first["error"].as_str().unwrap().contains("another listener"), "{first}");
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the one before is still served");
    }

    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).ok()
    }

    /// Ends the trace; returns its events and the last line.
    fn finish(mut self) -> (Vec<Value>, Value) {
        self.stream.shutdown(Shutdown::Write).unwrap();
        let mut events = Vec::new();
        loop {
            let line = self.line().expect("the trace ends");
            match line.get("end") {
                Some(end) => return (events, end.clone()),
                None => events.push(line),
            }
        }
    }
}

#[test]
fn every_request_is_traced() {
    let dir = disk(8);
    let config = two_disks(dir.path(), 8, "quantum = \"16KiB\"");
    let config = with_keys(&config, "b", "guest_priority = { ceiling = \"best-effort\" }\n");
    let _iod = Iod::start(dir.path(), &config);
    let options = Options { buffer: 65_536, ..Options::default() };
    let mut a = Client::connect(&dir.path().join("a"), options).unwrap();
    let mut b = Client::connect(&dir.path().join("b"), options).unwrap();
    // Before the trace.
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    let listener = Listener::start(dir.path());
    let data = vec![7; 65_536];
    assert_eq!(request(&mut a, &write(8, 65_536), Some(&data)).0, 0);
    assert_eq!(request(&mut a, &FLUSH, None).0, 0);
    // The guest uses real-time 2 and idle 7; the ceiling of this VM is best effort.
    assert_eq!(request(&mut b, &BlkRequest { priority: 1 << 13 | 2, ..read(0, 4_096) }, None).0, 0);
    assert_eq!(request(&mut b, &BlkRequest { priority: 3 << 13 | 7, ..read(0, 512) }, None).0, 0);
    let (events, end) = listener.finish();
    let traced: Vec<_> = events
        .iter()
        .map(|e| {
            let text = |key: &str| e[key].as_str().unwrap().to_owned();
            (text("vm"), text("op"), e["len"].as_u64().unwrap(), text("class"), e["level"].as_u64().unwrap())
        })
        .collect();
    let event =
        |vm: &str, op: &str, len, class: &str, level| (vm.into(), op.into(), len, class.into(), level);
    assert_eq!(
        traced,
        [
            event("a", "write", 65_536, "best-effort", 4),
            event("a", "flush", 0, "best-effort", 4),
            event("b", "read", 4_096, "best-effort", 2),
            event("b", "read", 512, "idle", 7),
        ]
    );
    assert_eq!(end, serde_json::json!({ "events": 4, "dropped": 0 }));
    let mut before = 0;
    for e in &events {
        let ns = |key: &str| e[key].as_u64().unwrap();
        assert!(ns("device_ns") > 0 && ns("total_ns") == ns("wait_ns") + ns("device_ns"), "{e}");
        // At depth 1 each request is fetched after the completion of the previous one.
        assert!(ns("at_ns") >= before, "{e}");
        before = ns("at_ns") + ns("total_ns");
        assert_eq!((&e["status"], &e["device"], &e["reserved"]), (&0.into(), &"d".into(), &false.into()));
    }
    // Requests after the trace are not in it.
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    assert_eq!(Listener::start(dir.path()).finish().0.len(), 0);
}

/// Time under a cap is waiting time, not device time; and errors are in the trace.
#[test]
fn waiting_and_device_time_are_separate() {
    let dir = disk(8);
    let config = two_disks(dir.path(), 8, "quantum = \"16KiB\"")
        .replace("name = \"a\"\n", "name = \"a\"\nread_cap = { requests = \"200/s\" }\n")
        .replace("name = \"b\"\n", "name = \"b\"\nread_cap = { bytes = \"1MB/s\" }\n");
    let _iod = Iod::start(dir.path(), &config);
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let listener = Listener::start(dir.path());
    // The second round reuses all slots of the first.
    for _ in 0..2 {
        for i in 0..20 {
            a.queues[0].push(&read(i * 8, 4_096)).unwrap();
        }
        a.queues[0].notify().unwrap();
        for _ in 0..20 {
            assert_eq!(common::completion(&mut a.queues[0]).expect("an answer").status, 0);
        }
    }
    // Beyond the end of the truncated file.
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("disk")).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(request(&mut a, &read(4_096, 4_096), None).0, 1);
    let (events, end) = listener.finish();
    assert_eq!((events.len(), &end["dropped"]), (41, &0.into()));
    for events in [&events[..20], &events[20..40]] {
        // The submission of each request.
        let went = |e: &Value| e["at_ns"].as_u64().unwrap() + e["wait_ns"].as_u64().unwrap();
        for (i, event) in events.iter().enumerate() {
            // The most that the cap allows, on any machine: one at once, then one per 5 ms.
            assert!(went(event) - went(&events[0]) >= i as u64 * 4_990_000, "{i}: {event}");
        }
    }
    assert_eq!(events[40]["status"], 1);

    // Its first piece goes at once, the cap delays the other seven: time after the submission.
    let mut b =
        Client::connect(&dir.path().join("b"), Options { buffer: 131_072, ..Options::default() }).unwrap();
    let listener = Listener::start(dir.path());
    file.set_len(8 << 20).unwrap();
    assert_eq!(request(&mut b, &read(0, 131_072), None).0, 0);
    let (events, _) = listener.finish();
    assert!(events[0]["device_ns"].as_u64().unwrap() > 100_000_000, "{}", events[0]);
}

/// A listener that does not read loses events only: each is delivered or counted.
#[test]
fn a_sleeping_listener_delays_no_request() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let mut clients = [Client::connect(&dir.path().join("a"), Options::default()).unwrap()];
    let flood = Stream { block: 512, ..Stream::reads("flood", 64, 2 << 20) };
    let plan = Plan { warm_up: Duration::ZERO, length: Duration::from_secs(1), seed: 1, spin: false };
    // When no request is outstanding.
    let answered = || loop {
        let disk = iod.disk("a");
        if disk["outstanding"] == 0 {
            return disk["read"]["requests"].as_u64().unwrap();
        }
    };
    // More events than the ring and the socket hold.
    let mut flood = || {
        let before = answered();
        for _ in 0..200 {
            assert_eq!(run(&mut clients, std::slice::from_ref(&flood), &plan).unwrap()[0].errors, 0);
            if answered() > before + 60_000 {
                return;
            }
        }
        panic!("{} requests in 200 s", answered() - before);
    };
    // A listener that disconnects with unread events.
    let listener = Listener::start(dir.path());
    flood();
    drop(listener);
    let listener = Listener::start(dir.path());
    let before = answered();
    flood();
    // A second listener is refused; other commands work.
    let (_, refused) = Listener::ask(dir.path(), r#"{"command": "trace"}"#);
    assert!(refused["error"].as_str().unwrap().contains("another listener"), "{refused}");
    let all = answered() - before;
    let (events, end) = listener.finish();
    let (traced, dropped) = (end["events"].as_u64().unwrap(), end["dropped"].as_u64().unwrap());
    assert_eq!(events.len() as u64, traced);
    assert_eq!(traced + dropped, all);
    assert!(traced >= 8_192 && dropped > 0, "{traced} and {dropped}");
}

/// A trace ends after its time, and when its listener disconnects.
#[test]
fn a_trace_ends() {
    let dir = disk(8);
    let _iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let (mut listener, first) = Listener::ask(dir.path(), r#"{"command": "trace", "for_ms": 50}"#);
    assert_eq!(first["trace"]["devices"], 1, "{first}");
    assert_eq!(listener.line().unwrap()["end"]["events"], 0);
    assert_eq!(listener.line(), None);
    drop(Listener::start(dir.path()));
    drop(Listener::start(dir.path()));
}
