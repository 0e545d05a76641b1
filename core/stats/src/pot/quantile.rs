//! Percentiles beyond the sample, with bounds.

use serde::{Deserialize, Serialize};

use super::gpd::Method;
use super::profile::Profile;
use super::sums::Sums;
use super::{Pot, PotError, Threshold};
use crate::{Interval, normal_quantile};

/// Higher thresholds count for the bounds while they have this share of the exceedances of the
/// chosen one. The test of fit sees the many excesses just above the threshold, the percentile
/// depends on the few far out: with stalls whose latency falls towards their end the chosen
/// threshold alone keeps 70 to 85 % instead of 95 %, with the next four candidates 95 %.
const NEIGHBOURS: f64 = 0.3;
/// A threshold must be exceeded at least this many times as often as the percentile.
const ABOVE: f64 = 2.0;

/// A percentile beyond the sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TailQuantile {
    /// Level of the percentile, as a share in (0, 1).
    pub p: f64,
    /// Confidence of the interval and of the bound, each by itself.
    pub confidence: f64,
    /// Estimate of the percentile, in the unit of the values.
    pub estimate: f64,
    /// Two-sided interval; around the estimate. Its lower end is the threshold where the fit is
    /// held at its edge.
    pub interval: Interval,
    /// Upper bound, one-sided, not below the estimate. Infinite where the data give none.
    pub upper: f64,
}

impl Pot {
    /// Estimates the percentile `p` with bounds at `confidence`. Their coverage, and the cases in
    /// which they do not hold, are documented in [`crate::pot`].
    ///
    /// # Errors
    /// [`PotError::BadSetting`] for `p` outside (0, 1) or a confidence outside [0.5, 1),
    /// [`PotError::BelowThreshold`] for a percentile that half of the exceedances or more lie
    /// above.
    pub fn tail_quantile(&self, p: f64, confidence: f64) -> Result<TailQuantile, PotError> {
        let (one, two) = levels(p, confidence)?;
        let usable = |t: &Threshold| self.share(t) >= ABOVE * (1.0 - p);
        let chosen = self.threshold();
        if !usable(chosen) {
            return Err(PotError::BelowThreshold { share: self.share(chosen) });
        }
        let fewest = NEIGHBOURS * chosen.exceedances as f64;
        let estimate = chosen.level + chosen.gpd.quantile((1.0 - p) / self.share(chosen));
        let mut found = TailQuantile {
            p,
            confidence,
            estimate,
            interval: Interval { low: estimate, high: estimate },
            upper: estimate,
        };
        for (threshold, sums) in self.chosen_and_above() {
            if usable(threshold) && threshold.exceedances as f64 >= fewest {
                self.widen(&mut found, threshold, sums, (one, two));
            }
        }
        Ok(found)
    }

    /// Widens bounds to include those of another threshold. `levels` are normal quantiles, one- and
    /// two-sided.
    fn widen(&self, found: &mut TailQuantile, threshold: &Threshold, sums: &Sums, levels: (f64, f64)) {
        let profile = Profile {
            sums,
            n: self.record.n() as f64,
            weight: threshold.effective / sums.count(),
            exceedance: 1.0 - found.p,
        };
        let (one, two) = (student(levels.0, threshold.effective), student(levels.1, threshold.effective));
        let end = |z: f64, up| threshold.level + profile.end(z, up);
        found.upper = found.upper.max(end(one, true));
        found.interval.high = found.interval.high.max(end(two, true));
        let low = if threshold.gpd.method == Method::Edge { threshold.level } else { end(two, false) };
        found.interval.low = found.interval.low.min(low);
    }

    /// Share of requests above a threshold.
    pub(super) fn share(&self, threshold: &Threshold) -> f64 {
        threshold.exceedances as f64 / self.record.n() as f64
    }
}

/// Normal quantiles of a confidence, one- and two-sided.
fn levels(p: f64, confidence: f64) -> Result<(f64, f64), PotError> {
    if !(p > 0.0 && p < 1.0) {
        return Err(PotError::BadSetting("the percentile lies inside (0, 1)"));
    }
    let both = normal_quantile(confidence).zip(normal_quantile(0.5 + 0.5 * confidence));
    both.filter(|(one, _)| *one >= 0.0).ok_or(PotError::BadSetting("the confidence lies in [0.5, 1)"))
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
