//! The host as it was seen: plain data, from which [`crate::reconcile()`] decides.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::Line;
use rtvirtio_cpu::Level;
use rtvirtio_kernel::ProcessId;
use rtvirtio_planner::replan::{Basis, NoPlan, Outline, Unplanned};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Kinds of settings, for the policy about drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KnobClass {
    /// Budget of a VM's CPU contract, and the group that holds it.
    Budget,
    /// Policy and group of a thread.
    Thread,
    /// Weight of a VM on a disk.
    Weight,
    /// Limit of a VM on a disk.
    Limit,
    /// Elevator of a disk, and its tunables.
    Elevator,
    /// A setting inside a guest.
    Guest,
}

impl KnobClass {
    /// The kind of the setting in this file, as a journal names it.
    #[must_use]
    pub fn of_path(path: &str) -> Self {
        let file = path.rsplit('/').next().unwrap_or_default();
        if !path.starts_with('/') {
            Self::Guest
        } else if path.starts_with("/proc/") {
            Self::Thread
        } else if path.starts_with("/sys/block/") || path.starts_with("/sys/devices/") {
            Self::Elevator
        } else if file.to_lowercase().contains("weight") {
            Self::Weight
        } else if file.starts_with("blkio.throttle.") || file == "io.max" || file.ends_with(": IOAccounting")
        {
            Self::Limit
        } else {
            Self::Budget
        }
    }
}

/// Why it is not known whether a VM runs, before the first look has come back.
pub const LOOKED_FOR: &str = "it is looked for";

/// Whether a VM runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// These are its processes.
    Running(Vec<ProcessId>),
    /// It does not run.
    Off(String),
    /// That is not known, and why.
    Unknown(String),
}

/// A setting in force that has another value than ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// The setting.
    pub knob: String,
    /// Its file.
    pub path: String,
    /// Its kind.
    pub class: KnobClass,
    /// Our value.
    pub wanted: String,
    /// Its value now.
    pub found: String,
}

/// A setting that another program has changed, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftSnapshot {
    /// The setting.
    pub knob: String,
    /// Its file.
    pub path: String,
    /// Our value.
    pub wanted: String,
    /// Its value now.
    pub found: String,
}

impl DriftSnapshot {
    pub(crate) fn of(drift: &Drift) -> Self {
        Self {
            knob: drift.knob.clone(),
            path: drift.path.clone(),
            wanted: drift.wanted.clone(),
            found: drift.found.clone(),
        }
    }
}

/// How a VM's journal stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopeState {
    /// All was written.
    Whole,
    /// Applying or putting back was cut off.
    Cut,
    /// The host was restarted since.
    Rebooted,
    /// It cannot be used, and why.
    Unusable(String),
}

/// What is in force for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeView {
    /// The contract that it carries out.
    pub contract: String,
    /// The start of the VM that it belongs to.
    pub start: Vec<ProcessId>,
    /// Whether a process of that start is still there.
    pub start_alive: bool,
    /// How the journal stands.
    pub state: ScopeState,
    /// Place of the VM among those of its order, where it has a CPU contract.
    pub level: Option<Level>,
    /// Settings that another program has changed, as far as this look compared them.
    pub drift: Vec<Drift>,
}

/// Threads of a VM that could be in the contract in force for it, and are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outside {
    /// None.
    #[default]
    None,
    /// So many.
    Threads(usize),
    /// They have not been looked for since the service began.
    NotLookedFor,
}

impl Outside {
    /// Why a contract is not said to be in force.
    pub(crate) fn why(self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Threads(1) => Some("1 thread is still outside of it".to_owned()),
            Self::Threads(n) => Some(format!("{n} threads are still outside of it")),
            Self::NotLookedFor => Some(
                "whether all threads are in it has not been looked at since the service began".to_owned(),
            ),
        }
    }
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedVm {
    /// Whether it runs.
    pub presence: Presence,
    /// What is in force for it.
    pub scope: Option<ScopeView>,
    /// Whether threads are there that are not in its contract yet, or its budget is to be split
    /// anew.
    pub new_threads: bool,
    /// Threads that are known not to be in it.
    pub outside: Outside,
    /// Whether `rtvirtio apply` has settings for it.
    pub applied_by_hand: bool,
    /// Whether it was started again since `rtvirtio apply` has put a plan in force, so that it
    /// lacks its weights and limits.
    pub lacks_plan: bool,
    /// The same of the plan that the service holds.
    pub lacks_held: bool,
}

