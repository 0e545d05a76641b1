//! Choice of the VMs that are served, and of those that are capped for them, where the device
//! cannot carry all declared rates.
//!
//! Some VM loses rate then under every setting. Weights leave the choice to the elevator, and
//! mostly all miss; limits decide it. VMs are admitted by urgency while the device carries them,
//! one that is too much for the remainder is skipped, and those that are not admitted share it.

use rtvirtio_model::{Config, Elevator, declared_shares};
use rtvirtio_units::Ratio;

use super::whole_cap;
use crate::PlanOptions;
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Shares of the device up to which VMs are admitted, in turn. No VM is given up where the declared
/// rates take no more than all of it: then it is targets that do not fit, and a VM that loses its
/// rate for those of another has lost more than the other gains.
const CEILINGS: [f64; 6] = [0.95, 0.85, 0.75, 0.65, 0.5, 0.35];

/// Share of the budget of evaluations for each ceiling.
const EACH: f64 = 0.1;

/// Share of the budget for the search before, in which no VM is given up.
const BEFORE: f64 = 0.35;

/// Largest factor between two caps that the search has tried.
const WIDEST: f64 = 3.0;

/// Bisection steps between two of these: to within 7 %.
const STEPS: u32 = 4;

/// Margin up to which a VM with declared rates is capped further: with it a prediction of half the
/// truth still meets the target. A flood is capped for more ([`PlanOptions::enough`]).
pub(crate) const ENOUGH: f64 = 0.5;

/// Share of the device that the rates of each VM take: of the device's own capacity, without the
/// cost of an elevator.
fn shares(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Vec<f64> {
    let config = Config { elevator: Elevator::None, ..problem.options.start.clone() };
    declared_shares(evaluator.profile(), problem.spec, &config).unwrap_or_default()
}

/// Share of the device of all VMs with targets; above 1 one of them loses rate under every setting.
pub(crate) fn asked(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> f64 {
    let shares = shares(problem, evaluator);
    shares
        .iter()
        .zip(&problem.spec.vms)
        .filter(|(_, vm)| vm.tightest_target().is_some())
        .map(|(s, _)| s)
        .sum()
}

/// Shares of all VMs, if they sum to more than the device and limits may be set.
fn too_much(problem: &Problem<'_>, evaluator: &Evaluator<'_>) -> Option<Vec<f64>> {
    let options = problem.options;
    // Where no limit acts on any VM, giving one up does not help.
    let may = options.space.caps && (0..problem.spec.vms.len()).any(|vm| options.placements.limits_act(vm));
    let shares = shares(problem, evaluator);
    (may && shares.iter().sum::<f64>() > 1.0).then_some(shares)
}

/// `problem` with other targets, in which VMs without any of them may be capped where the declared
/// rates exceed the device.
pub(crate) fn released<'a>(
    problem: &Problem<'a>,
    evaluator: &Evaluator<'_>,
    targets: Vec<Option<f64>>,
) -> Problem<'a> {
    let new = problem.with_targets(targets);
    if too_much(problem, evaluator).is_none() {
        return new;
    }
    let tightest = new.tightest();
    let rated = |vm: &usize| problem.spec.vms[*vm].tasks.iter().any(|t| t.rate.is_some());
    let given_up = (0..tightest.len()).filter(|&vm| tightest[vm].is_none()).filter(rated).collect();
    Problem { given_up, ..new }
}

/// Result of `first`; where that misses targets and the declared rates exceed the device, a result
/// that serves more urgent VMs by giving up others.
pub(super) fn search(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    first: impl FnOnce(&mut Evaluator<'_>) -> Option<Outcome>,
) -> Option<Outcome> {
    let shares =
        if problem.thorough && problem.given_up.is_empty() { too_much(problem, evaluator) } else { None };
    let Some(shares) = shares else { return first(evaluator) };
    let whole = evaluator.limit(BEFORE);
    let found = first(evaluator);
    evaluator.lift(whole);
    let mut best = found?;
    if best.missed == 0 {
        return Some(best);
    }
    let said = problem.options.enough.map_or(ENOUGH, |enough| enough.0.min(ENOUGH));
    let options = PlanOptions { enough: Some(Ratio(said)), ..problem.options.clone() };
    let mut before = Vec::new();
    for ceiling in CEILINGS {
        let given_up = beyond(problem, &shares, ceiling);
        if given_up == before {
            continue;
        }
        before.clone_from(&given_up);
        let fewer = Problem { options: &options, ..problem.without(given_up) };
        if fewer.targets.iter().all(Option::is_none) {
            break;
        }
        let whole = evaluator.limit(EACH);
        let served = super::search(&fewer, evaluator).map(|served| loosen(&fewer, evaluator, served));
        evaluator.lift(whole);
        let Ok(served) = served else { continue };
        let all = served.missed == 0;
        if let Some(mut outcome) = evaluator.outcome(problem, served.config) {
            if outcome.better_than(&best) {
                outcome.given_up = fewer.given_up;
                best = outcome;
            }
        }
        if all {
            break;
        }
    }
    Some(best)
}

/// `found` with the loosest possible limits of the VMs that are given up, between the steps in
/// which they were searched.
fn loosen(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, found: Outcome) -> Outcome {
    if found.missed > 0 || !found.has_enough() {
        return found;
    }
    let (mut tight, mut loose, mut best) = (1.0, WIDEST, found.clone());
    for _ in 0..STEPS {
        let middle = f64::sqrt(tight * loose);
        let mut config = found.config.clone();
        for &i in &problem.given_up {
            config.vms[i].cap = config.vms[i].cap.map(|cap| whole_cap(cap.0 * middle));
        }
        match evaluator.outcome(problem, config).filter(|o| o.missed == 0 && o.has_enough()) {
            Some(o) => (tight, best) = (middle, o),
            None => loose = middle,
        }
    }
    best
}

/// VMs that are not admitted, in spec order: those that no longer fit when the more urgent ones are
/// served.
fn beyond(problem: &Problem<'_>, shares: &[f64], ceiling: f64) -> Vec<usize> {
    let mut taken = 0.0;
    let mut given_up = Vec::new();
    for &vm in &problem.urgency {
        if taken + shares[vm] <= ceiling {
            taken += shares[vm];
        } else {
            given_up.push(vm);
        }
    }
    given_up.sort_unstable();
    given_up
}

#[cfg(test)]
mod tests;
