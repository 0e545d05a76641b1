//! Block bootstrap of a dependent series: variation of a statistic when the series is resampled.
//!
//! Neighbouring latencies depend on each other, so single values must not be drawn; whole blocks
//! are. Two ways of drawing them ([`Scheme`]), a block length chosen from the data
//! ([`block_length`]) and two intervals (Davison and Hinkley, Bootstrap Methods and their
//! Application, 1997, sections 5.2 and 5.3).
//!
//! Resampling cannot produce what the series lacks: for a percentile beyond the sample the
//! intervals are too short, and [`rtvirtio_stats::pot`] therefore does not rest on them.

mod blocks;
mod length;

use rtvirtio_stats::Interval;
use serde::{Deserialize, Serialize};

pub use blocks::{Blocks, Scheme};
pub use length::block_length;

/// Largest share of replicates without a value; beyond it the others would be a biased selection.
const MAY_FAIL: f64 = 0.1;
/// Largest number of replicates: beyond it only memory grows.
const MOST_REPLICATES: usize = 1_000_000;

/// Error of a bootstrap.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BootstrapError {
    /// Fewer values than the method needs.
    #[error("{have} values, {need} needed")]
    TooFew {
        /// Number of values given.
        have: usize,
        /// Fewest values that suffice.
        need: usize,
    },
    /// A value is NaN or infinite.
    #[error("value {index} is not a finite number")]
    NotFinite {
        /// Index of the value.
        index: usize,
    },
    /// A setting is outside its range.
    #[error("{0}")]
    BadSetting(&'static str),
    /// The statistic has no value for the series itself or for more than a tenth of the replicates.
    #[error("the statistic failed {failed} of {of} times")]
    Unstable {
        /// Draws without a value.
        failed: usize,
        /// Draws made, with and without a value.
        of: usize,
    },
}

/// Parameters of the resampling and its seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Method of drawing blocks.
    pub scheme: Scheme,
    /// Mean block length in values, at least 1; `None` for [`block_length`] of the series.
    pub block: Option<f64>,
    /// Number of replicates, 1 to 1 000 000.
    pub replicates: usize,
    /// Seed: equal seeds give equal replicates.
    pub seed: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self { scheme: Scheme::Stationary, block: None, replicates: 1_000, seed: 1 }
    }
}

/// A statistic and its replicates.
#[derive(Clone, Debug, PartialEq)]
pub struct Bootstrap {
    /// The statistic of the series itself.
    pub estimate: f64,
    /// Values of the statistic on replicates, in rising order, at least one, all finite.
    pub replicates: Vec<f64>,
    /// Replicates for which the statistic had no value.
    pub failed: usize,
    /// Mean block length used, in values.
    pub block: f64,
}

/// Resamples the series and evaluates `statistic`, which is `None` where it has no value.
///
/// # Errors
/// [`BootstrapError`]: an empty series, values that are not finite, settings out of range, or a
/// statistic without a value for the series itself or too many replicates.
pub fn bootstrap(
    series: &[f64],
    plan: &Plan,
    statistic: impl Fn(&[f64]) -> Option<f64>,
) -> Result<Bootstrap, BootstrapError> {
    check_finite(series)?;
    let block = match plan.block {
        Some(length) => length,
        None => block_length(series, plan.scheme)?,
    };
    let mut blocks = Blocks::new(series.len(), plan.scheme, block, plan.seed)?;
    let (mut runs, mut again) = (Vec::new(), Vec::with_capacity(series.len()));
    resample(plan.replicates, block, statistic(series), || {
        blocks.draw(&mut runs);
        again.clear();
        runs.iter().for_each(|run| again.extend_from_slice(&series[run.clone()]));
        statistic(&again)
    })
}

/// Collects replicates of a statistic that draws for itself.
fn resample(
    replicates: usize,
    block: f64,
    estimate: Option<f64>,
    mut draw: impl FnMut() -> Option<f64>,
) -> Result<Bootstrap, BootstrapError> {
    if !(1..=MOST_REPLICATES).contains(&replicates) {
        return Err(BootstrapError::BadSetting("1 to 1000000 replicates"));
    }
    let estimate = estimate.filter(|e| e.is_finite()).ok_or(BootstrapError::Unstable { failed: 1, of: 1 })?;
    let mut values: Vec<f64> = (0..replicates).filter_map(|_| draw()).filter(|v| v.is_finite()).collect();
    let failed = replicates - values.len();
    if values.is_empty() || failed as f64 > MAY_FAIL * replicates as f64 {
        return Err(BootstrapError::Unstable { failed, of: replicates });
    }
    values.sort_unstable_by(f64::total_cmp);
    Ok(Bootstrap { estimate, replicates: values, failed, block })
}

impl Bootstrap {
    /// Quantile of the replicates at `level` in 0..1: the one with rank `(R + 1) level` (Davison
    /// and Hinkley 1997, section 5.2.1), rounded outwards from the median, so that few replicates
    /// widen an interval. The estimate without replicates.
    #[must_use]
    pub fn quantile(&self, level: f64) -> f64 {
        let r = self.replicates.len();
        // The margin undoes the rounding of 1 - 0.975: rank 975 of 999 is meant, not 976.
        let exact = (r + 1) as f64 * level;
        let rank = if level < 0.5 { (exact + 1e-9).floor() } else { (exact - 1e-9).ceil() };
        let place = (rank.max(1.0) as usize).min(r).saturating_sub(1);
        self.replicates.get(place).copied().unwrap_or(self.estimate)
    }

    /// Percentile interval: quantiles of the replicates. `None` unless `confidence` is inside
    /// (0, 1).
    #[must_use]
    pub fn percentile_interval(&self, confidence: f64) -> Option<Interval> {
        let (low, high) = Interval::tails(confidence)?;
        Some(Interval { low: self.quantile(low), high: self.quantile(high) })
    }

    /// Basic interval: the same quantiles mirrored at the estimate. `None` unless `confidence` is
    /// inside (0, 1).
    #[must_use]
    pub fn basic_interval(&self, confidence: f64) -> Option<Interval> {
        let (low, high) = Interval::tails(confidence)?;
        let mirror = |level| 2.0 * self.estimate - self.quantile(level);
        Some(Interval { low: mirror(high), high: mirror(low) })
    }

    /// Standard deviation of the replicates: the bootstrap standard error. 0 for one replicate.
    #[must_use]
    pub fn standard_error(&self) -> f64 {
        let r = self.replicates.len().max(1) as f64;
        let mean = self.replicates.iter().sum::<f64>() / r;
        let square: f64 = self.replicates.iter().map(|v| (v - mean).powi(2)).sum();
        (square / (r - 1.0).max(1.0)).sqrt()
    }
}

fn check_finite(series: &[f64]) -> Result<(), BootstrapError> {
    match series.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(BootstrapError::NotFinite { index }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
