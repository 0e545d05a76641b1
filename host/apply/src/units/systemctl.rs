//! Runs `systemctl`, for a bounded time: while systemd reads its units anew, or hangs, each call
//! would wait for as long as the message bus does.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time for one call: an answer of an idle systemd takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const LIMIT: u64 = 256 << 10;

/// Standard output of a call.
///
/// # Errors
/// `TimedOut`; the message of a call that failed.
pub(super) fn run(args: &[&str]) -> io::Result<String> {
    let mut command = Command::new("systemctl");
    command.args(["--no-pager", "--no-ask-password"]).args(args);
    command.env("LC_ALL", "C").env("SYSTEMD_COLORS", "0");
    call(&mut command, TIMEOUT)
}

/// A child that is ended and reaped when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            // It may have ended in between.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn call(command: &mut Command, timeout: Duration) -> io::Result<String> {
    let end = Instant::now() + timeout;
    let mut child =
        Running(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
    let (out, errors) = (read(child.0.stdout.take())?, read(child.0.stderr.take())?);
    let wait = |from: &Receiver<io::Result<Vec<u8>>>| {
        let left = end.saturating_duration_since(Instant::now());
        let late = |_| {
            let why = format!("no answer within {} s: systemd may be busy or hang", timeout.as_secs_f64());
            io::Error::new(io::ErrorKind::TimedOut, why)
        };
        from.recv_timeout(left).map_err(late)?
    };
    let (out, errors) = (wait(&out)?, wait(&errors)?);
    // Both pipes are closed, so it is ending.
    if child.0.wait()?.success() {
        return String::from_utf8(out).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
    }
    Err(io::Error::other(String::from_utf8_lossy(&errors).trim().to_owned()))
}

fn read(pipe: Option<impl Read + Send + 'static>) -> io::Result<Receiver<io::Result<Vec<u8>>>> {
    let (sender, answer) = channel();
    let run = move || {
        let mut bytes = Vec::new();
        let read = pipe.map_or(Ok(0), |pipe| pipe.take(LIMIT).read_to_end(&mut bytes));
        // There is none to hear it after the time.
        let _ = sender.send(read.map(|_| bytes));
    };
    thread::Builder::new().name("systemctl".to_owned()).spawn(run)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> io::Result<String> {
        call(Command::new("/bin/sh").args(["-c", script]), timeout)
    }

    #[test]
    fn an_answer_is_waited_for_so_long_and_an_error_has_its_text() {
        let long = Duration::from_secs(60);
        assert_eq!(shell("echo yes", long).unwrap(), "yes\n");
        assert_eq!(shell("echo no unit >&2; exit 1", long).unwrap_err().to_string(), "no unit");
        let late = shell("exec sleep 600", Duration::from_millis(50)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");
    }
}
