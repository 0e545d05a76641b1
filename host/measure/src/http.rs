//! Small HTTP client for load: back-to-back requests, and requests at a fixed period.
//!
//! Each request has a connection of its own (HTTP/1.0), as with the reservations paper's `ab`, so
//! that an answer includes all of the server's cost.
//!
//! No client library fits: [`Load::bytes`] counts bytes on the wire, headers included, while an
//! answer still arrives, which `minreq` and `ureq` do not show (in `ureq` only a transport of its
//! `unversioned` part could); a load must end within half a second in the middle of an answer,
//! where both only have timeouts; and both send HTTP/1.1, whose answers may come in chunks.

mod url;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use url::{Url, UrlError};

/// Time without data after which a server counts as hung.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a client checks whether it must stop.
const STOP_CHECK: Duration = Duration::from_millis(500);
/// Interval at which the answers are checked for being complete.
const AWAIT: Duration = Duration::from_millis(20);
/// Pause before a client repeats a failed request.
const RETRY: Duration = Duration::from_millis(100);
/// Largest header of an answer: no common server sends more, and no hostile one makes us allocate
/// more.
const LONGEST_HEAD: usize = 64 << 10;

/// GET request with the expected answer.
#[derive(Clone, Debug)]
pub struct Request {
    url: Url,
    text: Arc<[u8]>,
    body: Option<usize>,
}

impl Request {
    /// Request for this address, of any length.
    #[must_use]
    pub fn new(url: Url) -> Self {
        let text =
            format!("GET {} HTTP/1.0\r\nHost: {}\r\nConnection: close\r\n\r\n", url.path(), url.authority());
        Self { url, text: text.into_bytes().into(), body: None }
    }

    /// Counts an answer with another body length as wrong.
    #[must_use]
    pub fn expecting(self, bytes: usize) -> Self {
        Self { body: Some(bytes), ..self }
    }

    /// Sends one request and receives the answer, whose bytes are counted as they arrive; those of
    /// a broken answer are subtracted again. Returns the length of the whole answer, or `None` when
    /// stopped.
    fn get(&self, bytes: &AtomicU64, stop: &AtomicBool) -> io::Result<Option<u64>> {
        let mut whole = 0;
        let answer = self.receive(bytes, &mut whole, stop);
        if answer.is_err() {
            bytes.fetch_sub(whole, Ordering::Relaxed);
        }
        Ok(answer?.then_some(whole))
    }

    /// Receives the answer; false when stopped. `whole` counts its bytes.
    fn receive(&self, bytes: &AtomicU64, whole: &mut u64, stop: &AtomicBool) -> io::Result<bool> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut stream = TcpStream::connect_timeout(&self.url.address(), IDLE_TIMEOUT)?;
        stream.set_read_timeout(Some(STOP_CHECK))?;
        stream.write_all(&self.text)?;
        let (mut head, mut body) = (Vec::new(), None::<usize>);
        let mut buffer = vec![0; 64 << 10];
        let mut last = Instant::now();
        loop {
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let n = match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if last.elapsed() > IDLE_TIMEOUT {
                        return Err(e);
                    }
                    continue;
                }
                Err(e) => return Err(e),
            };
            last = Instant::now();
            bytes.fetch_add(n as u64, Ordering::Relaxed);
            *whole += n as u64;
            match &mut body {
                Some(have) => *have += n,
                None => {
                    head.extend_from_slice(&buffer[..n]);
                    let end = head.windows(4).position(|w| w == b"\r\n\r\n");
                    body = end.map(|end| head.len() - end - 4);
                    if body.is_none() && head.len() > LONGEST_HEAD {
                        return Err(bad(format!("{} answers with a header that does not end", self.url)));
                    }
                }
            }
        }
        let status = head.split(|b| *b == b'\r').next().unwrap_or_default();
        let good = status.split(|b| *b == b' ').nth(1) == Some(b"200");
        match (body, self.body.or_else(|| content_length(&head))) {
            (Some(have), Some(expected)) if good && have != expected => {
                // Connection broken off: a server under load may do that.
                let text = format!("{} sent {have} bytes of {expected}", self.url);
                Err(if self.body.is_some() {
                    bad(text)
                } else {
                    io::Error::new(io::ErrorKind::UnexpectedEof, text)
                })
            }
            (Some(_), _) if good => Ok(true),
            (None, _) if head.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Err(bad(format!("{} answers `{}`", self.url, String::from_utf8_lossy(status)))),
        }
    }
}

