//! Spread between runs of the same condition: no prediction can be sharper.
//!
//! A tail is a random quantity. A bound that holds for 99 of 100 runs must leave room for the
//! spread between runs of one condition, and so would a model that knew the distribution of each
//! condition exactly. The spread is measured by running some conditions more than once.

use rtvirtio_model::learned::Regime;
use serde::Serialize;

use rtvirtio_learn::condition::{conditions, regime};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::statistic::median;

/// Normal quantile of 99 %.
const Z99: f64 = 2.326;

/// Spread of repeated conditions.
#[derive(Clone, Debug, Serialize)]
pub struct Repeatability {
    /// Conditions that ran more than once.
    pub conditions: usize,
    /// Number of runs of these conditions.
    pub runs: usize,
    /// Per regime: name, pairs of runs, typical factor between two runs (median of larger over
    /// smaller), 90th percentile of that.
    pub regimes: Vec<(String, usize, f64, f64)>,
    /// Median over all tasks of the factor that a bound at 99 % needs above the median of its own
    /// condition: `exp(2.33 s)`, with `s` the standard deviation of ln(tail) between runs of one
    /// condition, pooled in each regime. Tails are taken as log-normal here, which is optimistic:
    /// theirs are heavier.
    pub floor: f64,
    /// `Repeatability::floor` of tasks in runs in which BFQ does not idle, and the number of such
    /// runs; `None` without any.
    pub non_idling: Option<(f64, usize)>,
}

/// Spread of repeated conditions; `None` when no condition ran twice.
#[must_use]
pub fn repeatability(points: &[Point]) -> Option<Repeatability> {
    let groups: Vec<Vec<&Point>> = conditions(points)
        .into_iter()
        .filter(|g| g.len() > 1)
        .map(|g| g.into_iter().map(|i| &points[i]).collect())
        .collect();
    let mut ratios: Vec<Vec<f64>> = vec![Vec::new(); Regime::ALL.len()];
    // Sum of squares about the mean and degrees of freedom, by regime.
    let mut spread = vec![(0.0f64, 0usize); Regime::ALL.len()];
    let mut non_idling_runs = 0;
    for group in &groups {
        let of = regime(group[0]);
        non_idling_runs += if of.is_non_idling() { group.len() } else { 0 };
        let regime = of.category();
        for task in 0..group[0].results.len() {
            if group[0].tasks().nth(task).is_none_or(|(_, s, _)| s.rate.is_none()) {
                continue;
            }
            let logs: Vec<f64> =
                group.iter().map(|p| p.results[task].tail().as_secs_f64().max(1e-6).ln()).collect();
            let mean = logs.iter().sum::<f64>() / logs.len() as f64;
            spread[regime].0 += logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>();
            spread[regime].1 += logs.len() - 1;
            for (i, a) in logs.iter().enumerate() {
                ratios[regime].extend(logs[..i].iter().map(|b| (a - b).abs().exp()));
            }
        }
    }
    if groups.is_empty() {
        return None;
    }
    let factor =
        |(squares, freedom): &(f64, usize)| (Z99 * (squares / (*freedom).max(1) as f64).sqrt()).exp();
    let median_of =
        |of: &[(f64, usize)]| median(of.iter().flat_map(|s| std::iter::repeat_n(factor(s), s.1)).collect());
    let flows = |r: &&Regime| r.is_non_idling();
    let of_non_idling: Vec<(f64, usize)> =
        Regime::ALL.iter().filter(flows).map(|r| spread[r.category()]).collect();
    let non_idling = (non_idling_runs > 0).then(|| (median_of(&of_non_idling), non_idling_runs));
    let regimes = Regime::ALL
        .iter()
        .zip(ratios)
        .map(|(r, mut of)| {
            of.sort_unstable_by(f64::total_cmp);
            let p90 = of.get(of.len() * 9 / 10).copied().unwrap_or(0.0);
            (r.name().to_owned(), of.len(), median(of), p90)
        })
        .collect();
    let runs = groups.iter().map(Vec::len).sum();
    Some(Repeatability { conditions: groups.len(), runs, regimes, floor: median_of(&spread), non_idling })
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;
    use rtvirtio_learn::synthetic::synthetic_runs;

    #[test]
    fn the_spread_between_runs_is_found_and_conditions_are_told_apart() {
        let mut points = synthetic_runs(20, 0.0, 1);
        assert!(repeatability(&points).is_none(), "each condition ran once");
        // Each condition again, by a factor of e^0.2 longer: a standard deviation of 0.2 / sqrt(2)
        // about the mean.
        let again: Vec<Point> = points
            .iter()
            .map(|p| {
                let mut p = p.clone();
                for r in &mut p.results {
                    r.p9999 = Nanos((r.p9999.0 as f64 * 0.2f64.exp()) as u64);
                }
                p
            })
            .collect();
        points.extend(again);
        let found = repeatability(&points).unwrap();
        assert_eq!((found.conditions, found.runs), (20, 40));
        let expected = (Z99 * 0.2 / 2f64.sqrt()).exp();
        assert!((found.floor / expected - 1.0).abs() < 0.01, "{} instead of {expected}", found.floor);
        assert!((found.non_idling.unwrap().0 / expected - 1.0).abs() < 0.01, "{:?}", found.non_idling);
        for (name, n, typical, _) in found.regimes.iter().filter(|r| r.1 > 0) {
            assert!((typical / 0.2f64.exp() - 1.0).abs() < 0.01, "{name} {n} {typical}");
        }
    }
}
