//! Fits of known distributions.

use super::super::goodness::{anderson_darling, p_value};
use super::super::gpd::{fit_sums, grow, moments};
use super::super::profile::Profile;
use super::super::sums::Sums;
use super::super::*;
use crate::Random;

fn sample(shape: f64, scale: f64, n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| scale * grow(shape, -(1.0 - random.unit()).ln()).max(1e-12)).collect()
}

fn mean_and_deviation(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    (mean, (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (x.len() - 1) as f64).sqrt())
}

/// Estimates of shape and scale are within their errors, and the errors are the true ones.
#[test]
fn a_fit_recovers_shape_and_scale() {
    let (n, seeds, scale) = (600, 200, 3.0);
    for shape in [-0.2, 0.0, 0.2, 0.5] {
        let fits: Vec<GpdFit> =
            (0..seeds).map(|seed| fit_gpd(&sample(shape, scale, n, seed), n as f64).unwrap()).collect();
        assert!(fits.iter().all(|f| f.method == Method::Likelihood));
        let (shapes, deviation) = mean_and_deviation(&fits.iter().map(|f| f.shape).collect::<Vec<_>>());
        let (scales, scale_deviation) = mean_and_deviation(&fits.iter().map(|f| f.scale).collect::<Vec<_>>());
        let (error, _) = mean_and_deviation(&fits.iter().filter_map(|f| f.shape_error).collect::<Vec<_>>());
        let (scale_error, _) =
            mean_and_deviation(&fits.iter().filter_map(|f| f.scale_error).collect::<Vec<_>>());
        // The bias is of the order 1/n; the mean of 200 fits is known to 0.07 errors.
        assert!((shapes - shape).abs() < 0.3 * error, "{shape}: {shapes}");
        assert!((scales - scale).abs() < 0.3 * scale_error, "{shape}: {scales}");
        assert!((error / deviation - 1.0).abs() < 0.2, "{shape}: {error} for {deviation}");
        assert!(
            (scale_error / scale_deviation - 1.0).abs() < 0.2,
            "{shape}: {scale_error} for {scale_deviation}"
        );
    }
}

/// Errors of moments are larger. From -0.3 on every tenth fit would end before the largest excess
/// and be refused.
#[test]
fn moments_recover_shape_and_scale() {
    let (n, seeds, scale) = (600, 200, 3.0);
    for shape in [-0.1, 0.0, 0.25] {
        let fits: Vec<GpdFit> = (0..seeds)
            .filter_map(|seed| moments(&Sums::new(&sample(shape, scale, n, seed)).unwrap(), n as f64))
            .collect();
        let (shapes, deviation) = mean_and_deviation(&fits.iter().map(|f| f.shape).collect::<Vec<_>>());
        let (scales, scale_deviation) = mean_and_deviation(&fits.iter().map(|f| f.scale).collect::<Vec<_>>());
        let (error, _) = mean_and_deviation(&fits.iter().filter_map(|f| f.shape_error).collect::<Vec<_>>());
        let (scale_error, _) =
            mean_and_deviation(&fits.iter().filter_map(|f| f.scale_error).collect::<Vec<_>>());
        assert!((shapes - shape).abs() < 0.3 * error, "{shape}: {shapes}");
        assert!((scales - scale).abs() < 0.3 * scale_error, "{shape}: {scales}");
        assert!((error / deviation - 1.0).abs() < 0.2, "{shape}: {error} for {deviation}");
        assert!((scale_error / scale_deviation - 1.0).abs() < 0.2, "{shape}: {scale_error}");
    }
}

#[test]
fn moments_and_the_edge_stand_in_for_the_likelihood() {
    let heavy = fit_gpd(&sample(2.0, 1.0, 2_000, 1), 2_000.0).unwrap();
    assert_eq!((heavy.method, heavy.shape_error), (Method::Moments, None));
    assert!(heavy.shape > 0.8 && heavy.shape < 1.0, "{heavy:?}");
    let uniform = fit_gpd(&sample(-1.0, 2.0, 2_000, 2), 2_000.0).unwrap();
    assert_eq!((uniform.method, uniform.shape_error), (Method::Edge, None));
    assert!((uniform.shape + 0.5).abs() < 1e-4 && uniform.quantile(1e-4) > 2.0, "{uniform:?}");
    // Likelihood just outside, moments just inside.
    let errors: Vec<GpdFit> =
        (0..400).filter_map(|s| fit_gpd(&sample(-0.45, 2.0, 200, s), 200.0).ok()).collect();
    let moments: Vec<&GpdFit> = errors.iter().filter(|f| f.method == Method::Moments).collect();
    assert!(!moments.is_empty() && moments.iter().all(|f| f.shape > -0.5 && f.shape_error.is_some()));
}

#[test]
fn quantiles_invert_the_distribution() {
    for shape in [-0.4, -1e-14, 0.0, 1e-9, 0.3, 0.9] {
        let gpd =
            GpdFit { method: Method::Likelihood, shape, scale: 5.0, shape_error: None, scale_error: None };
        for exceedance in [0.9, 0.1, 1e-4] {
            assert!(
                (gpd.cdf(gpd.quantile(exceedance)) - (1.0 - exceedance)).abs() < 1e-9,
                "{shape} {exceedance}"
            );
        }
        assert_eq!((gpd.quantile(1.0), gpd.quantile(3.0), gpd.cdf(-1.0)), (0.0, 0.0, 0.0));
    }
    let short =
        GpdFit { method: Method::Edge, shape: -0.5, scale: 1.0, shape_error: None, scale_error: None };
    assert_eq!(short.cdf(2.5), 1.0);
}

