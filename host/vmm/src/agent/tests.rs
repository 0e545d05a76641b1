use std::io::{BufRead, BufReader, Read, Write};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rtvirtio_testkit::HANG;

use super::*;

/// Scripted agent: answers syncs by itself, and the other commands by `answer`. Returns the
/// requests it received.
fn scripted(
    mut answer: impl FnMut(&str, &Value) -> Option<String> + Send + 'static,
) -> (GuestAgent, JoinHandle<Vec<String>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let player = thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        let mut requests = BufReader::new(theirs);
        let mut seen = Vec::new();
        let mut line = Vec::new();
        while requests.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = line.strip_prefix(&[RESET]).unwrap_or(&line);
            let request: Value = serde_json::from_slice(text).unwrap();
            let command = request["execute"].as_str().unwrap().to_owned();
            if command == "guest-sync-delimited" {
                assert_eq!(line[0], RESET, "a sync must reset the agent's parser first");
                out.write_all(&[RESET]).unwrap();
                writeln!(out, "{}", json!({ "return": request["arguments"]["id"] })).unwrap();
            } else if let Some(text) = answer(&command, &request["arguments"]) {
                if writeln!(out, "{text}").is_err() {
                    break;
                }
            }
            seen.push(command);
            line.clear();
        }
        seen
    });
    (GuestAgent::from_stream(ours, "scripted"), player)
}

/// Ends the connection; returns the requests that the agent received.
fn end(agent: GuestAgent, player: JoinHandle<Vec<String>>) -> Vec<String> {
    drop(agent);
    player.join().unwrap()
}

#[test]
fn stale_answers_of_a_dead_client_are_thrown_away() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // Left by others: half an answer, the answer to another sync, and one that is no number.
    theirs
        .write_all(b"\"YWJj\"}}\n{\"return\": {}}\n\xff{\"return\": 17}\n\xff{\"return\": {\"pid\": 3}}\n")
        .unwrap();
    let player = thread::spawn(move || {
        let mut requests = BufReader::new(theirs.try_clone().unwrap());
        let mut line = Vec::new();
        requests.read_until(b'\n', &mut line).unwrap();
        let request: Value = serde_json::from_slice(&line[1..]).unwrap();
        writeln!(theirs, "{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"JSON parse error\"}}}}")
            .unwrap();
        theirs.write_all(&[RESET]).unwrap();
        writeln!(theirs, "{{\"return\": {}}}", request["arguments"]["id"]).unwrap();
        line.clear();
        requests.read_until(b'\n', &mut line).unwrap();
        assert!(String::from_utf8_lossy(&line).contains("guest-ping"));
        writeln!(theirs, "{{\"return\": {{}}}}").unwrap();
    });
    let mut agent = GuestAgent::from_stream(ours, "stale");
    agent.synchronise(HANG).unwrap();
    agent.ping().unwrap();
    player.join().unwrap();
}

#[test]
fn lost_sync_is_sent_again() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let player = thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        let mut requests = BufReader::new(theirs);
        let mut line = Vec::new();
        requests.read_until(b'\n', &mut line).unwrap();
        line.clear();
        requests.read_until(b'\n', &mut line).unwrap();
        let request: Value = serde_json::from_slice(&line[1..]).unwrap();
        out.write_all(&[RESET]).unwrap();
        writeln!(out, "{}", json!({ "return": request["arguments"]["id"] })).unwrap();
    });
    GuestAgent::from_stream(ours, "booting").synchronise(HANG).unwrap();
    player.join().unwrap();
}

#[test]
fn silent_agent_times_out_and_is_synchronised_again() {
    let mut first = true;
    let (mut agent, player) = scripted(move |_, _| {
        let silent = std::mem::take(&mut first);
        (!silent).then(|| "{\"return\": {}}".to_owned())
    });
    agent.set_timeout(Duration::from_millis(200));
    let start = Instant::now();
    let error = agent.ping().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(start.elapsed() < HANG);
    agent.set_timeout(HANG);
    agent.ping().unwrap();
    let seen = end(agent, player);
    assert_eq!(seen, ["guest-sync-delimited", "guest-ping", "guest-sync-delimited", "guest-ping"]);
}

