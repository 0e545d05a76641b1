//! A vCPU's thread: the CPU time that it uses, and the level that it has.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rtvirtio_apply::{Guard, Movable};
use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_kernel::{Root, task};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Activity, Level};
use rustix::time::{ClockId, clock_gettime};

use crate::UrgencyError;

/// The host's clock for all of this: `CLOCK_MONOTONIC`.
#[must_use]
pub fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    Nanos(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}

/// A vCPU's thread. The open file is that of this very thread: it fails when the thread has ended,
/// also where its number is used again.
#[derive(Debug)]
pub(crate) struct VcpuThread {
    movable: Movable,
    usage: File,
    /// Open where the guest reports nothing.
    status: Option<File>,
    ran: Nanos,
    level: Level,
}

impl VcpuThread {
    /// `None` when it has ended.
    pub fn open(movable: Movable) -> Result<Option<Self>, UrgencyError> {
        let (pid, tid) = (movable.pid, movable.tid);
        let path = PathBuf::from(format!("/proc/{pid}/task/{tid}/schedstat"));
        let usage = match File::open(&path) {
            Ok(file) => file,
            Err(e) if rtvirtio_kernel::is_gone(&e) => return Ok(None),
            Err(e) => return Err(UrgencyError::io("open", path)(e)),
        };
        // After it was opened: what is open is the thread that the journal names.
        let stat = rtvirtio_kernel::unless_gone(task::stat(&Root::default(), pid, tid))?;
        if stat.is_none_or(|stat| stat.start != movable.start) {
            return Ok(None);
        }
        // One that a former process left at a level has to be found there.
        let attr = sched::get(tid).map_err(UrgencyError::io("read the policy of", path))?;
        let level = level_of(&attr);
        let mut thread = Self { movable, usage, status: None, ran: Nanos(0), level };
        if thread.ran_since().is_none() {
            return Ok(None);
        }
        Ok(Some(thread))
    }

    /// Also reads whether it sleeps.
    pub fn with_status(mut self) -> Result<Self, UrgencyError> {
        let path = PathBuf::from(format!("/proc/{}/task/{}/status", self.movable.pid, self.movable.tid));
        self.status = Some(File::open(&path).map_err(UrgencyError::io("open", path))?);
        Ok(self)
    }

    /// What it does, with the CPU time that [`VcpuThread::ran_since`] has returned; `None` when it
    /// has ended, or is not asked for.
    pub fn activity(&self, ran: Nanos) -> Option<Activity> {
        let mut buffer = [0; 4096];
        let n = self.status.as_ref()?.read_at(&mut buffer, 0).ok()?;
        parse_activity(std::str::from_utf8(&buffer[..n]).ok()?, ran)
    }

    pub fn movable(&self) -> &Movable {
        &self.movable
    }

    /// Its level, as last set or found.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The level of its contract.
    pub fn contract(&self) -> Level {
        level_of(&self.movable.contract)
    }

    /// CPU time since the last call; `None` when it has ended.
    pub fn ran_since(&mut self) -> Option<Nanos> {
        let mut buffer = [0; 96];
        let n = self.usage.read_at(&mut buffer, 0).ok()?;
        let text = std::str::from_utf8(&buffer[..n]).ok()?;
        let total = Nanos(text.split_whitespace().next()?.parse().ok()?);
        let since = Nanos(total.0.saturating_sub(self.ran.0));
        self.ran = total;
        Some(since)
    }

    /// Gives it a level. False when another program has given it one that is none of ours: it is
    /// left to that program.
    pub fn set(&mut self, level: Level, guard: &Guard<'_>) -> io::Result<bool> {
        let found = sched::get(self.movable.tid)?;
        if !self.movable.may_be(&found) {
            return Ok(false);
        }
        let wanted = self.attr(level).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{level:?} is no level of {}", self.movable.knob),
            )
        })?;
        guard.set(&self.movable, &wanted)?;
        self.level = level;
        Ok(true)
    }

    /// The journal's value for a level.
    fn attr(&self, level: Level) -> Option<Attr> {
        let all = std::iter::once(&self.movable.contract).chain(&self.movable.levels);
        all.copied().find(|attr| level_of(attr) == level)
    }
}

fn level_of(attr: &Attr) -> Level {
    let real_time = matches!(attr.policy, Policy::Fifo | Policy::Rr);
    Level { priority: if real_time { attr.priority } else { 0 }, round_robin: attr.policy == Policy::Rr }
}

/// From proc_pid_status(5).
fn parse_activity(status: &str, ran: Nanos) -> Option<Activity> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let slept = field("voluntary_ctxt_switches:")?.parse().ok()?;
    Some(Activity { sleeps: field("State:")?.starts_with(['S', 'D']), slept, ran })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_is_read_from_the_status() {
        let status = |state: &str| {
            format!(
                "Name:\tCPU 0/TCG\nState:\t{state}\nvoluntary_ctxt_switches:\t71\nnonvoluntary_ctxt_switches:\t9\n"
            )
        };
        let seen = |sleeps| Some(Activity { sleeps, slept: 71, ran: Nanos(3) });
        assert_eq!(parse_activity(&status("S (sleeping)"), Nanos(3)), seen(true));
        assert_eq!(parse_activity(&status("R (running)"), Nanos(3)), seen(false));
        assert_eq!(parse_activity("State:\tR (running)\n", Nanos(3)), None);
        // This very thread runs, and the file has the form that is expected.
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        assert!(parse_activity(&status, Nanos(0)).is_some_and(|seen| !seen.sleeps));
    }
}
