//! Answers on rtvirtiod's socket, where whoever listens there is hostile: the client's call ends in
//! time, keeps a bounded part of the answer, and returns a status or an error with a reason.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rtvirtio_daemon::Snapshot;
use rtvirtio_daemon::api::Client;
use serde_json::Value;

use super::json;

/// Time limit of an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// More than both calls of an input may take.
const CALLS_TIMEOUT: Duration = Duration::from_secs(12);
/// A status with two VMs, as the service publishes it.
const STATUS: &str = include_str!("../documents/status.json");

/// Asks for the status, and for a change.
///
/// # Panics
/// When a call does not end in time, an error has no reason, or a status that was read cannot be
/// written again.
pub fn play(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            for _ in 0..2 {
                let Ok((mut stream, _)) = listener.accept() else { return };
                stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(&answer(data));
            }
        });
        let client = Client::new(&socket).with_patience(TIMEOUT);
        // The server waits for both calls, also where one panics.
        let status = std::panic::catch_unwind(|| client.status());
        let change = std::panic::catch_unwind(|| client.post::<Value>("/v1/plan/accept"));
        drop(UnixStream::connect(&socket));
        drop(UnixStream::connect(&socket));
        server.join().expect("a server that ends");
        match status.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            Ok(status) => assert!(round_trips(&status)),
            Err(e) => assert!(!e.to_string().is_empty()),
        }
        if let Err(e) = change.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            assert!(!e.to_string().is_empty());
        }
    });
    assert!(begin.elapsed() < CALLS_TIMEOUT, "the calls took {:?}", begin.elapsed());
}

/// A whole answer of the input's own, or a good head over a status with the input's edits.
fn answer(data: &[u8]) -> Vec<u8> {
    match data.first() {
        Some(1..=8) => [b"HTTP/1.0 200 OK\r\n\r\n".to_vec(), json::document(&[STATUS], data)].concat(),
        _ => data.to_vec(),
    }
}

fn round_trips(status: &Snapshot) -> bool {
    let text = serde_json::to_string(status).expect("JSON");
    serde_json::from_str::<Snapshot>(&text).is_ok_and(|again| again.vms.len() == status.vms.len())
}
