//! The paper's search (its section VI): from the current configuration, predict; while a target is
//! missed, give the VMs that need it more weight and try neighbouring tunables; when the weights
//! would sum to more than the host has, serve the most urgent VM first.

use rtvirtio_model::{Config, Elevator};
use rtvirtio_units::{Bytes, Nanos};

use super::{consider, initial_bfq, weights_allowed};
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Largest weight written: BFQ's range is 1 to 1000.
const TOP_WEIGHT: f64 = 1000.0;

/// Least share of the host that a VM keeps when shares are short: weight 1 of 1000 would starve it
/// outright.
const LEAST_SHARE: f64 = 0.01;

/// Need that counts for a target which no share can meet: more than any reachable one, so that the
/// walk first makes targets reachable, yet finite so that the others still count.
const OUT_OF_REACH: f64 = 1e3;

/// Terms of eqs. (2) and (4) that are inversely proportional to the VM's share phi.
const BY_SHARE: [(rtvirtio_model::Side, &str); 3] = [
    (rtvirtio_model::Side::Host, "own-service"),
    (rtvirtio_model::Side::Guest, "own-service"),
    (rtvirtio_model::Side::Guest, "other-tasks"),
];

/// Indices into the lists of tunables.
type At = [usize; 3];

pub(super) fn search(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    start: Option<Outcome>,
) -> Option<Outcome> {
    let lists = Lists::new(problem);
    let mut at = lists.origin(problem);
    let mut best = start;
    if best.as_ref().is_some_and(|b| b.missed == 0) {
        return best;
    }
    // Walk to where the targets need the smallest sum of shares. Each move lowers it, so the walk
    // ends. The outcome itself cannot guide it: far from feasible, better tunables change neither
    // which VMs are served nor the worst margin.
    let mut here = visit(problem, evaluator, &mut best, &lists, at);
    while best.as_ref().is_none_or(|b| b.missed > 0) {
        let mut moved = None;
        for next in lists.neighbours(at) {
            let there = visit(problem, evaluator, &mut best, &lists, next);
            if there < here {
                (here, moved) = (there, Some(next));
            }
        }
        match moved {
            Some(next) => at = next,
            None => break,
        }
    }
    best
}

/// Evaluates one point of the tunables, with the weights at the start and with the weights that the
/// targets need there. Returns the sum of the shares needed; infinite where the model covers
/// nothing or some target is out of reach.
fn visit(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    best: &mut Option<Outcome>,
    lists: &Lists,
    at: At,
) -> f64 {
    let mut config = lists.config(problem, at);
    consider(problem, evaluator, best, config.clone());
    let Some(need) = needs(problem, evaluator, &config) else { return f64::INFINITY };
    if weights_allowed(problem) {
        let share = divide(&need, &problem.urgency);
        let most = share.iter().fold(0.0f64, |a, &b| a.max(b));
        for (vm, s) in config.vms.iter_mut().zip(share) {
            vm.weight = (TOP_WEIGHT * s / most).round().clamp(1.0, TOP_WEIGHT) as u32;
        }
        consider(problem, evaluator, best, config);
    }
    need.iter().map(|n| n.min(OUT_OF_REACH)).sum()
}

/// The tunables' values, rising.
struct Lists {
    idle: Vec<Nanos>,
    timeout: Vec<Nanos>,
    budget: Vec<Option<Bytes>>,
}

impl Lists {
    fn new(problem: &Problem<'_>) -> Self {
        let (space, initial) = (&problem.options.space, initial_bfq(&problem.options.start));
        let mut idle = space.slice_idle.clone();
        idle.push(initial.slice_idle);
        let mut timeout = space.timeout_sync.clone();
        timeout.push(initial.timeout_sync);
        let mut budget = space.max_budget.clone();
        budget.push(initial.max_budget);
        idle.sort_unstable();
        idle.dedup();
        timeout.sort_unstable();
        timeout.dedup();
        // Automatic (`None`) last: it is the largest.
        budget.sort_unstable_by_key(|b| b.map_or(u64::MAX, |b| b.0));
        budget.dedup();
        Self { idle, timeout, budget }
    }

    fn origin(&self, problem: &Problem<'_>) -> At {
        let initial = initial_bfq(&problem.options.start);
        let at = |found: Option<usize>| found.unwrap_or(0);
        [
            at(self.idle.iter().position(|&v| v == initial.slice_idle)),
            at(self.timeout.iter().position(|&v| v == initial.timeout_sync)),
            at(self.budget.iter().position(|&v| v == initial.max_budget)),
        ]
    }

