//! The host's end of the port on which a guest says that something starts: QEMU's socket of a
//! `virtserialport` named [`rtvirtio_startup::PORT`].

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_startup::{Word, WordReader};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Time between two attempts to connect to a VM that does not run.
const RETRY: Duration = Duration::from_secs(1);
/// Bytes that are read at once, so that a guest which writes without end holds up no other.
const CHUNK: usize = 1024;

/// How a port stands.
#[derive(Debug)]
pub enum PortState {
    /// Connected, and there was no news of it.
    Same,
    /// It has just been connected.
    Connected,
    /// The VM has ended, or QEMU has closed it. It is connected again when it is back.
    Closed,
    /// Not connected: the VM does not run.
    Absent,
    /// Not connected for another reason, which may last.
    Failed(io::Error),
}

/// A port. It connects, and connects again, by itself.
#[derive(Debug)]
pub struct StartPort {
    path: PathBuf,
    stream: Option<UnixStream>,
    next_try: Instant,
    reader: WordReader,
}

impl StartPort {
    /// A port by QEMU's socket; nothing is connected yet.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        let (path, reader) = (path.to_owned(), WordReader::default());
        Self { path, stream: None, next_try: Instant::now(), reader }
    }

    /// QEMU's socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its descriptor, to wait for words.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(UnixStream::as_fd)
    }

    /// Lines of the guest that were no words.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.reader.ignored()
    }

    /// Reads what the guest has said, or tries to connect; never waits.
    pub fn poll(&mut self, on_word: &mut dyn FnMut(Word)) -> PortState {
        let Some(stream) = &mut self.stream else {
            if Instant::now() < self.next_try {
                return PortState::Absent;
            }
            self.next_try = Instant::now() + RETRY;
            return match connect(&self.path) {
                Ok(stream) => {
                    (self.stream, self.reader) = (Some(stream), WordReader::default());
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
            // Its end, or an error after which nothing more comes.
            _ => {
                self.stream = None;
                PortState::Closed
            }
        }
    }
}

/// QEMU serves one client: with another one connected, `EAGAIN` says that its queue is full, and
/// the connection waits in it otherwise.
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
        assert_eq!(words, [Word::Start { id: 3, wanted: Nanos(250_000_000) }]);
        assert_eq!(port.ignored(), 1);
        drop(guest);
        assert!(matches!(port.poll(&mut |_| {}), PortState::Closed));
        port.next_try = Instant::now();
        assert!(matches!(port.poll(&mut |_| {}), PortState::Connected), "the VM is back");
    }
}
