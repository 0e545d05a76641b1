mod bounds;
mod shapes;

use super::cluster::{automatic_gap, clusters, effective_number, extremal_index};
use super::record::Record;
use super::*;
use crate::Random;

/// Exponential latencies.
fn exponential(n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| -(1.0 - random.unit()).ln()).collect()
}

#[test]
fn few_samples_are_refused() {
    // A fifth of 100 lies above the lowest threshold.
    let error = Pot::fit(&exponential(100, 1)).unwrap_err();
    assert!(matches!(error, PotError::TooFew { have: 10..=20, need: 30 }), "{error}");
    // Many values, all the same.
    let two: Vec<f64> = (0..5_000).map(|i| f64::from(u8::from(i % 50 == 0))).collect();
    assert!(matches!(Pot::fit(&two), Err(PotError::TooFew { need: 3, .. })));
}

#[test]
fn a_queue_that_builds_up_has_no_tail() {
    let late: Vec<f64> =
        exponential(3_000, 5).iter().zip(0..).map(|(x, i)| x + f64::from(i) / 100.0).collect();
    assert_eq!(Pot::fit(&late).unwrap_err(), PotError::Grows { s: 45 });
}

/// A single bad phase has nothing around it, and the extremal index takes its requests for
/// independent.
#[test]
fn a_single_bad_phase_has_no_tail() {
    let mut series = exponential(3_000, 6);
    series.iter_mut().skip(1_300).take(700).for_each(|x| *x += 20.0);
    let error = Pot::fit(&series).unwrap_err();
    assert!(matches!(error, PotError::Uneven { dispersion } if dispersion > 60.0), "{error}");
}

/// 25 slow requests among 5 000: too few for a threshold of their own, too many for the tail of the
/// rest.
#[test]
fn what_no_distribution_fits_is_refused() {
    let refused = (0..40).filter(|seed| {
        let mut series = exponential(5_000, *seed);
        series.iter_mut().step_by(200).for_each(|x| *x = 40.0 * (0.4 * *x).exp());
        matches!(Pot::fit(&series), Err(PotError::NoFit { p_value }) if p_value < 0.01)
    });
    let refused = refused.count();
    assert!(refused > 20, "{refused} of 40");
}

#[test]
fn bad_input_is_refused() {
    let series = exponential(2_000, 4);
    let with = |i: usize, x: f64| {
        let mut changed = series.clone();
        changed[i] = x;
        Pot::fit(&changed).unwrap_err()
    };
    assert_eq!(with(5, f64::NAN), PotError::NotFinite { index: 5 });
    assert_eq!(with(7, f64::INFINITY), PotError::NotFinite { index: 7 });
    assert_eq!(Pot::fit(&[]).unwrap_err(), PotError::TooFew { have: 0, need: 1 });
    let pot = Pot::fit(&series).unwrap();
    for (p, confidence) in
        [(0.0, 0.9), (1.0, 0.9), (f64::NAN, 0.9), (0.999, 0.4), (0.999, 1.0), (0.999, f64::NAN)]
    {
        assert!(matches!(pot.tail_quantile(p, confidence), Err(PotError::BadSetting(_))), "{p} {confidence}");
    }
    assert!(matches!(pot.tail_quantile(0.5, 0.95), Err(PotError::BelowThreshold { .. })));
}

#[test]
fn clusters_are_runs_within_the_gap() {
    let times = [0.0, 1.0, 3.0, 10.0, 12.0, 30.0];
    assert_eq!(clusters(&times, 2.0), [0..3, 3..5, 5..6]);
    assert_eq!(clusters(&times, 0.5).len(), 6);
    assert_eq!(clusters(&times, 18.0).len(), 1);
    assert!(clusters(&[], 1.0).is_empty());
    assert_eq!(effective_number(&clusters(&times, 2.0)), 36.0 / 14.0);
    assert_eq!(effective_number(&clusters(&times, 0.5)), 6.0);
    assert_eq!(effective_number(&[]), 0.0);
}

#[test]
fn the_extremal_index_by_hand_and_of_known_processes() {
    // Waits 1, 1, 1, 100: 2 x 99^2 / (4 x 99 x 98). Waits up to 2 take the first form: 2 x 5^2 /
    // (3 x 9).
    assert!((extremal_index(&[0.0, 1.0, 2.0, 3.0, 103.0]) - 99.0 / 196.0).abs() < 1e-12);
    assert_eq!(extremal_index(&[0.0, 1.0, 3.0, 5.0]), 1.0);
    assert!((extremal_index(&[5.0, 5.0, 5.0, 7.0]) - 2.0 / 3.0).abs() < 1e-12);
    assert_eq!((extremal_index(&[]), extremal_index(&[3.0])), (1.0, 1.0));
    // The larger one of k neighbours has the index 1 / k.
    for k in [1usize, 2, 5] {
        let base = exponential(100_000, 6);
        let series: Vec<f64> = base.windows(k).map(|w| w.iter().copied().fold(0.0, f64::max)).collect();
        let record = Record::new(&series).unwrap();
        let above = record.above(record.threshold(0.99));
        let found = extremal_index(&above.times);
        assert!((found * k as f64 - 1.0).abs() < 0.12, "{k}: {found}");
        let share = clusters(&above.times, automatic_gap(&above.times, found)).len() as f64
            / above.times.len() as f64;
        assert!((share / found - 1.0).abs() < 0.05, "{k}: {share} for {found}");
    }
}

/// The heavy part has 3 % of the requests; below its share of the sample no threshold fits.
#[test]
fn the_threshold_is_above_what_does_not_fit() {
    for seed in 0..10 {
        let pot = Pot::fit(&bounds::mixture(10_000, seed)).unwrap();
        assert!(pot.threshold().quantile > 0.965, "{seed}: {}", pot.threshold().quantile);
        let candidates = || pot.thresholds.iter().map(|(t, _)| t);
        assert!(candidates().any(|t| t.quantile < 0.9 && t.p_value < 0.01));
        assert!(candidates().all(|t| t.clusters >= 30));
    }
    let low =
        (0..20).filter(|s| Pot::fit(&exponential(5_000, *s)).unwrap().threshold().quantile < 0.9).count();
    assert!(low >= 10, "an exponential tail begins at once: {low} of 20");
}
