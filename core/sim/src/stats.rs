//! What a simulation saw.

use rtvirtio_sched::{Contract, VmCounters};
use rtvirtio_units::Nanos;

/// One load's outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadResult {
    /// As declared.
    pub name: String,
    /// Whose.
    pub vm: usize,
    /// Requests answered.
    pub n: u64,
    /// Requests made and not answered by the end.
    pub incomplete: u64,
    /// Answers per second.
    pub rate: f64,
    /// Median latency from the moment at which the request was due.
    pub p50: Nanos,
    /// 99th percentile.
    pub p99: Nanos,
    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    pub p9999: Nanos,
    /// Longest.
    pub max: Nanos,
    /// Answers after the deadline.
    pub late: u64,
}

/// A simulation's outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct SimResult {
    /// Virtual time that passed.
    pub time: Nanos,
    /// Requests answered, of all loads.
    pub requests: u64,
    /// Each load.
    pub loads: Vec<LoadResult>,
    /// Each VM's counts.
    pub vms: Vec<VmCounters>,
    /// What each VM got, reads and writes.
    pub contracts: Vec<[Contract; 2]>,
    /// The window at the end.
    pub window: u32,
}
