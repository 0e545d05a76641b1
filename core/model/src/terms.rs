//! Sums of terms: with the terms kept for a forecast, or the total alone for a search.

use std::borrow::Cow;

use rtvirtio_units::Nanos;

use crate::types::{Brief, Forecast, Side, Term};

/// Collects terms in seconds.
pub(crate) trait Terms: Default {
    /// Sum of the terms.
    type Whole;

    fn add(&mut self, side: Side, name: &'static str, seconds: f64);

    /// Names the statistic that feeds the last term, where terms are kept.
    fn note_statistic(&mut self, statistic: impl FnOnce() -> String);

    fn whole(self, rate_kept: f64) -> Self::Whole;
}

/// Keeps the terms, for a forecast whose terms sum exactly to the total.
pub(crate) struct Sum {
    terms: Vec<Term>,
}

/// Keeps the sum only, in ns: equal to [`Sum`]'s to the bit, for searches over thousands of
/// configurations.
#[derive(Default)]
pub(crate) struct Total(u64);

/// Most terms that a model gives a task.
const MOST_TERMS: usize = 10;

/// Longest term in seconds (about 11 days): keeps every sum finite whatever the input.
const LONGEST_TERM: f64 = 1e6;

impl Default for Sum {
    fn default() -> Self {
        Self { terms: Vec::with_capacity(MOST_TERMS) }
    }
}

/// A term of so many seconds, clamped to the countable range.
fn counted(seconds: f64) -> Nanos {
    Nanos::from_secs_f64(if seconds.is_nan() { LONGEST_TERM } else { seconds.clamp(0.0, LONGEST_TERM) })
}

impl Terms for Total {
    type Whole = Brief;

    fn add(&mut self, _: Side, _: &'static str, seconds: f64) {
        self.0 = self.0.saturating_add(counted(seconds).0);
    }

    fn note_statistic(&mut self, _: impl FnOnce() -> String) {}

    fn whole(self, rate_kept: f64) -> Brief {
        Brief { latency_ns: Nanos(self.0), rate_kept: rate_kept.clamp(0.0, 1.0) }
    }
}

impl Terms for Sum {
    type Whole = Forecast;

    fn add(&mut self, side: Side, name: &'static str, seconds: f64) {
        let latency_ns = counted(seconds);
        self.terms.push(Term { side, name: Cow::Borrowed(name), latency_ns, statistic: None });
    }

    fn note_statistic(&mut self, statistic: impl FnOnce() -> String) {
        if let Some(last) = self.terms.last_mut().filter(|t| t.latency_ns.0 > 0) {
            last.statistic = Some(statistic());
        }
    }

    fn whole(self, rate_kept: f64) -> Forecast {
        let total = self.terms.iter().fold(0u64, |sum, t| sum.saturating_add(t.latency_ns.0));
        Forecast {
            latency_ns: Nanos(total),
            rate_kept: rate_kept.clamp(0.0, 1.0),
            terms: self.terms,
            upper: None,
        }
    }
}
