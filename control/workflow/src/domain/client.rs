//! Client of a running I/O domain's control socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_domain_protocol::{Command, ReplyError, Status, parse_reply};
use rtvirtio_kernel::process;
use serde::de::DeserializeOwned;

use crate::error::{Context as _, Error, Kind, Result, ensure};

/// Name of the I/O domain's program.
pub(super) const PROGRAM: &str = "rtvirtio-iod";
/// Timeout of an answer, after which the I/O domain has a fault.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read: more than that of the largest I/O domain.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Path of the I/O domain's program: next to this one, or found by `PATH`.
#[must_use]
pub fn program() -> PathBuf {
    let sibling = std::env::current_exe().ok().map(|p| p.with_file_name(PROGRAM));
    // `PATH` is searched only without it.
    sibling.filter(|p| !matches!(p.try_exists(), Ok(false))).unwrap_or_else(|| PROGRAM.into())
}

/// A connection to a control socket.
///
/// # Errors
/// When none listens there.
pub fn connect(control: &Path) -> Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let no_answer = || format!("{}: no I/O domain answers there; is {PROGRAM} running?", control.display());
    let address = SocketAddrUnix::new(control).with_context(no_answer)?;
    let begin = Instant::now();
    loop {
        // A connection to a listener with a full backlog waits without a limit otherwise.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(rustix::io::Errno::AGAIN) if begin.elapsed() < ANSWER_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(std::io::Error::from(e)).with_context(no_answer),
        }
    }
}

/// Status of an I/O domain.
pub fn ask(control: &Path) -> Result<Status> {
    send_command(control, &Command::Status)
}

/// Status of an I/O domain, if it is one of these processes: others may listen at that path.
///
/// # Errors
/// [`crate::Kind::NotRunning`] when none of them answers.
pub fn ask_one_of(control: &Path, pids: &[u32]) -> Result<Status> {
    let stream = connect(control)?;
    let peer = process::peer(&stream)?;
    ensure!(
        peer.is_some_and(|pid| pids.contains(&pid)),
        NotRunning,
        "{}: another process than the I/O domain answers there{}",
        control.display(),
        peer.map_or_else(String::new, |pid| format!(" ({pid})"))
    );
    request(&stream, control, &Command::Status, ANSWER_TIMEOUT)
}

/// The process that listens at a control socket; `None` where none does.
pub fn listener(control: &Path) -> Result<Option<String>> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    match UnixStream::connect(control) {
        Ok(stream) => {
            let pid = process::peer(&stream)?;
            Ok(Some(pid.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string())))
        }
        Err(e) if matches!(e.kind(), NotFound | ConnectionRefused) => Ok(None),
        Err(e) => Err(e).with_context(|| control.display().to_string()),
    }
}

/// Sends a command and returns its reply.
///
/// # Errors
/// When none answers; as [`answer`].
pub fn send_command<T: DeserializeOwned>(control: &Path, command: &Command) -> Result<T> {
    request(&connect(control)?, control, command, ANSWER_TIMEOUT)
}

/// Sends a command after any descriptors sent ahead of it; returns its reply within `patience`.
pub fn request<T: DeserializeOwned>(
    stream: &UnixStream,
    control: &Path,
    command: &Command,
    patience: Duration,
) -> Result<T> {
    let mut to = stream;
    to.write_all(command.line()?.as_bytes())?;
    answer(stream, control, patience)
}

/// The reply to a command already sent, within `patience`.
///
/// # Errors
/// [`Kind::Guarded`] with the error of the I/O domain; no reply, or one without what is required.
pub fn answer<T: DeserializeOwned>(stream: &UnixStream, control: &Path, patience: Duration) -> Result<T> {
    stream.set_read_timeout(Some(patience))?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_line(&mut line)?;
    match parse_reply(&line) {
        Ok(reply) => Ok(reply),
        Err(ReplyError::Refused(error)) => Err(Error::new(Kind::Guarded, error)),
        Err(ReplyError::Invalid(e)) => {
            Err(e).with_context(|| format!("{}: not an answer", control.display()))
        }
    }
}
