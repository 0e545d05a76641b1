//! The search of the scheme `bound`: the slice model evaluates everything, the learned bound the
//! best of it.
//!
//! The learned model costs a hundred times the slice model. So the slice model ranks the whole
//! space, of which the best of each kind go on: one kind is an elevator, with or without idling,
//! with or without caps. Hill climbing starts from the best of those by their bounds.
//!
//! Where no bound meets all targets nothing can be promised, and a choice by the least bad bound is
//! a choice by the bounds' own errors: in the strict cases such choices passed 5 of 16, those of
//! the slice model 9 (all 16 less the host's stalls). So the slice model then decides, and the
//! bounds only exclude: of the settings it predicts to be good, none whose bound for some task is
//! many times that of others. On a disk that others use, it predicted no harm from a writer without
//! a limit under which reads waited 2.2 s; its bound was 580 times the target, those of limits 2 to
//! 5 times.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_model::{Config, Elevator, ModelKind};
use rtvirtio_units::Ratio;

use super::{climb, settable_guests, slice, weights_differ};
use crate::PlanOptions;
use crate::evaluate::{Evaluator, Outcome, Problem};
use crate::types::RATE_KEPT;

/// Configurations of each kind that are judged by their bounds.
const PER_KIND: usize = 6;

/// Configurations from which the search climbs.
const CLIMBED: usize = 2;

/// Safety margin where only the expected tail is known, as for the scheme `slice`.
pub(crate) const SAFETY: Ratio = Ratio(0.2);

/// Largest allowed ratio of a choice's bound to the least known bound of a task, for choices of the
/// slice model. Bounds are up to 20 times the tails that they hold for, in the median of a dataset,
/// so smaller differences say little; the ones that matter are by hundreds.
const FAR: f64 = 20.0;

/// Largest such ratio of the replacement.
const NEAR: f64 = 2.0;

/// Most moves of a climb.
const STEPS: usize = 12;

pub(super) fn search(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    start: Option<Outcome>,
) -> Option<Outcome> {
    let mut found: Vec<Outcome> = start.into_iter().collect();
    for config in shortlist(problem, evaluator) {
        found.extend(evaluator.outcome(problem, as_learned(problem, config)));
    }
    found.sort_by(|a, b| b.compare(a));
    let mut best = found.first().cloned()?;
    if best.missed == 0 && best.has_enough() {
        return Some(best);
    }
    for from in found.into_iter().take(CLIMBED) {
        let top = climb::climb(problem, evaluator, from, STEPS);
        if top.better_than(&best) {
            best = top;
        }
    }
    Some(best)
}

/// The slice model's choice, as judged by the learned model; or another setting of those it
/// predicts to be good where the learned bound of that is far better.
pub(super) fn expected(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>) -> Option<Outcome> {
    let mut asked = problem.options.clone();
    asked.start = as_learned(problem, asked.start);
    let options = PlanOptions { model: ModelKind::Slice, learned: None, safety: SAFETY, ..asked };
    let by_slice = Problem::new(problem.spec, &options).with_targets(problem.targets.clone());
    let mut slice = Evaluator::new(evaluator.profile(), problem.spec, &options).ok()?;
    let found = super::search(&by_slice, &mut slice).ok()?;
    let outcome = evaluator.outcome(problem, found.config)?;
    if found.missed > 0 || !found.given_up.is_empty() {
        // The slice model found no good setting, or only by giving VMs up.
        return Some(Outcome { given_up: found.given_up, ..outcome });
    }
    let all: Vec<BoundedOutcome> = std::iter::once(outcome.config)
        .chain(good_ones(&by_slice, &mut slice))
        .filter_map(|config| BoundedOutcome::new(problem, evaluator, config))
        .collect();
    let taken = unless_far_worse(&all);
    let raw = all.into_iter().nth(taken)?.outcome;
    if taken == 0 {
        return Some(raw);
    }
    // Tidied by the bounds alone, the choice may lose settings that the slice model needs.
    let tidied = super::tidy(problem, evaluator, raw.clone(), super::WITHIN_ERROR);
    let good = slice.outcome(&by_slice, tidied.config.clone()).is_some_and(|o| o.missed == 0);
    Some(if good { tidied } else { raw })
}

/// A configuration judged by the bounds.
struct BoundedOutcome {
    outcome: Outcome,
    /// Bound over target of every task with a target.
    over: Vec<f64>,
    /// Least share of its declared rate that one of these tasks is expected to keep.
    kept: f64,
}

impl BoundedOutcome {
    /// `None` where the model does not cover the configuration or the budget is spent.
    fn new(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, config: Config) -> Option<Self> {
        let judged = evaluator.judge(&config)?;
        let targets = || problem.targets.iter().enumerate().filter_map(|(i, t)| t.map(|t| (i, t)));
        let over = targets().map(|(i, t)| judged.latency[i] / t).collect();
        let kept = targets().map(|(i, _)| judged.kept[i]).fold(f64::INFINITY, f64::min);
        Some(Self { outcome: problem.outcome(config, judged), over, kept })
    }
}

/// Of the settings that meet all targets of `problem`, the best of each kind and of each set of
/// caps, best first.
fn good_ones(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>) -> Vec<Config> {
    let start = evaluator.outcome(problem, problem.options.start.clone());
    let mut taken = BTreeSet::new();
    let mut new = |c: &Config| {
        let caps: Vec<Option<u64>> = c.vms.iter().map(|vm| vm.cap.map(|cap| cap.0 as u64)).collect();
        taken.insert((kind(c), caps))
    };
    let candidates = slice::candidates(problem, evaluator, start).into_iter();
    candidates.filter(|o| o.missed == 0).map(|o| o.config).filter(|c| new(c)).collect()
}

