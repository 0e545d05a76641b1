//! The publisher against a test server: tokens of Keystone, conflicts, unreachable services. The
//! real Placement and Keystone are tested in `scripts/placement.sh`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rtvirtio_placement::{PlacementConfig, PlacementError, Publisher, Taken, Wanted};
use rtvirtio_testkit::tempdir;
use serde_json::Value;

const UUID: &str = "f0d2c3a4-0000-4000-8000-00000000000a";
const CLASS: &str = "CUSTOM_RTVIRTIO_CPU";

/// A received request: method and path, headers in lower case, body.
#[derive(Debug)]
struct Seen {
    line: String,
    headers: BTreeMap<String, String>,
    body: Value,
}

/// Status, further headers and body of a reply.
type Reply = (u16, &'static str, String);

/// Answers requests one after the other with these replies, one connection each.
fn serve(replies: Vec<Reply>) -> (u16, Receiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, seen) = channel();
    thread::spawn(move || {
        for (status, more, body) in replies {
            let Ok((stream, _)) = listener.accept() else { return };
            let Some(request) = read(&stream) else { return };
            let text = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{more}\r\n{body}",
                body.len()
            );
            let _ = (&stream).write_all(text.as_bytes());
            let _ = sender.send(request);
        }
    });
    (port, seen)
}

fn read(stream: &TcpStream) -> Option<Seen> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut headers = BTreeMap::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|l| l.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let line = line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Some(Seen { line, headers, body: serde_json::from_slice(&body).unwrap_or(Value::Null) })
}

fn ok(body: &str) -> Reply {
    (200, "", body.to_owned())
}

fn providers() -> Reply {
    ok(&format!("{{\"resource_providers\": [{{\"uuid\": \"{UUID}\", \"name\": \"n1\"}}]}}"))
}

fn inventories(generation: u32, reserved: Option<u32>) -> Reply {
    let of = reserved.map_or_else(String::new, |reserved| {
        format!(
            "\"{CLASS}\": {{\"total\": 1000, \"reserved\": {reserved}, \"min_unit\": 1, \"max_unit\": 1000, \"step_size\": 1, \"allocation_ratio\": 1.0}}, "
        )
    });
    ok(&format!(
        "{{\"resource_provider_generation\": {generation}, \"inventories\": {{{of}\"VCPU\": {{\"total\": 4, \"reserved\": 0, \"min_unit\": 1, \
         \"max_unit\": 4, \"step_size\": 1, \"allocation_ratio\": 16.0}}}}}}"
    ))
}

fn allocations(generation: u32, of: &str) -> Reply {
    ok(&format!("{{\"resource_provider_generation\": {generation}, \"allocations\": {{{of}}}}}"))
}

fn conflict() -> Reply {
    (409, "", "{\"errors\": [{\"detail\": \"generation conflict\"}]}".to_owned())
}

fn publisher(port: u16, more: &str, dir: &Path) -> Publisher {
    let text = format!("url = \"http://127.0.0.1:{port}/\"\nprovider = \"n1\"\nfleet = \"f\"\n{more}");
    let config: PlacementConfig = toml::from_str(&text).unwrap();
    Publisher::new(&config.below(dir)).unwrap()
}

fn wanted(takes: u32) -> Wanted {
    let takes = BTreeMap::from([(CLASS.to_owned(), takes)]);
    let contract = Taken { vm: "plc".to_owned(), uuid: Some("aa".to_owned()), takes };
    Wanted { classes: BTreeSet::from([CLASS.to_owned()]), contracts: vec![contract] }
}

