//! Child processes with an end: killed and reaped when dropped, their output read to a limit by a
//! thread, so that a caller waits for both no longer than it likes.

use std::io::{self, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

/// Child process that is killed and reaped when dropped.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            // It may have ended in between.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Reads a pipe to its end, or one byte more than `limit`, in a thread; nothing without a pipe. A
/// thread that cannot be started is an error of the read.
#[must_use]
pub fn read(from: Option<impl Read + Send + 'static>, limit: usize) -> Receiver<io::Result<Vec<u8>>> {
    let (to, receiver) = channel();
    let failed = to.clone();
    let run = move || {
        let mut bytes = Vec::new();
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        let done = from.map_or(Ok(0), |from| from.take(most).read_to_end(&mut bytes));
        // The receiver is gone after a time-out.
        let _ = to.send(done.map(|_| bytes));
    };
    if let Err(e) = thread::Builder::new().name("output".to_owned()).spawn(run) {
        let _ = failed.send(Err(e));
    }
    receiver
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn output_is_read_to_one_byte_over_the_limit_and_a_child_ends_with_its_owner() {
        let sleeping = Command::new("/bin/sh")
            .args(["-c", "printf 12345; exec sleep 600"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = sleeping.id();
        let mut child = Running(sleeping);
        assert_eq!(read(child.0.stdout.take(), 3).recv().unwrap().unwrap(), b"1234");
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(read(None::<std::io::Empty>, 3).recv().unwrap().unwrap(), b"");
    }
}
