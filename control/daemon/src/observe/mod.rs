//! What VMs get, without the guest's part: latencies from the histograms of QEMU and of the I/O
//! domain, the time that threads wait for a CPU, whether limits were hit, pressure; and a verdict
//! for each target over sliding windows.

mod domain;
mod domain_waits;
mod limiters;
mod memory;
mod monitors;
mod qdisc;
mod sampler;
mod stalls;
mod targets;
pub(crate) mod uncovered;
mod waits;
mod window;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::LateCauses;
use rtvirtio_measure::observe::Observed;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

pub use limiters::{LimiterKind, LimiterObservation};
pub use memory::MemoryObservation;
pub use sampler::Sampler;
pub use stalls::StallsObservation;
pub use targets::{ObservedTargets, ObservedVmTargets};
pub use uncovered::UncoveredObservation;
pub use waits::WaitsObservation;
pub use window::{DiskWindow, StoodStill, judge_task};

/// What was seen of all VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Observation {
    /// RFC 3339; empty before the first look.
    pub time: String,
    /// By name.
    pub vms: BTreeMap<String, VmObservation>,
    /// The host.
    pub host: HostObservation,
    /// Which VM waits for which.
    pub waits: WaitsObservation,
    /// On what no setting in force acts.
    pub uncovered: UncoveredObservation,
}

impl Observation {
    /// With the age of each look. Of one longer than `limit` ago no target has a verdict any more.
    #[must_use]
    pub(crate) fn aged(mut self, now: Instant, limit: Duration) -> Self {
        for vm in self.vms.values_mut() {
            let Some(age) = vm.at.map(|at| now.saturating_duration_since(at)) else { continue };
            vm.looked_s = Some(age.as_secs_f64());
            if age > limit {
                vm.targets.clear();
                vm.disks_unseen = Some(format!("it has not been looked at for {} s", age.as_secs()));
            }
        }
        self
    }

    /// How long ago the VM was looked at whose look is the oldest.
    pub(crate) fn oldest(&self, now: Instant) -> Option<Duration> {
        let ages = self.vms.values().filter_map(|vm| vm.at);
        ages.map(|at| now.saturating_duration_since(at)).max()
    }
}

/// What was seen of one VM over the last window.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmObservation {
    /// When it was looked at.
    #[serde(skip)]
    pub at: Option<Instant>,
    /// Seconds since then; `None` where that is not known.
    pub looked_s: Option<f64>,
    /// Its disks.
    pub disks: Vec<DiskObservation>,
    /// Why its disks are not seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks_unseen: Option<String>,
    /// Share of one CPU that its threads used; `None` at the first look, and where not all threads
    /// could be read, now or at the look before.
    pub cpu_used: Option<f64>,
    /// Time that its threads were ready and waited for a CPU, per second, all together; `None`
    /// where the kernel does not count it.
    pub cpu_delay: Option<f64>,
    /// How often its quota stopped it, per second; `None` where nothing counts that, as under a
    /// real-time budget.
    pub throttled_per_s: Option<f64>,
    /// Share of the time in which its quota stopped it, summed over CPUs.
    pub throttled_time: Option<f64>,
    /// What its threads move to and from memory.
    pub memory: MemoryObservation,
    /// The same of each thread that runs vCPUs or moves data.
    pub threads: Vec<ThreadObservation>,
    /// Every limiter that acts on it.
    pub limiters: Vec<LimiterObservation>,
    /// A verdict for each target.
    pub targets: Vec<TargetObservation>,
}

/// One thread since the last look.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ThreadObservation {
    /// Its number.
    pub tid: u32,
    /// What it does, such as `vcpu 0`.
    pub role: String,
    /// Share of one CPU that it used.
    pub cpu_used: f64,
    /// Share of the time in which it was ready and waited for a CPU; `None` where the kernel does
    /// not count it.
    pub cpu_delay: Option<f64>,
}

/// What counts the requests of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskSource {
    /// QEMU, from when it takes a request up.
    #[default]
    Qemu,
    /// The I/O domain, from when it fetches a request.
    IoDomain,
}

/// One disk over the last window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskObservation {
    /// What counts it.
    pub source: DiskSource,
    /// What names it in QEMU, or in the I/O domain.
    pub id: String,
    /// The file or device on the host.
    pub file: Option<String>,
    /// Length of the window, in seconds.
    pub seconds: f64,
    /// By direction; directions at rest are left out.
    pub directions: Vec<Observed>,
    /// Latencies of reads and writes in the window, for a drawing: limits in nanoseconds and
    /// counts.
    pub histogram: Option<HistogramObservation>,
}

/// Requests by latency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HistogramObservation {
    /// Upper limits of the bins, in nanoseconds; the last bin has none.
    pub limits_ns: Vec<u64>,
    /// Reads.
    pub reads: Vec<u64>,
    /// Writes.
    pub writes: Vec<u64>,
}

/// One target over one window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetObservation {
    /// The task.
    pub task: String,
    /// Which percentile.
    pub percentile: Percentile,
    /// What it must stay below.
    pub latency_ns: Nanos,
    /// The verdict.
    pub verdict: Verdict,
    /// Why, with numbers.
    pub why: String,
    /// Requests behind it.
    pub n: u64,
    /// Those that took longer.
    pub exceedances: u64,
    /// Requests per second.
    pub rate: Iops,
    /// Length of the window, in seconds.
    pub seconds: f64,
    /// What the late requests waited for, an estimate; `None` where nothing watched the host.
    #[serde(default)]
    pub late: Option<LateCauses>,
    /// Why that is not known, or only of a part of them.
    #[serde(default)]
    pub late_unseen: Option<String>,
}

/// The host over the time between two looks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostObservation {
    /// Share of the time in which some task waited, by resource (`cpu`, `io`, `memory`); those that
    /// the kernel counts.
    pub pressure: BTreeMap<String, f64>,
    /// Share of all CPUs that the host's own hypervisor gave to others; `None` where that is not
    /// known.
    pub stolen: Option<f64>,
    /// How it stood still, as probes under SCHED_FIFO saw it on all CPUs; `None` where nothing
    /// watched.
    pub stalls: Option<StallsObservation>,
    /// Why nothing did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stalls_unseen: Option<String>,
    /// How disks stood still, by the device's path: requests were in the driver and none was
    /// completed, without the host's stalls.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub standstills: BTreeMap<String, StallsObservation>,
    /// Time of a request as a multiple of the measured one, by the device's path; devices of which
    /// that can be told.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slow: BTreeMap<String, f64>,
}