#[test]
fn flood_is_cut_off_at_the_limit() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let flood = thread::spawn(move || while theirs.write_all(&[b'1'; 65536]).is_ok() {});
    let mut agent = GuestAgent::from_stream(ours, "flood");
    agent.in_step = true;
    let error = agent.ping().unwrap_err();
    assert!(matches!(error, VmmError::TooLarge { limit: SMALL_REPLY, .. }), "{error}");
    // The flood has no end: synchronising must give up at its deadline, and keep no bytes of it.
    agent.set_timeout(Duration::from_millis(300));
    assert!(agent.ping().unwrap_err().is_timeout());
    assert!(agent.link.buffered() <= 128 * 1024, "kept {} bytes", agent.link.buffered());
    drop(agent);
    flood.join().unwrap();
}

#[test]
fn endless_file_stops_at_the_limit() {
    use base64::Engine;
    let chunk = base64::engine::general_purpose::STANDARD.encode([7_u8; 48 * 1024]);
    let (mut agent, player) = scripted(move |command, _| {
        Some(match command {
            "guest-file-open" => json!({ "return": 1000 }).to_string(),
            "guest-file-read" => {
                json!({ "return": { "count": 48 * 1024, "buf-b64": chunk, "eof": false } }).to_string()
            }
            _ => json!({ "return": {} }).to_string(),
        })
    });
    let error = agent.read_file("/dev/zero", 100_000).unwrap_err();
    assert!(matches!(error, VmmError::TooLarge { limit: 100_000, .. }), "{error}");
    let seen = end(agent, player);
    assert_eq!(seen.iter().filter(|c| *c == "guest-file-read").count(), 3);
    assert_eq!(seen.last().unwrap(), "guest-file-close");
}

#[test]
fn file_that_comes_byte_by_byte_ends_with_the_first() {
    let (mut agent, player) = scripted(|command, _| {
        Some(match command {
            "guest-file-open" => json!({ "return": 1000 }).to_string(),
            "guest-file-read" => {
                json!({ "return": { "count": 1, "buf-b64": "Bw==", "eof": false } }).to_string()
            }
            _ => json!({ "return": {} }).to_string(),
        })
    });
    assert_eq!(agent.read_file("/dev/drip", 4096).unwrap(), [7]);
    assert_eq!(end(agent, player).iter().filter(|c| *c == "guest-file-read").count(), 1);
}

#[test]
fn program_that_never_ends_is_killed() {
    let (mut agent, player) = scripted(|command, arguments| {
        Some(match command {
            "guest-exec" if arguments["path"] == "kill" => {
                assert_eq!(arguments["arg"], json!(["-KILL", "41"]));
                json!({ "return": { "pid": 42 } }).to_string()
            }
            "guest-exec" => json!({ "return": { "pid": 41 } }).to_string(),
            _ => json!({ "return": { "exited": false } }).to_string(),
        })
    });
    let error = agent.exec(&["sleep", "1000"], Duration::from_millis(100)).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("`sleep 1000`"), "{error}");
    assert_eq!(end(agent, player).last().unwrap(), "guest-exec");
}

