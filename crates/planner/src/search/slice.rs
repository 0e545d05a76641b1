//! Our search: exact enumeration of the host's discrete knobs and of caps, then of the weights where they are few, else local
//! search on them.

use rtvirtio_model::{Bfq, Config, Elevator, spare_rates, weights_act};
use rtvirtio_units::Iops;

use super::{initial_bfq, settable_guests, settle, weights_allowed};
use crate::evaluate::{Evaluator, Outcome, Problem};
use crate::options::CgroupMode;

/// Caps that are tried, as shares of what the declared rates leave of the device.
const CAP_SHARES: [f64; 6] = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05];

/// Best enumerated configurations whose weights are refined.
const REFINED: usize = 6;

/// Most combinations of weights that are enumerated: 3 VMs on 7 levels, 4 on 4. Beyond it they are searched.
const ENUMERATED: usize = 512;

/// VMs up to which a step of the local search tries every VM's neighbours, not only those of the worst and the easiest.
const ALL_NEIGHBOURS: usize = 8;

/// Most weight steps per refinement: each moves one VM by one level, so this crosses the levels for several VMs.
const WEIGHT_STEPS: usize = 60;

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
            found.extend(evaluator.outcome(problem, &settle(problem, config)));
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
    let mut best = found.first().cloned()?;
    if weights_allowed(problem) {
        for seed in seeds(problem, &found) {
            let refined = weigh(problem, evaluator, seed);
            if refined.better_than(&best) {
                best = refined;
            }
        }
    }
    Some(best)
}

/// The best configurations in which weights act, one for each setting of the other knobs.
fn seeds(problem: &Problem<'_>, found: &[Outcome]) -> Vec<Outcome> {
    let mut seeds: Vec<Outcome> = Vec::new();
    for o in found.iter().filter(|o| weights_act(problem.spec, &o.config)) {
        let same = |s: &Outcome| {
            // Raising goes off with unequal weights, so it does not tell two seeds apart.
            let bfq = Bfq { low_latency: o.config.bfq.low_latency, ..s.config.bfq };
            bfq == o.config.bfq
                && s.config.vms.iter().zip(&o.config.vms).all(|(a, b)| {
                    (a.cap, a.guest_elevator, a.guest_bfq) == (b.cap, b.guest_elevator, b.guest_bfq)
                })
        };
        if !seeds.iter().any(same) {
            seeds.push(o.clone());
        }
        if seeds.len() == REFINED {
            break;
        }
    }
    seeds
}

/// The best weights for the other settings of `seed`.
fn weigh(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, seed: Outcome) -> Outcome {
    let levels = &problem.options.space.weights;
    let combinations = u32::try_from(seed.config.vms.len()).ok().and_then(|n| levels.len().checked_pow(n));
    match combinations {
        Some(n) if n <= ENUMERATED => {
            let mut best = seed.clone();
            for mut code in 0..n {
                let mut config = seed.config.clone();
                for vm in &mut config.vms {
                    vm.weight = levels[code % levels.len()];
                    code /= levels.len();
                }
                if let Some(o) = evaluator.outcome(problem, &settle(problem, config)) {
                    if o.better_than(&best) {
                        best = o;
                    }
                }
            }
            best
        }
        _ => refine(problem, evaluator, seed),
    }
}

