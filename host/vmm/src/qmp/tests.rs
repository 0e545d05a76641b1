use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rtvirtio_testkit::HANG;

use super::*;

/// Output of QEMU 7.2.22 of Debian 12 with 2 vCPUs and one I/O thread, as recorded.
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg-7+deb12u18+b3"}, "capabilities": ["oob"]}}"#;
const STATUS: &str = r#"{"return": {"status": "running", "singlestep": false, "running": true}, "id": @}"#;
const VERSION: &str = r#"{"return": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg-7+deb12u18+b3"}, "id": @}"#;
const KVM: &str = r#"{"return": {"enabled": false, "present": true}, "id": @}"#;
const CPUS: &str = r#"{"return": [{"thread-id": 18065, "props": {"core-id": 0, "thread-id": 0, "socket-id": 0}, "qom-path": "/machine/unattached/device[0]", "cpu-index": 0, "target": "x86_64"}, {"thread-id": 18066, "props": {"core-id": 1, "thread-id": 0, "socket-id": 0}, "qom-path": "/machine/unattached/device[2]", "cpu-index": 1, "target": "x86_64"}], "id": @}"#;
const IOTHREADS: &str = r#"{"return": [{"poll-shrink": 0, "thread-id": 18063, "aio-max-batch": 0, "poll-grow": 0, "poll-max-ns": 32768, "id": "io0"}], "id": @}"#;
const UNKNOWN: &str =
    r#"{"id": @, "error": {"class": "CommandNotFound", "desc": "The command nonsense has not been found"}}"#;
const STOP: &str = "{\"timestamp\": {\"seconds\": 1795230146, \"microseconds\": 205641}, \"event\": \"STOP\"}\r\n{\"return\": {}, \"id\": @}";
const SHUTDOWN: &str = r#"{"timestamp": {"seconds": 1795230146, "microseconds": 205996}, "event": "SHUTDOWN", "data": {"guest": false, "reason": "host-qmp-quit"}}"#;

/// Plays one side of a transcript: for each (command, answer), reads a request, checks the command,
/// and answers with its id in place of `@`. An empty answer sends nothing. Ends the connection
/// after the last.
fn play(script: &'static [(&'static str, &'static str)]) -> (Result<Qmp, VmmError>, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let player = thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        let mut requests = BufReader::new(theirs);
        writeln!(out, "{GREETING}\r").unwrap();
        for (command, answer) in [("qmp_capabilities", "{\"return\": {}, \"id\": @}")].iter().chain(script) {
            let mut line = String::new();
            requests.read_line(&mut line).unwrap();
            let request: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(request["execute"], *command);
            if !answer.is_empty() {
                writeln!(out, "{}\r", answer.replace('@', &request["id"].to_string())).unwrap();
            }
        }
    });
    (Qmp::from_stream(ours, "transcript", HANG), player)
}

#[test]
fn recorded_session() {
    let (qmp, player) = play(&[
        ("query-status", STATUS),
        ("query-version", VERSION),
        ("query-kvm", KVM),
        ("query-cpus-fast", CPUS),
        ("query-iothreads", IOTHREADS),
        ("nonsense", UNKNOWN),
        ("stop", STOP),
        ("quit", SHUTDOWN),
    ]);
    let mut qmp = qmp.unwrap();
    assert_eq!(qmp.version().qemu, VersionTriple { major: 7, minor: 2, micro: 22 });
    assert_eq!(qmp.query_status().unwrap(), RunStatus { running: true, status: "running".into() });
    assert_eq!(qmp.execute("query-version", None).unwrap()["qemu"]["major"], 7);
    assert_eq!(qmp.query_kvm().unwrap(), KvmInfo { enabled: false, present: true });
    let cpus = qmp.query_cpus_fast().unwrap();
    assert_eq!(cpus.iter().map(|c| (c.cpu_index, c.thread_id)).collect::<Vec<_>>(), [(0, 18065), (1, 18066)]);
    assert_eq!(qmp.query_iothreads().unwrap(), [IoThread { id: "io0".into(), thread_id: 18063 }]);
    let refused = qmp.execute("nonsense", None).unwrap_err();
    assert!(matches!(&refused, VmmError::Refused { class, .. } if class == "CommandNotFound"), "{refused}");
    assert_eq!(qmp.events_skipped(), 0);
    qmp.execute("stop", None).unwrap();
    assert_eq!(qmp.events_skipped(), 1);
    // QEMU may end before its answer is sent: the event arrived, the answer did not.
    qmp.quit().unwrap();
    player.join().unwrap();
}