#[test]
fn conflicts_are_read_anew_and_allocations_count_once() {
    let dir = tempdir().unwrap();
    let (port, seen) = serve(vec![
        providers(),
        inventories(3, None),
        allocations(3, ""),
        (201, "", String::new()),
        conflict(),
        // Nova has allocated in between, and another publisher has written.
        inventories(5, Some(7)),
        allocations(5, "\"AA\": {\"resources\": {\"CUSTOM_RTVIRTIO_CPU\": 200}}"),
        (200, "", "{\"resource_provider_generation\": 6}".to_owned()),
    ]);
    let mut publisher = publisher(port, "token = \"admin\"\n", dir.path());
    let published = publisher.round(&wanted(264), false).unwrap();
    assert_eq!(published.inventories[CLASS].reserved, 64);
    assert_eq!(published.changes.len(), 1);
    assert_eq!(published.changes[0].from.as_ref().map(|i| i.reserved), Some(7));
    let seen: Vec<Seen> = seen.iter().collect();
    let lines: Vec<&str> = seen.iter().map(|s| s.line.as_str()).collect();
    let at = format!("/resource_providers/{UUID}");
    assert_eq!(lines[0], "GET /resource_providers?name=n1");
    assert_eq!(lines[3..5], [format!("PUT /resource_classes/{CLASS}"), format!("POST {at}/inventories")]);
    // Only inventories of this project's classes are written.
    assert_eq!(lines[7], format!("PUT {at}/inventories/{CLASS}"));
    assert_eq!(
        (&seen[7].body["resource_provider_generation"], &seen[7].body["reserved"]),
        (&5.into(), &64.into())
    );
    assert!(seen.iter().all(|s| s.headers["x-auth-token"] == "admin"));
}

#[test]
fn nothing_is_written_in_a_dry_run_and_twice_the_same_only_once() {
    let dir = tempdir().unwrap();
    let (port, seen) = serve(vec![
        providers(),
        inventories(3, Some(0)),
        allocations(3, ""),
        inventories(4, Some(264)),
        allocations(4, ""),
    ]);
    let mut publisher = publisher(port, "", dir.path());
    let dry = publisher.round(&wanted(264), true).unwrap();
    assert_eq!((dry.changes.len(), dry.inventories[CLASS].reserved), (1, 264));
    let same = publisher.round(&wanted(264), false).unwrap();
    assert!(same.changes.is_empty(), "{same:?}");
    assert!(seen.iter().all(|s| s.line.starts_with("GET ") && !s.headers.contains_key("x-auth-token")));
}

#[test]
fn keystone_gives_tokens_and_revoked_ones_are_renewed() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), "s3cret\n").unwrap();
    let token = |name: &'static str| {
        let body = "{\"token\": {\"expires_at\": \"2999-01-01T00:00:00.000000Z\"}}".to_owned();
        (201, name, body)
    };
    let (port, seen) = serve(vec![
        token("X-Subject-Token: t1\r\n"),
        providers(),
        (401, "", "{\"error\": {\"message\": \"revoked\"}}".to_owned()),
        token("X-Subject-Token: t2\r\n"),
        inventories(1, Some(0)),
        allocations(1, ""),
    ]);
    let keystone = format!(
        "[keystone]\nurl = \"http://127.0.0.1:{port}/v3/\"\nid = \"app\"\nsecret_file = \"secret\"\n"
    );
    let mut publisher = publisher(port, &keystone, dir.path());
    publisher.round(&wanted(0), false).unwrap();
    let seen: Vec<Seen> = seen.iter().collect();
    assert_eq!(seen[0].line, "POST /v3/auth/tokens");
    let identity = &seen[0].body["auth"]["identity"];
    assert_eq!(identity["methods"][0], "application_credential");
    assert_eq!(identity["application_credential"]["secret"], "s3cret");
    let tokens: Vec<_> = seen.iter().filter_map(|s| s.headers.get("x-auth-token")).collect();
    assert_eq!(tokens, ["t1", "t1", "t2", "t2"]);
}

#[test]
fn each_failure_names_its_remedy() {
    let dir = tempdir().unwrap();
    let fails = |replies: Vec<Reply>, more: &str| {
        let (port, _seen) = serve(replies);
        publisher(port, more, dir.path()).round(&wanted(1), false).unwrap_err()
    };
    let none = fails(vec![ok("{\"resource_providers\": []}")], "");
    assert!(matches!(none, PlacementError::NoProvider { .. }) && none.to_string().contains("nova-compute"));
    let forbidden = fails(vec![(403, "", "{\"errors\": [{\"detail\": \"no\"}]}".to_owned())], "");
    assert!(matches!(forbidden, PlacementError::Forbidden { status: 403, .. }), "{forbidden}");
    assert!(matches!(fails(vec![ok("<html>")], ""), PlacementError::Answer { .. }));
    assert!(matches!(fails(Vec::new(), ""), PlacementError::Away { .. }));
    assert!(matches!(fails(vec![providers(), (503, "", String::new())], ""), PlacementError::Away { .. }));
    assert!(matches!(fails(Vec::new(), "token_file = \"none\"\n"), PlacementError::Read { .. }));
    // The class is made in the first try only.
    let mut again = vec![providers(), inventories(1, Some(9)), allocations(1, "")];
    again.extend([(204, "", String::new()), conflict()]);
    again.extend((1..5).flat_map(|_| [inventories(1, Some(9)), allocations(1, ""), conflict()]));
    assert!(matches!(fails(again, ""), PlacementError::Conflict { tries: 5 }));
}

