//! Comparable measurements in interleaved, random order.

use rtvirtio_stats::Random;

use rtvirtio_workflow::{Bar, Progress};

/// A progress bar that counts measurements.
pub struct Counter {
    bar: Box<dyn Bar>,
    done: u64,
}

impl Counter {
    /// A counter from 0 to `total`.
    #[must_use]
    pub fn new(progress: &dyn Progress, label: &str, total: usize) -> Self {
        Self { bar: progress.bar(label, total as u64), done: 0 }
    }

    /// Counts one more finished measurement.
    pub fn step(&mut self) {
        self.set(self.done + 1);
    }

    /// Sets the number of finished measurements.
    pub fn set(&mut self, done: u64) {
        self.done = done;
        self.bar.set(done);
    }
}

/// Measures every item once, in a random order, so that a host that becomes slower affects all
/// items alike; equal rounds have equal orders. Returns the results in the order of `items`.
///
/// # Errors
/// The first that `measure` returns, and cancellation.
pub fn interleaved<I, T>(
    items: &[I],
    round: usize,
    counter: &mut Counter,
    progress: &dyn Progress,
    mut measure: impl FnMut(&I) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<T>> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    Random::new(round as u64 + 1).shuffle(&mut order);
    let mut results: Vec<Option<T>> = items.iter().map(|_| None).collect();
    for i in order {
        progress.check_cancelled()?;
        results[i] = Some(measure(&items[i])?);
        counter.step();
    }
    Ok(results.into_iter().flatten().collect())
}
