//! A server for one request line and one reply line per connection, on a Unix socket. Peers of the
//! owner may pass descriptors with the line.
//!
//! A connection has one deadline from accept to the last byte of its reply, so a silent or slow
//! peer holds its place no longer. The number of connections is bounded; a new one replaces the
//! oldest.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketFlags, accept_with,
    recv, recvmsg, send, sockopt,
};

/// Limits of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest number of connections.
    pub connections: usize,
    /// Longest line, in bytes.
    pub line: usize,
    /// Largest number of descriptors of a connection.
    pub descriptors: usize,
    /// The user whose processes may pass descriptors and change what is served; root may too.
    pub owner: u32,
    /// Deadline of a connection, from accept to the last byte of the reply.
    pub deadline: Duration,
    /// Pause after a failed accept, for want of descriptors or memory.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            line: 1 << 16,
            // Three of 256 disks, two of 128 ports.
            descriptors: 1_024,
            owner: 0,
            deadline: Duration::from_secs(5),
            pause: Duration::from_millis(100),
        }
    }
}

/// Reply to a request, and the further use of its connection.
#[derive(Debug)]
pub enum Reply {
    /// Sends this line, which ends with a newline, and closes.
    Line(UnixStream, String),
    /// Hands the stream over to another thread.
    Detached,
}

/// A request line of a peer.
#[derive(Debug)]
pub struct Request<'a> {
    /// The line, without its newline.
    pub line: &'a str,
    /// Connection to which the reply goes.
    pub stream: UnixStream,
    /// Descriptors that came with it, in order; of peers that may pass them.
    pub descriptors: Vec<OwnedFd>,
    /// Whether the peer is root or the owner of the server.
    pub is_owner: bool,
}

/// Descriptors in one message; the kernel's limit is 253.
const DESCRIPTORS_PER_MESSAGE: usize = 16;

struct Connection {
    stream: UnixStream,
    until: Instant,
    is_owner: bool,
    descriptors: Vec<OwnedFd>,
    request: Vec<u8>,
    /// The reply and the number of bytes sent, after the request.
    reply: Option<(Vec<u8>, usize)>,
}

impl Connection {
    fn new(stream: UnixStream, until: Instant, is_owner: bool) -> Self {
        Self { stream, until, is_owner, descriptors: Vec::new(), request: Vec::new(), reply: None }
    }

    /// Reads what is there. Descriptors of peers that may not pass any are never received: the
    /// kernel drops them.
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Errno> {
        if !self.is_owner {
            return recv(&self.stream, bytes, RecvFlags::DONTWAIT).map(|(_, n)| n);
        }
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE), ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                self.descriptors.extend(passed);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) { Err(Errno::MSGSIZE) } else { Ok(got.bytes) }
    }
}

/// The next state of a connection.
enum Progress {
    Wait(Connection),
    Request(Connection),
    Close,
}

/// Serves until the listener fails for good. The caller makes `listener` non-blocking, because a
/// confined thread may not; `handle` gets each request line without its newline.
///
/// # Errors
/// Of `poll`; a listener that was shut down.
pub fn serve(
    listener: &UnixListener,
    limits: Limits,
    mut handle: impl FnMut(Request<'_>) -> Reply,
) -> io::Result<()> {
    let mut connections: Vec<Connection> = Vec::with_capacity(limits.connections);
    let mut paused_until: Option<Instant> = None;
    loop {
        let now = Instant::now();
        connections.retain(|c| c.until > now);
        paused_until = paused_until.filter(|until| *until > now);
        let ready = wait(listener, &connections, paused_until, now)?;
        let mut open = Vec::with_capacity(limits.connections);
        let mut handled = Duration::ZERO;
        for (i, connection) in connections.drain(..).enumerate() {
            let next = match ready.connections.get(i) {
                Some(true) => progress(connection, limits),
                _ => Progress::Wait(connection),
            };
            match next {
                Progress::Wait(connection) => open.push(connection),
                Progress::Close => {}
                Progress::Request(Connection { stream, until, request, is_owner, descriptors, .. }) => {
                    let line = String::from_utf8_lossy(&request);
                    let begin = Instant::now();
                    let reply = handle(Request { line: line.trim(), stream, descriptors, is_owner });
                    handled += begin.elapsed();
                    if let Reply::Line(stream, line) = reply {
                        let reply = Some((line.into_bytes(), 0));
                        // However long the reply took, its peer has time to read it.
                        let until = until.max(Instant::now() + limits.deadline / 2);
                        let connection = Connection { reply, ..Connection::new(stream, until, is_owner) };
                        if let Progress::Wait(connection) = progress(connection, limits) {
                            open.push(connection);
                        }
                    }
                }
            }
        }
        // Time in `handle` does not count against other connections.
        open.iter_mut().for_each(|c| c.until += handled);
        connections = open;
        if ready.listener {
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(stream) => {
                    if connections.len() >= limits.connections {
                        // The oldest without a request.
                        let oldest = connections.iter().position(|c| c.reply.is_none()).unwrap_or(0);
                        connections.remove(oldest);
                    }
                    let until = Instant::now() + limits.deadline;
                    // A peer that cannot be identified passes nothing.
                    let uid = sockopt::socket_peercred(&stream).map(|peer| peer.uid.as_raw());
                    let is_owner = uid.is_ok_and(|uid| uid == 0 || uid == limits.owner);
                    connections.push(Connection::new(UnixStream::from(stream), until, is_owner));
                }
                // The peer has closed, or another thread has accepted.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::INVAL | Errno::BADF) => return Err(Errno::INVAL.into()),
                // The connection stays in the backlog: an immediate retry would spin.
                Err(_) => paused_until = Some(Instant::now() + limits.pause),
            }
        }
    }
}

