//! The other end of a monitor's or agent's socket: says what the input says, whatever it is asked,
//! and hangs up at the end.
//!
//! The input is a row of messages: kind, length (2 bytes), payload. Kinds: bytes as they are; a
//! line; `return` with a payload; `error`; an event; the answer to a synchronisation; a file's
//! data; a payload again and again; and a number of them that first wait for what is asked, so that
//! they know its `id`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Messages of one input.
const MOST: usize = 64;
/// Bytes of one that is repeated.
const FLOOD: usize = 5 << 20;
/// How long it waits for a question that may never come.
const PATIENCE: Duration = Duration::from_millis(2);

/// Runs `client` on one end of a socket, and what the input says on the other.
///
/// # Panics
/// When the socket cannot be made, and when the client panics.
pub fn exchange<T>(data: &[u8], client: impl FnOnce(UnixStream) -> T) -> T {
    let (ours, theirs) = UnixStream::pair().expect("a socket");
    std::thread::scope(|scope| {
        let peer = scope.spawn(move || send(theirs, data));
        let result = client(ours);
        // The client's end is closed: the peer's next write fails.
        peer.join().expect("a peer that ends");
        result
    })
}

fn send(mut stream: UnixStream, data: &[u8]) {
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut asked = Vec::new();
    let mut rest = data;
    for _ in 0..MOST {
        let [kind, low, high, tail @ ..] = rest else { return };
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        let (payload, tail) = tail.split_at(length);
        rest = tail;
        if kind & 0x80 != 0 {
            wait(&mut stream, &mut asked);
        }
        let id = last_id(&asked);
        let text = String::from_utf8_lossy(payload);
        let message = match kind & 0x0f {
            0 => payload.to_vec(),
            1 => [payload, b"\n"].concat(),
            2 => format!("{{\"return\": {text}, \"id\": {id}}}\n").into_bytes(),
            3 => format!("{{\"return\": {text}}}\n").into_bytes(),
            4 => format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": {text:?}}}, \"id\": {id}}}\n").into_bytes(),
            5 => format!("{{\"event\": {text:?}, \"data\": {{}}}}\n").into_bytes(),
            6 => format!("{{\"return\": {id}}}\n").into_bytes(),
            7 => [&[0xff][..], format!("{{\"return\": {id}}}\n").as_bytes()].concat(),
            8 => {
                let count = if kind & 0x10 == 0 { payload.len() } else { payload.len() + 1 };
                let eof = kind & 0x20 == 0;
                let data = STANDARD.encode(payload);
                format!("{{\"return\": {{\"count\": {count}, \"buf-b64\": \"{data}\", \"eof\": {eof}}}}}\n").into_bytes()
            }
            9 => {
                // A full piece of a file.
                let data = STANDARD.encode(vec![payload.first().copied().unwrap_or_default(); 48 << 10]);
                let count = if payload.is_empty() { 0 } else { 48 << 10 };
                format!("{{\"return\": {{\"count\": {count}, \"buf-b64\": \"{data}\", \"eof\": false}}}}\n").into_bytes()
            }
            10 => payload.repeat(FLOOD.checked_div(payload.len()).unwrap_or(0)),
            11 => payload.repeat(1_000.min(FLOOD.checked_div(payload.len()).unwrap_or(0))),
            12 => b"{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}, \"package\": \"\"}, \"capabilities\": []}}\n".to_vec(),
            13 => format!("{{\"return\": {{\"exited\": true, \"exitcode\": 0, \"out-data\": \"{}\"}}}}\n", STANDARD.encode(payload)).into_bytes(),
            14 => [&b"{\"return\": "[..], &b"[".repeat(payload.len() * 100), b"\n"].concat(),
            _ => format!("{{\"return\": {{}}, \"id\": {id}}}\n").into_bytes(),
        };
        if stream.write_all(&message).is_err() {
            return;
        }
    }
}

/// Reads what was asked, for a moment.
fn wait(stream: &mut UnixStream, asked: &mut Vec<u8>) {
    let mut chunk = [0; 4_096];
    if let Ok(n) = stream.read(&mut chunk) {
        asked.clear();
        asked.extend(&chunk[..n]);
    }
}

/// The number of the last question; 1, which the first one has, as long as none is known.
fn last_id(asked: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(asked);
    let digits = text.rfind("\"id\":").map(|at| &text[at + 5..]);
    let digits = digits.map(|d| d.chars().take_while(char::is_ascii_digit).collect::<String>());
    digits.and_then(|d| d.parse().ok()).unwrap_or(1)
}
