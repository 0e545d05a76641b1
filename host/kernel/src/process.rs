//! Processes by id and start time, so that a reused id is never mistaken for the process that was started.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process that was alive when this was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
}

impl ProcessId {
    /// The process that has this id now; `None` when there is none.
    ///
    /// # Errors
    /// When `/proc` does not tell.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        Ok(start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// Whether it still runs. A zombie does not. One that `/proc` does not tell of may run.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        start_time(self.pid).map_or(true, |now| now == Some(self.start_time))
    }

    /// Asks it to end (SIGTERM) and kills it when it has not ended within `patience`.
    pub fn stop(&self, patience: Duration) {
        self.signal(Signal::TERM);
        if !self.wait(patience) {
            self.signal(Signal::KILL);
            // A process that SIGKILL does not end within the patience is stuck in the kernel: nothing more to do here.
            let _ = self.wait(patience);
        }
    }

    /// Sends a signal unless the process is gone. Through a pidfd checked after it is open: the id cannot be reused in between.
    pub fn signal(&self, signal: Signal) {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return };
        let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // For certain: a process that cannot be told from another one gets no signal.
        if start_time(self.pid).is_ok_and(|now| now == Some(self.start_time)) {
            // Already gone is what we want.
            let _ = pidfd_send_signal(fd, signal);
        }
    }

    /// Waits until it is gone; false when it is still there after `patience`. Reaps it when it is a child of ours.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // ECHILD when it is not ours.
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
        true
    }
}

/// Field 22 of /proc/PID/stat; `None` for a missing process or a zombie.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(e) => return Err(e),
    };
    let form = || io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat: {stat:?}"));
    // The command may hold spaces and parentheses; the fields after it start behind the last ')'.
    let mut fields = stat.rsplit_once(')').ok_or_else(form)?.1.split_ascii_whitespace();
    let state = fields.next().ok_or_else(form)?;
    if matches!(state, "Z" | "X") {
        return Ok(None);
    }
    fields.nth(18).and_then(|field| field.parse().ok()).map(Some).ok_or_else(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_seen_stopped_and_reaped() {
        #[expect(clippy::zombie_processes, reason = "`stop` reaps it, which is what is tested")]
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        assert!(id.is_alive());
        id.stop(Duration::from_secs(2));
        assert!(!id.is_alive());
        assert!(ProcessId::of(child.id()).unwrap().is_none());
    }

    #[test]
    fn a_reused_id_is_another_process() {
        let me = ProcessId::of(std::process::id()).unwrap().unwrap();
        let other = ProcessId { start_time: me.start_time + 1, ..me };
        assert!(!other.is_alive());
        other.signal(Signal::KILL);
    }
}
