use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rtvirtio_spec::HostSpec;
use rtvirtio_testkit::HANG;
use serde_json::{Value, json};

use super::*;
use crate::Contract;

/// Serves a monitor at a socket: to each command its answer, `None` for a command that is never
/// answered.
fn serve(socket: &Path, answer: fn(&str) -> Option<Value>) {
    let listener = UnixListener::bind(socket).unwrap();
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut out = client.try_clone().unwrap();
                let version = json!({ "qemu": { "major": 9, "minor": 0, "micro": 0 }, "package": "" });
                let _ = writeln!(out, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }));
                for line in BufReader::new(client).lines().map_while(Result::ok) {
                    let request: Value = serde_json::from_str(&line).unwrap();
                    if let Some(answer) = answer(request["execute"].as_str().unwrap()) {
                        let _ = writeln!(out, "{}", json!({ "return": answer, "id": request["id"] }));
                    }
                }
            });
        }
    });
}

/// A running VM with this monitor.
fn vm(name: &str, socket: &Path) -> Arc<RunningVm> {
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
         block = \"4KiB\"\n",
        socket.display()
    );
    let spec = HostSpec::parse("x.toml", &text).unwrap();
    let contract = Contract::of_spec(&spec, Path::new("x.toml")).remove(0);
    let processes = vec![ProcessId { pid: 7, start_time: 1 }];
    Arc::new(RunningVm { contract, processes, named: Default::default(), cpu: None })
}

fn dirs(dir: &Path) -> Dirs {
    Dirs { state: dir.join("state"), run: dir.join("run") }
}

/// Looks until the VM's disks are there.
fn look_until_seen(monitors: &mut Monitors, vms: &[Arc<RunningVm>], name: &str) -> Instant {
    let begin = Instant::now();
    loop {
        let mut looked = monitors.sample(vms);
        match looked.remove(name).unwrap() {
            (at, Ok(_)) => return at,
            (_, Err(why)) => assert!(begin.elapsed() < HANG, "{why}"),
        }
    }
}

#[test]
fn a_monitor_that_does_not_answer_holds_up_the_look_at_no_other_vm() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
    let empty = |command: &str| Some(if command == "qmp_capabilities" { json!({}) } else { json!([]) });
    serve(&good, empty);
    serve(&bad, |command| (command == "qmp_capabilities").then(|| json!({})));
    // The bad one comes first.
    let vms = [vm("bad", &bad), vm("good", &good)];
    let mut monitors = Monitors::new(dirs(dir.path()), false);
    let first = look_until_seen(&mut monitors, &vms, "good");
    let second = look_until_seen(&mut monitors, &vms, "good");
    assert!(second > first);
    let (_, seen) = monitors.sample(&vms).remove("bad").unwrap();
    let why = seen.unwrap_err();
    assert!(why.contains("has not answered for") || why.contains("no answer within"), "{why}");
    if monitors.asked["bad"].pending.is_some() {
        assert!(!monitors.ask(&vms[0], Instant::now()), "it is not asked again while it is asked");
    }
}

#[test]
fn more_drives_than_a_vm_may_have_are_refused_and_asked_for_later_and_later() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
    serve(&good, |command| Some(if command == "qmp_capabilities" { json!({}) } else { json!([]) }));
    serve(&bad, |command| {
        let drive = json!({ "device": "d" });
        Some(if command == "qmp_capabilities" { json!({}) } else { json!(vec![drive; 5_000]) })
    });
    let vms = [vm("bad", &bad), vm("good", &good)];
    let mut monitors = Monitors::new(dirs(dir.path()), false);
    let begin = Instant::now();
    while monitors.asked.get("bad").is_none_or(|asked| asked.failures < 2) {
        assert!(begin.elapsed() < HANG);
        look_until_seen(&mut monitors, &vms, "good");
    }
    let asked = &monitors.asked["bad"];
    let why = asked.why.clone().unwrap();
    assert!(why.contains("more than 64 drives"), "{why}");
    // From now on it is asked seldom, and what is wrong stays said.
    assert!(asked.again > Instant::now() || begin.elapsed() > MIN_RETRY_DELAY);
    assert!(asked.unseen(Instant::now()).contains("more than 64 drives"));
}

#[test]
fn what_fails_is_asked_later_and_later_and_a_success_ends_that() {
    let (now, failed) = (Instant::now(), Err("no".to_owned()));
    let mut asked = Asked { processes: Vec::new(), pending: None, failures: 0, again: now, why: None };
    let mut pauses = Vec::new();
    for _ in 0..9 {
        asked.note(&failed, now);
        pauses.push(asked.again.duration_since(now).as_secs());
    }
    assert_eq!(pauses, [0, 2, 4, 8, 16, 32, 60, 60, 60]);
    asked.note(&Ok((Vec::new(), Vec::new())), now);
    assert_eq!((asked.failures, asked.why), (0, None));
}

#[test]
fn a_question_that_panics_has_failed_and_is_put_again() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let good = dir.path().join("good");
    serve(&good, |command| Some(if command == "qmp_capabilities" { json!({}) } else { json!([]) }));
    let vms = [vm("good", &good)];
    let mut monitors = Monitors::new(dirs(dir.path()), false);
    look_until_seen(&mut monitors, &vms, "good");
    let thread = Detached::call("test", || -> (Instant, Disks) { panic!("as a question might") }).unwrap();
    let asked = monitors.asked.get_mut("good").unwrap();
    let question = Question { processes: asked.processes.clone(), since: Instant::now(), thread };
    asked.pending = Some(question);
    monitors.take(|_| HANG);
    assert_eq!(monitors.asked["good"].failures, 1);
    look_until_seen(&mut monitors, &vms, "good");
}
