//! Estimate of a tail from few samples: p99.99 when the samples are too few to show it.
//!
//! Peaks over threshold ([`rtvirtio_stats::pot`]): the excesses over a high threshold follow a
//! generalised Pareto distribution, whose quantiles extend the sample; stalls that hit several
//! requests count once. It is an estimate in addition to the verdict and never changes it: a
//! verdict rests on counted requests alone.

use rtvirtio_stats::pot::Pot;
use rtvirtio_units::{Nanos, Percentile, Ratio};
use serde::{Deserialize, Serialize};

/// Confidence of the upper bound.
pub const CONFIDENCE: Ratio = Ratio(0.95);

/// Extreme-value estimate of a percentile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TailEstimate {
    pub percentile: Percentile,
    /// Best estimate of the percentile.
    pub estimate_ns: Nanos,
    /// Upper bound with [`CONFIDENCE`]; `None` where the samples give none.
    pub upper_ns: Option<Nanos>,
    /// Number of exceedances of the threshold.
    pub exceedances: u64,
    /// Number of independent clusters that they form.
    pub clusters: u64,
}

/// Estimates a percentile from latencies in the order of their requests, ns.
///
/// # Errors
/// Text with the reason: too few independent exceedances, or no distribution that fits.
pub fn estimate(latencies_ns: &[u64], percentile: Percentile) -> Result<TailEstimate, String> {
    let series: Vec<f64> = latencies_ns.iter().map(|l| *l as f64).collect();
    let pot = Pot::fit(&series).map_err(|e| e.to_string())?;
    let quantile = pot.tail_quantile(percentile.0 / 100.0, CONFIDENCE.0).map_err(|e| e.to_string())?;
    let ns = |v: f64| Nanos(v.clamp(0.0, u64::MAX as f64) as u64);
    let threshold = pot.threshold();
    Ok(TailEstimate {
        percentile,
        estimate_ns: ns(quantile.estimate),
        upper_ns: quantile.upper.is_finite().then(|| ns(quantile.upper)),
        exceedances: threshold.exceedances as u64,
        clusters: threshold.clusters as u64,
    })
}

#[cfg(test)]
mod tests {
    use rtvirtio_stats::Random;

    use super::*;

    #[test]
    fn an_exponential_tail_is_estimated_and_bounded() {
        let mut random = Random::new(5);
        let series: Vec<u64> =
            (0..3000).map(|_| 100_000 + (-(1.0 - random.unit()).ln() * 1e6) as u64).collect();
        let tail = estimate(&series, Percentile::P9999).unwrap();
        // True p99.99: 0.1 ms + ln(10^4) ms = 9.3 ms, from 3000 requests.
        let truth = 9.31e6;
        assert!((tail.estimate_ns.0 as f64 / truth - 1.0).abs() < 0.5, "{tail:?}");
        assert!(tail.upper_ns.unwrap().0 as f64 > truth, "{tail:?}");
        assert!(tail.clusters >= 30);
    }

    #[test]
    fn too_few_requests_are_reported_and_not_guessed() {
        let few: Vec<u64> = (1..=50).map(|i| i * 37 % 50).collect();
        let reported = estimate(&few, Percentile::P9999).unwrap_err();
        assert!(reported.contains("measure longer"), "{reported}");
        assert!(estimate(&[], Percentile::P9999).is_err());
        let late = estimate(&(1..=5_000).collect::<Vec<u64>>(), Percentile::P9999).unwrap_err();
        assert!(late.contains("more is asked for than is served"), "{late}");
    }
}
