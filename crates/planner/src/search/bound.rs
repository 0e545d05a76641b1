//! The search of the scheme `bound`: the slice model is asked about everything, the learned bound about the best of it.
//!
//! A network costs a hundred times what the slice model costs. So the slice model ranks the whole space, of which the best of each
//! kind go on: one kind is an elevator, with or without idling, with or without caps. From the best of those by their bounds we climb.
//!
//! Where no bound meets all targets there is nothing to promise, and to choose by what is promised least badly is to choose by the bounds' own errors: in the strict cases such
//! choices passed 5 of 16, those of the slice model 9 (all 16 less the host's stalls). So the slice model then decides alone, and the bounds are only told.

use std::collections::BTreeMap;

use rtvirtio_model::{Config, Elevator, ModelKind};
use rtvirtio_units::Ratio;

use super::{climb, slice, weights_differ};
use crate::PlanOptions;
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Configurations of each kind that are judged by their bounds.
const PER_KIND: usize = 6;

/// Configurations from which the search climbs.
const CLIMBED: usize = 2;

/// What a target must be met by where only the expected tail is known, as for the scheme `slice`.
pub(crate) const SAFETY: Ratio = Ratio(0.2);

/// Most moves of a climb.
const STEPS: usize = 12;

pub(super) fn search(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    start: Option<Outcome>,
) -> Option<Outcome> {
    let mut found: Vec<Outcome> = start.into_iter().collect();
    for config in shortlist(problem, evaluator) {
        found.extend(evaluator.outcome(problem, config));
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

/// What the slice model would choose, as the learned model judges it.
pub(super) fn expected(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>) -> Option<Outcome> {
    let asked = problem.options.clone();
    let options = PlanOptions { model: ModelKind::Slice, learned: None, safety: SAFETY, ..asked };
    let by_slice = Problem::new(problem.spec, &options).with_targets(problem.targets.clone());
    let mut slice = Evaluator::new(evaluator.profile(), problem.spec, &options).ok()?;
    let found = super::search(&by_slice, &mut slice).ok()?;
    let outcome = evaluator.outcome(problem, found.config)?;
    Some(Outcome { given_up: found.given_up, ..outcome })
}

/// The slice model's best of each kind.
fn shortlist(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Vec<Config> {
    let options = PlanOptions { model: ModelKind::Slice, learned: None, ..problem.options.clone() };
    // Cannot fail: the slice model needs nothing learned.
    let Ok(mut by_slice) = Evaluator::new(evaluator.profile(), problem.spec, &options) else {
        return Vec::new();
    };
    diverse(problem, &mut by_slice, PER_KIND, usize::MAX)
}

/// The best configurations of each kind by the evaluator's model, best first, at most `most`.
pub(crate) fn diverse(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    per_kind: usize,
    most: usize,
) -> Vec<Config> {
    let start = evaluator.outcome(problem, problem.options.start.clone());
    let kind = |c: &Config| {
        (
            c.elevator as u8,
            c.elevator == Elevator::Bfq && c.bfq.slice_idle.0 > 0,
            c.vms.iter().any(|vm| vm.cap.is_some()),
            weights_differ(c),
        )
    };
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
