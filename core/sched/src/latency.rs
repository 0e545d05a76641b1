//! Latency histograms of fixed size.

use hdrhistogram::Histogram;
use rtvirtio_units::Nanos;

/// Below so many samples a p99.99 is the largest sample.
const TAIL_SAMPLES: u64 = 10_000;

/// Latencies with their exact maximum. Its memory does not grow after it is made.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    hist: Histogram<u64>,
    max: u64,
}

impl LatencyHistogram {
    /// For latencies of 1 ns to `longest` at so many significant digits, at most 5; longer ones
    /// count as `longest`, but for the maximum.
    #[must_use]
    pub fn new(longest: Nanos, digits: u8) -> Self {
        // The documented bounds of the crate: 2 * low <= high, digits from 0 to 5.
        let hist = Histogram::new_with_bounds(1, longest.0.max(2), digits.min(5));
        Self { hist: hist.unwrap_or_else(|_| unreachable!("bounds are within the type's range")), max: 0 }
    }

    /// Adds a sample.
    pub fn record(&mut self, latency: Nanos) {
        self.hist.saturating_record(latency.0);
        self.max = self.max.max(latency.0);
    }

    /// Number of samples.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.hist.len()
    }

    /// A percentile from 0 to 100; zero without samples.
    #[must_use]
    pub fn percentile(&self, percentile: f64) -> Nanos {
        Nanos(self.hist.value_at_percentile(percentile).min(self.max))
    }

    /// The longest latency.
    #[must_use]
    pub fn max(&self) -> Nanos {
        Nanos(self.max)
    }

    /// p99.99; the maximum where there are fewer than 10 000 samples.
    #[must_use]
    pub fn tail(&self) -> Nanos {
        if self.count() < TAIL_SAMPLES { self.max() } else { self.percentile(99.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_of_few_samples_is_their_maximum() {
        let mut h = LatencyHistogram::new(Nanos(1_000_000), 2);
        assert_eq!((h.count(), h.percentile(50.0), h.tail()), (0, Nanos(0), Nanos(0)));
        for i in 1..=100 {
            h.record(Nanos(i * 1_000));
        }
        h.record(Nanos(5_000_000));
        assert_eq!((h.count(), h.max(), h.tail()), (101, Nanos(5_000_000), Nanos(5_000_000)));
        let p50 = h.percentile(50.0).0;
        assert!((50_000..=52_000).contains(&p50), "{p50}");
        (0..10_000).for_each(|_| h.record(Nanos(10)));
        assert!(h.tail() < h.max());
    }
}
