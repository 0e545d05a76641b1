//! Asking a running I/O domain.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::process;
use serde_json::{Value, json};

use crate::error::{Context as _, Result, bail, ensure};

/// The domain's program.
const PROGRAM: &str = "rtvirtio-iod";
/// A domain that does not answer for so long has a fault.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read: more than that of the largest domain.
const LONGEST: u64 = 16 << 20;

/// The domain's program: next to this one, or in the path.
#[must_use]
pub fn program() -> PathBuf {
    let sibling = std::env::current_exe().ok().map(|p| p.with_file_name(PROGRAM));
    // A program of the path is used only without it.
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
            Err(rustix::io::Errno::AGAIN) if begin.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(std::io::Error::from(e)).with_context(no_answer),
        }
    }
}

/// The status of a domain.
///
/// # Errors
/// When none answers.
pub fn ask(control: &Path) -> Result<Value> {
    send_command(control, "status")
}

/// The status of a domain, if it is one of these processes: another one may listen at that path.
///
/// # Errors
/// [`Kind::NotRunning`](crate::Kind::NotRunning) when none of them answers.
pub fn ask_one_of(control: &Path, pids: &[u32]) -> Result<Value> {
    let stream = connect(control)?;
    let peer = process::peer(&stream)?;
    ensure!(
        peer.is_some_and(|pid| pids.contains(&pid)),
        NotRunning,
        "{}: another process than the I/O domain answers there{}",
        control.display(),
        peer.map_or_else(String::new, |pid| format!(" ({pid})"))
    );
    exchange(&stream, control, "status")
}

/// The process that listens at a control socket; `None` where none does.
///
/// # Errors
/// When that is unknown.
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

/// One command and its answer.
///
/// # Errors
/// When none answers.
pub fn send_command(control: &Path, command: &str) -> Result<Value> {
    exchange(&connect(control)?, control, command)
}

fn exchange(stream: &UnixStream, control: &Path, command: &str) -> Result<Value> {
    request(stream, control, &json!({ "command": command }), PATIENCE)
}

/// One request, with descriptors that were sent ahead of it, and its answer within `patience`.
///
/// # Errors
/// As [`answer`].
pub fn request(stream: &UnixStream, control: &Path, request: &Value, patience: Duration) -> Result<Value> {
    let mut to = stream;
    to.write_all(format!("{request}\n").as_bytes())?;
    answer(stream, control, patience)
}

/// The error that a domain answers with.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) with it.
pub fn refused(reply: &Value) -> Result<()> {
    match reply["error"].as_str() {
        Some(error) => bail!(Guarded, "{error}"),
        None => Ok(()),
    }
}

/// The answer to what was sent, within `patience`.
///
/// # Errors
/// None, or one that is no JSON.
pub fn answer(stream: &UnixStream, control: &Path, patience: Duration) -> Result<Value> {
    stream.set_read_timeout(Some(patience))?;
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST)).read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("{}: not an answer", control.display()))
}
