//! The interface of the service: state, events, metrics, and clients that behave badly.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Rig, answer, contract_of_none, free_address};
use rtvirtio_testkit::openapi::differences;
use rtvirtio_testkit::site::{signal, wait_for};
use rtvirtio_testkit::{HANG, Machine, Need, has};
use rtvirtio_vmm::{EVENTS_CHARDEV, Qmp};
use rustix::process::Signal;
use serde_json::Value;

/// Status and body of a request on the socket.
fn ask(rig: &Rig, method: &str, path: &str) -> (u16, String) {
    answer(UnixStream::connect(rig.socket()).unwrap(), method, path, "localhost")
}

#[test]
fn state_events_and_metrics_are_served() {
    if !has("state_events_and_metrics_are_served", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    contract_of_none(&rig, "plc");
    rig.start(&[]);
    wait_for("the contract", || rig.vm("plc")["state"] != Value::Null);
    let (code, body) = ask(&rig, "GET", "/v1/vms/plc");
    let vm: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((code, &vm["targets"][0]["task"]), (200, &Value::from("t")));
    assert_eq!(vm["targets"][0]["latency_ns"], 10_000_000);
    for (method, path, expected) in [
        ("GET", "/v1/vms/none", 404),
        ("GET", "/v2/status", 404),
        ("GET", "/v1/history?after=x", 400),
        ("DELETE", "/v1/status", 405),
        ("POST", "/v1/vms/plc/accept", 409),
        ("GET", "/v1/plan", 404),
        ("POST", "/v1/plan/accept", 409),
        ("POST", "/v1/plan/refuse", 409),
        ("POST", "/v1/compare", 202),
        ("GET", "/openapi.json", 200),
    ] {
        assert_eq!(ask(&rig, method, path).0, expected, "{method} {path}");
    }
    let history: Vec<Value> = serde_json::from_str(&ask(&rig, "GET", "/v1/history?limit=1").1).unwrap();
    assert_eq!(history.len(), 1);
    let (code, metrics) = ask(&rig, "GET", "/metrics");
    assert_eq!(code, 200);
    for line in
        ["# TYPE rtvirtio_loop_passes_total counter", "rtvirtio_contract_drift_settings{vm=\"plc\"} 0"]
    {
        assert!(metrics.contains(line), "{metrics}");
    }

    // A stream: the state at once, then what happens; with a number, also what was missed.
    let mut stream = UnixStream::connect(rig.socket()).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 0\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    // In which order the first ones come is not said.
    let mut wanted = vec!["event: status", "event: observation", "service started"];
    while !wanted.is_empty() {
        let line = lines.next().expect("the stream ended");
        wanted.retain(|text| !line.contains(text));
    }
    fs::write(rig.contracts().join("broken.toml"), "x").unwrap();
    assert!(lines.by_ref().any(|l| l.starts_with("data: ") && l.contains("broken.toml")));

    // Only root, where there is no group.
    let mode = fs::metadata(rig.socket()).unwrap().permissions().mode() & 0o777;
    assert!([0o600, 0o660].contains(&mode), "{mode:o}");

    // SIGTERM ends it, and the socket goes.
    signal(&rig.service.as_ref().unwrap().0, Signal::TERM);
    assert!(rig.service.as_mut().unwrap().0.wait().unwrap().success());
    assert!(!rig.socket().exists());
}

/// Each answer has what `openapi.json` describes, and nothing else.
#[test]
fn answers_are_as_they_are_described() {
    if !has("answers_are_as_they_are_described", &[Need::Root, Need::QEMU]) {
        return;
    }
    let mut rig = Rig::new();
    contract_of_none(&rig, "off");
    fs::write(rig.contracts().join("broken.toml"), "x").unwrap();
    fs::write(rig.config(), "[plan]\n").unwrap();
    let machine = Machine::start(rig.site.dir.path(), "plc", &[]);
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"10/s\"\ntarget = {{ percentile = \"p99\", latency = \"10ms\" }}\n",
        machine.qmp().display()
    );
    fs::write(rig.contracts().join("plc.toml"), text).unwrap();
    rig.start(&[]);
    let parsed = |path: &str| -> Value { serde_json::from_str(&ask(&rig, "GET", path).1).unwrap() };
    wait_for("the VM's process", || parsed("/v1/vms/plc")["processes"][0].is_object());
    wait_for("its sample", || parsed("/v1/observation")["vms"]["plc"].is_object());
    assert_eq!(parsed("/v1/status")["faults"].as_array().map(Vec::len), Some(1));
    let description = parsed("/openapi.json");
    for (method, path, described) in [
        ("get", "/v1/status", "/v1/status"),
        ("get", "/v1/vms/plc", "/v1/vms/{vm}"),
        ("get", "/v1/vms/off", "/v1/vms/{vm}"),
        ("get", "/v1/vms/none", "/v1/vms/{vm}"),
        ("get", "/v1/vms/plc/settings", "/v1/vms/{vm}/settings"),
        ("get", "/v1/vms/none/settings", "/v1/vms/{vm}/settings"),
        ("post", "/v1/vms/plc/accept", "/v1/vms/{vm}/accept"),
        ("get", "/v1/plan", "/v1/plan"),
        ("post", "/v1/plan/accept", "/v1/plan/accept"),
        ("post", "/v1/plan/refuse", "/v1/plan/refuse"),
        ("post", "/v1/compare", "/v1/compare"),
        ("get", "/v1/arrivals", "/v1/arrivals"),
        ("delete", "/v1/arrivals?vm=none", "/v1/arrivals"),
        ("get", "/v1/observation", "/v1/observation"),
        ("get", "/v1/waits", "/v1/waits"),
        ("get", "/v1/history", "/v1/history"),
    ] {
        let (status, body) = ask(&rig, &method.to_uppercase(), path);
        let answer: Value =
            serde_json::from_str(&body).unwrap_or_else(|e| panic!("{method} {path} {status}: {e}: {body}"));
        let found = differences(&description, (method, described), status, &answer);
        assert!(found.is_empty(), "{found:#?}");
    }
}

