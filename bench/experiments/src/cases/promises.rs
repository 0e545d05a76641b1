//! Trials that tuning needs, and coverage of the bound of settings that were chosen by it.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_planner::tune::TuneGoal;

use crate::cases::passes::{TRIAL, case_of, worst_awake};
use crate::claims::Claim;
use rtvirtio_learn::dataset::{Outcome, Point};
use rtvirtio_learn::statistic::median;

/// Most trials that tuning may take.
const TRIALS: f64 = 15.0;

/// Trials that tuning took until one setting met all targets as often as `goal` requires, in the
/// cases of `possible`. As in the tuner, a setting that missed in one of its trials does not count.
#[must_use]
pub fn trials(points: &[Point], possible: &BTreeSet<String>, goal: &TuneGoal) -> Option<Claim> {
    let mut by: BTreeMap<&str, Vec<&Point>> = BTreeMap::new();
    for p in points.iter().filter(|p| p.scheme == TRIAL && possible.contains(case_of(&p.id))) {
        by.entry(case_of(&p.id)).or_default().push(p);
    }
    let reached = |trials: &[&Point]| {
        trials.iter().any(|of| {
            let same: Vec<f64> =
                trials.iter().filter(|p| p.knobs == of.knobs).map(|p| worst_awake(p)).collect();
            same.len() >= goal.repeats && same.iter().all(|score| *score <= goal.score)
        })
    };
    let counts: Vec<Option<usize>> = by.values().map(|t| reached(t).then_some(t.len())).collect();
    let never = counts.iter().filter(|n| n.is_none()).count();
    // A goal that was not reached counts as one trial more than allowed.
    let taken: Vec<f64> = counts.into_iter().map(|n| n.unwrap_or(goal.trials + 1) as f64).collect();
    let most = taken.iter().copied().reduce(f64::max)?;
    let what = format!(
        "most trials of tuning until a setting met {} of all targets in each of {} trials, in cases that some setting passes; median {}, {never} not reached",
        goal.score,
        goal.repeats,
        median(taken)
    );
    Some(Claim::new("tune.trials", what, most, "trials", by.len()).at_most(TRIALS))
}

/// Coverage of the learned bound, for tails as measured and less the host's own stalls: of settings
/// chosen because their bound is within the targets, and of those that the slice model chose where
/// no bound met all targets. `confidence` is the bound's own.
#[must_use]
pub fn chosen(points: &[Point], confidence: f64) -> Vec<Claim> {
    let by_bound = points.iter().filter(|p| p.is_of("bound"));
    let (shown, other): (Vec<&Point>, Vec<&Point>) = by_bound.partition(|p| within(p));
    type Check = fn(&Outcome) -> Option<bool>;
    let measured: Check = |o| Some(o.p9999 <= o.promised?);
    let awake: Check = |o| Some(o.tail() <= o.upper?);
    let claim = |id: &str, of: &[&Point], what: String, held: Check| {
        let tasks = of.iter().flat_map(|p| p.tasks()).filter(|(_, s, _)| s.target.is_some());
        let held: Vec<bool> = tasks.filter_map(|(_, _, o)| held(o)).collect();
        let share = held.iter().filter(|h| **h).count() as f64 / held.len().max(1) as f64;
        (!held.is_empty()).then(|| Claim::new(id, what, share, "share", held.len()))
    };
    let kinds = [
        ("", "tails with the host's own stalls below the bound given before the run", measured),
        ("_awake", "tails less the host's own stalls below the bound given before the run", awake),
    ];
    let mut out = Vec::new();
    for (end, what, held) in kinds {
        let at = 100.0 * confidence;
        let chosen = format!("{what}, of settings chosen by the bound at {at:.0} %");
        let id = format!("cases.bound.coverage{end}");
        out.extend(claim(&id, &shown, chosen, held).map(|c| c.at_least(confidence)));
        let elsewhere = "the same where no bound met all targets, and the slice model chose".to_owned();
        out.extend(claim(&format!("cases.bound.coverage_elsewhere{end}"), &other, elsewhere, held));
    }
    out
}

/// Whether the bound given before a run was within every target.
fn within(point: &Point) -> bool {
    let mut tasks = point.tasks().filter(|(_, s, _)| s.target.is_some());
    tasks.all(|(_, s, o)| o.upper.zip(s.target).is_some_and(|(upper, target)| upper <= target))
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::cases::passes::tests::run;
    use rtvirtio_learn::load::Knobs;

    /// A trial of the case with a target of 400 ms, at a weight that names its setting.
    fn trial(n: usize, weight: u32, tail_ms: u64) -> Point {
        let mut p = run("trial", n, tail_ms, 100.0, 0);
        p.knobs = Knobs { weights: vec![weight], ..p.knobs };
        p
    }

    fn claim(points: &[Point]) -> Claim {
        let possible = BTreeSet::from(["1vm-L-paper".to_owned()]);
        trials(points, &possible, &TuneGoal::default()).unwrap()
    }

    #[test]
    fn a_setting_that_was_good_each_time_counts() {
        let c = claim(&[trial(1, 100, 900), trial(2, 200, 40), trial(3, 200, 40)]);
        assert_eq!((c.value, c.met), (3.0, true));
        assert!(c.what.contains("0 not reached"), "{}", c.what);
    }

    #[test]
    fn a_setting_that_was_good_all_but_once_does_not() {
        let mostly: Vec<Point> = (1..=15).map(|n| trial(n, 100, if n == 2 { 440 } else { 40 })).collect();
        let c = claim(&mostly);
        assert_eq!((c.value, c.met), (16.0, false));
        assert!(c.what.contains("1 not reached"), "{}", c.what);
        // A tail between nine tenths of the target and the target does not reach the goal: the
        // tuner requires the margin.
        assert_eq!(claim(&[trial(1, 100, 380), trial(2, 100, 380)]).value, 16.0);
        assert!(trials(&mostly, &BTreeSet::new(), &TuneGoal::default()).is_none());
    }

    #[test]
    fn what_the_bound_did_not_choose_is_told_apart() {
        let with = |upper_ms: u64, tail_ms: u64| {
            let mut p = run("slice,bound", 0, tail_ms, 100.0, 0);
            p.results[0].upper = Some(Nanos::from_millis(upper_ms));
            p.results[0].promised = p.results[0].upper;
            p
        };
        // The target is 400 ms. Two chosen by the bound, of which one is above it; one where the
        // bound is far above the target.
        let claims = chosen(&[with(300, 200), with(100, 150), with(9_000, 300)], 0.99);
        let of = |id: &str| claims.iter().find(|c| c.id == id).map(|c| (c.value, c.n, c.met)).unwrap();
        assert_eq!(of("cases.bound.coverage"), (0.5, 2, false));
        assert_eq!(of("cases.bound.coverage_awake"), (0.5, 2, false));
        assert!(chosen(&[with(300, 200), with(100, 150)], 0.5)[0].met);
        assert_eq!(of("cases.bound.coverage_elsewhere"), (1.0, 1, true));
        assert!(chosen(&[run("slice", 0, 1, 100.0, 0)], 0.99).is_empty());
    }
}
