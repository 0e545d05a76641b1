//! Observed state of the host: plain data, from which [`crate::reconcile()`] decides.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::Line;
use rtvirtio_cpu::{Backend, Level};
use rtvirtio_kernel::ProcessId;
use rtvirtio_planner::replan::{Basis, NoPlan, Outline, Unplanned};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

pub use rtvirtio_workflow::knob_class::KnobClass;

/// Reason in [`Presence::Unknown`] until the first search for a VM has ended.
pub const LOOKED_FOR: &str = "its process is being looked up";

/// Whether a VM runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The VM runs with these processes.
    Running(Vec<ProcessId>),
    /// The VM does not run, and why.
    Off(String),
    /// Not known, and why.
    Unknown(String),
}

/// A setting in force that has another value than ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// Name of the setting.
    pub knob: String,
    /// Path of the setting, as a journal names it.
    pub path: String,
    /// Kind of the setting, for the policy about drift.
    pub class: KnobClass,
    /// Value that rtvirtio has written.
    pub wanted: String,
    /// Value found by the last scan.
    pub found: String,
}

/// A setting that another program has changed, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftSnapshot {
    /// Name of the setting.
    pub knob: String,
    /// Path of the setting, as a journal names it.
    pub path: String,
    /// Value that rtvirtio has written.
    pub wanted: String,
    /// Value found by the last scan.
    pub found: String,
}

impl DriftSnapshot {
    pub(crate) fn from_drift(drift: &Drift) -> Self {
        Self {
            knob: drift.knob.clone(),
            path: drift.path.clone(),
            wanted: drift.wanted.clone(),
            found: drift.found.clone(),
        }
    }
}

/// State of the journal of a VM or of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopeState {
    /// Applied completely.
    Whole,
    /// Applying or reverting was interrupted.
    Cut,
    /// Written before the last boot of the host.
    Rebooted,
    /// Unreadable or inconsistent, and why.
    Unusable(String),
}

/// Contract in force for a VM, by its journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeView {
    /// Identifier of the contract in force.
    pub contract: String,
    /// Processes of the start of the VM that it was applied to.
    pub start: Vec<ProcessId>,
    /// Whether a process of that start is still there.
    pub start_alive: bool,
    /// State of the VM's journal.
    pub state: ScopeState,
    /// Priority rank among VMs with CPU contracts; `None` without one.
    pub level: Option<Level>,
    /// Mechanism of the CPU contract; `None` without one.
    pub cpu: Option<Backend>,
    /// Settings that another program has changed, as far as the last scan compared them.
    pub drift: Vec<Drift>,
    /// Settings that are not known to be in force, each with the reason.
    pub lost: Vec<String>,
}

/// Settings that are not known to be in force, as one line: a VM may have thousands.
pub(crate) fn lost_words(lost: &[String]) -> Option<String> {
    /// Number of settings that are named.
    const NAMED: usize = 3;
    let named = lost.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    match lost.len() {
        0 => None,
        n if n > NAMED => Some(format!("{named}; and {} more", n - NAMED)),
        _ => Some(named),
    }
}

/// Threads of a VM that could be in the contract in force for it, and are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outside {
    /// All threads are in the contract.
    #[default]
    None,
    Threads(usize),
    /// No scan for them since the service began.
    NotLookedFor,
}

impl Outside {
    /// Reason why the contract is reported as pending; `None` when no thread is outside.
    pub(crate) fn why(self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Threads(1) => Some("1 thread is still outside of it".to_owned()),
            Self::Threads(n) => Some(format!("{n} threads are still outside of it")),
            Self::NotLookedFor => Some(
                "whether all threads are in it has not been checked since the service started".to_owned(),
            ),
        }
    }
}

