//! Service that VMs get, without the guest's part: latencies from the histograms of QEMU and of the
//! I/O domain, run delay of threads, hits of limits, pressure; and a verdict for each target over
//! sliding windows.

mod ageing;
mod causes;
pub(crate) mod coverage;
mod domain;
mod domain_waits;
mod facts;
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

use rtvirtio_blame::Cause;
use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::LateCauses;
use rtvirtio_measure::observe::Observed;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

pub use ageing::{AgeingObservation, DeviceAge};
pub use limiters::{LimiterKind, LimiterObservation};
pub use memory::MemoryObservation;
pub use sampler::Sampler;
pub use stalls::StallsObservation;
pub use targets::{ObservedTargets, ObservedVmTargets};
pub use uncovered::UncoveredObservation;
pub use waits::WaitsObservation;
pub use window::{DiskWindow, StoodStill, judge_task};

/// Latest samples of the host and of all VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Observation {
    /// Time of the sample, RFC 3339; empty before the first one.
    pub time: String,
    /// Samples of VMs by name.
    pub vms: BTreeMap<String, VmObservation>,
    /// Pressure, steal and stalls of the host.
    pub host: HostObservation,
    /// Waits of VMs for each other at shared devices.
    pub waits: WaitsObservation,
    /// I/O on which no setting in force acts.
    pub uncovered: UncoveredObservation,
}

impl Observation {
    /// Sets the age of each sample. A VM whose sample is older than `limit` loses its verdicts.
    #[must_use]
    pub(crate) fn aged(mut self, now: Instant, limit: Duration) -> Self {
        for vm in self.vms.values_mut() {
            let Some(age) = vm.at.map(|at| now.saturating_duration_since(at)) else { continue };
            vm.looked_s = Some(age.as_secs_f64());
            if age > limit {
                vm.targets.clear();
                vm.disks.clear();
                vm.disks_unseen = Some(format!("last checked {} s ago", age.as_secs()));
            }
        }
        self
    }

    /// Age of the oldest VM sample; `None` without any.
    pub(crate) fn oldest(&self, now: Instant) -> Option<Duration> {
        let ages = self.vms.values().filter_map(|vm| vm.at);
        ages.map(|at| now.saturating_duration_since(at)).max()
    }
}

/// Sample of one VM; its disks and targets over the last window.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmObservation {
    /// Time of the sample.
    #[serde(skip)]
    pub at: Option<Instant>,
    /// Age of the sample, in seconds; `None` where that is not known.
    pub looked_s: Option<f64>,
    /// Disks with a window of counters: QEMU's first, then the I/O domain's.
    pub disks: Vec<DiskObservation>,
    /// Reason why disks could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks_unseen: Option<String>,
    /// CPU time of its threads, as a multiple of one CPU; `None` at the first sample, and where not
    /// all threads could be read, now or at the sample before.
    pub cpu_used: Option<f64>,
    /// Time that its threads were ready and waited for a CPU, per second, all together; `None`
    /// where the kernel does not count it.
    pub cpu_delay: Option<f64>,
    /// Periods per second in which its quota throttled it; `None` where nothing counts that, as
    /// under a real-time budget.
    pub throttled_per_s: Option<f64>,
    /// Share of the time in which its quota throttled it, summed over CPUs.
    pub throttled_time: Option<f64>,
    /// Memory traffic of its threads.
    pub memory: MemoryObservation,
    /// CPU use and delay of each thread that runs vCPUs or moves data.
    pub threads: Vec<ThreadObservation>,
    /// Every limiter that acts on it.
    pub limiters: Vec<LimiterObservation>,
    /// A verdict for each target.
    pub targets: Vec<TargetObservation>,
}

/// CPU use and delay of one thread since the last sample.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ThreadObservation {
    /// Thread id in Linux (`gettid(2)`).
    pub tid: u32,
    /// Work of the thread, such as `vcpu 0`.
    pub role: String,
    /// Share of one CPU that it used.
    pub cpu_used: f64,
    /// Share of the time in which it was ready and waited for a CPU; `None` where the kernel does
    /// not count it.
    pub cpu_delay: Option<f64>,
}

/// Program whose counters of a disk are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskSource {
    /// QEMU, from when its device model fetches a request.
    #[default]
    Qemu,
    /// The I/O domain, from when it fetches a request.
    IoDomain,
}

/// Rates and latencies of one disk over the last window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskObservation {
    /// Program whose counters these are.
    pub source: DiskSource,
    /// Device id in QEMU, or device and disk of the I/O domain.
    pub id: String,
    /// The file or device on the host.
    pub file: Option<String>,
    /// Length of the window, in seconds.
    pub seconds: f64,
    /// Rates and tails by direction; directions at rest are left out.
    pub directions: Vec<Observed>,
    /// Latencies of reads and writes in the window, for a graph.
    pub histogram: Option<HistogramObservation>,
}

/// Number of requests by latency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HistogramObservation {
    /// Upper limits of the bins, in nanoseconds; the last bin has none.
    pub limits_ns: Vec<u64>,
    /// Number of reads in each bin.
    pub reads: Vec<u64>,
    /// Number of writes in each bin.
    pub writes: Vec<u64>,
}

/// Verdict on one target over one window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetObservation {
    /// Name of the task in the contract.
    pub task: String,
    /// Percentile that is judged.
    pub percentile: Percentile,
    /// Largest latency that the target allows.
    pub latency_ns: Nanos,
    /// Met, missed or unproven.
    pub verdict: Verdict,
    /// Reason of the verdict, with numbers.
    pub why: String,
    /// Requests that were judged.
    pub n: u64,
    /// Requests of these that took longer than `latency_ns`.
    pub exceedances: u64,
    /// Requests per second of the task's directions in the window.
    pub rate: Iops,
    /// Length of the window, in seconds.
    pub seconds: f64,
    /// Estimated causes of late requests; `None` where nothing watched the host.
    #[serde(default)]
    pub late: Option<LateCauses>,
    /// Reason why causes are not known, or not of all late requests.
    #[serde(default)]
    pub late_unseen: Option<String>,
    /// Causes of a missed target, the most certain first; empty where none is seen. `None` where
    /// causes were not looked for: the target is not missed.
    #[serde(default)]
    pub causes: Option<Vec<Cause>>,
    /// Names of counters that could not be read: what these would show is not ruled out.
    #[serde(default)]
    pub causes_unread: Vec<String>,
}

/// The host over the time between two samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostObservation {
    /// Share of the time in which some task waited (PSI), by resource (`cpu`, `io`, `memory`);
    /// those that the kernel counts.
    pub pressure: BTreeMap<String, f64>,
    /// Share of all CPUs that the host's own hypervisor gave to others (steal); `None` where that
    /// is not known.
    pub stolen: Option<f64>,
    /// Stalls of the host that probes under SCHED_FIFO saw on all CPUs; `None` where nothing
    /// watched.
    pub stalls: Option<StallsObservation>,
    /// Reason why stalls were not watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stalls_unseen: Option<String>,
    /// Standstills of disks, by the device's path: requests were in the driver and none was
    /// completed, without the host's stalls.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub standstills: BTreeMap<String, StallsObservation>,
    /// Service time of devices as a multiple of the measured one, by path, where it is known.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slow: BTreeMap<String, f64>,
    /// Devices under contract against their profiles, by path.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ageing: BTreeMap<String, AgeingObservation>,
    /// Reasons why a device slower than its profile may go unnoticed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ageing_unseen: Vec<String>,
}
