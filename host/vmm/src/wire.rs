//! UNIX stream with deadlines and a size limit, for the line protocols of both clients.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::{VmmError, WaitLimit};

/// Bytes of one read from the socket: enough that a big reply takes few system calls.
const CHUNK: usize = 64 * 1024;
/// `sun_path` has 108 bytes with the closing zero: unix(7).
const SUN_PATH_MAX: usize = 107;

/// Point in time, with its distance at the start, so that an error can state the time waited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    total: Duration,
}

impl Deadline {
    /// Ends after this time, or sooner where this thread's waits have a common end.
    pub(crate) fn after(total: Duration) -> Deadline {
        let total = WaitLimit::wait(total);
        Deadline { at: Instant::now() + total, total }
    }

    /// Time left, or `None` when it has passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        // The socket options have microsecond resolution and take zero as "forever".
        (left >= Duration::from_micros(1)).then_some(left)
    }

    /// Error of a deadline that has passed without an answer.
    pub(crate) fn passed(self, peer: &str, operation: &str) -> VmmError {
        VmmError::Timeout { peer: peer.into(), operation: operation.into(), waited: self.total }
    }

    /// The earlier of this one and another.
    pub(crate) fn or_sooner(self, other: Option<Deadline>) -> Deadline {
        other.filter(|other| other.at < self.at).unwrap_or(self)
    }

    /// The earlier of this one and `total` from now.
    pub(crate) fn at_most(&self, total: Duration) -> Deadline {
        let other = Deadline::after(total);
        if other.at < self.at { other } else { *self }
    }
}

