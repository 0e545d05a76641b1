//! What VMs get, without the guest's part: latencies from QEMU's histograms, the time that threads
//! wait for a CPU, throttling, pressure; and a verdict for each target over sliding windows.

mod memory;
mod sampler;
mod waits;
mod window;

use std::collections::BTreeMap;

use rtvirtio_measure::Verdict;
use rtvirtio_measure::observe::Observed;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

pub use memory::MemoryObservation;
pub use sampler::Sampler;
pub use waits::WaitsObservation;
pub use window::{DiskWindow, judge_task};

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
}

/// What was seen of one VM over the last window.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmObservation {
    /// Its disks.
    pub disks: Vec<DiskObservation>,
    /// Why its disks are not seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks_unseen: Option<String>,
    /// Share of one CPU that its threads used.
    pub cpu_used: f64,
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
    /// A verdict for each target.
    pub targets: Vec<TargetObservation>,
}

/// One disk over the last window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskObservation {
    /// What names it in QEMU.
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
    /// Time of a request as a multiple of the measured one, by the device's path; devices of which
    /// that can be told.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slow: BTreeMap<String, f64>,
}
