//! Child process that runs a user's command: signals are forwarded, and its end is awaited.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpgrp, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// Length of each wait for an end without a limit.
const LONG: Duration = Duration::from_secs(3_600);

/// Handlers of signals that would end this process. They end the command instead, so that changes
/// made for it are reverted. A signal that is ignored, as under nohup(1), stays ignored.
pub(crate) struct Signals(SignalDelivery<UnixStream, SignalOnly>);

impl Signals {
    /// Installs the handlers, which the command does not inherit.
    pub(crate) fn handle() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let mut handled = vec![SIGCHLD];
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            if !is_ignored(signal)? {
                handled.push(signal);
            }
        }
        Ok(Self(SignalDelivery::with_pipe(read, write, SignalOnly, handled)?))
    }

    /// Starts the command.
    ///
    /// # Errors
    /// As `Command::spawn`; kind `Interrupted` after a signal.
    pub(crate) fn start(mut self, command: &mut Command) -> io::Result<Running> {
        if self.0.pending().next().is_some() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let mut running = Running { child: command.spawn()?, signals: self.0 };
        // Signals that came before its `execve` did not reach it.
        running.pass_on(true);
        Ok(running)
    }
}

fn is_ignored(signal: c_int) -> io::Result<bool> {
    // SAFETY: sigaction(2) with a null action only fills the structure, which is valid zeroed.
    let (done, old) = unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, std::ptr::null(), &raw mut old), old)
    };
    if done == 0 { Ok(old.sa_sigaction == libc::SIG_IGN) } else { Err(io::Error::last_os_error()) }
}

/// Whether this process is in the foreground of its terminal, which sends `SIGINT` and `SIGQUIT` to
/// the command as well.
fn is_in_foreground() -> bool {
    // kernel file
    let terminal = File::open("/dev/tty");
    terminal.is_ok_and(|tty| rustix::termios::tcgetpgrp(tty).is_ok_and(|group| group == getpgrp()))
}

/// Running command with the signals for it.
pub(crate) struct Running {
    child: Child,
    signals: SignalDelivery<UnixStream, SignalOnly>,
}

impl Running {
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Forwards pending signals; those that the terminal sends to the command too only if `all`.
    fn pass_on(&mut self, all: bool) {
        let signals: Vec<c_int> = self.signals.pending().collect();
        let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else { return };
        for signal in signals {
            let passed = match signal {
                SIGTERM => Signal::TERM,
                SIGHUP => Signal::HUP,
                SIGINT if all || !is_in_foreground() => Signal::INT,
                SIGQUIT if all || !is_in_foreground() => Signal::QUIT,
                _ => continue,
            };
            // A command that has ended needs none. It is no other process: an ended child keeps its
            // id until it is waited for.
            let _ = kill_process(pid, passed);
        }
    }

    /// Waits for its end; `None` when it still runs after `longest`.
    pub(crate) fn wait(&mut self, longest: Duration) -> io::Result<Option<ExitStatus>> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            self.pass_on(false);
            let left = longest.saturating_sub(begin.elapsed()).min(LONG);
            if left.is_zero() {
                return Ok(None);
            }
            let time = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            // The end of the child is a signal too.
            match poll(&mut [PollFd::new(self.signals.get_read(), PollFlags::IN)], Some(&time)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits for its end, however long that takes.
    pub(crate) fn wait_for_end(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.wait(LONG)? {
                return Ok(status);
            }
        }
    }
}

/// Lock for tests that start commands, and tests that check the holder of a lock: a child has all
/// open files of this process until its `execve`.
#[cfg(test)]
pub(crate) static FORKS: std::sync::Mutex<()> = std::sync::Mutex::new(());
