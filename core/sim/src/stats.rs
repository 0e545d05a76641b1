//! What a simulation saw.

use hdrhistogram::Histogram;
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
    pub unanswered: u64,
    /// Answers per second.
    pub rate: f64,
    /// Median latency from the moment at which the request was made.
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

/// Latencies of a load.
#[derive(Debug)]
pub struct Latencies {
    hist: Histogram<u64>,
    max: u64,
    pub late: u64,
}

impl Latencies {
    pub fn new() -> Self {
        // One day in ns at three digits; the arguments are constants within the type's range.
        let hist = Histogram::new_with_bounds(1, 86_400_000_000_000, 3);
        Self { hist: hist.unwrap_or_else(|_| unreachable!("constant bounds")), max: 0, late: 0 }
    }

    pub fn add(&mut self, latency: u64, deadline: Option<Nanos>) {
        self.hist.saturating_record(latency);
        self.max = self.max.max(latency);
        self.late += u64::from(deadline.is_some_and(|d| latency > d.0));
    }

    pub fn n(&self) -> u64 {
        self.hist.len()
    }

    pub fn at(&self, percentile: f64) -> Nanos {
        Nanos(self.hist.value_at_percentile(percentile).min(self.max))
    }

    pub fn max(&self) -> Nanos {
        Nanos(self.max)
    }

    pub fn tail(&self) -> Nanos {
        if self.n() < 10_000 { self.max() } else { self.at(99.99) }
    }
}