#[test]
fn late_answer_to_an_abandoned_command_is_skipped() {
    let (qmp, player) = play(&[
        ("query-status", ""),
        (
            "query-kvm",
            "{\"return\": {\"status\": \"paused\", \"running\": false}, \"id\": 2}\r\n{\"return\": {\"enabled\": true, \"present\": true}, \"id\": @}",
        ),
    ]);
    let mut qmp = qmp.unwrap();
    qmp.timeout = Duration::from_millis(50);
    assert!(qmp.query_status().unwrap_err().is_timeout());
    qmp.timeout = HANG;
    assert!(qmp.query_kvm().unwrap().enabled);
    player.join().unwrap();
}

#[test]
fn an_event_may_come_before_the_greeting() {
    let connect = |first: &'static str| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let player = thread::spawn(move || {
            write!(theirs, "{first}\r\n{GREETING}\r\n").unwrap();
            let mut line = String::new();
            if BufReader::new(theirs.try_clone().unwrap()).read_line(&mut line).is_ok_and(|n| n > 0) {
                let request: Value = serde_json::from_str(&line).unwrap();
                write!(theirs, "{{\"return\": {{}}, \"id\": {}}}\r\n", request["id"]).unwrap();
            }
        });
        let qmp = Qmp::from_stream(ours, "eager", HANG);
        player.join().unwrap();
        qmp
    };
    let qmp = connect(SHUTDOWN).unwrap();
    assert_eq!((qmp.version().qemu.major, qmp.events_skipped()), (7, 1));
    let error = connect("{\"return\": {}}").unwrap_err().to_string();
    assert!(error.contains("neither a greeting nor an event"), "{error}");
}

#[test]
fn silence_is_a_timeout() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let start = Instant::now();
    let error = Qmp::from_stream(ours, "silent", Duration::from_millis(100)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("QMP silent: greeting: no answer within 100 ms"), "{error}");
    assert!(start.elapsed() < HANG);
}

#[test]
fn something_else_on_the_socket_is_named() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"SSH-2.0-OpenSSH_9.2\n").unwrap();
    let error = Qmp::from_stream(ours, "wrong", HANG).unwrap_err();
    assert!(matches!(error, VmmError::Protocol { .. }), "{error}");
}

#[test]
fn endless_line_is_refused_and_the_connection_not_used_again() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let flood = thread::spawn(move || {
        writeln!(theirs, "{GREETING}\n{{\"return\": {{}}, \"id\": 1}}").unwrap();
        // Ends with an error when the client closes the connection.
        while theirs.write_all(&[b'x'; 65536]).is_ok() {}
    });
    let mut qmp = Qmp::from_stream(ours, "flood", HANG).unwrap();
    assert!(matches!(qmp.query_status(), Err(VmmError::TooLarge { .. })));
    assert!(qmp.link.buffered() <= REPLY_LIMIT, "kept {} bytes", qmp.link.buffered());
    assert!(matches!(qmp.query_status(), Err(VmmError::Protocol { .. })));
    drop(qmp);
    flood.join().unwrap();
}

#[test]
fn absent_socket_and_long_path() {
    let error = Qmp::connect(Path::new("/nonexistent/qmp"), Duration::from_secs(1)).unwrap_err();
    assert!(error.is_closed() && error.to_string().contains("/nonexistent/qmp"), "{error}");
    let long = format!("/tmp/{}", "x".repeat(120));
    let error = Qmp::connect(Path::new(&long), Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("shorter"), "{error}");
}

