//! Delays of raising vCPUs, by cause.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::Reason;
use rtvirtio_urgency::page::RawReport;
use serde::{Deserialize, Serialize};

/// Histogram of raise delays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delays {
    /// Number of delays below each of [`Delays::EDGES_US`], and not below the one before; the last
    /// counts all longer ones.
    pub counts: [u64; 9],
    /// Longest delay, in nanoseconds.
    pub longest: Nanos,
}

impl Delays {
    /// Upper edges of the bins, in microseconds.
    pub const EDGES_US: [u64; 8] = [25, 50, 100, 200, 400, 800, 1600, 3200];

    fn add(&mut self, delay: Nanos) {
        let at = Self::EDGES_US.iter().take_while(|edge| delay.0 >= **edge * 1000).count();
        self.counts[at] += 1;
        self.longest = self.longest.max(delay);
    }

    #[must_use]
    pub fn n(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum with another histogram.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        let mut both = *self;
        both.counts.iter_mut().zip(other.counts).for_each(|(n, of)| *n += of);
        both.longest = both.longest.max(other.longest);
        both
    }
}

/// Delays of raising a vCPU whose guest reports, by cause; measured by the host. For a guest that
/// does not report, interrupts only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Raises {
    /// For an announced timer, since the time for which the raise was planned.
    pub timer: Delays,
    /// For a report that a poll found, since it was written.
    pub look: Delays,
    /// For a report that came with a notice, since it was written.
    pub notice: Delays,
    /// Number of raises for urgent completions of the I/O domain.
    pub completions: u64,
    /// For an interrupt of a device or of another vCPU, since KVM made it pending.
    #[serde(default)]
    pub interrupts: Delays,
    /// From an announced timer to the report of the urgent task, in the guest's time, where the
    /// vCPU was raised before the timer: the guest's own delay.
    pub tasks_in_time: Delays,
    /// From an announced timer to that report, where it was raised after the timer, or not for it.
    pub tasks_late: Delays,
}

impl Raises {
    /// Sum with the counts of another vCPU.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        Self {
            timer: self.timer.with(&other.timer),
            look: self.look.with(&other.look),
            notice: self.notice.with(&other.notice),
            completions: self.completions + other.completions,
            interrupts: self.interrupts.with(&other.interrupts),
            tasks_in_time: self.tasks_in_time.with(&other.tasks_in_time),
            tasks_late: self.tasks_late.with(&other.tasks_late),
        }
    }
}

/// Records the raises of one vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trace {
    raises: Raises,
    /// Time at which the last report was written, in the host's time.
    written: Option<Nanos>,
    /// Announced timer, in the guest's time and the host's.
    timer: Option<(Nanos, Nanos)>,
    /// Time of the last raise; `None` when it has been lowered since.
    raised: Option<Nanos>,
}

impl Trace {
    pub fn raises(&self) -> Raises {
        self.raises
    }

    /// Records a new report.
    pub fn report(&mut self, raw: &RawReport, to_host: impl Fn(Nanos) -> Option<Nanos>) {
        let written = Nanos(raw.written);
        self.written = to_host(written);
        if raw.policy == 0 {
            let timer = Nanos(raw.deadline);
            self.timer = (timer.0 != 0).then(|| to_host(timer)).flatten().map(|host| (timer, host));
            return;
        }
        // A task that runs before the timer was not woken by it.
        let Some((timer, host)) = self.timer.take().filter(|(timer, _)| *timer <= written) else { return };
        let in_time = self.raised.is_some_and(|raised| raised <= host);
        let of = if in_time { &mut self.raises.tasks_in_time } else { &mut self.raises.tasks_late };
        of.add(Nanos(written.0 - timer.0));
    }

    /// Records that the vCPU's thread was raised at `now`. `due` is the time planned for the timer,
    /// or of KVM's interrupt, that raised it; `is_called`: the guest has rung the doorbell.
    pub fn raised(&mut self, reason: Reason, due: Option<Nanos>, is_called: bool, now: Nanos) {
        self.raised = Some(now);
        let since = |due: Option<Nanos>| due.map(|due| Nanos(now.0.saturating_sub(due.0)));
        let (of, delay) = match reason {
            Reason::Timer => (&mut self.raises.timer, since(due)),
            Reason::Interrupt => (&mut self.raises.interrupts, since(due)),
            Reason::Completion => {
                self.raises.completions += 1;
                return;
            }
            Reason::Task | Reason::Blocked | Reason::Critical => {
                let of = if is_called { &mut self.raises.notice } else { &mut self.raises.look };
                // A raise without a new report, as when the budget is full again, is not late by
                // the old one.
                (of, since(self.written.take()))
            }
            Reason::Contract | Reason::Floor | Reason::Exhausted => return,
        };
        if let Some(delay) = delay {
            of.add(delay);
        }
    }

    /// Records that the vCPU's thread was lowered.
    pub fn lowered(&mut self) {
        self.raised = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_raised_it_and_how_late_the_task_was() {
        let us = Nanos::from_micros;
        let to_host = |guest: Nanos| Some(Nanos(guest.0 + us(500).0));
        let report = |policy, written, deadline| RawReport {
            policy,
            priority: 0,
            flags: 0,
            written: us(written).0,
            deadline: us(deadline).0,
        };
        let mut trace = Trace::default();
        // Raised 30 us before the timer, 20 us later than planned; the task runs 70 us after.
        trace.report(&report(0, 1000, 2000), to_host);
        trace.raised(Reason::Timer, Some(us(2450)), false, us(2470));
        trace.report(&report(1, 2070, 0), to_host);
        trace.lowered();
        // Raised too late for the next one.
        trace.report(&report(0, 2100, 3000), to_host);
        trace.raised(Reason::Timer, Some(us(3450)), false, us(4000));
        trace.report(&report(1, 3900, 0), to_host);
        trace.lowered();
        // Found by a poll, and then by a notice; before its timer.
        trace.report(&report(0, 4000, 9000), to_host);
        trace.report(&report(1, 5000, 0), to_host);
        trace.raised(Reason::Task, None, false, us(5600));
        trace.lowered();
        trace.raised(Reason::Task, None, true, us(5505));
        trace.lowered();
        trace.report(&report(1, 5000, 0), to_host);
        trace.raised(Reason::Task, None, true, us(5510));
        trace.raised(Reason::Completion, None, false, us(6000));
        trace.raised(Reason::Interrupt, Some(us(6100)), false, us(6130));
        trace.raised(Reason::Contract, None, false, us(7000));
        let raises = trace.raises();
        assert_eq!((raises.timer.counts[0], raises.timer.counts[5], raises.timer.n()), (1, 1, 2));
        assert_eq!(raises.timer.longest, us(550));
        assert_eq!((raises.look.longest, raises.notice.longest), (us(100), us(10)));
        assert_eq!((raises.tasks_in_time.longest, raises.tasks_in_time.n()), (us(70), 1));
        assert_eq!((raises.tasks_late.longest, raises.tasks_late.n()), (us(900), 1));
        assert_eq!((raises.completions, raises.interrupts.longest), (1, us(30)));
        let twice = raises.with(&raises);
        assert_eq!((twice.timer.n(), twice.completions, twice.look.longest), (4, 2, us(100)));
    }
}