impl ObservedVm {
    /// One that does not run, with nothing in force.
    #[must_use]
    pub fn off(why: impl Into<String>) -> Self {
        Self {
            presence: Presence::Off(why.into()),
            scope: None,
            new_threads: false,
            outside: Outside::None,
            applied_by_hand: false,
            lacks_plan: false,
            lacks_held: false,
        }
    }
}

/// The plan that the service holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanScope {
    /// What it was made from; `None` where that is not known.
    pub basis: Option<Basis>,
    /// How its journal stands.
    pub state: ScopeState,
    /// Settings that another program has changed.
    pub drift: Vec<Drift>,
    /// Settings that were left to another program, by name.
    pub yielded: BTreeSet<String>,
    /// Why it was put in force.
    pub reason: String,
    /// When: RFC 3339.
    pub since: String,
    /// The devices that it has settings of, by path.
    pub devices: BTreeSet<String>,
    /// What it predicts for each target.
    pub predictions: Vec<PredictionSnapshot>,
}

/// What the plan in force predicts for one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PredictionSnapshot {
    /// The VM.
    pub vm: String,
    /// The task.
    pub task: String,
    /// Which percentile, such as `p99.99`.
    pub percentile: String,
    /// The expected latency.
    pub latency_ns: Nanos,
    /// What it stays below, with the host's own stalls, where a model was learned on this host;
    /// formulas give none.
    pub bound_ns: Option<Nanos>,
}

/// A plan that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadePlan {
    /// What it would do.
    pub outline: Outline,
    /// The settings that it would change.
    pub changes: Vec<Line>,
    /// Why not all targets are met.
    pub reasons: Vec<String>,
    /// What it predicts for each target.
    pub predictions: Vec<PredictionSnapshot>,
}

/// Which contracts fit together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Those that do, with their place among those of their order.
    pub admitted: BTreeMap<String, Level>,
    /// Those that do not, and why, of VMs for which others are in force that do: what is in force
    /// stays, and is what is admitted.
    pub kept: BTreeMap<String, String>,
    /// Those that do not, and why; what is in force for the VM does not either.
    pub refused: BTreeMap<String, String>,
}

impl Admission {
    /// Whether the contract of a VM, as it stands now, is known to fit.
    #[must_use]
    pub fn takes(&self, vm: &str) -> bool {
        self.admitted.contains_key(vm) && !self.kept.contains_key(vm)
    }
}

/// The host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Every VM that has a contract or something in force.
    pub vms: BTreeMap<String, ObservedVm>,
    /// Which contracts fit together.
    pub admission: Admission,
    /// Settings that `rtvirtio apply` has put in force and another program has changed.
    pub applied_drift: Vec<Drift>,
    /// The plan that the service holds.
    pub plan: Option<PlanScope>,
    /// The answer to the request of this number for a plan: the plan, or why there is none.
    pub made: Option<(u64, Result<MadePlan, NoPlan>)>,
    /// Devices of the contracts that have no usable profile, by path; none where no plan is wanted.
    pub unmeasured: BTreeMap<String, Unplanned>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_shows_its_kind() {
        for (path, class) in [
            ("/sys/fs/cgroup/cpu/rtvirtio-plc/cpu.rt_runtime_us", KnobClass::Budget),
            ("/sys/fs/cgroup/cpu/rtvirtio-plc", KnobClass::Budget),
            ("/proc/7/task/8/sched", KnobClass::Thread),
            ("/sys/fs/cgroup/blkio/vms/a/blkio.bfq.weight_device", KnobClass::Weight),
            ("/sys/fs/cgroup/blkio/vms/a/blkio.throttle.read_iops_device", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a/io.max", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a.scope: IOAccounting", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a.scope: IODeviceWeight", KnobClass::Weight),
            ("/sys/fs/cgroup/machine.slice/a.scope: CPUQuota", KnobClass::Budget),
            ("/sys/block/sda/queue/scheduler", KnobClass::Elevator),
            ("plc:/sys/block/vda/queue/scheduler", KnobClass::Guest),
        ] {
            assert_eq!(KnobClass::of_path(path), class, "{path}");
        }
    }
}
