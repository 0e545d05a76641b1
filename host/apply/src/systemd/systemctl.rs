//! Runs `systemctl`, for a bounded time: while systemd reads its units anew, or hangs, each call
//! would wait for as long as the message bus does.

use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_kernel::WaitLimit;
use rtvirtio_kernel::child::{Output, Running, read};

/// Time for one call: an answer of an idle systemd takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const LIMIT: usize = 256 << 10;

/// Standard output of a call; it is waited for no longer than [`WaitLimit`] allows.
///
/// # Errors
/// `TimedOut`, `InvalidData` for an answer that is too long or no text, and the message of a call
/// that failed.
pub(super) fn run(args: &[&str]) -> io::Result<String> {
    let mut command = Command::new("systemctl");
    command.args(["--no-pager", "--no-ask-password"]).args(args);
    command.env("LC_ALL", "C").env("SYSTEMD_COLORS", "0");
    call(&mut command, TIMEOUT)
}

fn call(command: &mut Command, timeout: Duration) -> io::Result<String> {
    let timeout = WaitLimit::wait(timeout);
    let end = Instant::now() + timeout;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running::for_call(command)?;
    let (out, errors) = (read(child.0.stdout.take(), LIMIT)?, read(child.0.stderr.take(), LIMIT)?);
    let wait = |from: &Output| {
        let left = end.saturating_duration_since(Instant::now());
        let late = || {
            let why = format!("no answer within {} s: systemd may be busy or hang", timeout.as_secs_f64());
            io::Error::new(io::ErrorKind::TimedOut, why)
        };
        from.wait(left).ok_or_else(late)??
    };
    let (out, errors) = (wait(&out)?, wait(&errors)?);
    if out.len() > LIMIT {
        let why = format!("its answer is longer than {LIMIT} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    // Both pipes are closed, so it is ending.
    if child.0.wait()?.success() {
        return String::from_utf8(out).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
    }
    Err(io::Error::other(String::from_utf8_lossy(&errors).trim().to_owned()))
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
        // All waits of this call together have a limit, which is over.
        let _limit = WaitLimit::lasting(Duration::ZERO);
        let late = shell("exec sleep 600", 10 * long).unwrap_err();
        assert!(late.to_string().starts_with("no answer within 0.5 s"), "{late}");
        assert_eq!(shell("echo yes", long).unwrap(), "yes\n");
    }
}
