//! Bounds of tasks and paths, each against the target that the spec gives.

use rtvirtio_spec::Target;
use rtvirtio_units::Nanos;
use serde::Serialize;

/// The bound of a task, against one of its targets: from the submission of a request to its
/// completion, for requests that the reservation of its VM covers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskPromise {
    pub vm: String,
    /// Name of the task in its VM.
    pub task: String,
    /// Latency and percentile that the spec asks for.
    pub target: Option<Target>,
    /// Worst-case latency from the submission, including the guest's own part; `None` without a
    /// reservation.
    pub bound: Option<Nanos>,
    /// Whether the target is met in the worst case, from the submission; `None` without a target.
    pub met: Option<bool>,
    /// Bound of a task with a rate from the intended starts of its requests, which fall behind
    /// while its guest or the device stands still; `None` where nothing bounds that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_intended: Option<IntendedBound>,
    /// Reason for no promise, where that is the task's doing and not the device's load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpromised: Option<String>,
}

/// A bound from the time at which a request is due at its task's rate, as measurements count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct IntendedBound {
    /// Worst-case latency, the guest's stall included.
    pub bound: Nanos,
    /// Longest stall of the guest with which it holds.
    pub stall: Nanos,
}

/// The bound of a path, against its target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPromise {
    pub vm: String,
    /// Name of the path in its VM.
    pub path: String,
    /// Network, CPU and disk parts in the path's order.
    pub parts: Vec<PartPromise>,
    /// Sum of the parts; `None` where one has no bound.
    pub bound: Option<Nanos>,
    /// Latency and percentile that the spec asks for.
    pub target: Target,
    /// Whether the target is met in the worst case.
    pub met: bool,
    /// Change that would meet the target, where it is not met.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// The bound of a part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartPromise {
    /// `net`, `cpu` or `disk`.
    pub part: &'static str,
    /// Name of the flow or task, or the CPU time.
    pub of: String,
    /// Longest time of the part; `None` without a promise.
    pub bound: Option<Nanos>,
    /// Reason for no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpromised: Option<String>,
}