/// Monitor that answers the negotiation, and then to each command sends `lines` before the answer.
fn noisy(lines: Vec<String>, answer: &'static str) -> Qmp {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        let mut requests = BufReader::new(theirs).lines().map_while(Result::ok);
        let mut reply = |request: Option<String>, text: &str| {
            let request: Value = serde_json::from_str(&request?).ok()?;
            writeln!(out, "{}", text.replace('@', &request["id"].to_string())).ok()
        };
        // The client disconnects when the limit is reached.
        let mut talk = || -> Option<()> {
            reply(Some("{\"id\": 0}".to_owned()), GREETING)?;
            reply(requests.next(), "{\"return\": {}, \"id\": @}")?;
            for request in requests.by_ref() {
                for line in &lines {
                    reply(Some("{\"id\": 0}".to_owned()), line)?;
                }
                reply(Some(request), answer)?;
            }
            None
        };
        talk()
    });
    Qmp::from_stream(ours, "noisy", HANG).unwrap()
}

#[test]
fn a_flood_of_events_ends_the_connection_and_a_guest_that_stops_and_goes_on_does_not() {
    let event = r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESUME"}"#.to_owned();
    let mut qmp = noisy(vec![event.clone(); 500], KVM);
    qmp.query_kvm().unwrap();
    assert_eq!(qmp.events_skipped(), 500);
    let large = format!(r#"{{"event": "X", "data": "{}"}}"#, "x".repeat(64 << 10));
    // Endless late answers have the same effect.
    let late = r#"{"return": {}, "id": 999999}"#.to_owned();
    for flood in [vec![event; 20_000], vec![large; 100], vec![late; 20_000]] {
        let mut qmp = noisy(flood, KVM);
        let e = qmp.query_kvm().unwrap_err();
        assert!(matches!(e, VmmError::TooMany { limit: MOST_EVENTS, .. }), "{e}");
        let again = qmp.query_kvm().unwrap_err();
        assert!(matches!(again, VmmError::Protocol { .. }), "{again}");
    }
}

#[test]
fn all_commands_of_a_connection_have_one_end() {
    let mut qmp = noisy(Vec::new(), KVM);
    qmp.query_kvm().unwrap();
    // Without the total limit each command would have its full time again.
    let mut qmp = qmp.within(Duration::ZERO);
    let e = qmp.query_kvm().unwrap_err();
    assert!(e.is_timeout(), "{e}");
    let mut qmp = qmp.within(HANG);
    qmp.query_kvm().unwrap();
}

#[test]
fn more_drives_than_a_vm_may_have_are_refused() {
    let list = |n: usize| {
        let all = vec![r#"{"device": "d"}"#; n].join(", ");
        &*format!(r#"{{"return": [{all}], "id": @}}"#).leak()
    };
    assert_eq!(noisy(Vec::new(), list(MOST_DRIVES)).query_drives().unwrap(), []);
    let e = noisy(Vec::new(), list(MOST_DRIVES + 1)).query_drives().unwrap_err();
    assert!(matches!(e, VmmError::TooMany { limit: MOST_DRIVES, what: "drives", .. }), "{e}");
}

/// A list of small objects takes a hundred times its bytes in memory once it is a tree.
#[test]
fn an_answer_of_too_many_values_becomes_no_tree() {
    let list = |n: usize| {
        let all = vec![r#"{"a": 1}"#; n].join(", ");
        &*format!(r#"{{"return": [{all}], "id": @}}"#).leak()
    };
    let few = noisy(Vec::new(), list(MOST_VALUES)).execute("query-pci", None).unwrap();
    assert_eq!(few.as_array().unwrap().len(), MOST_VALUES);
    let mut qmp = noisy(Vec::new(), list(MOST_VALUES + 2));
    let e = qmp.execute("query-pci", None).unwrap_err();
    assert!(matches!(e, VmmError::TooMany { limit: MOST_VALUES, what: "values", .. }), "{e}");
    // An answer of a known form ends at its first wrong item.
    let e = qmp.query_cpus_fast().unwrap_err();
    assert!(matches!(e, VmmError::Protocol { .. }), "{e}");
}
