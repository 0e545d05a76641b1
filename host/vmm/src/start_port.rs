//! Host's end of the port on which a guest reports start-ups: QEMU's socket of a `virtserialport`
//! named [`rtvirtio_startup::PORT`].

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_startup::{StartMessage, StartMessageReader};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Time between two attempts to connect to a VM that does not run.
const RETRY: Duration = Duration::from_secs(1);
/// Bytes that are read at once, so that a guest which writes endlessly delays no other.
const CHUNK: usize = 1024;

/// State of a port after a poll.
#[derive(Debug)]
pub enum PortState {
    /// Connected as before the poll.
    Same,
    /// Connected by this poll.
    Connected,
    /// The VM has ended, or QEMU has closed the connection. Later polls connect again.
    Closed,
    /// Not connected: the VM does not run, or the next attempt is not due yet.
    Absent,
    /// Not connected for another reason, which may last.
    Failed(io::Error),
}

/// Connection to a port, which is made again by itself.
#[derive(Debug)]
pub struct StartPort {
    path: PathBuf,
    stream: Option<UnixStream>,
    next_try: Instant,
    reader: StartMessageReader,
}

impl StartPort {
    /// Port at QEMU's socket; not connected yet.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        let (path, reader) = (path.to_owned(), StartMessageReader::default());
        Self { path, stream: None, next_try: Instant::now(), reader }
    }

    /// Path of QEMU's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Descriptor to wait for messages; `None` while not connected.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(UnixStream::as_fd)
    }

    /// Number of lines of the guest that were no messages.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.reader.ignored()
    }

    /// Reads messages of the guest, or tries to connect; never waits.
    pub fn poll(&mut self, on_word: &mut dyn FnMut(StartMessage)) -> PortState {
        let Some(stream) = &mut self.stream else {
            if Instant::now() < self.next_try {
                return PortState::Absent;
            }
            self.next_try = Instant::now() + RETRY;
            return match connect(&self.path) {
                Ok(stream) => {
                    (self.stream, self.reader) = (Some(stream), StartMessageReader::default());
                    PortState::Connected
                }
                Err(e) if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&e.kind()) => {
                    PortState::Absent
                }
                Err(e) => PortState::Failed(e),
            };
        };
        let mut bytes = [0; CHUNK];
        match stream.read(&mut bytes) {
            Ok(n) if n > 0 => {
                self.reader.push(&bytes[..n], on_word);
                PortState::Same
            }
            Err(e) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&e.kind()) => {
                PortState::Same
            }
            // End of the stream, or an error after which nothing more comes.
            _ => {
                self.stream = None;
                PortState::Closed
            }
        }
    }
}

/// Connects without waiting. QEMU serves one client: while another one is connected, the connection
/// waits in its listen queue, or fails with `EAGAIN` if that is full.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).map_err(|e| match e {
        Errno::AGAIN => io::Error::other("another program is connected to it"),
        e => e.into(),
    })?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn a_port_is_read_and_connected_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("start");
        let mut port = StartPort::new(&path);
        let mut words = Vec::new();
        assert!(matches!(port.poll(&mut |_| {}), PortState::Absent), "no such socket");
        let listener = UnixListener::bind(&path).unwrap();
        port.next_try = Instant::now();
        assert!(matches!(port.poll(&mut |_| {}), PortState::Connected));
        let (mut guest, _) = listener.accept().unwrap();
        assert!(matches!(port.poll(&mut |w| words.push(w)), PortState::Same));
        guest.write_all(b"start 3 250\nnonsense\nend").unwrap();
        assert!(matches!(port.poll(&mut |w| words.push(w)), PortState::Same));
        assert_eq!(words, [StartMessage::Start { id: 3, wanted: Nanos(250_000_000) }]);
        assert_eq!(port.ignored(), 1);
        drop(guest);
        assert!(matches!(port.poll(&mut |_| {}), PortState::Closed));
        port.next_try = Instant::now();
        assert!(matches!(port.poll(&mut |_| {}), PortState::Connected), "the VM is back");
    }
}