#[test]
fn what_happens_wakes_a_loop_that_hardly_scans() {
    if !has("what_happens_wakes_a_loop_that_hardly_scans", &[Need::Root, Need::QEMU]) {
        return;
    }
    let mut rig = Rig::new();
    fs::write(rig.config(), "scan = \"1h\"\ncompare = \"1h\"\n").unwrap();
    rig.start(&[]);
    wait_for("the first pass", || rig.status()["problems"].as_array().is_some_and(Vec::is_empty));
    // A file comes; QEMU reports on the monitor that is there for it; the end of a process.
    let socket = rig.site.dir.path().join("events");
    let chardev = format!("socket,id={EVENTS_CHARDEV},path={},server=on,wait=off", socket.display());
    let monitor = format!("chardev={EVENTS_CHARDEV},mode=control");
    let mut machine = Machine::start(rig.site.dir.path(), "plc", &["-chardev", &chardev, "-mon", &monitor]);
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = {}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
        machine.pid()
    );
    fs::write(rig.contracts().join("plc.toml"), text).unwrap();
    rig.wait_state("plc", "observed");
    wait_for("the monitor", || rig.metric("rtvirtio_loop_reporters") == 1.0);
    let reports = || rig.metric("rtvirtio_loop_reports_total");
    let compares = || rig.metric("rtvirtio_loop_report_compares_total");
    wait_for("the comparison with what was there", || compares() >= 1.0);
    let (begin, before, reported) = (Instant::now(), compares(), reports());
    let mut qmp = Qmp::connect(machine.qmp(), HANG).unwrap();
    for _ in 0..100 {
        qmp.execute("stop", None).unwrap();
        qmp.execute("cont", None).unwrap();
    }
    wait_for("a comparison", || compares() > before);
    wait_for("every report", || reports() == reported + 200.0);
    let made = compares() - before;
    let most = begin.elapsed().as_secs_f64() + 2.0;
    assert!(made <= most, "{made} comparisons, {most} at most");
    machine.kill();
    rig.wait_state("plc", "off");
    fs::remove_file(rig.contracts().join("plc.toml")).unwrap();
    wait_for("no contract", || rig.vm("plc") == Value::Null);
}

#[test]
fn a_client_that_never_reads_holds_nothing() {
    if !has("a_client_that_never_reads_holds_nothing", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    contract_of_none(&rig, "plc");
    rig.start(&[]);
    let idle: Vec<UnixStream> = (0..8)
        .map(|_| {
            let mut stream = UnixStream::connect(rig.socket()).unwrap();
            stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            stream
        })
        .collect();
    // And one that does not even ask.
    let silent = UnixStream::connect(rig.socket()).unwrap();
    // Many changes of state, each sent to all.
    for i in 0..400 {
        fs::write(rig.contracts().join("broken.toml"), format!("x{i}")).unwrap();
        assert_eq!(ask(&rig, "POST", "/v1/compare").0, 202);
    }
    let passes = || rig.metric("rtvirtio_loop_passes_total");
    let before = passes();
    wait_for("more passes", || passes() > before + 3.0);
    let rss = fs::read_to_string(format!("/proc/{}/statm", rig.service.as_ref().unwrap().0.id())).unwrap();
    let pages: u64 = rss.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(pages * 4096 < 128 << 20, "{} MiB", (pages * 4096) >> 20);
    // Stopped while they hang on it, it ends.
    signal(&rig.service.as_ref().unwrap().0, Signal::TERM);
    assert!(rig.service.as_mut().unwrap().0.wait().unwrap().success());
    drop((idle, silent));
}

#[test]
fn on_tcp_it_is_read_only_and_for_this_host() {
    if !has("on_tcp_it_is_read_only_and_for_this_host", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    let out = rig.command(&["--listen", "0.0.0.0:0"]).output().unwrap();
    assert!(common::output_text(&out).contains("no loopback address"), "{}", common::output_text(&out));
    let address = free_address();
    rig.start(&["--listen", &address]);
    let ask = |method, path, host: &str| {
        let stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        answer(stream, method, path, host).0
    };
    assert_eq!(ask("GET", "/v1/status", &address), 200);
    assert_eq!(ask("GET", "/v1/status", "localhost"), 200);
    assert_eq!(ask("POST", "/v1/compare", &address), 404);
    assert_eq!(ask("GET", "/v1/status", "evil.example"), 403);
    assert_eq!(ask("GET", "/v1/status", "evil.example:80"), 403);
}
