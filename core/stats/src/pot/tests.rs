mod bounds;
mod shapes;

use super::*;
use crate::Random;

/// Exponential latencies.
fn exponential(n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| -(1.0 - random.unit()).ln()).collect()
}

fn fit_series(series: &[f64]) -> Result<Pot, PotError> {
    Pot::fit(Record::from_latencies(series)?, &Settings::default())
}

#[test]
fn few_samples_are_refused() {
    // A fifth of 100 lies above the lowest threshold.
    let error = fit_series(&exponential(100, 1)).unwrap_err();
    assert!(matches!(error, PotError::TooFew { have: 10..=20, need: 30 }), "{error}");
    // One stall of 400 requests is one cluster, however many requests it has.
    let mut series = exponential(1_000, 2);
    series.iter_mut().skip(300).take(400).for_each(|x| *x += 100.0);
    let settings = Settings { gap: Gap::Time(20.0), ..Settings::default() };
    let error = Pot::fit(Record::from_latencies(&series).unwrap(), &settings).unwrap_err();
    assert_eq!(error, PotError::TooFew { have: 1, need: 30 });
    // Many values, all the same.
    let two: Vec<f64> = (0..5_000).map(|i| f64::from(u8::from(i % 50 == 0))).collect();
    assert!(matches!(fit_series(&two), Err(PotError::TooFew { need: 3, .. })));
}

#[test]
fn a_queue_that_builds_up_has_no_tail() {
    let late = |seed| {
        exponential(3_000, seed).iter().enumerate().map(|(i, x)| x + i as f64 / 100.0).collect::<Vec<f64>>()
    };
    let error = fit_series(&late(5)).unwrap_err();
    assert_eq!(error, PotError::Grows { s: 45 });
    // The largest values alone do not show whether the others grow.
    let series = late(5);
    let largest: Vec<(f64, f64)> =
        (0..3_000).map(|i| (i as f64, series[i])).filter(|(_, x)| *x > 20.0).collect();
    let record = Record::from_exceedances(3_000, 3_000.0, 20.0, &largest).unwrap();
    assert!(!matches!(Pot::fit(record, &Settings::default()), Err(PotError::Grows { .. })));
}

/// A single bad phase has nothing around it, and the extremal index takes its requests for
/// independent.
#[test]
fn a_single_bad_phase_has_no_tail() {
    let mut series = exponential(3_000, 6);
    series.iter_mut().skip(1_300).take(700).for_each(|x| *x += 20.0);
    let error = fit_series(&series).unwrap_err();
    assert!(matches!(error, PotError::Uneven { dispersion } if dispersion > 60.0), "{error}");
}

