//! The client of the socket: one request, one answer.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;

use crate::snapshot::{Snapshot, VmSnapshot, VmState};

/// Timeout of an answer to a read, which the service has in memory.
const READ_PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of an answer to a change, which waits for the end of a pass.
const CHANGE_PATIENCE: Duration = Duration::from_secs(20);
/// Time for which a starting or ending service may hold its lock without listening.
const BEGINNING: Duration = Duration::from_secs(1);
/// Interval of attempts to connect.
const PAUSE: Duration = Duration::from_millis(10);
/// Interval of status requests while waiting for a contract.
const AGAIN: Duration = Duration::from_millis(30);
/// Largest answer, in bytes.
const LARGEST: usize = 64 << 20;

/// Client of the service's socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Option<Duration>,
}

/// Errors of a request to the service.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No service listens on the socket.
    #[error("no rtvirtiod answers on {socket}: {source}; start it with `systemctl start rtvirtiod`")]
    NotThere {
        /// Path of the socket.
        socket: PathBuf,
        /// Connection error, or that no service runs.
        source: io::Error,
    },
    /// A service runs, and does not listen.
    #[error(
        "rtvirtiod runs, and does not listen on {socket}: it begins or ends, or the socket was removed: `systemctl restart rtvirtiod`"
    )]
    Deaf {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The service listens, and did not answer in time.
    #[error(
        "rtvirtiod on {socket} did not answer within {} s: it runs, and is stopped or hangs: `systemctl status rtvirtiod`",
        .patience.as_secs_f64()
    )]
    Silent {
        /// Path of the socket.
        socket: PathBuf,
        /// Timeout of the answer.
        patience: Duration,
    },
    /// The caller may not use the socket.
    #[error("rtvirtiod on {socket} is for root and the members of its group (`rtvirtio`): run it with sudo")]
    NotAllowed {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// Whether a service runs is not known.
    #[error("whether rtvirtiod runs is not known: {why}")]
    Unknown {
        /// Reason, with its causes.
        why: String,
    },
    /// Other I/O error of the connection.
    #[error("rtvirtiod on {socket}: {source}")]
    Io {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The answer is malformed or too large.
    #[error("rtvirtiod on {socket} did not answer as it should: {why}")]
    Answer {
        /// Path of the socket.
        socket: PathBuf,
        /// Defect of the answer.
        why: String,
    },
    /// The service refused the request.
    #[error("rtvirtiod: {why}")]
    Refused {
        /// HTTP status, other than 2xx.
        status: u16,
        /// Reason that the service gave.
        why: String,
    },
}

impl Client {
    /// Client of this socket; does not connect yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), patience: None }
    }

    /// Sets another timeout for each answer; the default is 5 s for reads and 20 s for changes.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Client of the service in a run directory; `None` where none runs.
    ///
    /// # Errors
    /// When one runs and cannot be reached, or whether one runs is not known: neither is absence.
    pub fn find(run: &Path) -> Result<Option<Self>, ClientError> {
        let client = Self::new(crate::service::socket(run));
        let end = Instant::now() + BEGINNING;
        loop {
            match client.connect(Instant::now() + READ_PATIENCE, READ_PATIENCE) {
                Ok(_) => return Ok(Some(client)),
                Err(ClientError::NotThere { .. }) => {}
                Err(e) => return Err(e),
            }
            // The service takes its lock before it listens.
            match crate::service::runs(run) {
                Ok(false) => return Ok(None),
                Ok(true) if Instant::now() < end => thread::sleep(PAUSE),
                Ok(true) => return Err(ClientError::Deaf { socket: client.socket }),
                Err(e) => return Err(ClientError::Unknown { why: format!("{e:#}") }),
            }
        }
    }

    /// Client of the service in a run directory, where one has to run.
    ///
    /// # Errors
    /// As [`Client::find`]; [`ClientError::NotThere`] where none runs.
    pub fn running(run: &Path) -> Result<Self, ClientError> {
        let none = || {
            let source = io::Error::new(io::ErrorKind::NotFound, "none runs");
            ClientError::NotThere { socket: crate::service::socket(run), source }
        };
        Self::find(run)?.ok_or_else(none)
    }

    /// The state of the service of a run directory; `None` where none runs.
    ///
    /// # Errors
    /// As [`Client::find`] and [`Client::get`].
    pub fn status_of(run: &Path) -> Result<Option<Snapshot>, ClientError> {
        Self::find(run)?.map(|client| client.status()).transpose()
    }

    /// The state of the service.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn status(&self) -> Result<Snapshot, ClientError> {
        self.get("/v1/status")
    }

    /// State of a VM's contract that was just written, once the service has read it and acted on
    /// it. `None` where that takes longer than `within`.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn wait_for_contract(
        &self,
        vm: &str,
        id: &str,
        within: Duration,
    ) -> Result<Option<VmSnapshot>, ClientError> {
        self.wait(within, |status| {
            let found = status.vms.iter().find(|of| of.name == vm)?;
            let is_settled = !matches!(found.state, VmState::Pending | VmState::Unknown);
            (is_settled && found.written.as_deref() == Some(id)).then(|| found.clone())
        })
    }

    /// Whether what was in force for a VM whose contract was just removed is put back. False where
    /// that takes longer than `within`.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn wait_for_no_contract(&self, vm: &str, within: Duration) -> Result<bool, ClientError> {
        let gone = |status: &Snapshot| status.vms.iter().all(|of| of.name != vm).then_some(());
        Ok(self.wait(within, gone)?.is_some())
    }

    fn wait<T>(
        &self,
        within: Duration,
        found: impl Fn(&Snapshot) -> Option<T>,
    ) -> Result<Option<T>, ClientError> {
        let end = Instant::now() + within;
        loop {
            if let Some(found) = found(&self.status()?) {
                return Ok(Some(found));
            }
            if Instant::now() >= end {
                return Ok(None);
            }
            thread::sleep(AGAIN);
        }
    }

    /// Requests a value with GET.
    ///
    /// # Errors
    /// When there is no answer, or it is not such a value.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask("GET", path)
    }

    /// Requests a change with POST.
    ///
    /// # Errors
    /// As [`Client::get`]; [`ClientError::Refused`] with the reason.
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask("POST", path)
    }

    fn ask<T: DeserializeOwned>(&self, method: &str, path: &str) -> Result<T, ClientError> {
        let body = self.text(method, path)?;
        serde_json::from_str(&body).map_err(|e| self.wrong(&e))
    }

    /// The body of an answer.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn text(&self, method: &str, path: &str) -> Result<String, ClientError> {
        let usual = if method == "GET" { READ_PATIENCE } else { CHANGE_PATIENCE };
        let answer = self.exchange(method, path, self.patience.unwrap_or(usual))?;
        let answer = String::from_utf8(answer).map_err(|e| self.wrong(&e))?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| self.wrong(&"it has no head"))?;
        let status = head.split_ascii_whitespace().nth(1).and_then(|code| code.parse::<u16>().ok());
        match status {
            Some(200..300) => Ok(body.to_owned()),
            Some(status) => {
                let why: Option<String> = serde_json::from_str::<serde_json::Value>(body)
                    .ok()
                    .and_then(|v| Some(v.get("error")?.as_str()?.to_owned()));
                Err(ClientError::Refused { status, why: why.unwrap_or_else(|| body.to_owned()) })
            }
            None => Err(self.wrong(&"it has no status")),
        }
    }

    /// Sends a request, and takes everything until the end of the connection.
    fn exchange(&self, method: &str, path: &str, patience: Duration) -> Result<Vec<u8>, ClientError> {
        let until = Instant::now() + patience;
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.silent(patience),
            _ => ClientError::Io { socket: self.socket.clone(), source: e },
        };
        // A socket timeout of zero would mean none.
        let left = || match until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(self.silent(patience)),
            left => Ok(Some(left)),
        };
        let mut stream = self.connect(until, patience)?;
        stream.set_write_timeout(left()?).map_err(failed)?;
        // HTTP/1.0: the answer is not chunked, and ends with the connection.
        let request = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let (mut answer, mut piece) = (Vec::new(), [0; 16 << 10]);
        loop {
            stream.set_read_timeout(left()?).map_err(failed)?;
            match stream.read(&mut piece) {
                Ok(0) => return Ok(answer),
                Ok(n) if answer.len() + n > LARGEST => return Err(self.wrong(&"it is too large")),
                Ok(n) => answer.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(failed(e)),
            }
        }
    }

    /// Connects without blocking until `until`: to a full backlog connect(2) blocks without end.
    fn connect(&self, until: Instant, patience: Duration) -> Result<UnixStream, ClientError> {
        let failed = |source: io::Error| {
            let socket = self.socket.clone();
            match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    ClientError::NotThere { socket, source }
                }
                io::ErrorKind::PermissionDenied => ClientError::NotAllowed { socket },
                _ => ClientError::Io { socket, source },
            }
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let errno = |e: Errno| failed(e.into());
        let address = SocketAddrUnix::new(&self.socket).map_err(errno)?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(errno)?;
        loop {
            match connect(&fd, &address) {
                Ok(()) => break,
                Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(PAUSE),
                Err(Errno::AGAIN) => return Err(self.silent(patience)),
                Err(Errno::INTR) => {}
                Err(e) => return Err(errno(e)),
            }
        }
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(false).map_err(failed)?;
        Ok(stream)
    }

    fn silent(&self, patience: Duration) -> ClientError {
        ClientError::Silent { socket: self.socket.clone(), patience }
    }

    fn wrong(&self, why: &dyn std::fmt::Display) -> ClientError {
        ClientError::Answer { socket: self.socket.clone(), why: why.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::net::UnixListener;

    use rtvirtio_kernel::flock;

    use super::*;

    #[test]
    fn no_service_is_not_the_same_as_one_that_cannot_be_reached() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let run = dir.path().join("run");
        assert!(Client::find(&run).unwrap().is_none(), "there is no run directory");
        // A socket and a lock file that a killed service left.
        fs::create_dir(&run).unwrap();
        drop(UnixListener::bind(crate::service::socket(&run)).unwrap());
        let lock = File::create(run.join(crate::service::LOCK)).unwrap();
        assert!(Client::find(&run).unwrap().is_none(), "nothing holds the lock");
        assert!(flock::lock(&lock).unwrap());
        let e = Client::find(&run).unwrap_err();
        assert!(matches!(e, ClientError::Deaf { .. }) && e.to_string().contains("rtvirtiod runs"), "{e}");
    }

    #[test]
    fn one_that_is_silent_is_not_taken_for_one_that_is_not_there() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let _listens = UnixListener::bind(crate::service::socket(dir.path())).unwrap();
        let client = Client::find(dir.path()).unwrap().unwrap().with_patience(Duration::from_millis(50));
        let e = client.text("GET", "/v1/status").unwrap_err();
        assert!(matches!(e, ClientError::Silent { .. }), "{e}");
        assert!(e.to_string().contains("did not answer within 0.05 s"), "{e}");
        // Nor is one whose queue is full.
        let client = Client::new(dir.path().join("short"));
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&fd, &SocketAddrUnix::new(&client.socket).unwrap()).unwrap();
        rustix::net::listen(&fd, 1).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match client.connect(Instant::now(), Duration::ZERO) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
            assert!(waiting.len() < 100);
        };
        assert!(matches!(full, ClientError::Silent { .. }), "{full}");
    }
}
