//! Throughput over budget: measurements and their lower confidence bounds.
//!
//! The paper's Fig. 1b is one curve, of a VM alone; its Fig. 2 has one for each budget of a loaded
//! neighbour.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Measurement of a VM under a contract.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Round of the measurement, from 0.
    pub round: usize,
    /// The VM's budget, in percent of its period.
    pub budget_percent: u64,
    /// Budget of the loaded neighbour, in percent of its period; `None` when the VM was alone.
    pub neighbour_percent: Option<u64>,
    /// Requests a second that were answered.
    pub requests_per_s: f64,
    /// CPU time that all threads of the VM used, in seconds a second.
    pub cpu: f64,
    /// Requests a second that the neighbour answered, where its load reports them.
    pub neighbour_requests_per_s: Option<f64>,
}

/// Statistics of all runs at one budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The VM's budget, in percent of its period.
    pub budget_percent: u64,
    /// Budget of the loaded neighbour, in percent of its period; `None` when the VM was alone.
    pub neighbour_percent: Option<u64>,
    /// Number of measurements at this budget.
    pub n: usize,
    /// Mean of the measurements, in requests a second.
    pub mean: f64,
    /// Standard deviation of the sample, in requests a second; 0 for a single measurement.
    pub sd: f64,
    /// Lower bound, in requests a second: the one-sided 95 % confidence bound of the mean
    /// (Student's t), and no more than that of any larger budget on the same curve. `None` for a
    /// single measurement.
    pub lower: Option<f64>,
    /// CPU time of one request, in seconds: the mean over the runs, weighted by their requests.
    /// `None` when nothing was answered.
    pub cpu_per_request: Option<f64>,
}

/// Student's t for a one-sided bound of 95 %, by degrees of freedom from 1 (any table of it).
/// Beyond the table its last value is used, which is larger and so on the safe side.
const T95: [f64; 20] = [
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725,
];

/// Points of all curves, those measured alone first, each by rising budget.
#[must_use]
pub fn points(runs: &[Run]) -> Vec<Point> {
    let mut groups: BTreeMap<(Option<u64>, u64), Vec<&Run>> = BTreeMap::new();
    for run in runs {
        groups.entry((run.neighbour_percent, run.budget_percent)).or_default().push(run);
    }
    let mut all: Vec<Point> = groups.into_iter().map(|(key, runs)| point(key, &runs)).collect();
    // More budget never carries less. Where the bounds fall, the cause is chance or a bottleneck
    // elsewhere, and the smaller value is the safe one.
    let mut least: Option<(Option<u64>, f64)> = None;
    for point in all.iter_mut().rev() {
        let above = least.filter(|l| l.0 == point.neighbour_percent).map_or(f64::INFINITY, |l| l.1);
        point.lower = point.lower.map(|l| l.min(above));
        least = Some((point.neighbour_percent, point.lower.unwrap_or(above)));
    }
    all
}

fn point((neighbour_percent, budget_percent): (Option<u64>, u64), runs: &[&Run]) -> Point {
    let n = runs.len();
    let sum = |of: &dyn Fn(&Run) -> f64| runs.iter().map(|r| of(r)).sum::<f64>();
    let mean = sum(&|r| r.requests_per_s) / n as f64;
    let sd = match n {
        0 | 1 => 0.0,
        _ => (sum(&|r| (r.requests_per_s - mean).powi(2)) / (n - 1) as f64).sqrt(),
    };
    let t = T95[n.saturating_sub(2).min(T95.len() - 1)];
    let lower = (n > 1).then(|| (mean - t * sd / (n as f64).sqrt()).max(0.0));
    let cpu_per_request = (mean > 0.0).then(|| sum(&|r| r.cpu) / sum(&|r| r.requests_per_s));
    Point { budget_percent, neighbour_percent, n, mean, sd, lower, cpu_per_request }
}
