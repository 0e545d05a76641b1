//! Results of a simulation.

use rtvirtio_sched::VmCounters;
use rtvirtio_units::Nanos;

#[derive(Clone, Debug, PartialEq)]
pub struct LoadResult {
    pub name: String,
    pub vm: usize,
    /// Requests of this load that completed.
    pub n: u64,
    /// Mean completions per second of virtual time.
    pub rate: f64,
    /// Median latency from the moment at which the request was due.
    pub p50: Nanos,
    /// 99th percentile of the same latency.
    pub p99: Nanos,
    /// 99.99th percentile; the maximum where there are fewer than 10 000 completions.
    pub p9999: Nanos,
    /// Largest latency.
    pub max: Nanos,
    /// Completions after the load's deadline.
    pub late: u64,
}

/// Result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct SimResult {
    /// Requests completed, of all loads.
    pub requests: u64,
    /// Results in the order of the loads.
    pub loads: Vec<LoadResult>,
    pub vms: Vec<VmCounters>,
}
