//! The paper's search (its section VI): from the current configuration, predict; while a target is
//! missed, give the VMs that need it more weight and try neighbouring tunables; when the weights
//! would sum to more than the host has, serve the most urgent VM first.

use rtvirtio_model::{Analytical, Bfq, Coefficients, Config, Elevator, ModelError, Profile, TailModel};
use rtvirtio_planner::strategy::{Outcome, Steps, Strategy, configure};
use rtvirtio_planner::{PlanError, PlanOptions, Space};
use rtvirtio_spec::Spec;
use rtvirtio_units::Nanos;

use crate::PaperModels;
use crate::network::Network;

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

/// Most moves of the local search with the network: enough to cross all levels of all knobs of a
/// few VMs.
const NETWORK_STEPS: usize = 40;

/// The paper's Table II: BFQ, `slice_idle` {1,2,4,6,8} ms, `timeout_sync` {32,64,124} ms, weights
/// 50 to 700.
fn space() -> Space {
    Space {
        elevators: vec![Elevator::Bfq],
        slice_idle: [1, 2, 4, 6, 8].map(Nanos::from_millis).to_vec(),
        timeout_sync: [32, 64, 124].map(Nanos::from_millis).to_vec(),
        max_budget: Vec::new(),
        caps: false,
        guests: false,
        ..Space::default()
    }
}

/// Options of the paper's search from the configuration in force.
#[must_use]
pub fn options(start: Config) -> PlanOptions {
    PlanOptions { space: space(), ..PlanOptions::new(start) }
}

/// Configuration that the paper's search finds with its equations: coefficients as fitted on this
/// host, else those of Table III.
pub fn by_equations(
    spec: &Spec,
    profile: &Profile,
    options: &PlanOptions,
    models: &PaperModels,
) -> Result<Config, PlanError> {
    configure(spec, profile, options, &Equations(models.coefficients()))
}

/// Configuration that the paper's search finds with its network.
///
/// # Errors
/// The errors of [`configure`], and [`ModelError::NotLearned`] where no network was fitted.
pub fn by_network(
    spec: &Spec,
    profile: &Profile,
    options: &PlanOptions,
    models: &PaperModels,
) -> Result<Config, PlanError> {
    let network = models.network().ok_or(ModelError::NotLearned)?;
    configure(spec, profile, options, &network)
}

/// The search with equations, which can be inverted.
struct Equations(Coefficients);

impl Strategy for Equations {
    fn model(&self) -> Box<dyn TailModel> {
        Box::new(Analytical { coefficients: self.0, ..Analytical::default() })
    }

    fn search(&self, steps: &mut Steps<'_, '_>, start: Option<Outcome>) -> Option<Outcome> {
        walk(steps, start)
    }
}

/// The local search with the network, from the configuration in force.
impl Strategy for Network {
    fn model(&self) -> Box<dyn TailModel> {
        Box::new(self.clone())
    }

    fn search(&self, steps: &mut Steps<'_, '_>, start: Option<Outcome>) -> Option<Outcome> {
        let start = match start {
            Some(start) => start,
            None => {
                // The start's elevator may be one that the network does not cover.
                let mut config = steps.options().start.clone();
                if steps.options().space.elevators.contains(&Elevator::Bfq) {
                    config.elevator = Elevator::Bfq;
                    config.bfq = Bfq::default();
                }
                steps.outcome(config)?
            }
        };
        if start.missed() == 0 { Some(start) } else { Some(steps.climb(start, NETWORK_STEPS)) }
    }
}

/// Indices into the lists of tunables.
type At = [usize; 2];