/// A generation without a successor is an error of the server, and does not end the publisher.
#[test]
fn a_generation_without_a_next_one_is_an_error() {
    let dir = tempdir().unwrap();
    let last = |reply: Reply| (reply.0, reply.1, reply.2.replace("4242", &u64::MAX.to_string()));
    let (port, _seen) = serve(vec![
        providers(),
        last(inventories(4242, Some(7))),
        last(allocations(4242, "")),
        (201, "", String::new()),
        (200, "", "{\"resource_provider_generation\": 0}".to_owned()),
    ]);
    let e = publisher(port, "", dir.path()).round(&wanted(264), false).unwrap_err();
    assert!(matches!(&e, PlacementError::Answer { why, .. } if why.contains("generation")), "{e}");
}

/// What the server writes goes into logs, terminals and a command that is printed.
#[test]
fn what_the_server_names_is_no_command_and_moves_no_cursor() {
    let dir = tempdir().unwrap();
    let error = |replies: Vec<Reply>| {
        let (port, _seen) = serve(replies);
        publisher(port, "", dir.path()).round(&wanted(1), false).unwrap_err().to_string()
    };
    let text = "{\"errors\": [{\"detail\": \"\\u001b[2J gone\\u0000\"}]}";
    let refused = error(vec![(409, "", text.to_owned())]);
    assert!(refused.contains("[2J gone") && !refused.contains(char::is_control), "{refused:?}");
    let class = "CUSTOM_RTVIRTIO_$(reboot)\\u001b";
    let named = inventories(1, Some(9)).2.replace(CLASS, class);
    let refused = error(vec![providers(), ok(&named)]);
    assert!(refused.contains("no name of a resource class"), "{refused:?}");
    assert!(!refused.contains(char::is_control), "{refused:?}");
}

/// The environment of a service may name proxies for other programs, which would see the token.
#[test]
fn no_proxy_of_the_environment_is_used() {
    const CHILD: &str = "RTVIRTIO_TEST_BEHIND_A_PROXY";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "no_proxy_of_the_environment_is_used"]).env(CHILD, "1");
        for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
            // Nothing listens on port 1.
            child.env(name, "http://127.0.0.1:1");
        }
        let out = child.env_remove("NO_PROXY").env_remove("no_proxy").output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        return;
    }
    let dir = tempdir().unwrap();
    let (port, _seen) = serve(vec![providers(), inventories(3, Some(264)), allocations(3, "")]);
    publisher(port, "token = \"admin\"\n", dir.path()).round(&wanted(264), false).unwrap();
}

#[test]
fn mistakes_of_the_configuration_are_named() {
    let with = |more: &str| {
        let text = format!("provider = \"n1\"\nfleet = \"f\"\n{more}");
        let config: PlacementConfig = toml::from_str(&text).unwrap();
        match Publisher::new(&config.below(Path::new("/nowhere"))) {
            Err(e) => e.to_string(),
            Ok(_) => panic!("{text} is taken"),
        }
    };
    assert!(with("url = \"placement:8778\"\n").contains("write http://"));
    let url = "url = \"http://h\"\n";
    assert!(with(&format!("{url}every = \"1ms\"\n")).contains("at least 500ms"));
    assert!(with(&format!("{url}token = \"a\"\ntoken_file = \"b\"\n")).contains("keep one"));
    assert!(with(&format!("{url}ca = \"none.pem\"\n")).contains("cannot read"));
    assert!(
        toml::from_str::<PlacementConfig>(&format!("{url}provider = \"n\"\nfleet = \"f\"\nuser = \"x\"\n"))
            .is_err()
    );
}
