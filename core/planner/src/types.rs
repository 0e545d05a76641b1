//! A plan as data: ordered knob settings, each with its reason, and the predictions.

use rtvirtio_model::{Forecast, ModelKind};
use rtvirtio_units::io_cost::{CostModel, CostQos, IoCostError};
use rtvirtio_units::{Enforcement, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::cpu_room::CpuRoom;
use crate::cpu_wait::CpuWait;

/// Share of the declared rate that must be kept: a tail met by doing less work is not met.
pub(crate) const RATE_KEPT: f64 = 0.99;

/// Settings for one device, and the predictions under them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The scheme that chose the settings, such as `rt-virtio-analytical` or `slice`.
    pub scheme: String,
    /// The model behind the predictions.
    pub model: ModelKind,
    /// Settings in the order in which they are to be written.
    pub settings: Vec<Setting>,
    /// Prediction per target, in the order of [`Spec::goals`](rtvirtio_spec::Spec::goals).
    pub tasks: Vec<TaskOutlook>,
    /// Whether every target is predicted to be met.
    pub feasible: bool,
    /// Report of an infeasible plan; `None` when feasible.
    pub infeasible: Option<Infeasible>,
    /// Candidate configurations that the search evaluated.
    pub evaluated: u64,
}

/// Value for one knob.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    pub knob: Knob,
    /// The value as it is written to the kernel, without a newline, in the kernel's own unit.
    pub value: String,
    /// Reason for the value, in one sentence for the user.
    pub reason: String,
    /// Kind of enforcement by the kernel.
    pub strength: Enforcement,
}

/// A setting of the host or of a guest. Resolved to a file only when applied.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// The device's I/O scheduler on the host (`queue/scheduler`). Value: `bfq`, `mq-deadline`,
    /// `kyber`, `none`.
    HostElevator,
    /// A BFQ tunable of the device on the host (`queue/iosched/*`).
    HostBfq(BfqTunable),
    /// io.cost for the device on the host: a file of the root cgroup. Value: what the kernel takes
    /// after the device's number.
    HostIoCost(IoCostFile),
    /// BFQ weight of a VM's cgroup: `io.bfq.weight` (v2) or `blkio.bfq.weight` (v1). Value: 1
    /// to 1000.
    VmWeight { vm: String },
    /// Weight of a VM's cgroup for the device under io.cost: `io.weight` (v2). Value: 1 to 10000.
    VmIoWeight { vm: String },
    /// Latency target of a VM's cgroup for the device: `io.latency` (v2). Value: a whole number of
    /// us, or `max` for none.
    VmIoLatency { vm: String },
    /// A limit on a VM's cgroup for the device: `io.max` (v2) or `blkio.throttle.*_device` (v1).
    /// Value: a whole number per second, or `max` for none.
    VmLimit {
        vm: String,
        /// Direction and unit of the limit.
        limit: LimitKind,
    },
    /// The I/O scheduler inside a guest, set through its agent.
    GuestElevator { vm: String },
    /// A BFQ tunable inside a guest, set through its agent.
    GuestBfq {
        vm: String,
        /// Tunable of the guest's BFQ.
        tunable: BfqTunable,
    },
}

impl Knob {
    /// Position in a plan's write order: the elevator before its tunables, io.cost's model before
    /// it is enabled, weights, latency targets and limits of cgroups, then guest by guest.
    #[must_use]
    pub fn write_order(&self) -> impl Ord + use<> {
        let place = |step, vm: &str, tunable, limit| (step, vm.to_owned(), tunable, limit);
        match self {
            Self::HostElevator => place(0, "", None, None),
            Self::HostBfq(tunable) => place(1, "", Some(*tunable), None),
            Self::HostIoCost(IoCostFile::Model) => place(2, "", None, None),
            Self::HostIoCost(IoCostFile::Qos) => place(3, "", None, None),
            Self::VmWeight { vm } => place(4, vm, None, None),
            Self::VmIoWeight { vm } => place(5, vm, None, None),
            Self::VmIoLatency { vm } => place(6, vm, None, None),
            Self::VmLimit { vm, limit } => place(7, vm, None, Some(*limit)),
            // None sorts before any tunable.
            Self::GuestElevator { vm } => place(8, vm, None, None),
            Self::GuestBfq { vm, tunable } => place(8, vm, Some(*tunable), None),
        }
    }
}

/// BFQ's tunables, named as the files below `queue/iosched/`, in the order in which they are
/// written: setting `strict_guarantees` raises `slice_idle` to 8 ms
/// (`bfq_strict_guarantees_store()`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BfqTunable {
    /// Idle always and keep one request at the device: 0 or 1. Default 0.
    StrictGuarantees,
    /// Time that BFQ waits for the next request of the queue in service, in ms. Default 8.
    SliceIdle,
    /// Longest slice of a sync queue, in ms. Default 125 (124 after rounding to jiffies at HZ=250).
    TimeoutSync,
    /// Weight raising for interactive and soft real-time queues: 0 or 1. Default 1.
    LowLatency,
    /// Largest budget in 512 B sectors; 0 lets BFQ choose from the measured peak rate. Default 0.
    MaxBudget,
}

