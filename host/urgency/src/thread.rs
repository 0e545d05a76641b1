//! Thread of a vCPU: its CPU time and its level.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rtvirtio_apply::{Guard, Movable};
use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_kernel::{Root, task};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Activity, Level, Usage};
use rustix::time::{ClockId, clock_gettime};

use crate::UrgencyError;

/// Current time of the host's clock in this crate: `CLOCK_MONOTONIC`.
#[must_use]
pub fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    Nanos(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}

/// Weight of a fair thread over that of one with the next nice value (sched-nice-design.rst).
const NICE_STEP: f64 = 1.25;

/// Thread of a vCPU. The open file belongs to this very thread: reading it fails when the thread
/// has ended, also where its id is reused.
#[derive(Debug)]
pub(crate) struct VcpuThread {
    movable: Movable,
    usage: File,
    /// File `status` of the thread; open where the guest does not report.
    status: Option<File>,
    /// Usage since the thread started.
    total: Usage,
    level: Level,
    /// Nice value that the floor has among the journal's ordinary values: between the contract's
    /// and 19.
    nice: i32,
}

impl VcpuThread {
    /// Opens a thread; `None` when it has ended.
    pub fn open(movable: Movable) -> Result<Option<Self>, UrgencyError> {
        let (pid, tid) = (movable.pid, movable.tid);
        let path = PathBuf::from(format!("/proc/{pid}/task/{tid}/schedstat"));
        // kernel file
        let usage = match File::open(&path) {
            Ok(file) => file,
            Err(e) if rtvirtio_kernel::is_gone(&e) => return Ok(None),
            Err(e) => return Err(UrgencyError::io("open", path)(e)),
        };
        // Checked after opening: the open file is that of the thread in the journal.
        let stat = rtvirtio_kernel::unless_gone(task::stat(&Root::default(), pid, tid))?;
        if stat.is_none_or(|stat| stat.start != movable.start) {
            return Ok(None);
        }
        // A thread that an earlier process left at a level has to be found there.
        let attr = sched::get(tid).map_err(UrgencyError::io("read the policy of", path))?;
        let level = level_of(&attr);
        let nice = attr.nice;
        let mut thread = Self { movable, usage, status: None, total: Usage::default(), level, nice };
        if thread.used_since().is_none() {
            return Ok(None);
        }
        Ok(Some(thread))
    }

    /// Also reads whether the thread sleeps.
    pub fn with_status(mut self) -> Result<Self, UrgencyError> {
        let path = PathBuf::from(format!("/proc/{}/task/{}/status", self.movable.pid, self.movable.tid));
        // kernel file
        self.status = Some(File::open(&path).map_err(UrgencyError::io("open", path))?);
        Ok(self)
    }

    /// Activity of the thread, with the CPU time that [`VcpuThread::used_since`] has returned;
    /// `None` when it has ended, or without `with_status`.
    pub fn activity(&self, ran: Nanos) -> Option<Activity> {
        let mut buffer = [0; 4096];
        let n = self.status.as_ref()?.read_at(&mut buffer, 0).ok()?;
        parse_activity(std::str::from_utf8(&buffer[..n]).ok()?, ran)
    }

    pub fn movable(&self) -> &Movable {
        &self.movable
    }

    /// Level as last set or found.
    pub fn level(&self) -> Level {
        self.level
    }

    pub fn contract(&self) -> Level {
        level_of(&self.movable.contract)
    }

    /// CPU time since the last call; `None` when the thread has ended.
    pub fn used_since(&mut self) -> Option<Usage> {
        let mut buffer = [0; 96];
        let n = self.usage.read_at(&mut buffer, 0).ok()?;
        // CPU time, time on a run queue, time slices: sched-stats.rst.
        let mut fields = std::str::from_utf8(&buffer[..n]).ok()?.split_whitespace();
        let mut field = || fields.next()?.parse().ok().map(Nanos);
        let total = Usage { ran: field()?, waited: field()? };
        let since = |new: Nanos, old: Nanos| Nanos(new.0.saturating_sub(old.0));
        let used =
            Usage { ran: since(total.ran, self.total.ran), waited: since(total.waited, self.total.waited) };
        self.total = total;
        Some(used)
    }

    /// Sets a level. False when another program has set one that is none of ours: it is left to
    /// that program.
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

    /// Sets the floor to the journal's nice value whose weight is nearest to this share of the
    /// contract's. Returns that weight's share; `None` where the journal has one value only, or
    /// another program has set one that is none of ours.
    pub fn set_weight(&mut self, share: f64, guard: &Guard<'_>) -> io::Result<Option<f64>> {
        let ordinary = || self.movable.levels.iter().filter(|attr| level_of(attr).priority == 0);
        let Some(own) = ordinary().map(|attr| attr.nice).min() else { return Ok(None) };
        let weight = |nice: i32| NICE_STEP.powi(own - nice);
        let distance = |nice: i32| (weight(nice) / share).ln().abs();
        let Some(nearest) =
            ordinary().map(|attr| attr.nice).min_by(|a, b| distance(*a).total_cmp(&distance(*b)))
        else {
            return Ok(None);
        };
        if ordinary().count() < 2 {
            return Ok(None);
        }
        if nearest != self.nice {
            self.nice = nearest;
            if self.level.priority == 0 && !self.set(self.level, guard)? {
                return Ok(None);
            }
        }
        Ok(Some(weight(nearest)))
    }

    /// Value of the journal for a level.
    fn attr(&self, level: Level) -> Option<Attr> {
        let all = || std::iter::once(&self.movable.contract).chain(&self.movable.levels);
        let mut of_level = all().copied().filter(|attr| level_of(attr) == level);
        let is_floor = |attr: &Attr| level.priority > 0 || attr.nice == self.nice;
        of_level.clone().find(is_floor).or_else(|| of_level.next())
    }
}

fn level_of(attr: &Attr) -> Level {
    let real_time = matches!(attr.policy, Policy::Fifo | Policy::Rr);
    Level { priority: if real_time { attr.priority } else { 0 }, round_robin: attr.policy == Policy::Rr }
}

/// Parses a thread's `status` (proc_pid_status(5)).
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
        // This very thread is running, and the file has the expected format.
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        assert!(parse_activity(&status, Nanos(0)).is_some_and(|seen| !seen.sleeps));
    }
}
