//! The search of weights: enumerated where there are few combinations, else on fewer levels, with a
//! local search from the best of those.

use rtvirtio_model::{Bfq, Config, weights_act};

use super::{ALL_NEIGHBOURS, Pressed, above, below, settle, weighed};
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Most settings of the other knobs whose weights are searched.
const SEEDS: usize = 24;

/// Most combinations of weights that are enumerated, for all settings of the other knobs together:
/// for each of 24 seeds all of 2 VMs on 7 levels, 4 VMs on 3.
const ENUMERATED: usize = 2400;

/// Number of the best of these from which all levels are searched.
const STARTS: usize = 8;

/// Number of starts where the only question is whether the targets can be met.
const FEW_STARTS: usize = 2;

/// Share of the budget of evaluations for [`polish`].
const POLISH: f64 = 0.25;

/// Number of local searches from the best weights at other scales and with other lengths of idling.
const SCALED: usize = 12;

/// VMs up to which all of them are moved at once, by a level each.
const MOST_VMS_IN_FULL: usize = 5;

/// Most rounds of moves of several VMs and of other scales.
const ROUNDS: usize = 4;

/// Most steps of a local search.
const WEIGHT_STEPS: usize = 60;

/// The best configurations in which weights act, one for each setting of the other knobs.
pub(super) fn seeds(problem: &Problem<'_>, found: &[Outcome]) -> Vec<Outcome> {
    let mut seeds: Vec<Outcome> = Vec::new();
    for o in found.iter().filter(|o| weights_act(problem.spec, &o.config)) {
        let same = |s: &Outcome| {
            // Raising is switched off with unequal weights, so it does not separate two seeds.
            let bfq = Bfq { low_latency: o.config.bfq.low_latency, ..s.config.bfq };
            bfq == o.config.bfq
                && s.config.vms.iter().zip(&o.config.vms).all(|(a, b)| {
                    (a.cap, a.guest_elevator, a.guest_bfq) == (b.cap, b.guest_elevator, b.guest_bfq)
                })
        };
        if !seeds.iter().any(same) {
            seeds.push(o.clone());
        }
        if seeds.len() == SEEDS {
            break;
        }
    }
    seeds
}

/// The best weights for the other settings of any of the `seeds`. All combinations of levels are
/// enumerated where there are few enough, else those of fewer levels; from the best of them the
/// levels are searched one VM at a time, and finally several at a time.
pub(super) fn weigh(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    seeds: &[Outcome],
) -> Option<Outcome> {
    let levels = &problem.options.space.weights;
    let vms = u32::try_from(weighed(problem).len()).unwrap_or(u32::MAX);
    let room = ENUMERATED / seeds.len().max(1);
    let few = |n: &usize| n.checked_pow(vms).is_some_and(|all| all <= room);
    let mut found = Vec::new();
    if let Some(n) = (2..=levels.len()).rev().find(few) {
        let some = spread(levels, n);
        found = seeds.iter().flat_map(|seed| enumerate(problem, evaluator, seed, &some)).collect();
    }
    found.extend(seeds.iter().cloned());
    let starts = if problem.thorough { STARTS } else { FEW_STARTS };
    let refined = first(found, starts).into_iter().map(|start| refine(problem, evaluator, start, &single));
    let best = refined.reduce(better)?;
    if problem.spec.vms.len() > ALL_NEIGHBOURS || !problem.thorough {
        return Some(best);
    }
    // With more VMs this would take too long, and an infeasible result has yet to be explained.
    let whole = evaluator.limit(POLISH);
    let best = polish(problem, evaluator, seeds, best);
    evaluator.lift(whole);
    Some(best)
}

fn better(best: Outcome, next: Outcome) -> Outcome {
    if next.better_than(&best) { next } else { best }
}

/// Continues from `best`: several VMs at once, at other scales, with other lengths of idling.
fn polish(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    seeds: &[Outcome],
    mut best: Outcome,
) -> Outcome {
    let levels = &problem.options.space.weights;
    for _ in 0..ROUNDS {
        let mut next = refine(problem, evaluator, best.clone(), &several);
        let mut judge = |config: Config| evaluator.outcome(problem, settle(problem, config));
        // With these weights another setting of the other knobs may be best: the best one for each
        // length of idling.
        let others = seeds.iter().map(|seed| with_weights(seed.config.clone(), &next.config));
        let mut others = first(others.filter_map(&mut judge).collect(), SEEDS);
        others.insert(0, next.clone());
        let mut idles = Vec::new();
        others.retain(|o| {
            let new = !idles.contains(&o.config.bfq.slice_idle);
            idles.push(o.config.bfq.slice_idle);
            new
        });
        let scaled: Vec<Outcome> =
            others.iter().flat_map(|o| scaled(levels, &o.config)).filter_map(&mut judge).collect();
        for start in first(scaled, SCALED) {
            next = better(next, refine(problem, evaluator, start, &several));
        }
        if !next.better_than(&best) {
            break;
        }
        best = next;
    }
    best
}