/// Observed state of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVm {
    /// Whether the VM runs, and its processes.
    pub presence: Presence,
    /// Contract in force; `None` when nothing is.
    pub scope: Option<ScopeView>,
    /// Whether it has threads that are not in its contract yet.
    pub new_threads: bool,
    /// Whether its budget, which is split over its threads, is to be split anew.
    pub splits: bool,
    /// Threads that could be in the contract and are not.
    pub outside: Outside,
    /// Reason why a vCPU that was plugged in has no CPU of its own, with `cores`.
    pub without_cpu: Option<String>,
    /// Whether `rtvirtio apply` has settings for it.
    pub applied_by_hand: bool,
    /// Whether it was started again since `rtvirtio apply` has put a plan in force, so that it
    /// lacks its weights and limits.
    pub lacks_plan: bool,
    /// Whether it was started again since the service's plan was put in force, so that it lacks its
    /// weights and limits.
    pub lacks_held: bool,
}

impl ObservedVm {
    /// State of a VM that does not run, with nothing in force.
    #[must_use]
    pub fn off(why: impl Into<String>) -> Self {
        Self {
            presence: Presence::Off(why.into()),
            scope: None,
            new_threads: false,
            splits: false,
            outside: Outside::None,
            without_cpu: None,
            applied_by_hand: false,
            lacks_plan: false,
            lacks_held: false,
        }
    }
}

/// Plan that the service has in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanScope {
    /// Contracts and observations that it was made from; `None` where these are not known.
    pub basis: Option<Basis>,
    /// State of its journal.
    pub state: ScopeState,
    /// Settings that another program has changed.
    pub drift: Vec<Drift>,
    /// Settings that are not known to be in force, each with the reason.
    pub lost: Vec<String>,
    /// Settings that were left to another program, by name.
    pub yielded: BTreeSet<String>,
    /// Reason why it was put in force.
    pub reason: String,
    /// Time at which it was put in force, RFC 3339.
    pub since: String,
    /// Devices with settings of the plan, by path.
    pub devices: BTreeSet<String>,
    /// Prediction for each target.
    pub predictions: Vec<PredictionSnapshot>,
}

/// Prediction of the plan in force for one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PredictionSnapshot {
    pub vm: String,
    pub task: String,
    /// Percentile of the target, such as `p99.99`.
    pub percentile: String,
    /// Expected latency at that percentile.
    pub latency_ns: Nanos,
    /// Upper bound of the latency, including the host's own stalls, where a model was learned on
    /// this host; formulas give none.
    pub bound_ns: Option<Nanos>,
}

/// Finished plan that is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadePlan {
    /// Predicted effects on VMs and missed targets.
    pub outline: Outline,
    /// Settings that it would change.
    pub changes: Vec<Line>,
    /// Reasons why targets are missed.
    pub reasons: Vec<String>,
    /// Prediction for each target.
    pub predictions: Vec<PredictionSnapshot>,
}

/// Admission of contracts: whether they fit together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// VMs whose contract is admitted, with their priority rank.
    pub admitted: BTreeMap<String, Level>,
    /// VMs whose new contract does not fit, and why, while the one in force does: that one stays,
    /// and is the one in `admitted`.
    pub kept: BTreeMap<String, String>,
    /// VMs whose contract does not fit, and why; the one in force, if any, does not fit either.
    pub refused: BTreeMap<String, String>,
}

impl Admission {
    /// Whether the contract of a VM, as it stands now, is known to fit.
    #[must_use]
    pub fn takes(&self, vm: &str) -> bool {
        self.admitted.contains_key(vm) && !self.kept.contains_key(vm)
    }
}

/// Observed state of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Every VM that has a contract or something in force.
    pub vms: BTreeMap<String, ObservedVm>,
    /// Result of the admission test.
    pub admission: Admission,
    /// Settings that `rtvirtio apply` has put in force and another program has changed.
    pub applied_drift: Vec<Drift>,
    /// Plan that the service has in force.
    pub plan: Option<PlanScope>,
    /// The answer to the request of this number for a plan: the plan, or why there is none.
    pub made: Option<(u64, Result<MadePlan, NoPlan>)>,
    /// Warnings of the last planning, such as of a setting that the device does not offer.
    pub plan_warnings: Vec<String>,
    /// Devices of the contracts that have no usable profile, by path; none where no plan is wanted.
    pub unmeasured: BTreeMap<String, Unplanned>,
}
