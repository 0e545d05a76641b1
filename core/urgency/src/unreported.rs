//! Substitute for the report of a guest that makes none: activity of the vCPU's thread.

use rtvirtio_units::Nanos;

use crate::Report;

/// Activity of a vCPU's thread at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Whether it sleeps, because the vCPU waits for an interrupt.
    pub sleeps: bool,
    /// Number of sleeps since it started.
    pub slept: u64,
    /// CPU time that it has used since the last observation.
    pub ran: Nanos,
}

/// Takes a vCPU that was woken recently for one that handles its wake-up, and one that has computed
/// for some time without sleeping for one with ordinary work. Without a guest's report the host can
/// see no more: work that wakes on a vCPU that is busy already is not seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreported {
    slept: u64,
    /// CPU time since it last slept: an upper bound.
    awake: Nanos,
}

impl Unreported {
    /// Report in place of the guest's. A vCPU counts as waiting or recently woken until it has
    /// computed for `slice` without sleeping.
    pub fn report(&mut self, seen: Activity, slice: Nanos) -> Report {
        let rested = seen.sleeps || seen.slept != self.slept;
        // CPU time before the sleep belongs to the time before.
        self.awake = if rested { Nanos(0) } else { Nanos(self.awake.0.saturating_add(seen.ran.0)) };
        self.slept = seen.slept;
        Report { idle: self.awake < slice, ..Report::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_wakes_is_urgent_until_it_has_computed_for_a_slice() {
        let mut of_thread = Unreported::default();
        let slice = Nanos(1000);
        let mut idle =
            |sleeps, slept, ran| of_thread.report(Activity { sleeps, slept, ran: Nanos(ran) }, slice).idle;
        assert!(idle(true, 1, 0));
        assert!(idle(false, 1, 400) && idle(false, 1, 599), "just woken");
        assert!(!idle(false, 1, 1), "a slice is over");
        assert!(!idle(false, 1, u64::MAX) && !idle(false, 1, u64::MAX), "and no overflow");
        assert!(idle(false, 2, 5000), "it slept between two looks");
        assert!(!idle(false, 2, 1000));
        assert!(idle(true, 2, 0), "asleep, whatever is counted");
    }
}