/// 25 slow requests among 5 000: too few for a threshold of their own, too many for the tail of the
/// rest.
#[test]
fn what_no_distribution_fits_is_refused() {
    let refused = (0..40).filter(|seed| {
        let mut series = exponential(5_000, *seed);
        series.iter_mut().step_by(200).for_each(|x| *x = 40.0 * (0.4 * *x).exp());
        matches!(fit_series(&series), Err(PotError::NoFit { p_value }) if p_value < 0.01)
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
        Record::from_latencies(&changed)
    };
    assert_eq!(with(5, f64::NAN), Err(PotError::NotFinite { index: 5 }));
    assert_eq!(with(7, f64::INFINITY), Err(PotError::NotFinite { index: 7 }));
    assert_eq!(Record::from_latencies(&[]), Err(PotError::TooFew { have: 0, need: 1 }));
    let few = |n, span, floor, rows: &[(f64, f64)]| Record::from_exceedances(n, span, floor, rows);
    assert!(few(10, 5.0, 1.0, &[(0.0, 2.0), (5.0, 3.0)]).is_ok());
    for (what, bad) in [
        ("more than requests", few(1, 5.0, 1.0, &[(0.0, 2.0), (1.0, 2.0)])),
        ("out of order", few(10, 5.0, 1.0, &[(2.0, 2.0), (1.0, 2.0)])),
        ("after the end", few(10, 5.0, 1.0, &[(6.0, 2.0)])),
        ("before the start", few(10, 5.0, 1.0, &[(-1.0, 2.0)])),
        ("no span", few(10, 0.0, 1.0, &[(0.0, 2.0)])),
        ("at the floor", few(10, 5.0, 2.0, &[(0.0, 2.0)])),
        ("no floor", few(10, 5.0, f64::NAN, &[(0.0, 2.0)])),
    ] {
        assert!(matches!(bad, Err(PotError::BadRecord(_))), "{what}");
    }
    let spoil: [fn(&mut Settings); 6] = [
        |s| s.quantiles.clear(),
        |s| s.quantiles.push(0.5),
        |s| s.quantiles.push(f64::NAN),
        |s| s.gap = Gap::Time(-1.0),
        |s| s.min_clusters = 9,
        |s| s.significance = f64::NAN,
    ];
    for change in spoil {
        let mut settings = Settings::default();
        change(&mut settings);
        let refused = Pot::fit(Record::from_latencies(&series).unwrap(), &settings);
        assert!(matches!(refused, Err(PotError::BadSetting(_))), "{settings:?}");
    }
    let pot = fit_series(&series).unwrap();
    for (p, confidence) in
        [(0.0, 0.9), (1.0, 0.9), (f64::NAN, 0.9), (0.999, 0.4), (0.999, 1.0), (0.999, f64::NAN)]
    {
        assert!(matches!(pot.tail_quantile(p, confidence), Err(PotError::BadSetting(_))), "{p} {confidence}");
    }
    assert!(matches!(pot.tail_quantile(0.5, 0.95), Err(PotError::BelowThreshold { .. })));
}

/// A record of the largest values in seconds is the same as the whole series counted in requests.
#[test]
fn exceedances_with_times_are_as_good_as_the_series() {
    let series = exponential(4_000, 5);
    let rate = 500.0;
    let rows: Vec<(f64, f64)> =
        (0..series.len()).filter(|i| series[*i] > 1.0).map(|i| (i as f64 / rate, series[i])).collect();
    let part = Record::from_exceedances(4_000, 8.0, 1.0, &rows).unwrap();
    let settings = |gap| Settings { gap: Gap::Time(gap), ..Settings::default() };
    let whole = Pot::fit(Record::from_latencies(&series).unwrap(), &settings(3.5)).unwrap();
    let part = Pot::fit(part, &settings(3.5 / rate)).unwrap();
    let (a, b) = (whole.threshold(), part.threshold());
    assert_eq!((a.level, a.clusters, a.gpd), (b.level, b.clusters, b.gpd));
    assert!((a.gap / rate - b.gap).abs() < 1e-12);
    assert_eq!(whole.tail_quantile(0.9999, 0.95), part.tail_quantile(0.9999, 0.95));
    // A record that reaches down to its floor knows that threshold, and none below.
    let floor = Record::from_exceedances(100, 1.0, 7.0, &[(0.1, 9.0), (0.2, 8.0)]).unwrap();
    assert_eq!(
        (floor.threshold(0.99), floor.threshold(0.98), floor.threshold(0.97)),
        (Some(8.0), Some(7.0), None)
    );
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
        let record = Record::from_latencies(&series).unwrap();
        let above = record.above(record.threshold(0.99).unwrap());
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
        let pot = fit_series(&bounds::mixture(10_000, seed)).unwrap();
        assert!(pot.threshold().quantile > 0.965, "{seed}: {}", pot.threshold().quantile);
        assert!(pot.candidates().any(|t| t.quantile < 0.9 && t.p_value < 0.01));
        assert!(pot.candidates().all(|t| t.clusters >= 30));
    }
    let low =
        (0..20).filter(|s| fit_series(&exponential(5_000, *s)).unwrap().threshold().quantile < 0.9).count();
    assert!(low >= 10, "an exponential tail begins at once: {low} of 20");
}

#[test]
fn settings_and_results_survive_a_file() {
    let settings = Settings { gap: Gap::Time(2.5), ..Settings::default() };
    let text = serde_json::to_string(&settings).unwrap();
    assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
    let pot = fit_series(&exponential(3_000, 8)).unwrap();
    let text = serde_json::to_string(pot.threshold()).unwrap();
    assert_eq!(&serde_json::from_str::<Threshold>(&text).unwrap(), pot.threshold());
}
