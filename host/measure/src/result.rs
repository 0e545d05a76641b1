//! Result file: measurements of runs, judged against their targets.

use rtvirtio_blame::Cause;
use rtvirtio_spec::Direction;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::noise::Noise;
use crate::standstill::Standstills;
use crate::tail::TailEstimate;

/// Schema of the result file: name and version.
pub const RESULT_SCHEMA: &str = "rtvirtio.result.v1";

/// Results of one or more runs on one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultFile {
    /// Always [`RESULT_SCHEMA`] for a file of this version.
    pub schema: String,
    /// Host of the measurements.
    pub host: HostFacts,
    /// All runs in the order in which they were made.
    pub runs: Vec<Run>,
}

/// Facts about the host that are needed to read the numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Kernel release, as of `uname -r`.
    pub kernel: String,
    /// Number of online CPUs.
    pub cpus: u32,
    /// VMM and version, such as `QEMU 7.2.22`; `none` for process VMs.
    pub vmm: String,
    /// `kvm`, `tcg` or `none`.
    pub accelerator: String,
    /// Device under test: name, and the twin profile where it is one.
    pub device: String,
}

/// Kind of VM in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmKind {
    /// A QEMU guest with fio inside.
    Qemu,
    /// fio in a cgroup on the host.
    Process,
    /// Some of each.
    Mixed,
}

/// Run of all tasks under one scheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Scheme in force, such as `default-bfq` or `slice`; `as-found` when rtvirtio changed nothing.
    pub scheme: String,
    /// Kind of VM that the numbers come from.
    pub kind: VmKind,
    /// Length of the measured part in seconds.
    pub seconds: f64,
    /// Stalls of the host itself; absent in results of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise: Option<Noise>,
    /// Standstills of the disk itself; absent in results of older versions, and where the kernel
    /// does not count requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Standstills>,
    /// In spec order, one entry for each target of a task, and one for a task without; entries of
    /// one task differ in `percentile`, `target_ns`, `at_target_ns`, `achieved_rate` (which allows
    /// for the wait that a target allows), `predicted_ns`, `verdict` and `why`.
    pub tasks: Vec<TaskResult>,
}

/// Result of a task, against one of its targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    pub vm: String,
    /// Name of the task or flow.
    pub task: String,
    /// Percentile of the target.
    pub percentile: Percentile,
    /// Latency of the target, if any.
    pub target_ns: Option<Nanos>,
    /// Latency at that percentile, or the largest when `n` is too small to show it; absent without
    /// a target, and in results of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_target_ns: Option<Nanos>,
    pub declared_rate: Option<Iops>,
    /// Completed requests per second.
    pub achieved_rate: Iops,
    /// Number of completed requests.
    pub n: u64,
    /// Median latency from the intended start.
    pub p50_ns: Nanos,
    /// 99th percentile of the latency.
    pub p99_ns: Nanos,
    /// 99.99th percentile; the maximum when `n` < 10 000.
    pub p9999_ns: Nanos,
    /// 99.99th percentile of the latencies less the time in which a CPU of the host stalled; absent
    /// where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "p9999_awake_ns")]
    pub p9999_excl_host_stalls_ns: Option<Nanos>,
    /// 99.99th percentile less the same stalls shifted by a second, to when the host did not stall:
    /// the part that the method subtracts by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p9999_placebo_ns: Option<Nanos>,
    /// Largest latency from the intended start.
    pub max_ns: Nanos,
    /// p99.99 counted by fio from the actual start: the difference is the delay that a stalled
    /// queue would have hidden.
    pub fio_p9999_ns: Nanos,
    /// CPUs that fio itself kept busy for this task, as their kernel counts them: 0.5 is half of
    /// one.
    #[serde(default)]
    pub fio_cpus: f64,
    /// Estimate of the percentile, where the samples are too few to show it and enough to estimate
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<TailEstimate>,
    /// Latency predicted by the plan's model, if there was a plan or prediction.
    pub predicted_ns: Option<Nanos>,
    /// Addresses and frame counts of a flow; `None` for a task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<FlowFacts>,
    /// Number of requests above the target, those that still wait included; zero without a target,
    /// and in results of older versions.
    #[serde(default)]
    pub exceedances: u64,
    /// Causes of a missed target that counters show, the largest share first; empty where none is
    /// seen. `None` where nobody looked, and in results of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub causes: Option<Vec<Cause>>,
    /// Facts that could not be read while causes were looked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes_unread: Vec<String>,
    /// Verdict; `None` for a task without target.
    pub verdict: Option<Verdict>,
    /// Reason for the verdict in a few words, with numbers.
    pub why: String,
}

/// Addresses and frame counts of a flow. Its latencies are round trips from the scheduled time of
/// each frame, its requests are frames, and `fio_p9999_ns` counts from when they were sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowFacts {
    /// Direction as seen from the VM.
    pub direction: Direction,
    /// Interface by which its frames left this host.
    pub peer: String,
    /// Address of the echo service.
    pub echo: String,
    /// Number of frames without an echo.
    pub lost: u64,
    /// Number of frames that this host did not send.
    pub unsent: u64,
    /// Lateness of this host's sends, p99.99; the largest below 10 000 frames.
    pub sent_late_p9999_ns: Nanos,
}

/// Whether a target was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Shown at 95 % confidence, and the declared rate was kept.
    Met,
    /// More exceedances than the target allows at this n, or the rate was not kept.
    Missed,
    /// Nothing contradicts the target but n is too small to claim it.
    Unproven,
}