/// Value of the `Content-Length` header.
fn content_length(head: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(head);
    let line = text.lines().find(|l| l.to_ascii_lowercase().starts_with("content-length:"))?;
    line.split_once(':')?.1.trim().parse().ok()
}

/// Counters of all clients.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// Number of whole answers.
    pub answers: u64,
    /// Bytes of these answers, headers included.
    pub bytes: u64,
    /// Number of requests that were refused, broken off or not answered.
    pub failed: u64,
    /// Error of the last failed request.
    pub why: Option<String>,
}

/// Clients that send back-to-back requests until this is dropped.
pub struct Load {
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    counted: Arc<Mutex<Counted>>,
    clients: Vec<JoinHandle<io::Result<()>>>,
}

impl Load {
    /// Starts this number of clients.
    #[must_use]
    pub fn start(request: &Request, connections: usize) -> Self {
        let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let counted = Arc::new(Mutex::new(Counted::default()));
        let client = |_| {
            let (stop, bytes, counted) = (stop.clone(), bytes.clone(), counted.clone());
            let request = request.clone();
            std::thread::spawn(move || {
                loop {
                    let answer = request.get(&bytes, &stop);
                    let mut counted = counted.lock().unwrap_or_else(PoisonError::into_inner);
                    match answer {
                        Ok(Some(whole)) => {
                            counted.answers += 1;
                            counted.bytes += whole;
                        }
                        Ok(None) => return Ok(()),
                        // A wrong answer is an error of the setup. A server too busy to answer is
                        // an effect of the load: repeat.
                        Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(e),
                        Err(e) => {
                            counted.failed += 1;
                            counted.why = Some(e.to_string());
                            drop(counted);
                            if stop.load(Ordering::Relaxed) {
                                return Ok(());
                            }
                            std::thread::sleep(RETRY);
                        }
                    }
                }
            })
        };
        let clients = (0..connections).map(client).collect();
        Self { stop, bytes, counted, clients }
    }

    /// Bytes that all clients received so far, partial answers included. Falls when a partial
    /// answer breaks off.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counters of all clients so far.
    #[must_use]
    pub fn counted(&self) -> Counted {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops all clients.
    ///
    /// # Errors
    /// A wrong answer that any client got.
    pub fn finish(mut self) -> io::Result<Counted> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            client.join().map_err(|_| io::Error::other("an HTTP client panicked"))??;
        }
        Ok(self.counted())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Sends `n` requests, one each `period`, without waiting for earlier answers. Returns each
/// response time in ms, counted from when its request was due, and the number of requests that were
/// refused, broken off, or not answered completely within 30 s after the last one. `None` when
/// `cancelled` is set.
///
/// # Errors
/// When a client panicked.
pub fn periodic(
    request: &Request,
    n: usize,
    period: Duration,
    cancelled: &AtomicBool,
) -> io::Result<Option<(Vec<f64>, usize)>> {
    let begin = Instant::now() + period;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut sent = Vec::with_capacity(n);
        for i in 0..n {
            let due = begin + period.mul_f64(i as f64);
            // A late request is sent late: none is skipped.
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if cancelled.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
                return Ok(None);
            }
            let stop = &stop;
            sent.push(scope.spawn(move || {
                request.get(&AtomicU64::new(0), stop)?.ok_or(io::ErrorKind::TimedOut)?;
                Ok::<_, io::Error>((Instant::now() - due).as_secs_f64() * 1e3)
            }));
        }
        let last = Instant::now();
        while !sent.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let given_up = cancelled.load(Ordering::Relaxed);
            if given_up || last.elapsed() > IDLE_TIMEOUT {
                stop.store(true, Ordering::Relaxed);
            }
            if given_up {
                return Ok(None);
            }
            std::thread::sleep(AWAIT);
        }
        let (mut ms, mut failed) = (Vec::with_capacity(n), 0);
        for one in sent {
            match one.join() {
                // More digits than microseconds would be noise.
                Ok(Ok(answer)) => ms.push((answer * 1e3).round() / 1e3),
                Ok(Err(_)) => failed += 1,
                Err(_) => return Err(io::Error::other("an HTTP client panicked")),
            }
        }
        Ok(Some((ms, failed)))
    })
}

#[cfg(test)]
mod tests;
