//! The measurements in their order.

use std::fmt;

use rtvirtio_cpu::{Run, Setup};
use rtvirtio_stats::Random;

/// A measurement at one choice of budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of the round, from 0.
    pub round: usize,
    /// The VM's budget, in percent.
    pub budget: u64,
    /// The neighbour's budget, in percent; `None` without a neighbour.
    pub neighbour: Option<u64>,
}

impl Step {
    /// Whether this run is this measurement.
    pub fn is(self, run: &Run) -> bool {
        (self.round, self.budget, self.neighbour) == (run.round, run.budget_percent, run.neighbour_percent)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at a budget of {} %", self.budget)?;
        self.neighbour.map_or(Ok(()), |n| write!(f, " next to {n} %"))
    }
}

/// All measurements whose budgets fit into `free`, a share of each CPU. Every round has each once,
/// in a random order, so that a host that becomes slower affects all alike; the same setup gives
/// the same order.
pub fn steps(setup: &Setup, free: f64) -> Vec<Step> {
    let neighbours = setup.neighbour.iter().flat_map(|n| &n.budgets).map(|n| Some(*n));
    let curves: Vec<Option<u64>> = std::iter::once(None).chain(neighbours).collect();
    let mut all = Vec::new();
    for round in 0..setup.repeat {
        let mut of_round: Vec<Step> = curves
            .iter()
            .flat_map(|n| setup.budgets.iter().map(|b| Step { round, budget: *b, neighbour: *n }))
            .filter(|s| (s.budget + s.neighbour.unwrap_or(0)) as f64 / 100.0 <= free + 1e-6)
            .collect();
        Random::new(round as u64 + 1).shuffle(&mut of_round);
        all.extend(of_round);
    }
    all
}
