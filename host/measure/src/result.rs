//! The result file: what a run measured, judged against its targets.

use rtvirtio_spec::Direction;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::noise::Noise;
use crate::standstill::Standstills;
use crate::tail::TailEstimate;

/// Version of the result file's form.
pub const RESULT_SCHEMA: &str = "rtvirtio.result.v1";

/// Results of one or more runs on one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultFile {
    /// Always [`RESULT_SCHEMA`].
    pub schema: String,
    /// Where it was measured.
    pub host: HostFacts,
    /// The runs in the order in which they were made.
    pub runs: Vec<Run>,
}

/// What one needs to know of the host to read the numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Kernel release.
    pub kernel: String,
    /// Online CPUs.
    pub cpus: u32,
    /// VMM and version, such as `QEMU 7.2.22`; `none` for process VMs.
    pub vmm: String,
    /// `kvm`, `tcg` or `none`.
    pub accelerator: String,
    /// The device under test: name, and the twin profile where it is one.
    pub device: String,
}

/// What a VM was in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmKind {
    /// A QEMU guest with fio inside.
    Qemu,
    /// fio in a cgroup on the host.
    Process,
}

/// One run of all tasks under one scheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Scheme in force, such as `default-bfq` or `slice`; `as-found` when rtvirtio chose nothing.
    pub scheme: String,
    /// Which kind of VM the numbers come from.
    pub kind: VmKind,
    /// Length of the measured part in seconds.
    pub seconds: f64,
    /// How quiet the host itself was; absent in results of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise: Option<Noise>,
    /// Whether the disk itself stood still; absent in results of older versions, and where the
    /// kernel does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Standstills>,
    /// In spec order, one entry for each target of a task, and one for a task without; entries of
    /// one task differ in `percentile`, `target_ns`, `at_target_ns`, `achieved_rate` (which allows
    /// for the wait that a target allows), `predicted_ns`, `verdict` and `why`.
    pub tasks: Vec<TaskResult>,
}

/// What one task got, against one of its targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    /// VM name.
    pub vm: String,
    /// Name of the task or flow.
    pub task: String,
    /// Percentile that the target is about.
    pub percentile: Percentile,
    /// The target, if any.
    pub target_ns: Option<Nanos>,
    /// Latency at that percentile, below which `n` shows it the largest; absent without a target,
    /// and in results of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_target_ns: Option<Nanos>,
    /// Declared rate, if any.
    pub declared_rate: Option<Iops>,
    /// Completed requests per second.
    pub achieved_rate: Iops,
    /// Completed requests.
    pub n: u64,
    /// Median latency from the intended start.
    pub p50_ns: Nanos,
    /// 99th percentile.
    pub p99_ns: Nanos,
    /// 99.99th percentile; the maximum when `n` < 10 000.
    pub p9999_ns: Nanos,
    /// The same of the latencies less the time in which a CPU of the host stood still; absent where
    /// that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "p9999_awake_ns")]
    pub p9999_excl_host_stalls_ns: Option<Nanos>,
    /// The same with these stalls a second later, when the host did not stand still: how much the
    /// method subtracts by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p9999_placebo_ns: Option<Nanos>,
    /// Largest.
    pub max_ns: Nanos,
    /// fio's own p99.99, counted from the actual start: the difference is what a stalled queue
    /// would have hidden.
    pub fio_p9999_ns: Nanos,
    /// Processors that fio itself kept busy for this task, as their kernel counts it: 0.5 is half
    /// of one.
    #[serde(default)]
    pub fio_cpus: f64,
    /// What the percentile probably is, where the samples are too few to show it and enough to
    /// estimate it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<TailEstimate>,
    /// What the plan's model predicted, if there was a plan or prediction.
    pub predicted_ns: Option<Nanos>,
    /// Of a flow, how it was run; `None` for a task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<FlowFacts>,
    /// The judgement; `None` for a task without target.
    pub verdict: Option<Verdict>,
    /// Reason for the verdict in a few words, with numbers.
    pub why: String,
}

/// How a flow was run: its latencies are round trips from the moment at which each frame was due,
/// its requests are frames, and `fio_p9999_ns` counts from the moment at which they were sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowFacts {
    /// Seen from the VM.
    pub direction: Direction,
    /// The interface by which its frames left this host.
    pub peer: String,
    /// What answered them.
    pub echo: String,
    /// Frames without an answer.
    pub lost: u64,
    /// Frames that this host did not send.
    pub unsent: u64,
    /// How late this host sent them, p99.99; the longest below 10 000 frames.
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
