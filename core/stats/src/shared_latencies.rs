//! Latency histograms that one thread writes and others read meanwhile: neither waits for the
//! other, and nothing is copied in the writer's thread.
//!
//! Buckets are those of [`Latencies`] with two digits: exact below 256 ns, then 128 in each octave.
//! An octave (1 KiB) is allocated with its first sample, so an unused histogram holds no buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rtvirtio_units::Nanos;

use crate::Latencies;

/// Upper limit of the histogram: 1000 s. Longer latencies are recorded as this.
const LONGEST_LATENCY: Nanos = Nanos(1_000_000_000_000);
/// Buckets of an octave.
const BUCKETS: usize = 128;
/// Binary logarithm of [`BUCKETS`].
const BITS: u32 = BUCKETS.ilog2();
/// Latencies below 128 ns, then the octaves up to that of [`LONGEST_LATENCY`].
const OCTAVES: usize = (LONGEST_LATENCY.0.ilog2() - BITS + 2) as usize;

type Octave = [AtomicU64; BUCKETS];

#[derive(Debug)]
struct Shared {
    octaves: [OnceLock<Box<Octave>>; OCTAVES],
    max: AtomicU64,
}

/// Octave and bucket of a latency.
fn place(latency: u64) -> (usize, usize) {
    let octave = (latency.max(1).ilog2() + 1).saturating_sub(BITS);
    let bucket = latency >> octave.saturating_sub(1);
    (octave as usize, bucket as usize % BUCKETS)
}

/// Largest latency of a bucket.
fn top(octave: usize, bucket: usize) -> u64 {
    let Some(shift) = octave.checked_sub(1) else { return bucket as u64 };
    (((bucket + BUCKETS + 1) as u64) << shift) - 1
}

/// The writer of a histogram. There is one, which makes a sample two plain stores.
#[derive(Debug)]
pub struct LatencyRecorder(Arc<Shared>);

impl Default for LatencyRecorder {
    fn default() -> Self {
        let octaves = std::array::from_fn(|_| OnceLock::new());
        Self(Arc::new(Shared { octaves, max: AtomicU64::new(0) }))
    }
}

impl LatencyRecorder {
    /// Adds a sample.
    pub fn record(&mut self, latency: Nanos) {
        let latency = latency.0.clamp(1, LONGEST_LATENCY.0);
        if latency > self.0.max.load(Ordering::Relaxed) {
            // Before the count: a reader finds no sample beyond the maximum.
            self.0.max.store(latency, Ordering::Relaxed);
        }
        let (octave, bucket) = place(latency);
        let counts =
            self.0.octaves[octave].get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
        let count = &counts[bucket];
        count.store(count.load(Ordering::Relaxed).saturating_add(1), Ordering::Release);
    }

    /// A reader of this histogram, for any thread.
    #[must_use]
    pub fn reader(&self) -> LatencyReader {
        LatencyReader(Arc::clone(&self.0))
    }

    /// Bytes that the buckets take by now.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.octaves.iter().filter(|octave| octave.get().is_some()).count() * size_of::<Octave>()
    }
}

/// A reader of a histogram that is written meanwhile.
#[derive(Clone, Debug)]
pub struct LatencyReader(Arc<Shared>);

impl LatencyReader {
    /// The samples so far. A sample that is added meanwhile is in it or not.
    #[must_use]
    pub fn snapshot(&self) -> Latencies {
        let load = |bucket: usize, octave: &Octave| octave[bucket].load(Ordering::Acquire);
        let octaves = self.0.octaves.iter().enumerate().filter_map(|(i, octave)| Some((i, octave.get()?)));
        let counts: Vec<(u64, u64)> = octaves
            .flat_map(|(i, octave)| (0..BUCKETS).map(move |bucket| (top(i, bucket), load(bucket, octave))))
            .filter(|(_, n)| *n > 0)
            .collect();
        // After the counts, see `record`.
        let max = self.0.max.load(Ordering::Relaxed);
        let mut latencies = Latencies::with_range(LONGEST_LATENCY, 2);
        for (latency, n) in counts {
            latencies.record(Nanos(latency.min(max)), n);
        }
        latencies
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rtvirtio_units::Percentile;

    use super::*;

    fn both(samples: impl IntoIterator<Item = u64>) -> (Latencies, LatencyRecorder) {
        let (mut plain, mut shared) = (Latencies::with_range(LONGEST_LATENCY, 2), LatencyRecorder::default());
        for latency in samples {
            plain.record(Nanos(latency), 1);
            shared.record(Nanos(latency));
        }
        (plain, shared)
    }

    #[test]
    fn bounds_of_buckets_are_in_their_own_bucket() {
        for octave in 0..OCTAVES {
            for bucket in 0..BUCKETS {
                let last = top(octave, bucket);
                assert_eq!(place(last), (octave, bucket), "{last}");
                let (next, first) = place(last + 1);
                assert!((next, first) > (octave, bucket) && top(next, first) > last, "{last}");
            }
        }
        assert_eq!(place(LONGEST_LATENCY.0).0, OCTAVES - 1);
    }

    proptest! {
        /// Percentiles, counts and maximum are those of a histogram that is not shared.
        #[test]
        fn a_snapshot_is_what_was_recorded(samples in prop::collection::vec(
            (0u32..64, any::<u64>()).prop_map(|(shift, bits)| bits >> shift), 0..200)
        ) {
            let (plain, shared) = both(samples);
            let read = shared.reader().snapshot();
            prop_assert_eq!((read.n(), read.max()), (plain.n(), plain.max()));
            prop_assert!(read.iter().eq(plain.iter()));
            for p in [1.0, 50.0, 99.0, 99.99] {
                prop_assert_eq!(read.at(Percentile(p)), plain.at(Percentile(p)));
            }
        }
    }

    #[test]
    fn memory_comes_with_the_first_sample_of_an_octave_and_is_bounded() {
        let (_, mut shared) = both([]);
        assert_eq!(shared.size(), 0);
        (0..1_000).for_each(|i| shared.record(Nanos(100_000 + i)));
        assert_eq!(shared.size(), 1_024);
        for shift in 0..64 {
            (0..100).for_each(|i| shared.record(Nanos((u64::MAX >> shift).wrapping_sub(i * i))));
        }
        assert!(shared.size() <= OCTAVES * 1_024 && OCTAVES <= 34);
    }

    #[test]
    fn a_reader_sees_samples_of_another_thread_and_none_beyond_the_maximum() {
        let mut shared = LatencyRecorder::default();
        let reader = shared.reader();
        let writer = std::thread::spawn(move || (1..=200_000).for_each(|i| shared.record(Nanos(i * 10))));
        let mut last = 0;
        while last < 200_000 {
            let read = reader.snapshot();
            assert!(read.n() >= last && read.at(Percentile(100.0)) <= read.max());
            last = read.n();
        }
        writer.join().unwrap();
        assert_eq!(reader.snapshot().max(), Nanos(2_000_000));
    }
}
