//! Percentiles beyond the sample, with upper bounds.

use super::profile::Profile;
use super::sums::Sums;
use super::{Pot, PotError, Threshold};
use crate::normal_quantile;

/// Higher thresholds count for the bounds while they have this share of the exceedances of the
/// chosen one. The test of fit sees the many excesses just above the threshold, the percentile
/// depends on the few far out: with stalls whose latency falls towards their end the chosen
/// threshold alone keeps 70 to 85 % instead of 95 %, with the next four candidates 95 %.
const NEIGHBOURS: f64 = 0.3;
/// A threshold must be exceeded at least this many times as often as the percentile.
const ABOVE: f64 = 2.0;

/// A percentile beyond the sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TailQuantile {
    /// Estimate of the percentile, in the unit of the values.
    pub estimate: f64,
    /// Upper bound, one-sided, not below the estimate. Infinite where the data give none.
    pub upper: f64,
}

impl Pot {
    /// Estimates the percentile `p` with a bound at `confidence`. Its coverage, and the cases in
    /// which it does not hold, are documented in [`crate::pot`].
    ///
    /// # Errors
    /// [`PotError::BadSetting`] for `p` outside (0, 1) or a confidence outside [0.5, 1),
    /// [`PotError::BelowThreshold`] for a percentile that half of the exceedances or more lie
    /// above.
    pub fn tail_quantile(&self, p: f64, confidence: f64) -> Result<TailQuantile, PotError> {
        let z = normal_level(p, confidence)?;
        let usable = |t: &Threshold| self.share(t) >= ABOVE * (1.0 - p);
        let chosen = self.threshold();
        if !usable(chosen) {
            return Err(PotError::BelowThreshold { share: self.share(chosen) });
        }
        let fewest = NEIGHBOURS * chosen.exceedances as f64;
        let estimate = chosen.level + chosen.gpd.quantile((1.0 - p) / self.share(chosen));
        let mut upper = estimate;
        for (threshold, sums) in self.chosen_and_above() {
            if usable(threshold) && threshold.exceedances as f64 >= fewest {
                upper = upper.max(self.bound(threshold, sums, 1.0 - p, z));
            }
        }
        Ok(TailQuantile { estimate, upper })
    }

    /// Bound by one threshold; `z` is the normal quantile of the confidence.
    fn bound(&self, threshold: &Threshold, sums: &Sums, exceedance: f64, z: f64) -> f64 {
        let weight = threshold.effective / sums.count();
        let profile = Profile { sums, n: self.record.n() as f64, weight, exceedance };
        threshold.level + profile.end(student(z, threshold.effective))
    }

    /// Share of requests above a threshold.
    pub(super) fn share(&self, threshold: &Threshold) -> f64 {
        threshold.exceedances as f64 / self.record.n() as f64
    }
}

/// Normal quantile of a confidence, one-sided.
fn normal_level(p: f64, confidence: f64) -> Result<f64, PotError> {
    if !(p > 0.0 && p < 1.0) {
        return Err(PotError::BadSetting("the percentile lies inside (0, 1)"));
    }
    let z = normal_quantile(confidence).filter(|z| *z >= 0.0);
    z.ok_or(PotError::BadSetting("the confidence lies in [0.5, 1)"))
}

/// Student's quantile for a normal one, by the expansion of Fisher and Cornish (Abramowitz and
/// Stegun 1964, 26.7.5). The two parameters take two of the `effective` exceedances; the expansion
/// needs 3 degrees of freedom.
fn student(z: f64, effective: f64) -> f64 {
    let freedom = (effective - 2.0).max(3.0);
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    z + first / freedom + second / freedom.powi(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 26.10 of Abramowitz and Stegun (1964).
    #[test]
    fn known_quantiles_of_student() {
        let z = normal_quantile(0.95).unwrap();
        for (freedom, exact) in [(10.0, 1.812), (30.0, 1.697), (120.0, 1.658)] {
            assert!((student(z, freedom + 2.0) - exact).abs() < 2e-3, "{freedom}");
        }
    }
}
