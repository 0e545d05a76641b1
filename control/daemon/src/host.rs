//! Interface between the loop and a host. The clock is part of it, so that a simulated host has
//! virtual time.

use rtvirtio_planner::replan::{Observations, Request};
use serde::{Deserialize, Serialize};

use crate::desired::Desired;
use crate::observed::Observed;
use crate::step::Step;

/// Milliseconds of a clock that never goes back: `CLOCK_MONOTONIC`, or virtual time. A jump of the
/// wall clock moves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Millis(pub u64);

impl Millis {
    /// Milliseconds since `earlier`; 0 if that is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Depth of a look at the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanDepth {
    /// VMs and threads that came or went.
    Scan,
    /// Also every setting in force.
    Compare,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingChange {
    /// Name of the setting, such as `weight of plc`.
    pub knob: String,
    /// Path of its file, as in the journal.
    pub path: String,
    /// Value before, where it had one.
    pub old: Option<String>,
    /// Value after the change.
    pub new: String,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The step was carried out.
    Done {
        /// Settings that were written.
        changes: Vec<SettingChange>,
        /// Settings that were not written, with the reason, and other notes.
        notes: Vec<String>,
    },
    /// The lock is held by another rtvirtio, or a new look is needed first: retried, no failure.
    Busy,
    /// Admission, the VM or what is to be written is not known yet: tried again later, this is no
    /// failure.
    NotYet,
    /// Reason why the step was not completed.
    Failed(String),
}

/// Host as the loop sees and changes it.
pub trait Host {
    /// Time of the loop's clock.
    fn now(&self) -> Millis;

    /// The contracts, when they have changed since the last call; always at the first.
    fn desired(&mut self) -> Option<Desired>;

    /// Whether nothing that a scan looks at can have changed since the last sample, as far as a few
    /// cheap checks tell. A host that cannot tell is always looked at.
    fn rests(&mut self) -> bool {
        false
    }

    /// Looks at the host. Never fails: what cannot be seen is unknown.
    fn observe(&mut self, desired: &Desired, look: ScanDepth) -> Observed;

    /// Observed load, slow devices and missed targets since the last call; `None` without news, as
    /// of a host on which nothing is planned.
    fn sight(&mut self, _: &Desired) -> Option<Observations> {
        None
    }

    /// Begins to make a plan. The answer is in [`Observed::made`] of a later look. A host on which
    /// nothing is planned does nothing.
    fn make_plan(&mut self, _: &Request, _: &Desired) {}

    /// Carries a step out.
    fn perform(&mut self, step: &Step, desired: &Desired) -> Outcome;

    /// Remainder of a step that was done in part, as a step of its own that is queued last.
    fn rest(&self, _: &Step) -> Option<Step> {
        None
    }
}
