use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rtvirtio_testkit::HANG;
use serde_json::{Value, json};

use super::*;

/// A monitor that names the first thread of this process as its vCPU.
pub(in crate::keep) fn serve(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    let this = std::process::id();
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(std::result::Result::ok) {
            let mut out = client.try_clone().unwrap();
            let version = json!({ "qemu": { "major": 9, "minor": 0, "micro": 0 }, "package": "" });
            let _ = writeln!(out, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }));
            for line in BufReader::new(client).lines().map_while(std::result::Result::ok) {
                let request: Value = serde_json::from_str(&line).unwrap();
                let answer = match request["execute"].as_str() {
                    Some("query-cpus-fast") => json!([{ "cpu-index": 0, "thread-id": this }]),
                    Some("query-iothreads") => json!([]),
                    _ => json!({}),
                };
                let _ = writeln!(out, "{}", json!({ "return": answer, "id": request["id"] }));
            }
        }
    });
}

pub(in crate::keep) fn vm(name: &str, socket: &Path) -> Vm {
    let vm = format!("name = \"{name}\"\nqmp = \"{}\"", socket.display());
    crate::fixtures::spec(&vm, crate::fixtures::READS).vms()[0].clone()
}

#[test]
fn a_vm_whose_monitor_is_silent_keeps_no_other_from_being_found() {
    let (dir, dirs) = crate::fixtures::dirs();
    let (good, silent) = (dir.path().join("good"), dir.path().join("silent"));
    serve(&good);
    // Connects, and says nothing.
    let _listener = UnixListener::bind(&silent).unwrap();
    let mut search = Search::new(&dirs);
    search.start(&vm("silent", &silent)).unwrap();
    for _ in 0..2 {
        search.start(&vm("good", &good)).unwrap();
        let found = search.wait_for("good", HANG).expect("it was not found");
        let (_, handle) = found.found.unwrap();
        assert_eq!(handle.pids, std::collections::BTreeSet::from([std::process::id()]));
        assert!(search.wait_for("good", Duration::ZERO).is_none(), "an answer is given once");
    }
    // Its own search ends too, with the reason.
    let lost = search.wait_for("silent", HANG).expect("it is waited for without end");
    let why = format!("{:#}", lost.found.err().unwrap());
    assert!(why.contains("no answer within"), "{why}");
}

#[test]
fn a_search_that_panics_is_an_error_and_is_made_anew() {
    let (dir, dirs) = crate::fixtures::dirs();
    let good = dir.path().join("good");
    serve(&good);
    let mut search = Search::new(&dirs);
    let panics = Detached::call("test", || -> SearchResult { panic!("as a search might") });
    search.threads.insert("good".to_owned(), panics.unwrap());
    let why = search.wait_for("good", HANG).unwrap().found.err().unwrap();
    assert!(format!("{why:#}").contains("without a result"), "{why:#}");
    search.start(&vm("good", &good)).unwrap();
    assert!(search.wait_for("good", HANG).unwrap().found.is_ok());
}
