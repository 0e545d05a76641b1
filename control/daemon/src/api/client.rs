//! The client of the socket: one request, one answer.

use std::error::Error;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use form_urlencoded::Serializer;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::header::{CONNECTION, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rtvirtio_units::Nanos;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;
use tokio::runtime::Builder;
use tokio::time::timeout_at;

use crate::arrivals::ArrivalAnswer;
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
const STATUS_INTERVAL: Duration = Duration::from_millis(30);
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
        socket: PathBuf,
        /// Connection error, or that no service runs.
        source: io::Error,
    },
    /// A service runs, and does not listen.
    #[error(
        "rtvirtiod runs but does not listen on {socket}: it is starting or stopping, or the socket was removed: `systemctl restart rtvirtiod`"
    )]
    Deaf { socket: PathBuf },
    /// The service listens, and did not answer in time.
    #[error(
        "rtvirtiod on {socket} did not answer within {} s: it runs, and is stopped or hangs: `systemctl status rtvirtiod`",
        .patience.as_secs_f64()
    )]
    Silent {
        socket: PathBuf,
        /// Timeout of the answer.
        patience: Duration,
    },
    /// The caller may not use the socket.
    #[error(
        "whether rtvirtiod runs is not known: only root and the members of its group (`rtvirtio`) may use {socket}: \
         run it with sudo"
    )]
    NotAllowed { socket: PathBuf },
    /// Whether a service runs is not known.
    #[error("whether rtvirtiod runs is not known: {why}")]
    Unknown {
        /// Reason, with its causes.
        why: String,
    },
    /// Other I/O error of the connection.
    #[error("rtvirtiod on {socket}: {source}")]
    Io {
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The answer is malformed or too large.
    #[error("rtvirtiod on {socket} did not answer as it should: {why}")]
    Answer {
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
        let client = Self::new(crate::run_dir::socket(run));
        let end = Instant::now() + BEGINNING;
        loop {
            match client.connect(Instant::now() + READ_PATIENCE, READ_PATIENCE) {
                Ok(_) => return Ok(Some(client)),
                Err(ClientError::NotThere { .. }) => {}
                Err(e) => return Err(e),
            }
            // The service takes its lock before it listens.
            match crate::run_dir::runs(run) {
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
            ClientError::NotThere { socket: crate::run_dir::socket(run), source }
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
            thread::sleep(STATUS_INTERVAL);
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

    /// Requests room for a VM that is about to arrive: `described` by a contract file or libvirt's
    /// XML, for the time `hold`, or as long as the service holds it. `vm` chooses from a file with
    /// several.
    ///
    /// # Errors
    /// As [`Client::post`]; status 409 where the VM may not come, 503 where nothing was decided.
    pub fn reserve(
        &self,
        described: &str,
        vm: Option<&str>,
        hold: Option<Nanos>,
    ) -> Result<ArrivalAnswer, ClientError> {
        let mut query = Serializer::new(String::new());
        query.extend_pairs(vm.map(|vm| ("vm", vm)));
        query.extend_pairs(hold.map(|hold| ("for", hold.to_string())));
        let path = format!("/v1/arrivals?{}", query.finish());
        let answer = self.send("POST", &path, described.to_owned().into())?;
        serde_json::from_str(&answer).map_err(|e| self.wrong(&e))
    }

    /// Gives back the room that is reserved for a VM; false where none is. `vm` is its UUID or its
    /// name in libvirt, for a contract file the name there.
    ///
    /// # Errors
    /// As [`Client::post`].
    pub fn release(&self, vm: &str) -> Result<bool, ClientError> {
        let query = Serializer::new(String::new()).append_pair("vm", vm).finish();
        match self.text("DELETE", &format!("/v1/arrivals?{query}")) {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { status: 404, .. }) => Ok(false),
            Err(e) => Err(e),
        }
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
        self.send(method, path, Bytes::new())
    }

    fn send(&self, method: &str, path: &str, body: Bytes) -> Result<String, ClientError> {
        let usual = if method == "GET" { READ_PATIENCE } else { CHANGE_PATIENCE };
        let (status, answer) = self.exchange(method, path, body, self.patience.unwrap_or(usual))?;
        let body = String::from_utf8(answer.into()).map_err(|e| self.wrong(&e))?;
        if status.is_success() {
            return Ok(body);
        }
        let why: Option<String> = serde_json::from_str::<serde_json::Value>(&body)
            .ok()
            .and_then(|v| Some(v.get("error")?.as_str()?.to_owned()));
        Err(ClientError::Refused { status: status.as_u16(), why: why.unwrap_or(body) })
    }

    /// Sends a request, and takes the whole answer.
    fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let until = Instant::now() + patience;
        let failed = |source| ClientError::Io { socket: self.socket.clone(), source };
        let stream = self.connect(until, patience)?;
        let request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        let request =
            request.header(CONNECTION, "close").body(Full::new(body)).map_err(|e| self.wrong(&e))?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let answer = async {
            let stream = tokio::net::UnixStream::from_std(stream).map_err(failed)?;
            let shaken = handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await;
            let (mut sender, connection) = shaken.map_err(|e| self.broken(&e))?;
            tokio::spawn(connection);
            let answer = sender.send_request(request).await.map_err(|e| self.broken(&e))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), LARGEST).collect().await;
            Ok::<_, ClientError>((status, body.map_err(|e| self.broken(&*e))?.to_bytes()))
        };
        runtime.block_on(async { timeout_at(until.into(), answer).await.map_err(|_| self.silent(patience))? })
    }

    /// An exchange that was cut off or is no HTTP.
    fn broken(&self, error: &(dyn Error + 'static)) -> ClientError {
        let mut causes = std::iter::successors(Some(error), |e| (*e).source());
        match causes.find_map(|e| e.downcast_ref::<io::Error>()) {
            Some(e) => {
                let source = io::Error::new(e.kind(), e.to_string());
                ClientError::Io { socket: self.socket.clone(), source }
            }
            None => self.wrong(&error),
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
        Ok(UnixStream::from(fd))
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
    use std::io::{Read as _, Write as _};
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
        drop(UnixListener::bind(crate::run_dir::socket(&run)).unwrap());
        let lock = File::create(run.join(crate::run_dir::LOCK)).unwrap();
        assert!(Client::find(&run).unwrap().is_none(), "nothing holds the lock");
        assert!(flock::lock(&lock).unwrap());
        let e = Client::find(&run).unwrap_err();
        assert!(matches!(e, ClientError::Deaf { .. }) && e.to_string().contains("rtvirtiod runs"), "{e}");
    }

    #[test]
    fn one_that_is_silent_is_not_taken_for_one_that_is_not_there() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let _listens = UnixListener::bind(crate::run_dir::socket(dir.path())).unwrap();
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

    /// The client's view of one answer, whatever is asked.
    fn answered(answer: &[u8]) -> Result<String, ClientError> {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 4096];
                assert!(stream.read(&mut request).unwrap() > 0);
                // The client may leave before the end.
                let _ = stream.write_all(answer);
            });
            Client::new(&socket).with_patience(rtvirtio_testkit::HANG).text("POST", "/v1/plan/accept")
        })
    }

    #[test]
    fn an_answer_is_taken_whole_or_not_at_all() {
        assert_eq!(answered(b"HTTP/1.0 200 OK\r\n\r\n{}").unwrap(), "{}", "until the connection ends");
        assert_eq!(answered(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap(), "{}");
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        assert_eq!(answered(chunked).unwrap(), "{}");
        for wrong in [&b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}"[..], b"no HTTP\r\n\r\n{}", b""] {
            let e = answered(wrong).unwrap_err();
            assert!(matches!(e, ClientError::Answer { .. } | ClientError::Io { .. }), "{e:?}");
        }
        let e = answered(b"HTTP/1.0 409 Conflict\r\n\r\n{\"error\": \"none waits\"}").unwrap_err();
        let ClientError::Refused { status, why } = e else { panic!("{e:?}") };
        assert_eq!((status, why.as_str()), (409, "none waits"));
        let large = [b"HTTP/1.0 200 OK\r\n\r\n".to_vec(), vec![b' '; LARGEST + 1]].concat();
        let e = answered(&large).unwrap_err();
        assert!(matches!(e, ClientError::Answer { .. }), "{e:?}");
    }
}
