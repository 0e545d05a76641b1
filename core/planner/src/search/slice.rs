//! Our search: exact enumeration of the host's discrete knobs and of caps, then the weights.

use rtvirtio_model::{Bfq, Config, Elevator, declared_shares, spare_rates, weights_act};
use rtvirtio_units::Iops;

use super::weights::{nearest, seeds, weigh};
use super::{initial_bfq, settable_guests, settle, weights_allowed, whole_cap};
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Caps that are tried, as shares of the device time that the declared rates leave.
const CAP_SHARES: [f64; 7] = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05, 0.02];

/// All enumerated configurations, best first.
pub(super) fn candidates(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    start: Option<Outcome>,
) -> Vec<Outcome> {
    let mut found: Vec<Outcome> = start.into_iter().collect();
    for base in bases(problem, evaluator) {
        let mut urgent = None;
        if weights_allowed(problem) && weights_act(problem.spec, &base) {
            urgent = Some(by_urgency(problem, base.clone()));
        }
        for config in std::iter::once(base).chain(urgent) {
            found.extend(evaluator.outcome(problem, settle(problem, config)));
        }
    }
    // Stable, so equal candidates keep the order of enumeration.
    found.sort_by(|a, b| b.compare(a));
    found
}

pub(super) fn search(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    start: Option<Outcome>,
) -> Option<Outcome> {
    let found = candidates(problem, evaluator, start);
    let best = found.first().cloned()?;
    if !weights_allowed(problem) || (best.missed == 0 && best.has_enough()) {
        return Some(best);
    }
    let weighed = weigh(problem, evaluator, &seeds(problem, &found));
    weighed.filter(|w| w.better_than(&best)).or(Some(best))
}

/// Every combination of elevator, tunables, caps and guest elevators that the space allows, weights
/// as at the start.
fn bases(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Vec<Config> {
    let (start, space) = (&problem.options.start, &problem.options.space);
    let mut elevators = vec![start.elevator];
    add_all(&mut elevators, &space.elevators);
    let mut out = Vec::new();
    for elevator in elevators {
        let tunables = if elevator == Elevator::Bfq { tunables(problem) } else { vec![start.bfq] };
        let room = Room::new(problem, evaluator, elevator);
        for bfq in tunables {
            let mut config = Config { elevator, bfq, vms: start.vms.clone() };
            if space.caps {
                lift_harmful_caps(problem, &mut config);
                for capped in room.iter().flat_map(|room| room.caps(problem, &config)) {
                    out.extend(guests(problem, capped));
                }
            }
            out.extend(guests(problem, config));
        }
    }
    out
}

/// BFQ tunables of the space. Without idling there are no slices, so the slice lengths stay as they
/// are.
fn tunables(problem: &Problem<'_>) -> Vec<Bfq> {
    let (initial, space) = (initial_bfq(&problem.options.start), &problem.options.space);
    let mut idles = vec![initial.slice_idle];
    add_all(&mut idles, &space.slice_idle);
    let mut timeouts = vec![initial.timeout_sync];
    add_all(&mut timeouts, &space.timeout_sync);
    let mut budgets = vec![initial.max_budget];
    add_all(&mut budgets, &space.max_budget);
    let raising =
        if space.low_latency && initial.low_latency { vec![true, false] } else { vec![initial.low_latency] };
    let mut out = Vec::new();
    for &slice_idle in &idles {
        for &low_latency in &raising {
            let base = Bfq { slice_idle, low_latency, ..initial };
            if slice_idle.0 == 0 && !base.strict_guarantees {
                out.push(base);
                continue;
            }
            for &timeout_sync in &timeouts {
                out.extend(budgets.iter().map(|&max_budget| Bfq { timeout_sync, max_budget, ..base }));
            }
        }
    }
    out
}

/// A VM with targets never keeps a cap below its declared rate, unless it is given up.
fn lift_harmful_caps(problem: &Problem<'_>, config: &mut Config) {
    for (i, (vm, c)) in problem.spec.vms.iter().zip(&mut config.vms).enumerate() {
        let counts = vm.tightest_target().is_some() && !problem.given_up.contains(&i);
        if counts && c.cap.is_some_and(|cap| cap.0 < vm.declared_rate().0) {
            c.cap = None;
        }
    }
}

/// Device time that the VMs with targets leave to those that may be capped.
struct Room {
    /// Rate left to each VM by the declared rates, beyond its own.
    spare: Vec<Option<Iops>>,
    /// Share of their declared rates that is left to VMs that are given up; 1 without any.
    kept: f64,
}

impl Room {
    /// The room under an elevator; `None` where no VM may be capped.
    fn new(problem: &Problem<'_>, evaluator: &Evaluator<'_>, elevator: Elevator) -> Option<Self> {
        problem.held().next()?;
        let config = Config { elevator, ..problem.options.start.clone() };
        let spare = spare_rates(evaluator.profile(), problem.spec, &config).ok()?;
        let taken = declared_shares(evaluator.profile(), problem.spec, &config).ok()?;
        let given_up: f64 = problem.given_up.iter().map(|&i| taken[i]).sum();
        let left = 1.0 - (taken.iter().sum::<f64>() - given_up);
        let kept = if given_up > 0.0 { (left / given_up).clamp(0.0, 1.0) } else { 1.0 };
        Some(Self { spare, kept })
    }

    /// Copies of `config` with all these VMs capped to a share of the rate that is left to them, in
    /// whole requests per second.
    fn caps(&self, problem: &Problem<'_>, config: &Config) -> Vec<Config> {
        CAP_SHARES
            .iter()
            .map(|share| {
                let mut c = config.clone();
                for i in problem.held() {
                    let declared = problem.spec.vms[i].declared_rate().0;
                    let rated = if problem.given_up.contains(&i) { self.kept * share } else { 1.0 };
                    let cap = declared * rated + self.spare[i].map_or(0.0, |s| s.0) * share;
                    c.vms[i].cap = Some(whole_cap(cap));
                }
                c
            })
            .collect()
    }
}

/// `config`, and a copy with BFQ removed from every guest that has it.
fn guests(problem: &Problem<'_>, config: Config) -> Vec<Config> {
    let mut plain = config.clone();
    for i in settable_guests(problem) {
        if plain.vms[i].guest_elevator == Elevator::Bfq {
            plain.vms[i].guest_elevator = Elevator::None;
        }
    }
    if plain == config { vec![config] } else { vec![config, plain] }
}

/// Weights in inverse proportion to each VM's tightest target, on the levels of the space; the
/// lowest without target.
fn by_urgency(problem: &Problem<'_>, mut config: Config) -> Config {
    let levels = &problem.options.space.weights;
    let (least, most) = (levels[0], levels[levels.len() - 1]);
    let tightest = problem.tightest();
    let first = tightest.iter().flatten().fold(f64::INFINITY, |a, &b| a.min(b));
    for (vm, t) in config.vms.iter_mut().zip(tightest) {
        let wish = t.map_or(f64::from(least), |t| f64::from(most) * first / t);
        vm.weight = nearest(levels, wish);
    }
    config
}

fn add_all<T: Copy + PartialEq>(to: &mut Vec<T>, more: &[T]) {
    for &m in more {
        if !to.contains(&m) {
            to.push(m);
        }
    }
}
