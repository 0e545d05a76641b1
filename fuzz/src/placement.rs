//! Placement's answers, where the service, or who answers in its place, is hostile: a round ends,
//! is refused with a reason, or publishes inventories that reserve no more than there is.
//!
//! Layout of the input: a row of answers. Each is the index of its status, the index of a good
//! document (0 for none) that [`json`] edits, the payload's length (2 bytes), and the payload. The
//! connection ends without an answer after the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rtvirtio_placement::{PlacementConfig, Publisher, Taken, Wanted};

use super::json;

const STATUSES: [u16; 12] = [200, 201, 204, 301, 400, 401, 403, 404, 409, 500, 503, 999];
/// Answers of one input.
const MAX_ANSWERS: usize = 24;
/// More than a round may take when no answer is delayed.
const ROUND_TIMEOUT: Duration = Duration::from_secs(20);
const CLASS: &str = "CUSTOM_RTVIRTIO_CPU";
const DOCUMENTS: [&str; 5] = [
    r#"{"resource_providers": [{"uuid": "3b9e6d1c-52f1-4d0a-9d5e-1b7a3c1f2e4d", "name": "host", "generation": 3}]}"#,
    r#"{"resource_provider_generation": 3, "inventories": {"CUSTOM_RTVIRTIO_CPU": {"total": 1000, "reserved": 0, "min_unit": 1, "max_unit": 1000, "step_size": 1, "allocation_ratio": 1.0}}}"#,
    r#"{"resource_provider_generation": 3, "allocations": {"5d8f2a9e-7a86-4f6f-8d6b-0a4e2f1c9b7d": {"resources": {"CUSTOM_RTVIRTIO_CPU": 250}}}}"#,
    r#"{"resource_provider_generation": 4}"#,
    r#"{"errors": [{"status": 409, "detail": "the provider has changed", "code": "placement.concurrent_update"}]}"#,
];

/// One round of publication against the input's answers.
///
/// # Panics
/// When the round takes too long, an error has no reason or control characters, or an inventory
/// reserves more than its total.
pub fn play(data: &[u8]) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
    let address = listener.local_addr().expect("an address");
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let server = scope.spawn(move || answer(&listener, data));
        // The server is ended first where this panics.
        let published = std::panic::catch_unwind(|| publish(&format!("http://{address}")));
        // The server may wait for one more request.
        drop(TcpStream::connect(address).and_then(|mut s| s.write_all(b"END\r\n\r\n")));
        server.join().expect("a server that ends");
        if let Err(panic) = published {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(begin.elapsed() < ROUND_TIMEOUT, "the round took {:?}", begin.elapsed());
}

fn publish(url: &str) {
    let config = PlacementConfig {
        url: url.to_owned(),
        provider: "host".to_owned(),
        every: rtvirtio_units::Nanos::from_millis(60_000),
        ca: None,
        token: Some("admin".to_owned()),
        token_file: None,
        keystone: None,
        fleet: "fleet.toml".into(),
        host: None,
    };
    let taken = |vm: &str, uuid: Option<&str>, n| Taken {
        vm: vm.to_owned(),
        uuid: uuid.map(str::to_owned),
        takes: BTreeMap::from([(CLASS.to_owned(), n)]),
    };
    let wanted = Wanted {
        classes: BTreeSet::from([CLASS.to_owned()]),
        contracts: vec![
            taken("plc", Some("5d8f2a9e-7a86-4f6f-8d6b-0a4e2f1c9b7d"), 300),
            taken("hmi", None, 200),
        ],
    };
    let mut publisher = Publisher::new(&config).expect("a good configuration");
    for is_dry in [true, false] {
        match publisher.round(&wanted, is_dry) {
            Err(e) => {
                let reason = e.to_string();
                assert!(!reason.is_empty() && !reason.contains(char::is_control), "{reason:?}");
            }
            Ok(published) => {
                let fits = |i: &rtvirtio_fleet::Inventory| i.reserved <= i.total;
                assert!(published.inventories.values().all(fits), "{published:?}");
                for note in &published.notes {
                    assert!(!note.is_empty() && !note.contains(char::is_control), "{note:?}");
                }
            }
        }
        assert!(publisher.pause() >= Duration::from_secs(60));
    }
}

fn answer(listener: &TcpListener, data: &[u8]) {
    let mut rest = data;
    for _ in 0..=MAX_ANSWERS {
        let Ok((mut stream, _)) = listener.accept() else { return };
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let request = head(&mut stream);
        if request.starts_with(b"END") {
            return;
        }
        let [status, document, low, high, tail @ ..] = rest else { continue };
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        let (payload, tail) = tail.split_at(length);
        rest = tail;
        let body = match usize::from(*document) {
            n @ 1..=5 => json::document(&DOCUMENTS[n - 1..n], &[&[1], payload].concat()),
            _ => payload.to_vec(),
        };
        let status = STATUSES[usize::from(*status) % STATUSES.len()];
        let head = format!(
            "HTTP/1.1 {status} Text\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // What was not read would reset the connection before the answer is seen.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // Until the client's end.
    while let Ok((mut stream, _)) = listener.accept() {
        if head(&mut stream).starts_with(b"END") {
            return;
        }
    }
}

/// A request up to the end of its head.
fn head(stream: &mut TcpStream) -> Vec<u8> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
        head.push(byte[0]);
    }
    head
}
