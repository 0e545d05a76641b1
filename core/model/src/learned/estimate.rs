//! A forest's prediction for one task, and checks of a forest that came from a file.

use std::ops::RangeInclusive;

use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::{Forest, ForestError, Scratch};
use rtvirtio_units::Nanos;

use super::features::{FEATURES, WIDTH};

/// Largest logarithm of a latency in s, of a ratio of two or of a score that a file may hold; e^30
/// s are 300 000 years, and still finite.
const LN_MOST: f64 = 30.0;

/// Checks a forest and the level of its high quantile, as read from a file; the error describes the
/// damage. Shares of lost rates lie in `lost`.
pub(super) fn check_forest(forest: &Forest, high: f64, lost: RangeInclusive<f64>) -> Result<(), String> {
    if !(high > 0.5 && high < 1.0) {
        return Err("its high quantile is none".to_owned());
    }
    forest.check().map_err(|e| e.to_string())?;
    if forest.ranges.len() != WIDTH {
        return Err(format!("{} features instead of {WIDTH}", forest.ranges.len()));
    }
    if forest.targets.iter().any(|ln| ln.abs() > LN_MOST) {
        return Err("an impossible latency".to_owned());
    }
    if forest.secondary_targets.iter().any(|share| !lost.contains(share)) {
        return Err("an impossible loss of rate".to_owned());
    }
    Ok(())
}

/// Checks a calibrated score, as read from a file.
pub(super) fn check_bound(bound: &Quantile) -> Result<(), String> {
    if bound.score.abs() > LN_MOST {
        return Err("an impossible score".to_owned());
    }
    bound.check().map_err(|e| e.to_string())
}

/// Names of the features of a row outside the forest's training range, then `unlike`.
pub(super) fn outside(forest: &Forest, row: &[f64; WIDTH], unlike: Option<&'static str>) -> Vec<String> {
    let features = forest.outside(row).into_iter().filter_map(|i| FEATURES.get(i).map(|(_, what)| *what));
    features.chain(unlike).map(str::to_owned).collect()
}

/// Prediction of a forest: logarithms of the median and of the high quantile, mean share of the
/// rate that is lost.
pub(super) struct Estimate {
    pub(super) middle: f64,
    pub(super) high: f64,
    pub(super) lost: f64,
}

impl Estimate {
    /// The estimate in absolute terms, for a forest trained on ratios to a latency of `e^ln` s and
    /// differences from a loss of `lost`.
    pub(super) fn beyond(self, ln: f64, lost: f64) -> Self {
        Self { middle: self.middle + ln, high: self.high + ln, lost: self.lost + lost }
    }

    /// Upper bound, s: never below the expected tail, also where the calibrated score is negative,
    /// plus the `stall` that any run may meet and most do not.
    pub(super) fn upper(&self, score: f64, stall: Nanos) -> f64 {
        (self.high + score).exp().max(self.middle.exp() + stall.as_secs_f64())
    }
}

pub(super) fn estimate(
    forest: &Forest,
    high: f64,
    row: &[f64; WIDTH],
    scratch: &mut Scratch,
) -> Result<Estimate, ForestError> {
    let mut quantiles = [0.0; 2];
    let lost = forest.predict_with(row, &[0.5, high], scratch, &mut quantiles)?;
    Ok(Estimate { middle: quantiles[0], high: quantiles[1], lost })
}