/// File of the root cgroup by which io.cost is set up, in the order in which they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoCostFile {
    /// `io.cost.model`: cost of a request.
    Model,
    /// `io.cost.qos`: whether io.cost acts, and the latencies that it keeps.
    Qos,
}

impl IoCostFile {
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Model => "io.cost.model",
            Self::Qos => "io.cost.qos",
        }
    }

    /// The one text of a setting that means the same.
    ///
    /// # Errors
    /// A value that the kernel would refuse or cut.
    pub fn canonical(self, value: &str) -> Result<String, IoCostError> {
        match self {
            Self::Model => value.parse::<CostModel>().map(|model| model.to_string()),
            Self::Qos => value.parse::<CostQos>().map(|qos| qos.to_string()),
        }
    }
}

/// Direction and unit of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// Bytes read per second.
    ReadBps,
    /// Bytes written per second.
    WriteBps,
    /// Read requests per second.
    ReadIops,
    /// Write requests per second.
    WriteIops,
}

/// Prediction for one target, or for a task without one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskOutlook {
    pub vm: String,
    pub task: String,
    /// Percentile of the prediction.
    pub percentile: Percentile,
    pub target_ns: Option<Nanos>,
    /// The prediction with its terms.
    pub forecast: Forecast,
    /// Target minus prediction (its upper bound where there is one), in nanoseconds; negative when
    /// missed. `None` without a target.
    pub margin_ns: Option<i64>,
    /// CPU time for the guests that share CPUs with this one; `None` where it was not looked at,
    /// and for a VM that has a CPU contract or is a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuRoom>,
    /// Estimated wait for a CPU, which is not in the prediction; `None` where nothing tells of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_wait: Option<CpuWait>,
    /// Reason why it is not known whether the requests have CPU time enough; `None` where it is,
    /// and where it was not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_unknown: Option<String>,
    /// Reason why the forecast is none of the device as it is now; `None` where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_predicted: Option<String>,
}

impl TaskOutlook {
    /// Whether the task has a target that is predicted to be met at the declared rate, and CPU time
    /// is known and not short where it was looked at.
    #[must_use]
    pub fn holds(&self) -> bool {
        let is_predicted = self.margin_ns.is_some() && self.not_predicted.is_none();
        is_predicted && !self.misses() && !self.lacks_cpu() && self.cpu_unknown.is_none()
    }

    /// Whether the target is predicted to be missed, or the declared rate not to be kept.
    #[must_use]
    pub fn misses(&self) -> bool {
        self.margin_ns.is_some_and(|margin| margin < 0 || !self.keeps_rate())
    }

    /// Whether the declared rate is predicted to be kept.
    #[must_use]
    pub fn keeps_rate(&self) -> bool {
        self.forecast.rate_kept >= RATE_KEPT
    }

    /// Whether the requests need more CPU time than others leave, or may wait for it for so long
    /// that the target is missed.
    #[must_use]
    pub fn lacks_cpu(&self) -> bool {
        self.cpu.is_some_and(|room| room.is_short()) || self.waits_too_long()
    }

    /// Whether they need more than the host has.
    #[must_use]
    pub fn exceeds_cpus(&self) -> bool {
        self.cpu.is_some_and(|room| room.is_too_much())
    }

    /// Whether the wait for a CPU may take more than the prediction leaves of the target.
    #[must_use]
    pub fn waits_too_long(&self) -> bool {
        let Some((of, margin)) = self.cpu_wait.zip(self.margin_ns) else { return false };
        of.exceeds(Nanos(u64::try_from(margin).unwrap_or(0)))
    }
}

/// Reasons why not every target can be met, and targets that would fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Infeasible {
    /// VMs whose targets the plan gives up, least urgent first.
    pub sacrificed: Vec<String>,
    /// Tasks (`vm/task`) whose targets no searched setting is predicted to meet together.
    pub conflict: Vec<String>,
    /// Smallest target per missed task that fits by the model, with everything else as declared.
    pub relaxation: Vec<Relaxation>,
    /// Explanation in one sentence, for the user.
    pub reason: String,
}

/// A target that would fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relaxation {
    pub vm: String,
    pub task: String,
    /// Percentile of the target; of plans that older versions saved p99.99.
    #[serde(default = "p9999")]
    pub percentile: Percentile,
    /// Target as declared in the spec.
    pub declared_ns: Nanos,
    /// Smallest target that fits.
    pub fits_ns: Nanos,
}

fn p9999() -> Percentile {
    Percentile::P9999
}

impl BfqTunable {
    /// File name below `queue/iosched/`.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Self::SliceIdle => "slice_idle",
            Self::TimeoutSync => "timeout_sync",
            Self::LowLatency => "low_latency",
            Self::MaxBudget => "max_budget",
            Self::StrictGuarantees => "strict_guarantees",
        }
    }
}