/// Index of the setting to take; the first is the slice model's choice, the others follow in its
/// order of preference. The first is taken unless the bounds of another meet all targets, or its
/// bound for some task is more than [`FAR`] times the least known one; then the first that is near
/// to those least ones in all tasks. Settings that keep less rate than the choice are left out of
/// the comparison: their tails are always short.
fn unless_far_worse(all: &[BoundedOutcome]) -> usize {
    if let Some(proven) = all.iter().position(|s| s.outcome.missed == 0) {
        return proven;
    }
    let Some(chosen) = all.first() else { return 0 };
    let keeps = |s: &&BoundedOutcome| s.kept >= chosen.kept.min(RATE_KEPT);
    let keeping = || all.iter().filter(keeps);
    // A bound below its target counts like one at it.
    let least = |task: usize| keeping().map(|s| s.over[task]).fold(f64::INFINITY, f64::min).max(1.0);
    let least: Vec<f64> = (0..chosen.over.len()).map(least).collect();
    let worse =
        |s: &BoundedOutcome| s.over.iter().zip(&least).map(|(over, least)| over / least).fold(0.0, f64::max);
    let nearest = keeping().map(worse).fold(f64::INFINITY, f64::min);
    if worse(chosen) <= FAR * nearest {
        return 0;
    }
    all.iter().position(|s| keeps(&s) && worse(s) <= NEAR * nearest).unwrap_or(0)
}

/// `config` without guest elevators, where the learned model was trained on guests: the training
/// runs had none, and the bounds prove nothing for others.
fn as_learned(problem: &Problem<'_>, mut config: Config) -> Config {
    if problem.options.learned.as_ref().is_some_and(|model| model.guests.is_some()) {
        for i in settable_guests(problem) {
            config.vms[i].guest_elevator = Elevator::None;
        }
    }
    config
}

/// The slice model's best configurations of each kind.
fn shortlist(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Vec<Config> {
    let options = PlanOptions { model: ModelKind::Slice, learned: None, ..problem.options.clone() };
    // Cannot fail: the slice model needs nothing learned.
    let Ok(mut by_slice) = Evaluator::new(evaluator.profile(), problem.spec, &options) else {
        return Vec::new();
    };
    diverse(problem, &mut by_slice, PER_KIND, usize::MAX)
}

/// Kind: elevator, whether it idles, whether any VM is capped, and whether weights differ.
fn kind(c: &Config) -> (u8, bool, bool, bool) {
    (
        c.elevator as u8,
        c.elevator == Elevator::Bfq && c.bfq.slice_idle.0 > 0,
        c.vms.iter().any(|vm| vm.cap.is_some()),
        weights_differ(c),
    )
}

/// The best configurations of each kind by the evaluator's model, best first, at most `most`.
pub(crate) fn diverse(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    per_kind: usize,
    most: usize,
) -> Vec<Config> {
    let start = evaluator.outcome(problem, problem.options.start.clone());
    let mut taken: BTreeMap<_, usize> = BTreeMap::new();
    let mut out: Vec<Config> = Vec::new();
    for o in slice::candidates(problem, evaluator, start) {
        let n = taken.entry(kind(&o.config)).or_default();
        if *n < per_kind && out.len() < most && !out.contains(&o.config) {
            *n += 1;
            out.push(o.config);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configuration whose bounds are so many times the targets.
    fn of_bounds(over: &[f64]) -> BoundedOutcome {
        let missed = over.iter().filter(|o| **o > 1.0).count() as u32;
        let outcome = Outcome {
            config: Config { elevator: Elevator::None, bfq: rtvirtio_model::Bfq::default(), vms: Vec::new() },
            missed,
            missed_by_urgency: vec![missed],
            margin: 1.0 - over.iter().copied().fold(0.0, f64::max),
            enough: 0.75,
            changes: 0,
            given_up: Vec::new(),
            left: 0.0,
        };
        BoundedOutcome { outcome, over: over.to_vec(), kept: 1.0 }
    }

    fn taken(all: &[&[f64]]) -> usize {
        unless_far_worse(&all.iter().map(|over| of_bounds(over)).collect::<Vec<_>>())
    }

    #[test]
    fn bounds_forbid_only_what_is_far_worse_and_do_not_choose() {
        assert_eq!(taken(&[&[580.0], &[580.0], &[7.0], &[3.5], &[2.0], &[5.0]]), 3);
        assert_eq!(taken(&[&[39.0], &[7.0], &[3.5], &[2.0]]), 0);
        assert_eq!(taken(&[&[41.0], &[7.0], &[2.0]]), 2);
        assert_eq!(taken(&[&[580.0]]), 0);
        assert_eq!(taken(&[&[1.2], &[30.0], &[400.0]]), 0);
        assert_eq!(taken(&[]), 0);
        // What is proven is taken.
        assert_eq!(taken(&[&[15.0], &[1.7], &[0.9]]), 2);
        assert_eq!(taken(&[&[0.9], &[0.5]]), 0);
        // A task that nothing helps does not hide what is done to another.
        assert_eq!(taken(&[&[300.0, 580.0], &[310.0, 3.0]]), 1);
        // A setting far from the least bound in either task is no replacement.
        assert_eq!(taken(&[&[300.0, 580.0], &[9000.0, 3.0], &[310.0, 400.0]]), 0);
    }

    #[test]
    fn a_tail_that_is_short_because_rate_is_lost_counts_for_nothing() {
        let mut all = [of_bounds(&[31.0]), of_bounds(&[1.5])];
        assert_eq!(unless_far_worse(&all), 1);
        all[1].kept = 0.95;
        assert_eq!(unless_far_worse(&all), 0);
        // Where the choice is expected to lose as much rate, the replacement stands.
        all[0].kept = 0.9;
        assert_eq!(unless_far_worse(&all), 1);
    }
}
