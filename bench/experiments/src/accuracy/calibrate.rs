//! The influence coefficients of the analytical model (RT-VirtIO paper, Table III) on this host,
//! with intervals, and the variance that the model does not explain.
//!
//! Intervals come from refitting on conditions drawn with replacement: tasks of one run are alike,
//! and so are runs of one condition. The fit itself is [`rtvirtio_paper::coefficients`].

use rtvirtio_model::{Coefficients, Profile};
use rtvirtio_paper::coefficients::{LIMITS, NAMES, PaperRuns, START, at_limit, of_the_paper};
use rtvirtio_stats::{Interval, Random};
use serde::Serialize;

use rtvirtio_learn::condition::conditions;
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::statistic::median;

pub use rtvirtio_paper::coefficients::{CalibrateError, fitted};

/// Refits for the intervals, the fewest with which the smallest and the largest are a 95 %
/// interval.
const REPLICATES: usize = 39;
/// Confidence of the intervals.
const CONFIDENCE: f64 = 0.95;
/// Influence coefficient fitted on this host's runs.
#[derive(Clone, Debug, Serialize)]
pub struct Fit {
    /// Symbol of the coefficient in the paper.
    pub name: &'static str,
    /// Value that fits these runs best.
    pub value: f64,
    /// Bounds of the 95 % interval, by refitting.
    pub interval: [f64; 2],
    /// Value in the paper's Table III.
    pub published: f64,
    /// Whether the fit ended at a limit of plausible values: then the data do not determine it.
    pub at_limit: bool,
}

/// A calibration, and the variance that it does not explain.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// Runs under BFQ that it was fitted on.
    pub runs: usize,
    /// Paced tasks of these runs.
    pub tasks: usize,
    /// The three host coefficients.
    pub fits: Vec<Fit>,
    /// Typical factor between prediction and measurement: median of max(p/a, a/p), with Table III
    /// and fitted.
    pub factor: [f64; 2],
    /// Share of the variance of ln(measured) that the fitted model explains; negative when a
    /// constant would do better.
    pub r_squared: f64,
    /// Deciles of ln(measured / predicted) after the fit.
    pub residuals: Vec<f64>,
    /// Coefficients that models use ([`fitted`]): of Table III where these runs do not determine
    /// one; `None` where they determine none.
    #[serde(skip)]
    pub used: Option<Coefficients>,
}

impl Calibration {
    /// Name, and value that models use.
    #[must_use]
    pub fn in_use(&self) -> Vec<(&'static str, f64)> {
        let used = self.used.unwrap_or(Coefficients::TABLE_III);
        NAMES.into_iter().zip([used.weight, used.host_timeout, used.host_idle]).collect()
    }
}

/// Fits the coefficients, with intervals and the unexplained variance.
pub fn calibrate(points: &[Point], profile: &Profile, seed: u64) -> Result<Calibration, CalibrateError> {
    let points = of_the_paper(points);
    let runs = PaperRuns::from_points(&points)?;
    let best = runs.solve(&runs.all(), profile, &START, &LIMITS);
    let mut random = Random::new(seed);
    let mut drawn: Vec<Vec<f64>> = vec![Vec::new(); 3];
    let groups = conditions(&points);
    for _ in 0..REPLICATES {
        let sample: Vec<usize> =
            groups.iter().flat_map(|_| groups[random.below(groups.len())].iter().copied()).collect();
        for (to, v) in drawn.iter_mut().zip(runs.solve(&sample, profile, &best, &LIMITS)) {
            to.push(v);
        }
    }
    let fits = (0..3)
        .map(|i| Fit {
            name: NAMES[i],
            value: best[i],
            interval: interval(drawn[i].clone()),
            published: START[i],
            at_limit: at_limit(&best, i),
        })
        .collect();
    let (before, after) = (runs.residuals(profile, &START), runs.residuals(profile, &best));
    let factor = |e: &[f64]| median(e.iter().map(|v| v.abs().exp()).collect());
    let actual: Vec<f64> = runs.tails().map(f64::ln).collect();
    let mean = actual.iter().sum::<f64>() / actual.len().max(1) as f64;
    let total: f64 = actual.iter().map(|a| (a - mean).powi(2)).sum();
    let residual: f64 = after.iter().map(|e| e * e).sum();
    Ok(Calibration {
        runs: points.len(),
        tasks: after.len(),
        fits,
        factor: [factor(&before), factor(&after)],
        r_squared: 1.0 - residual / total.max(f64::MIN_POSITIVE),
        residuals: deciles(after),
        used: runs.determined(profile, best).ok(),
    })
}

/// Percentile interval of the refits; NaN of none.
fn interval(mut v: Vec<f64>) -> [f64; 2] {
    v.sort_unstable_by(f64::total_cmp);
    let levels = Interval::tails(CONFIDENCE);
    levels.map_or([f64::NAN; 2], |(low, high)| [quantile(&v, low), quantile(&v, high)])
}

/// Quantile of refits in rising order: the one with rank `(R + 1) level` (Davison and Hinkley,
/// Bootstrap Methods and their Application, 1997, section 5.2.1), rounded outwards from the median,
/// so that few refits widen an interval.
fn quantile(refits: &[f64], level: f64) -> f64 {
    // The margin undoes the rounding of 1 - 0.975: rank 975 of 999 is meant, not 976.
    let exact = (refits.len() + 1) as f64 * level;
    let rank = if level < 0.5 { (exact + 1e-9).floor() } else { (exact - 1e-9).ceil() };
    let place = (rank.max(1.0) as usize).min(refits.len()).saturating_sub(1);
    refits.get(place).copied().unwrap_or(f64::NAN)
}

fn deciles(mut v: Vec<f64>) -> Vec<f64> {
    v.sort_unstable_by(f64::total_cmp);
    (0..=10).filter_map(|i| v.get((v.len().saturating_sub(1)) * i / 10).copied()).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_learn::synthetic::{by_equations, profile};

    use super::*;

    #[test]
    fn the_interval_is_of_the_ranks_that_it_says() {
        let of = |n: u32| interval((1..=n).rev().map(f64::from).collect());
        // 1 of 40 gaps between 39 values is 2.5 %, 5 of 200 between 199.
        assert_eq!(of(39), [1.0, 39.0]);
        assert_eq!(of(199), [5.0, 195.0]);
        assert_eq!(of(3), [1.0, 3.0]);
        assert!(interval(Vec::new()).iter().all(|v| v.is_nan()));
    }

    #[test]
    fn coefficients_that_made_the_runs_are_found_again() {
        let truth =
            Coefficients { weight: 0.8, host_timeout: 2.0, host_idle: 0.3, ..Coefficients::TABLE_III };
        let points = by_equations(truth);
        let c = calibrate(&points, &profile(), 1).unwrap();
        for (fit, true_value) in c.fits.iter().zip([0.8, 2.0, 0.3]) {
            assert!((fit.value / true_value - 1.0).abs() < 0.05, "{fit:?}");
            assert!(fit.interval[0] <= true_value * 1.05 && fit.interval[1] >= true_value * 0.95, "{fit:?}");
            assert!(!fit.at_limit);
        }
        assert!(c.factor[1] < c.factor[0] && c.r_squared > 0.99, "{c:?}");
    }
}
