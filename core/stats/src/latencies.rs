//! Latency histograms (HdrHistogram): percentiles by nearest rank, and the exact maximum.

use hdrhistogram::Histogram;
use rtvirtio_units::{Nanos, Percentile};

/// Longest latency that [`Latencies::new`] resolves, one hour; longer ones count as this.
pub const MAX_LATENCY: Nanos = Nanos(3_600_000_000_000);
/// Significant decimal digits of [`Latencies::new`].
const DIGITS: u8 = 3;

/// Latencies in nanoseconds. Percentiles are rounded up by at most one unit of the last significant
/// digit (0.1 % with three) and never beyond the largest sample, so they never flatter.
#[derive(Clone, Debug)]
pub struct Latencies {
    hist: Histogram<u64>,
    longest: Nanos,
    max: Nanos,
}

impl Latencies {
    /// An empty histogram from 1 ns to [`MAX_LATENCY`] with three digits.
    #[must_use]
    pub fn new() -> Self {
        Self::with_range(MAX_LATENCY, DIGITS)
    }

    /// An empty histogram from 1 ns to `longest` (at least 2 ns) with 1 to 5 significant `digits`:
    /// its memory is fixed, some 40 kB for 1000 s at two digits.
    #[must_use]
    pub fn with_range(longest: Nanos, digits: u8) -> Self {
        let (longest, digits) = (Nanos(longest.0.max(2)), digits.clamp(1, 5));
        // The crate's documented conditions: 1 <= low, 2 * low <= high, digits within 0..=5.
        let hist = Histogram::new_with_bounds(1, longest.0, digits).expect("bounds in range");
        Self { hist, longest, max: Nanos(0) }
    }

    /// Adds `n` samples of one latency.
    pub fn record(&mut self, latency: Nanos, n: u64) {
        let latency = Nanos(latency.0.clamp(1, self.longest.0));
        self.hist.saturating_record_n(latency.0, n);
        if n > 0 {
            self.max = self.max.max(latency);
        }
    }

    /// Adds all samples of another histogram. What lies beyond this one's range counts as its end.
    pub fn merge(&mut self, other: &Self) {
        for (latency, n) in other.iter() {
            self.record(latency.min(other.max), n);
        }
    }

    /// Number of samples recorded.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.hist.len()
    }

    /// The largest sample, exact within the range; zero when empty.
    #[must_use]
    pub fn max(&self) -> Nanos {
        self.max
    }

    /// The latency that a share `p` of the samples does not exceed (nearest rank: sample
    /// `ceil(p * n)` in rising order); zero when empty. With `n` < 10 000 the p99.99 is therefore
    /// the largest sample.
    #[must_use]
    pub fn at(&self, p: Percentile) -> Nanos {
        Nanos(self.hist.value_at_quantile(p.0 / 100.0)).min(self.max)
    }

    /// p99.99; the largest sample where there are fewer than 10 000.
    #[must_use]
    pub fn tail(&self) -> Nanos {
        self.at(Percentile::P9999)
    }

    /// Share of the samples with a latency from `low` to `high`, both included up to the precision.
    /// Zero when empty.
    #[must_use]
    pub fn share_between(&self, low: Nanos, high: Nanos) -> f64 {
        if self.n() == 0 || high < low {
            return 0.0;
        }
        let inside = |t: Nanos| t.0.clamp(1, self.longest.0);
        self.hist.count_between(inside(low), inside(high)) as f64 / self.n() as f64
    }

    /// Distinct latencies with their counts, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = (Nanos, u64)> + '_ {
        self.hist.iter_recorded().map(|v| (Nanos(v.value_iterated_to()), v.count_at_value()))
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
        assert!(h.at(Percentile(100.0)) >= MAX_LATENCY);
        assert_eq!(h.at(Percentile(50.0)), Nanos(1));
        let mut short = Latencies::with_range(Nanos(1_000), 2);
        short.merge(&h);
        assert_eq!((short.n(), short.max()), (2, Nanos(1_000)));
    }

    #[test]
    fn the_largest_sample_is_exact() {
        let h: Latencies = [Nanos(1_234_567), Nanos(9_876_543)].into_iter().collect();
        assert_eq!((h.max(), h.at(Percentile(100.0))), (Nanos(9_876_543), Nanos(9_876_543)));
        assert_eq!((Latencies::new().max(), Latencies::new().at(Percentile::P9999)), (Nanos(0), Nanos(0)));
    }

    #[test]
    fn a_tail_of_few_samples_is_their_maximum() {
        let mut h = Latencies::with_range(Nanos(10_000_000), 2);
        assert_eq!((h.n(), h.at(Percentile(50.0)), h.tail()), (0, Nanos(0), Nanos(0)));
        for i in 1..=100 {
            h.record(Nanos(i * 1_000), 1);
        }
        h.record(Nanos(5_000_000), 1);
        assert_eq!((h.n(), h.max(), h.tail()), (101, Nanos(5_000_000), Nanos(5_000_000)));
        let p50 = h.at(Percentile(50.0)).0;
        assert!((50_000..=52_000).contains(&p50), "{p50}");
        h.record(Nanos(10), 10_000);
        assert!(h.tail() < h.max());
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