    fn neighbours(&self, at: At) -> Vec<At> {
        let len = [self.idle.len(), self.timeout.len(), self.budget.len()];
        let mut out = Vec::new();
        for k in 0..3 {
            if at[k] > 0 {
                let mut n = at;
                n[k] -= 1;
                out.push(n);
            }
            if at[k] + 1 < len[k] {
                let mut n = at;
                n[k] += 1;
                out.push(n);
            }
        }
        out
    }

    fn config(&self, problem: &Problem<'_>, at: At) -> Config {
        let start = &problem.options.start;
        let allowed = problem.options.space.elevators.contains(&Elevator::Bfq);
        let mut bfq = initial_bfq(start);
        (bfq.slice_idle, bfq.timeout_sync, bfq.max_budget) =
            (self.idle[at[0]], self.timeout[at[1]], self.budget[at[2]]);
        let elevator = if allowed { Elevator::Bfq } else { start.elevator };
        Config { elevator, bfq, vms: start.vms.clone() }
    }
}

/// The share of the host that each VM's tightest task needs; [`LEAST_SHARE`] without targets.
///
/// With phi the VM's share, eqs. (1) to (5) have the form `a + b / phi`, so a target T needs `phi
/// >= b / (T - a)`: a and b follow from the terms of one forecast.
fn needs(problem: &Problem<'_>, evaluator: &Evaluator<'_>, config: &Config) -> Option<Vec<f64>> {
    let forecasts = evaluator.forecast(config).ok()?;
    let total: f64 = config.vms.iter().map(|v| f64::from(v.weight)).sum();
    let mut need = vec![LEAST_SHARE; config.vms.len()];
    for (i, forecast) in forecasts.iter().enumerate() {
        let Some(target) = problem.targets[i] else { continue };
        let vm = problem.vm_of[i];
        let phi = f64::from(config.vms[vm].weight) / total;
        let by_share: u64 = forecast
            .terms
            .iter()
            .filter(|t| BY_SHARE.iter().any(|&(side, name)| t.side == side && t.name == name))
            .map(|t| t.latency_ns.0)
            .sum();
        let rest = forecast.latency_ns.0.saturating_sub(by_share) as f64;
        let left = problem.limit(target) - rest;
        let wanted = if left > 0.0 { by_share as f64 * phi / left } else { f64::INFINITY };
        need[vm] = need[vm].max(wanted);
    }
    Some(need)
}

/// Shares with sum 1 by need: in proportion when the needs fit, else in order of urgency (the
/// paper's compromise), the VMs that do not fit sharing the remainder. Every VM keeps
/// [`LEAST_SHARE`], or an equal part if that is less.
fn divide(need: &[f64], urgency: &[usize]) -> Vec<f64> {
    let total: f64 = need.iter().sum();
    if total <= 1.0 {
        return need.iter().map(|n| n / total).collect();
    }
    let least = LEAST_SHARE.min(1.0 / need.len() as f64);
    let mut share = vec![least; need.len()];
    let mut left = 1.0 - least * need.len() as f64;
    let mut waiting = Vec::new();
    for &i in urgency {
        let more = need[i] - least;
        if waiting.is_empty() && more <= left {
            share[i] += more;
            left -= more;
        } else {
            waiting.push(i);
        }
    }
    // In proportion to need, and nothing to a VM that no share helps while others can use it.
    let finite: f64 = waiting.iter().filter(|&&i| need[i].is_finite()).map(|&i| need[i]).sum();
    for &i in &waiting {
        let part = if finite > 0.0 {
            if need[i].is_finite() { need[i] / finite } else { 0.0 }
        } else {
            1.0 / waiting.len() as f64
        };
        share[i] += left * part;
    }
    share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_that_fit_are_met_and_the_rest_is_shared() {
        let s = divide(&[0.4, 0.1], &[0, 1]);
        assert!((s[0] - 0.8).abs() < 1e-12 && (s[1] - 0.2).abs() < 1e-12);
    }

    #[test]
    fn the_most_urgent_comes_first_when_needs_do_not_fit() {
        let s = divide(&[0.5, 0.6, 0.3], &[1, 0, 2]);
        assert!((s[1] - 0.6).abs() < 1e-12, "{s:?}");
        assert!(s[0] < 0.5 && s[2] < 0.3);
        assert!((s.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        // A target out of reach of any share takes nothing from the others.
        let s = divide(&[f64::INFINITY, 0.6], &[0, 1]);
        assert!(s[1] > 0.6, "{s:?}");
    }
}