#[test]
fn what_a_guest_lacks_for_tasks_is_named() {
    // As on RHEL: guest-exec and the file commands exist and are disabled.
    let rhel = |disabled: &'static str, fio: &'static str| {
        scripted(move |command, arguments| {
            let file = |name: &str| name == fio;
            Some(match command {
                "guest-info" => {
                    let commands =
                        ["exec", "exec-status", "file-open", "file-read", "file-write", "file-flush"];
                    let list: Vec<Value> = (commands.iter().chain(&["file-close"]))
                        .map(|name| json!({ "name": format!("guest-{name}"), "enabled": !name.starts_with(disabled) }))
                        .collect();
                    json!({ "return": { "version": "7.2", "supported_commands": list } }).to_string()
                }
                "guest-file-open" if !file(arguments["path"].as_str().unwrap()) => {
                    json!({ "error": { "class": "GenericError", "desc": "No such file" } }).to_string()
                }
                "guest-file-open" => json!({ "return": 7 }).to_string(),
                "guest-file-read" => {
                    json!({ "return": { "count": 6, "buf-b64": "f0VMRgIB", "eof": false } }).to_string()
                }
                _ => json!({ "return": {} }).to_string(),
            })
        })
    };
    let lacks = |disabled, fio| {
        let (mut agent, player) = rhel(disabled, fio);
        let lacks = agent.lacks_for_tasks().unwrap();
        assert!(end(agent, player).iter().all(|c| c != "guest-exec"), "nothing is started");
        lacks
    };
    assert_eq!(lacks("none", "/usr/local/bin/fio"), [""; 0]);
    let none = lacks("none", "");
    assert!(none.len() == 1 && none[0].contains("fio is not installed"), "{none:?}");
    let exec = lacks("exec", "/usr/bin/fio");
    assert!(exec.len() == 1 && exec[0].contains("refuses guest-exec, guest-exec-status:"), "{exec:?}");
    let files = lacks("file", "/usr/bin/fio");
    assert!(files.len() == 2 && files[1].contains("not known"), "{files:?}");
}

#[test]
fn hostile_answers_are_errors() {
    let answers = [
        "nonsense",
        "{}",
        "[]",
        "{\"return\": {\"pid\": \"x\"}}",
        "{\"return\": {\"pid\": 99999999999999999999}}",
        "{\"return\": null}",
    ];
    for answer in answers {
        let (mut agent, player) = scripted(move |_, _| Some(answer.to_owned()));
        let error = agent.spawn(&["true"]).unwrap_err();
        assert!(matches!(error, VmmError::Protocol { .. }), "{answer}: {error}");
        end(agent, player);
    }
    let (mut agent, player) = scripted(move |command, _| {
        Some(match command {
            "guest-exec" => json!({ "return": { "pid": 1 } }).to_string(),
            _ => json!({ "return": { "exited": true, "exitcode": 0, "out-data": "***" } }).to_string(),
        })
    });
    let error = agent.exec(&["true"], Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, VmmError::Protocol { .. }), "{error}");
    end(agent, player);
}

#[test]
fn deeply_nested_answer_does_not_overflow_the_stack() {
    let (mut agent, player) = scripted(|_, _| Some("[".repeat(60_000)));
    assert!(matches!(agent.ping(), Err(VmmError::Protocol { .. })));
    end(agent, player);
}

#[test]
fn ids_are_fresh_and_exact_in_a_double() {
    let ids: std::collections::HashSet<u64> = (0..1000).map(|_| fresh_id()).collect();
    assert_eq!(ids.len(), 1000);
    assert!(ids.iter().all(|&id| id <= 1 << 53));
}

#[test]
fn hang_up_is_reported_as_such() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let player = thread::spawn(move || {
        let mut some = [0; 10];
        theirs.read_exact(&mut some).unwrap();
    });
    let mut agent = GuestAgent::from_stream(ours, "gone");
    let error = agent.ping().unwrap_err();
    assert!(error.is_closed(), "{error}");
    player.join().unwrap();
}

#[test]
fn silent_monitors_and_agents_are_waited_for_until_the_end() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("socket");
    // Connections are taken, and nothing is answered.
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let _limit = crate::WaitLimit::lasting(Duration::ZERO);
    let monitor = crate::Qmp::connect(&path, HANG).err().unwrap().to_string();
    let agent = GuestAgent::connect(&path, HANG).err().unwrap().to_string();
    // On a thread started for the call too.
    let apart = move || crate::Qmp::connect(&path, HANG).err().unwrap().to_string();
    let apart = rtvirtio_kernel::detached::Detached::call("test", apart).unwrap();
    let apart = apart.wait(HANG).unwrap().unwrap();
    for e in [monitor, agent, apart] {
        assert!(e.contains("no answer within 500 ms"), "{e}");
    }
}
