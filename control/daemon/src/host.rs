//! What the loop needs of a host. The clock is part of it, so that a simulated host has virtual
//! time.

use rtvirtio_planner::replan::{Request, Sight};
use serde::{Deserialize, Serialize};

use crate::desired::Desired;
use crate::observed::Observed;
use crate::reconcile::Step;

/// Milliseconds of a clock that never goes back: `CLOCK_MONOTONIC`, or virtual time. A jump of the
/// wall clock moves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Millis(pub u64);

impl Millis {
    /// Since an earlier moment.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// VMs and threads that came or went.
    Scan,
    /// Also every setting in force.
    Compare,
}

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingChange {
    /// The setting.
    pub knob: String,
    /// Its file.
    pub path: String,
    /// Value before, where it had one.
    pub old: Option<String>,
    /// Value now.
    pub new: String,
}

/// What became of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done {
        /// What was changed.
        changes: Vec<SettingChange>,
        /// Settings that were not, and why; further things to know.
        notes: Vec<String>,
    },
    /// Another rtvirtio is at work: again later, this is no failure.
    Busy,
    /// It was not done; nothing remains of it.
    Failed(String),
}

/// A host.
pub trait Host {
    /// The time now.
    fn now(&self) -> Millis;

    /// The contracts, when they have changed since the last call; always at the first.
    fn desired(&mut self) -> Option<Desired>;

    /// Whether nothing that a scan looks at can have changed since the last look, as far as a few
    /// cheap questions tell. A host that cannot tell is looked at.
    fn rests(&mut self) -> bool {
        false
    }

    /// Looks at the host. Never fails: what cannot be seen is unknown.
    fn observe(&mut self, desired: &Desired, look: Look) -> Observed;

    /// What was observed of load, devices and targets since the last call; `None` without news.
    fn sight(&mut self, desired: &Desired) -> Option<Sight>;

    /// Begins to make a plan. The answer is in [`Observed::made`] of a later look.
    fn make_plan(&mut self, request: &Request, desired: &Desired);

    /// Carries a step out.
    fn perform(&mut self, step: &Step, desired: &Desired) -> Outcome;

    /// What is left of a step that was done in part, as a step of its own: others come before it.
    fn rest(&self, _: &Step) -> Option<Step> {
        None
    }
}