/// The best `n`; the earlier ones among equals.
fn first(mut found: Vec<Outcome>, n: usize) -> Vec<Outcome> {
    found.sort_by(|a, b| b.compare(a));
    found.truncate(n);
    found
}

/// `config` with the weights of another one.
fn with_weights(mut config: Config, of: &Config) -> Config {
    for (vm, other) in config.vms.iter_mut().zip(&of.vms) {
        vm.weight = other.weight;
    }
    config
}

/// Copies of `config` with the same ratios of weights at other scales, as near as the levels come:
/// only the ratios act, and moves of a few VMs do not lead from one scale to another.
fn scaled(levels: &[u32], config: &Config) -> Vec<Config> {
    let most = config.vms.iter().map(|vm| vm.weight).max().unwrap_or(1).max(1);
    let at = |&level: &u32| {
        let mut config = config.clone();
        for vm in &mut config.vms {
            vm.weight = nearest(levels, f64::from(vm.weight) * f64::from(level) / f64::from(most));
        }
        config
    };
    levels.iter().map(at).collect()
}

/// Outcomes of every combination of `levels` as weights, the other knobs as in `seed`.
fn enumerate(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    seed: &Outcome,
    levels: &[u32],
) -> Vec<Outcome> {
    let vms = weighed(problem);
    let combinations = levels.len().pow(vms.len() as u32);
    let one = |mut code: usize| {
        let mut config = seed.config.clone();
        for &vm in &vms {
            config.vms[vm].weight = levels[code % levels.len()];
            code /= levels.len();
        }
        evaluator.outcome(problem, settle(problem, config))
    };
    (0..combinations).filter_map(one).collect()
}

/// `n` of the levels, at least 2, the first and the last among them.
fn spread(levels: &[u32], n: usize) -> Vec<u32> {
    (0..n).map(|i| levels[i * (levels.len() - 1) / (n - 1)]).collect()
}

/// New weights of some VMs.
type Move = Vec<(usize, u32)>;

/// Moves that may be made from an outcome.
type Moves<'a> = &'a dyn Fn(&Problem<'_>, &mut Evaluator<'_>, &Outcome) -> Vec<Move>;

/// Makes the best of the moves that `moves` offers, as long as one improves the result.
fn refine(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    mut best: Outcome,
    moves: Moves<'_>,
) -> Outcome {
    for _ in 0..WEIGHT_STEPS {
        let mut better: Option<Outcome> = None;
        for step in moves(problem, evaluator, &best) {
            let mut config = best.config.clone();
            for (vm, weight) in step {
                config.vms[vm].weight = weight;
            }
            let outcome = evaluator.outcome(problem, settle(problem, config));
            better = outcome.filter(|o| o.better_than(better.as_ref().unwrap_or(&best))).or(better);
        }
        match better {
            Some(b) => best = b,
            None => break,
        }
    }
    best
}

/// Moves of one VM to any level. With many VMs only to the next level: up for the one with the
/// least margin and the most urgent one that misses, down for the one with the most margin.
fn single(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, at: &Outcome) -> Vec<Move> {
    let levels = &problem.options.space.weights;
    if problem.spec.vms.len() <= ALL_NEIGHBOURS {
        let all = |vm| levels.iter().map(move |&weight| vec![(vm, weight)]);
        return weighed(problem).into_iter().flat_map(all).collect();
    }
    let Some(of) = Pressed::new(problem, evaluator, at) else { return Vec::new() };
    let weight = |i: usize| at.config.vms[i].weight;
    let up = of.missing.into_iter().chain(of.worst);
    let up = up.filter_map(|i| above(levels, weight(i)).map(|w| vec![(i, w)]));
    let down = of.easiest.into_iter().filter_map(|i| below(levels, weight(i)).map(|w| vec![(i, w)]));
    up.chain(down).collect()
}

/// Moves of any two VMs to any levels; and, with few VMs, every combination of one level up, one
/// down, or no move.
fn several(problem: &Problem<'_>, _: &mut Evaluator<'_>, at: &Outcome) -> Vec<Move> {
    let levels = &problem.options.space.weights;
    let vms = weighed(problem);
    let mut out = Vec::new();
    if problem.spec.vms.len() <= MOST_VMS_IN_FULL {
        let adjacent = |w: u32| [Some(w), above(levels, w), below(levels, w)];
        out.push(Vec::new());
        for &i in &vms {
            let with = |step: Move| {
                adjacent(at.config.vms[i].weight)
                    .into_iter()
                    .flatten()
                    .map(move |w| [step.as_slice(), &[(i, w)]].concat())
            };
            out = out.into_iter().flat_map(with).collect();
        }
    }
    for (k, &b) in vms.iter().enumerate() {
        for &a in &vms[..k] {
            for &of_a in levels {
                out.extend(levels.iter().map(|&of_b| vec![(a, of_a), (b, of_b)]));
            }
        }
    }
    out
}

pub(super) fn nearest(levels: &[u32], wish: f64) -> u32 {
    let off = |w: &u32| (f64::from(*w) - wish).abs();
    levels.iter().copied().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(100)
}