/// Every combination of elevator, tunables, caps and guest elevators that the space allows, weights as at the start.
fn bases(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Vec<Config> {
    let (start, space) = (&problem.options.start, &problem.options.space);
    let mut elevators = vec![start.elevator];
    add_all(&mut elevators, &space.elevators);
    let mut out = Vec::new();
    for elevator in elevators {
        let tunables = if elevator == Elevator::Bfq { tunables(problem) } else { vec![start.bfq] };
        for bfq in tunables {
            let mut config = Config { elevator, bfq, vms: start.vms.clone() };
            if space.caps && problem.options.mode == CgroupMode::PerVm {
                lift_harmful_caps(problem, &mut config);
                for capped in caps(problem, evaluator, &config) {
                    out.extend(guests(problem, capped));
                }
            }
            out.extend(guests(problem, config));
        }
    }
    out
}

/// BFQ tunables of the space. Without idling there are no slices, so their lengths stay as they are.
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

/// A VM with targets never keeps a cap below its declared rate.
fn lift_harmful_caps(problem: &Problem<'_>, config: &mut Config) {
    for (vm, c) in problem.spec.vms.iter().zip(&mut config.vms) {
        let declared: f64 = vm.tasks.iter().filter_map(|t| t.rate).map(|r| r.0).sum();
        if vm.tightest_target().is_some() && c.cap.is_some_and(|cap| cap.0 < declared) {
            c.cap = None;
        }
    }
}

/// `config` with all cappable VMs held to a share of what the declared rates leave, in whole requests per second.
fn caps(problem: &Problem<'_>, evaluator: &Evaluator<'_>, config: &Config) -> Vec<Config> {
    if problem.cappable.is_empty() {
        return Vec::new();
    }
    let Ok(spare) = spare_rates(evaluator.profile(), problem.spec, config) else { return Vec::new() };
    CAP_SHARES
        .iter()
        .map(|share| {
            let mut c = config.clone();
            for &i in &problem.cappable {
                let declared: f64 =
                    problem.spec.vms[i].tasks.iter().filter_map(|t| t.rate).map(|r| r.0).sum();
                let cap = declared + spare[i].map_or(0.0, |s| s.0) * share;
                c.vms[i].cap = Some(Iops(cap.floor().max(1.0)));
            }
            c
        })
        .collect()
}

/// `config`, and with BFQ taken out of every guest that has it.
fn guests(problem: &Problem<'_>, config: Config) -> Vec<Config> {
    let mut plain = config.clone();
    for i in settable_guests(problem) {
        if plain.vms[i].guest_elevator == Elevator::Bfq {
            plain.vms[i].guest_elevator = Elevator::None;
        }
    }
    if plain == config { vec![config] } else { vec![config, plain] }
}

/// Weights in inverse proportion to each VM's tightest target, on the levels of the space; the lowest without target.
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

/// Moves weights one level at a time while it helps: more for the VM with the least margin, less for the one with the most.
fn refine(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, mut best: Outcome) -> Outcome {
    let levels = &problem.options.space.weights;
    for _ in 0..WEIGHT_STEPS {
        let Some(judged) = evaluator.judge(&best.config) else { return best };
        let mut margins = vec![f64::INFINITY; problem.spec.vms.len()];
        for (i, target) in problem.targets.iter().enumerate() {
            if let Some(target) = *target {
                let vm = problem.vm_of[i];
                margins[vm] = margins[vm].min(Problem::margin(target, judged.latency[i], judged.kept[i]));
            }
        }
        let worst = margins.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
        let most_urgent_missing =
            problem.urgency.iter().zip(&best.missed_by_urgency).find(|(_, n)| **n > 0).map(|(i, _)| *i);
        let easiest = margins.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
        let (up, down): (Vec<usize>, Vec<usize>) = if margins.len() <= ALL_NEIGHBOURS {
            ((0..margins.len()).collect(), (0..margins.len()).collect())
        } else {
            (most_urgent_missing.into_iter().chain(worst).collect(), easiest.into_iter().collect())
        };
        let weight = |i: usize| best.config.vms[i].weight;
        let mut moves = Vec::new();
        moves.extend(up.iter().filter_map(|&i| level_above(levels, weight(i)).map(|w| (i, w))));
        moves.extend(down.iter().filter_map(|&i| level_below(levels, weight(i)).map(|w| (i, w))));
        let mut better = None;
        for (i, weight) in moves {
            let mut config = best.config.clone();
            config.vms[i].weight = weight;
            let outcome = evaluator.outcome(problem, &settle(problem, config));
            better = outcome.filter(|o| o.better_than(better.as_ref().unwrap_or(&best))).or(better);
        }
        match better {
            Some(b) => best = b,
            None => break,
        }
    }
    best
}

fn nearest(levels: &[u32], wish: f64) -> u32 {
    let off = |w: &u32| (f64::from(*w) - wish).abs();
    levels.iter().copied().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(100)
}

fn level_above(levels: &[u32], weight: u32) -> Option<u32> {
    levels.iter().copied().filter(|&l| l > weight).min()
}

fn level_below(levels: &[u32], weight: u32) -> Option<u32> {
    levels.iter().copied().filter(|&l| l < weight).max()
}

fn add_all<T: Copy + PartialEq>(to: &mut Vec<T>, more: &[T]) {
    for &m in more {
        if !to.contains(&m) {
            to.push(m);
        }
    }
}
