//! Latency histograms: 3 significant digits from 1 ns to 1 h (HdrHistogram).

use hdrhistogram::Histogram;
use rtvirtio_units::{Nanos, Percentile};

/// Longest latency that is told apart; longer ones count as this: one hour.
pub const LONGEST: Nanos = Nanos(3_600_000_000_000);

/// Latencies in nanoseconds. Percentiles are rounded up by at most 0.1 %, so they never flatter.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// An empty histogram.
    #[must_use]
    pub fn new() -> Self {
        // Cannot fail: 1 <= low, 2 * low <= high, and 3 is within 0..=5 (the crate's documented conditions).
        Self(Histogram::new_with_bounds(1, LONGEST.0, 3).expect("constant bounds"))
    }

    /// Adds `n` samples of one latency.
    pub fn record(&mut self, latency: Nanos, n: u64) {
        self.0.saturating_record_n(latency.0.clamp(1, LONGEST.0), n);
    }

    /// Adds all samples of another histogram.
    pub fn merge(&mut self, other: &Self) {
        // Bounds and precision are equal, so no value can be out of range; the crate reports only that.
        let _ = self.0.add(&other.0);
    }

    /// Number of samples.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.0.len()
    }

    /// The latency that a share `p` of the samples does not exceed (nearest rank: sample `ceil(p * n)` in rising order);
    /// zero when empty. With `n` < 10 000 the p99.99 is therefore the largest sample.
    #[must_use]
    pub fn at(&self, p: Percentile) -> Nanos {
        if self.n() == 0 { Nanos(0) } else { Nanos(self.0.value_at_quantile(p.0 / 100.0)) }
    }

    /// Share of the samples with a latency from `low` to `high`, both included up to the precision. Zero when empty.
    #[must_use]
    pub fn share_between(&self, low: Nanos, high: Nanos) -> f64 {
        if self.n() == 0 || high < low {
            return 0.0;
        }
        self.0.count_between(low.0.clamp(1, LONGEST.0), high.0.clamp(1, LONGEST.0)) as f64 / self.n() as f64
    }

    /// Distinct latencies with their counts, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = (Nanos, u64)> + '_ {
        self.0.iter_recorded().map(|v| (Nanos(v.value_iterated_to()), v.count_at_value()))
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl FromIterator<Nanos> for Latencies {
    fn from_iter<I: IntoIterator<Item = Nanos>>(latencies: I) -> Self {
        let mut h = Self::new();
        for latency in latencies {
            h.record(latency, 1);
        }
        h
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank_and_within_a_thousandth_above() {
        let h: Latencies = (1..=20_000u64).map(|i| Nanos(i * 1_000)).collect();
        for (p, exact) in [(50.0, 10_000_000u64), (99.0, 19_800_000), (99.99, 19_998_000)] {
            let got = h.at(Percentile(p)).0;
            assert!(got >= exact && got as f64 <= exact as f64 * 1.001, "p{p}: {got} for {exact}");
        }
        let few: Latencies = (1..=9_999u64).map(Nanos).collect();
        assert_eq!(
            few.at(Percentile::P9999).0,
            few.at(Percentile(100.0)).0,
            "below 10 000 it is the maximum"
        );
    }

    #[test]
    fn out_of_range_latencies_are_kept_at_the_bounds() {
        let h: Latencies = [Nanos(0), Nanos(u64::MAX)].into_iter().collect();
        assert_eq!(h.n(), 2);
        assert!(h.at(Percentile(100.0)) >= LONGEST);
        assert_eq!(h.at(Percentile(50.0)), Nanos(1));
    }

    #[test]
    fn merging_adds() {
        let mut a: Latencies = [Nanos(100)].into_iter().collect();
        a.merge(&[Nanos(200), Nanos(300)].into_iter().collect());
        assert_eq!(a.n(), 3);
        assert_eq!(a.iter().map(|(_, n)| n).sum::<u64>(), 3);
        assert!((a.share_between(Nanos(150), Nanos(250)) - 1.0 / 3.0).abs() < 1e-9);
    }
}
