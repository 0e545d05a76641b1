//! Child processes with an end: killed and reaped when dropped, their output read to a limit by a
//! thread, so that a caller waits for both no longer than it likes.

use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

use crate::detached::Detached;

/// Child process that is killed and reaped when dropped.
#[derive(Debug)]
pub struct Running(pub Child);

impl Running {
    /// Starts a child for a call that the calling thread waits for. The kernel kills it when that
    /// thread ends in any way, `kill -9` of this process included: it asks for nothing later. What
    /// it has asked another program for, as a message to systemd, may still be done.
    pub fn for_call(command: &mut Command) -> io::Result<Self> {
        let parent = getpid();
        let bind = move || bind_to(parent);
        // SAFETY: the closure makes three system calls and allocates nothing.
        unsafe { command.pre_exec(bind) };
        command.spawn().map(Self)
    }
}

/// Has the kernel kill this process with its parent, which must be alive.
fn bind_to(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have been killed before that.
    if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            // It may have ended in between.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Output of a child, or the error of reading it.
pub type Output = Detached<io::Result<Vec<u8>>>;

/// Reads a pipe to its end, or one byte more than `limit`, in a thread; nothing without a pipe.
pub fn read(from: Option<impl Read + Send + 'static>, limit: usize) -> io::Result<Output> {
    Detached::call("output", move || {
        let mut bytes = Vec::new();
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        from.map_or(Ok(0), |from| from.take(most).read_to_end(&mut bytes))?;
        Ok(bytes)
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rtvirtio_testkit::HANG;

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
        let text = |output: io::Result<Output>| output.unwrap().wait(HANG).unwrap().unwrap().unwrap();
        assert_eq!(text(read(child.0.stdout.take(), 3)), b"1234");
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(text(read(None::<std::io::Empty>, 3)), b"");
    }

    #[test]
    fn a_child_for_a_call_ends_with_the_thread_that_waits_for_it() {
        let start = || Running::for_call(Command::new("/bin/sleep").arg("600")).unwrap();
        let mut child = std::thread::spawn(start).join().unwrap();
        let status = child.0.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }
}