/// Stream with the bytes that were read but not yet used.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    peer: String,
    buf: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(stream: UnixStream, peer: String) -> Wire {
        Wire { stream, peer, buf: Vec::new() }
    }

    /// Connects to `path`. QEMU serves one client per socket: a second one waits in the listen
    /// queue, so a full queue (`EAGAIN`) is tried again until `timeout`.
    pub(crate) fn connect(kind: &str, path: &Path, timeout: Duration) -> Result<Wire, VmmError> {
        let peer = format!("{kind} {}", path.display());
        let len = path.as_os_str().len();
        if len > SUN_PATH_MAX {
            return Err(VmmError::PathTooLong { path: path.to_path_buf(), len });
        }
        let failed = |e: Errno| VmmError::Connect { peer: peer.clone(), source: io::Error::from(e) };
        let addr = SocketAddrUnix::new(path).map_err(failed)?;
        let deadline = Deadline::after(timeout);
        // Non-blocking for the connect only: a blocking connect to a full listen queue has no
        // deadline.
        let fd: OwnedFd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(failed)?;
        loop {
            match rustix::net::connect(&fd, &addr) {
                Ok(()) => break,
                Err(Errno::AGAIN) if deadline.left().is_some() => thread::sleep(Duration::from_millis(10)),
                Err(Errno::AGAIN) => return Err(deadline.passed(&peer, "connect")),
                Err(Errno::INTR) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false).map_err(|source| VmmError::Connect { peer: peer.clone(), source })?;
        Ok(Wire::new(stream, peer))
    }

    #[cfg(test)]
    pub(crate) fn buffered(&self) -> usize {
        self.buf.len()
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Process that called listen(2) at the other end.
    pub(crate) fn listener(&self) -> Result<Option<u32>, VmmError> {
        rtvirtio_kernel::process::peer(&self.stream).map_err(|e| self.io(e, "SO_PEERCRED"))
    }

    /// Sends all of `bytes` before `deadline`.
    pub(crate) fn send(&mut self, bytes: &[u8], deadline: Deadline, operation: &str) -> Result<(), VmmError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = deadline.left().ok_or_else(|| self.timeout(deadline, operation))?;
            self.stream.set_write_timeout(Some(left)).map_err(|e| self.io(e, operation))?;
            match self.stream.write(rest) {
                Ok(0) => return Err(self.closed(operation)),
                Ok(n) => rest = &rest[n..],
                Err(e) => self.retry(e, operation)?,
            }
        }
        Ok(())
    }

    /// Reads a line without its `\n`, at most `limit` bytes long.
    pub(crate) fn line(
        &mut self,
        limit: usize,
        deadline: Deadline,
        operation: &str,
    ) -> Result<Vec<u8>, VmmError> {
        let mut seen = 0;
        loop {
            if let Some(end) = self.buf[seen..].iter().position(|&b| b == b'\n') {
                let mut line: Vec<u8> = self.buf.drain(..=seen + end).collect();
                line.pop();
                if line.len() <= limit {
                    return Ok(line);
                }
                return Err(self.too_large(limit, operation));
            }
            seen = self.buf.len();
            if seen > limit {
                self.buf = Vec::new();
                return Err(self.too_large(limit, operation));
            }
            self.fill(deadline, operation)?;
        }
    }

    /// Bytes that have arrived, without waiting; `None` for none. Not for use between calls of
    /// [`Wire::line`], which keeps bytes that it has read ahead.
    pub(crate) fn arrived(&mut self, operation: &str) -> Result<Option<Vec<u8>>, VmmError> {
        let mut chunk = [0_u8; CHUNK];
        match rustix::net::recv(&self.stream, &mut chunk[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(self.closed(operation)),
            Ok((n, _)) => Ok(Some(chunk[..n].to_vec())),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(e) => Err(self.io(e.into(), operation)),
        }
    }

    /// Discards everything up to and including the next `mark`. Keeps nothing, so it needs no size
    /// limit.
    pub(crate) fn skip_past(
        &mut self,
        mark: u8,
        deadline: Deadline,
        operation: &str,
    ) -> Result<(), VmmError> {
        loop {
            if let Some(at) = self.buf.iter().position(|&b| b == mark) {
                self.buf.drain(..=at);
                return Ok(());
            }
            self.buf.clear();
            self.fill(deadline, operation)?;
        }
    }

    fn fill(&mut self, deadline: Deadline, operation: &str) -> Result<(), VmmError> {
        let mut chunk = [0_u8; CHUNK];
        loop {
            let left = deadline.left().ok_or_else(|| self.timeout(deadline, operation))?;
            self.stream.set_read_timeout(Some(left)).map_err(|e| self.io(e, operation))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(self.closed(operation)),
                Ok(n) => {
                    self.buf.extend_from_slice(&chunk[..n]);
                    return Ok(());
                }
                Err(e) => self.retry(e, operation)?,
            }
        }
    }

    /// A time-out or a signal is no error: the caller checks the deadline again.
    fn retry(&self, error: io::Error, operation: &str) -> Result<(), VmmError> {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(()),
            _ => Err(self.io(error, operation)),
        }
    }

    fn io(&self, source: io::Error, operation: &str) -> VmmError {
        VmmError::Io { peer: self.peer.clone(), operation: operation.into(), source }
    }

    fn timeout(&self, deadline: Deadline, operation: &str) -> VmmError {
        deadline.passed(&self.peer, operation)
    }

    fn closed(&self, operation: &str) -> VmmError {
        VmmError::Closed { peer: self.peer.clone(), operation: operation.into() }
    }

    pub(crate) fn too_many(&self, operation: &str, what: &'static str, limit: usize) -> VmmError {
        VmmError::TooMany { peer: self.peer.clone(), operation: operation.into(), what, limit }
    }

    fn too_large(&self, limit: usize, operation: &str) -> VmmError {
        VmmError::TooLarge { peer: self.peer.clone(), operation: operation.into(), limit }
    }

    pub(crate) fn protocol(&self, operation: &str, detail: impl Into<String>) -> VmmError {
        VmmError::Protocol { peer: self.peer.clone(), operation: operation.into(), detail: detail.into() }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