/// Readiness of the descriptors after a poll.
struct Ready {
    listener: bool,
    connections: Vec<bool>,
}

fn wait(
    listener: &UnixListener,
    connections: &[Connection],
    paused_until: Option<Instant>,
    now: Instant,
) -> io::Result<Ready> {
    let interest = |c: &Connection| if c.reply.is_some() { PollFlags::OUT } else { PollFlags::IN };
    let mut fds: Vec<PollFd<'_>> =
        connections.iter().map(|c| PollFd::from_borrowed_fd(c.stream.as_fd(), interest(c))).collect();
    if paused_until.is_none() {
        fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
    }
    let first = connections.iter().map(|c| c.until).chain(paused_until).min();
    let timeout = first.map(|at| at.saturating_duration_since(now) + Duration::from_millis(1));
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        // Temporary, as an accept that fails for want of memory.
        Err(Errno::NOMEM) => std::thread::sleep(Duration::from_millis(100)),
        Err(e) => return Err(e.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    Ok(Ready {
        listener: paused_until.is_none() && fds.last().is_some_and(is_ready),
        connections: fds.iter().take(connections.len()).map(is_ready).collect(),
    })
}

/// Reads or writes without waiting.
fn progress(mut c: Connection, limits: Limits) -> Progress {
    if let Some((reply, sent)) = &mut c.reply {
        loop {
            match send(&c.stream, &reply[*sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) if *sent + n >= reply.len() => return Progress::Close,
                Ok(n) => *sent += n,
                Err(Errno::AGAIN) => return Progress::Wait(c),
                Err(Errno::INTR) => {}
                Err(_) => return Progress::Close,
            }
        }
    }
    let mut bytes = [0u8; 1_024];
    match c.read(&mut bytes) {
        Ok(0) if c.request.is_empty() => Progress::Close,
        // A last line may lack its newline.
        Ok(0) => Progress::Request(c),
        Ok(n) => {
            let bytes = &bytes[..n];
            let end = bytes.iter().position(|b| *b == b'\n');
            c.request.extend_from_slice(&bytes[..end.unwrap_or(n)]);
            if end.is_some() {
                Progress::Request(c)
            } else if c.request.len() >= limits.line || c.descriptors.len() > limits.descriptors {
                Progress::Close
            } else {
                Progress::Wait(c)
            }
        }
        Err(Errno::AGAIN | Errno::INTR) => Progress::Wait(c),
        Err(_) => Progress::Close,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::path::Path;

    use super::*;

    const QUICK: Limits = Limits {
        connections: 8,
        line: 4_096,
        descriptors: 4,
        owner: 0,
        deadline: Duration::from_millis(1_500),
        pause: Duration::from_millis(50),
    };

    /// No peer that does something meets it, however slow the machine is.
    const PATIENT: Limits = Limits { deadline: Duration::from_secs(600), ..QUICK };

    /// A server that replies `len` copies of each line.
    fn start(path: &Path, len: usize, limits: Limits) {
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            serve(&listener, limits, |r| Reply::Line(r.stream, r.line.repeat(len) + "\n"))
        });
    }

    fn request(path: &Path) -> String {
        let stream = UnixStream::connect(path).unwrap();
        (&stream).write_all(b"ping\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn silent_peers_hold_no_place() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        start(&path, 1, PATIENT);
        // Many more than the limit.
        let idle: Vec<UnixStream> = (0..50).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for _ in 0..5 {
            assert_eq!(request(&path), "ping\n");
        }
        drop(idle);
        assert_eq!(request(&path), "ping\n");
    }

    /// Slow bytes do not extend the deadline.
    #[test]
    fn one_deadline_for_the_whole_connection() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        start(&path, 1, QUICK);
        let mut slow = UnixStream::connect(&path).unwrap();
        let begin = Instant::now();
        let closed = (0..6_000).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            slow.write_all(b"x").is_err()
        });
        assert!(closed && begin.elapsed() >= QUICK.deadline, "{:?}", begin.elapsed());
        // A line without an end.
        let mut endless = UnixStream::connect(&path).unwrap();
        assert!((0..100_000).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            endless.write_all(&[b'x'; 1_024]).is_err()
        }));
    }

    /// A peer that does not read its reply delays no other connection.
    #[test]
    fn a_long_reply_is_sent_in_parts() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        start(&path, 1 << 20, PATIENT);
        let slow_reader = UnixStream::connect(&path).unwrap();
        (&slow_reader).write_all(b"ping\n").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(request(&path).len(), (4 << 20) + 1);
        let mut rest = Vec::new();
        (&slow_reader).read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), (4 << 20) + 1);
    }
}