#[test]
fn bad_excesses_are_refused() {
    let fit = |y: &[f64]| fit_gpd(y, y.len() as f64);
    assert_eq!(fit(&[1.0, f64::NAN, 2.0, 3.0, 4.0]), Err(PotError::NotFinite { index: 1 }));
    assert!(matches!(fit(&[1.0, 0.0, 2.0, 3.0, 4.0]), Err(PotError::BadRecord(_))));
    assert_eq!(fit(&[1.0, 2.0, 3.0, 4.0]), Err(PotError::TooFew { have: 4, need: 5 }));
    assert!(matches!(fit_gpd(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.0), Err(PotError::BadSetting(_))));
    assert_eq!(fit(&[1.0, 2.0, 1.0, 2.0, 1.0]), Err(PotError::TooFew { have: 2, need: 3 }));
}

/// The log-likelihood, written out.
fn log_likelihood(y: &[f64], shape: f64, scale: f64) -> f64 {
    y.iter().map(|y| -scale.ln() - (1.0 + 1.0 / shape) * (1.0 + shape * y / scale).ln()).sum()
}

#[test]
fn sums_and_their_peak_are_those_of_the_likelihood() {
    let y = sample(0.3, 2.0, 101, 7);
    let sums = Sums::new(&y).unwrap();
    for ratio in [-0.9 / sums.max(), -1e-9, 1e-7, 0.01, 3.0, 1e6] {
        let exact: f64 = y.iter().map(|y| (ratio * y).ln_1p()).sum();
        let (sum, over) = sums.logs(ratio);
        assert!((sum / exact - 1.0).abs() < 1e-10 && (over * ratio / exact - 1.0).abs() < 1e-10, "{ratio}");
    }
    assert!((sums.logs(0.0).1 / y.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    let peak = sums.peak((-0.5, 1.0));
    assert!((log_likelihood(&y, peak.shape, peak.scale) - peak.log_likelihood).abs() < 1e-8);
    for (a, b) in [(0.99, 1.0), (1.01, 1.0), (1.0, 0.99), (1.0, 1.01), (1.01, 1.01), (0.97, 1.02)] {
        assert!(log_likelihood(&y, peak.shape * a, peak.scale * b) < peak.log_likelihood, "{a} {b}");
    }
}

/// The profile against a search over shape and share on a fine grid, with the scale from the
/// quantile.
#[test]
fn the_profile_is_the_highest_likelihood_for_a_quantile() {
    let y = sample(0.2, 1.0, 150, 9);
    let sums = Sums::new(&y).unwrap();
    let (n, exceedance) = (3_000.0, 1e-4);
    let highest = |d: f64| {
        let mut best = f64::NEG_INFINITY;
        for i in 0..301 {
            let shape = -0.4999 + 1.4998 * f64::from(i) / 300.0 + 1e-7;
            for j in 0..121 {
                let share = 0.05 * (0.7f64 + 0.6 * f64::from(j) / 120.0);
                let scale = d / grow(shape, (share / exceedance).ln());
                let above = y.len() as f64;
                let binomial = above * share.ln() + (n - above) * (1.0 - share).ln();
                let value = log_likelihood(&y, shape, scale) + binomial;
                if value > best {
                    best = value;
                }
            }
        }
        best
    };
    let profile = Profile { sums: &sums, n, weight: 0.5, exceedance };
    let gpd = fit_sums(&sums, 150.0);
    let top = log_likelihood(&y, gpd.shape, gpd.scale) + 150.0 * 0.05f64.ln() + 2_850.0 * 0.95f64.ln();
    for (z, up) in [(1.645, true), (1.96, true), (1.96, false), (3.0, true)] {
        let deviance = top - highest(profile.end(z, up));
        // Half the weight doubles the drop: z^2 = 2 x 0.5 x drop. The grid is a little too low.
        assert!((deviance - z * z).abs() < 0.02 * z * z, "{z} {up}: {deviance}");
    }
}

/// Under the hypothesis p-values are uniform; a mixture is detected.
#[test]
fn p_values_of_the_goodness_of_fit() {
    let p = |y: &[f64]| {
        let sums = Sums::new(y).unwrap();
        let gpd = fit_sums(&sums, sums.count());
        p_value(anderson_darling(sums.excesses(), &gpd), gpd.shape)
    };
    for shape in [-0.2, 0.1, 0.6] {
        let values: Vec<f64> = (0..1_000).map(|s| p(&sample(shape, 1.0, 100, s))).collect();
        for level in [0.05, 0.1, 0.5] {
            let share = values.iter().filter(|v| **v <= level).count() as f64 / 1_000.0;
            // Three standard errors.
            assert!(
                (share - level).abs() < 3.0 * (level * (1.0 - level) / 1_000.0).sqrt(),
                "{shape} {level}: {share}"
            );
        }
    }
    let mut mixed = sample(0.0, 1.0, 200, 1);
    mixed.extend(sample(0.0, 1.0, 20, 2).iter().map(|y| y + 30.0));
    assert!(p(&mixed) < 1e-3, "{}", p(&mixed));
    assert_eq!(p_value(0.0, 0.0), 1.0);
    assert!(p_value(1e9, 5.0) == 0.0 && p_value(0.4, -3.0) > 0.5);
}
