//! Fits of known distributions.

use super::super::goodness::{anderson_darling, p_value};
use super::super::gpd::{fit, grow, moments, shrink};
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

fn fit_to(excesses: &[f64]) -> GpdFit {
    fit(&Sums::new(excesses).unwrap())
}

/// From -0.3 on every tenth fit by moments would end before the largest excess and be refused.
#[test]
fn fits_recover_shape_and_scale() {
    let (n, seeds, scale) = (600, 200, 3.0);
    let recovered = |shape: f64, fit: &dyn Fn(&Sums) -> Option<GpdFit>| {
        let sums = (0..seeds).map(|seed| Sums::new(&sample(shape, scale, n, seed)).unwrap());
        let fits: Vec<GpdFit> = sums.filter_map(|sums| fit(&sums)).collect();
        let shapes = fits.iter().map(|f| f.shape).collect::<Vec<_>>();
        let scales = fits.iter().map(|f| f.scale).collect::<Vec<_>>();
        for (truth, estimates) in [(shape, shapes), (scale, scales)] {
            // The bias is of the order 1/n; the mean of 200 fits is known to 0.07 deviations.
            let (mean, deviation) = mean_and_deviation(&estimates);
            assert!((mean - truth).abs() < 0.3 * deviation, "{shape}: {mean} for {truth}");
        }
        fits
    };
    for shape in [-0.2, 0.0, 0.2, 0.5] {
        let fits = recovered(shape, &|sums| Some(fit(sums)));
        assert!(fits.iter().all(|f| f.method == Method::Likelihood));
    }
    for shape in [-0.1, 0.0, 0.25] {
        recovered(shape, &moments);
    }
}

#[test]
fn moments_and_the_edge_stand_in_for_the_likelihood() {
    let heavy = fit_to(&sample(2.0, 1.0, 2_000, 1));
    assert_eq!(heavy.method, Method::Moments);
    assert!(heavy.shape > 0.8 && heavy.shape < 1.0, "{heavy:?}");
    let uniform = fit_to(&sample(-1.0, 2.0, 2_000, 2));
    assert_eq!(uniform.method, Method::Edge);
    assert!((uniform.shape + 0.5).abs() < 1e-4 && uniform.quantile(1e-4) > 2.0, "{uniform:?}");
    // Likelihood just outside, moments just inside.
    let fits: Vec<GpdFit> = (0..400).map(|s| fit_to(&sample(-0.45, 2.0, 200, s))).collect();
    let moments: Vec<&GpdFit> = fits.iter().filter(|f| f.method == Method::Moments).collect();
    assert!(!moments.is_empty() && moments.iter().all(|f| f.shape > -0.5));
}

#[test]
fn quantiles_invert_the_distribution() {
    for shape in [-0.4, -1e-14, 0.0, 1e-9, 0.3, 0.9] {
        let gpd = GpdFit { method: Method::Likelihood, shape, scale: 5.0 };
        for exceedance in [0.9, 0.1, 1e-4] {
            let below = -(-shrink(shape, gpd.quantile(exceedance) / gpd.scale)).exp_m1();
            assert!((below - (1.0 - exceedance)).abs() < 1e-9, "{shape} {exceedance}");
        }
        assert_eq!((gpd.quantile(1.0), gpd.quantile(3.0)), (0.0, 0.0));
    }
    assert_eq!(shrink(-0.5, 2.5), f64::INFINITY, "beyond the end");
}

#[test]
fn excesses_must_differ() {
    let refused = Sums::new(&[1.0, 2.0, 1.0, 2.0, 1.0]).unwrap_err();
    assert_eq!(refused, PotError::TooFew { have: 2, need: 3 });
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
    let gpd = fit(&sums);
    let top = log_likelihood(&y, gpd.shape, gpd.scale) + 150.0 * 0.05f64.ln() + 2_850.0 * 0.95f64.ln();
    for z in [1.645, 1.96, 3.0] {
        let deviance = top - highest(profile.end(z));
        // Half the weight doubles the drop: z^2 = 2 x 0.5 x drop. The grid is a little too low.
        assert!((deviance - z * z).abs() < 0.02 * z * z, "{z}: {deviance}");
    }
}

/// Under the hypothesis p-values are uniform; a mixture is detected.
#[test]
fn p_values_of_the_goodness_of_fit() {
    let p = |y: &[f64]| {
        let sums = Sums::new(y).unwrap();
        let gpd = fit(&sums);
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