fn walk(steps: &mut Steps<'_, '_>, start: Option<Outcome>) -> Option<Outcome> {
    let lists = Lists::new(steps);
    let mut at = lists.origin(steps);
    let mut best = start;
    if best.as_ref().is_some_and(|b| b.missed() == 0) {
        return best;
    }
    // Walk to where the targets need the smallest sum of shares. Each move lowers it, so the walk
    // ends. The outcome itself cannot guide it: far from feasible, better tunables change neither
    // which VMs are served nor the worst margin.
    let mut here = visit(steps, &mut best, &lists, at);
    while best.as_ref().is_none_or(|b| b.missed() > 0) {
        let mut moved = None;
        for next in lists.neighbours(at) {
            let there = visit(steps, &mut best, &lists, next);
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
fn visit(steps: &mut Steps<'_, '_>, best: &mut Option<Outcome>, lists: &Lists, at: At) -> f64 {
    let mut config = lists.config(steps, at);
    steps.consider(best, config.clone());
    let Some(need) = needs(steps, &config) else { return f64::INFINITY };
    if steps.weights_allowed() {
        let share = divide(&need, steps.urgency());
        let most = share.iter().fold(0.0f64, |a, &b| a.max(b));
        for (vm, s) in config.vms.iter_mut().zip(share) {
            vm.weight = (TOP_WEIGHT * s / most).round().clamp(1.0, TOP_WEIGHT) as u32;
        }
        steps.consider(best, config);
    }
    need.iter().map(|n| n.min(OUT_OF_REACH)).sum()
}

/// The values of `slice_idle` and of `timeout_sync`, rising.
struct Lists([Vec<Nanos>; 2]);

impl Lists {
    fn new(steps: &Steps<'_, '_>) -> Self {
        let (space, initial) = (&steps.options().space, steps.initial_bfq());
        let rising = |listed: &[Nanos], initial: Nanos| {
            let mut values = listed.to_vec();
            values.push(initial);
            values.sort_unstable();
            values.dedup();
            values
        };
        let idle = rising(&space.slice_idle, initial.slice_idle);
        Self([idle, rising(&space.timeout_sync, initial.timeout_sync)])
    }

    fn origin(&self, steps: &Steps<'_, '_>) -> At {
        let initial = steps.initial_bfq();
        let at = |k: usize, value: Nanos| self.0[k].iter().position(|v| *v == value).unwrap_or(0);
        [at(0, initial.slice_idle), at(1, initial.timeout_sync)]
    }

    fn neighbours(&self, at: At) -> Vec<At> {
        let mut out = Vec::new();
        for k in 0..at.len() {
            for next in [at[k].checked_sub(1), Some(at[k] + 1)].into_iter().flatten() {
                if next < self.0[k].len() {
                    let mut n = at;
                    n[k] = next;
                    out.push(n);
                }
            }
        }
        out
    }

    fn config(&self, steps: &Steps<'_, '_>, at: At) -> Config {
        let start = &steps.options().start;
        let allowed = steps.options().space.elevators.contains(&Elevator::Bfq);
        let mut bfq = steps.initial_bfq();
        (bfq.slice_idle, bfq.timeout_sync) = (self.0[0][at[0]], self.0[1][at[1]]);
        let elevator = if allowed { Elevator::Bfq } else { start.elevator };
        Config { elevator, bfq, vms: start.vms.clone() }
    }
}

/// The share of the host that each VM's tightest task needs; [`LEAST_SHARE`] without targets.
///
/// With phi the VM's share, eqs. (1) to (5) have the form `a + b / phi`, so a target T needs `phi
/// >= b / (T - a)`: a and b follow from the terms of one forecast.
fn needs(steps: &Steps<'_, '_>, config: &Config) -> Option<Vec<f64>> {
    let forecasts = steps.forecast(config).ok()?;
    let total: f64 = config.vms.iter().map(|v| f64::from(v.weight)).sum();
    let mut need = vec![LEAST_SHARE; config.vms.len()];
    for (forecast, (vm, limit)) in forecasts.iter().zip(steps.limits()) {
        let Some(limit) = limit else { continue };
        let phi = f64::from(config.vms[vm].weight) / total;
        let by_share: u64 = forecast
            .terms
            .iter()
            .filter(|t| BY_SHARE.iter().any(|&(side, name)| t.side == side && t.name == name))
            .map(|t| t.latency_ns.0)
            .sum();
        let rest = forecast.latency_ns.0.saturating_sub(by_share) as f64;
        let left = limit - rest;
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

    use rtvirtio_learn::load::{Knobs, Stream, spec};
    use rtvirtio_learn::synthetic::profile;
    use rtvirtio_planner::{BfqTunable, Knob, settings_of};
    use rtvirtio_spec::{Device, LabKind, Target};
    use rtvirtio_units::{Bytes, Percentile};

    /// Process VMs with one stream each and a target, in requests per second and ms.
    fn vms(of: &[(f64, u64)]) -> (Spec, Config) {
        let device = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
        let streams: Vec<_> = of.iter().map(|(rate, _)| vec![Stream::paced(*rate)]).collect();
        let mut spec = spec(&streams, device, LabKind::Process);
        for (vm, (_, ms)) in spec.vms.iter_mut().zip(of) {
            let target = Target { percentile: Percentile::P9999, latency: Nanos::from_millis(*ms) };
            vm.tasks[0].targets = vec![target];
        }
        let start = Knobs::default_bfq(of.len()).config();
        (spec, start)
    }

    fn planned(spec: &Spec, start: &Config) -> Config {
        by_equations(spec, &profile(), &options(start.clone()), &PaperModels::default()).unwrap()
    }

    /// Predicted tails in ms by Table III's equations.
    fn tails(spec: &Spec, config: &Config) -> Vec<f64> {
        let all = Analytical::default().forecast(&profile(), spec, config).unwrap();
        all.iter().map(|f| f.latency_ns.as_millis_f64()).collect()
    }

    #[test]
    fn the_scheme_stays_in_its_space_and_stops_when_met() {
        let (spec, start) = vms(&[(100.0, 60_000); 3]);
        let now = tails(&spec, &start).into_iter().fold(0.0, f64::max);
        assert_eq!(planned(&spec, &start), start, "everything is met already: nothing to set");
        // Just missed by the settings in force, with the safety margin.
        let (spec, start) = vms(&[(100.0, now as u64); 3]);
        let found = planned(&spec, &start);
        assert!(tails(&spec, &found).iter().all(|ms| *ms <= 0.8 * now), "{found:?}");
        let settings = settings_of(&spec, &start, &found);
        assert!(!settings.is_empty());
        for setting in settings {
            assert!(
                matches!(
                    setting.knob,
                    Knob::HostBfq(BfqTunable::SliceIdle | BfqTunable::TimeoutSync | BfqTunable::LowLatency)
                        | Knob::VmWeight { .. }
                ),
                "{setting:?}"
            );
        }
    }

    #[test]
    fn the_scheme_gives_the_urgent_vm_more_weight() {
        let (even, start) = vms(&[(1_500.0, 60_000); 3]);
        let now = tails(&even, &start)[0];
        let (spec, start) =
            vms(&[(1_500.0, 2 * now as u64), (1_500.0, now as u64), (1_500.0, 2 * now as u64)]);
        let found = planned(&spec, &start);
        assert!(found.vms[1].weight > found.vms[0].weight, "{found:?}");
        assert!(!found.bfq.low_latency);
    }

    #[test]
    fn another_elevator_is_left_and_without_bfq_nothing_is_covered() {
        let (spec, mut start) = vms(&[(100.0, 60_000); 3]);
        start.elevator = Elevator::None;
        assert_eq!(planned(&spec, &start).elevator, Elevator::Bfq);
        let mut options = options(start);
        options.space.elevators = Vec::new();
        let refused = by_equations(&spec, &profile(), &options, &PaperModels::default()).unwrap_err();
        assert!(matches!(refused, PlanError::Model(ModelError::NotCovered { .. })), "{refused}");
        let refused = by_network(&spec, &profile(), &options, &PaperModels::default()).unwrap_err();
        assert_eq!(refused, PlanError::Model(ModelError::NotLearned));
    }

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
