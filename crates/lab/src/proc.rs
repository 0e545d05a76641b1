//! Processes by id and start time, so that a reused id is never mistaken for the process that was started.

use std::fs;
use std::time::{Duration, Instant};

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
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start_time: start_time(pid)? })
    }

    /// Whether it still runs. A zombie does not.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
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
        if self.is_alive() {
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
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command may hold spaces and parentheses; the fields after it start behind the last ')'.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_seen_stopped_and_reaped() {
        #[expect(clippy::zombie_processes, reason = "`stop` reaps it, which is what is tested")]
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        assert!(id.is_alive());
        id.stop(Duration::from_secs(2));
        assert!(!id.is_alive());
        assert!(ProcessId::of(child.id()).is_none());
    }

    #[test]
    fn a_reused_id_is_another_process() {
        let me = ProcessId::of(std::process::id()).unwrap();
        let other = ProcessId { start_time: me.start_time + 1, ..me };
        assert!(!other.is_alive());
        other.signal(Signal::KILL);
    }
}
