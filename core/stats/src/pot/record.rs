//! Measured record: the largest latencies, their times, and the number of requests in all.

use super::PotError;

/// Latencies in the order of time, or only the largest of them. Unit-free: thresholds, scales and
/// quantiles come out in the unit of the values.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    n: usize,
    span: f64,
    floor: f64,
    /// Times in rising order, within 0..=span.
    times: Vec<f64>,
    /// Values in the order of the times, all above the floor.
    values: Vec<f64>,
    /// The values in falling order.
    falling: Vec<f64>,
}

/// Exceedances of one threshold.
pub(super) struct Exceedances {
    /// Times in units of the mean distance between two requests, in rising order.
    pub(super) times: Vec<f64>,
    /// Heights above the threshold in the order of the times, above zero.
    pub(super) excesses: Vec<f64>,
}

impl Record {
    /// A complete series; the number of a request is its time.
    ///
    /// # Errors
    /// [`PotError::TooFew`] for an empty series, [`PotError::NotFinite`] for NaN and infinities.
    pub fn from_latencies(latencies: &[f64]) -> Result<Self, PotError> {
        let times = (0..latencies.len()).map(|i| i as f64).collect();
        Self::new(latencies.len(), latencies.len() as f64, f64::NEG_INFINITY, times, latencies.to_vec())
    }

    /// The latencies above `floor` among `n` requests over a time `span`, as (time, latency) in the
    /// order of time. Time runs from 0 to `span` in any unit; requests are taken as evenly spread
    /// over it.
    ///
    /// # Errors
    /// [`PotError::TooFew`] without exceedances, [`PotError::NotFinite`] for NaN and infinities,
    /// [`PotError::BadRecord`] for times out of order or outside the span, values not above the
    /// floor, or more of them than requests.
    pub fn from_exceedances(
        n: usize,
        span: f64,
        floor: f64,
        exceedances: &[(f64, f64)],
    ) -> Result<Self, PotError> {
        let (times, values) = exceedances.iter().copied().unzip();
        Self::new(n, span, floor, times, values)
    }

    fn new(n: usize, span: f64, floor: f64, times: Vec<f64>, values: Vec<f64>) -> Result<Self, PotError> {
        if values.is_empty() {
            return Err(PotError::TooFew { have: 0, need: 1 });
        }
        if let Some(index) = (0..values.len()).find(|i| !(times[*i].is_finite() && values[*i].is_finite())) {
            return Err(PotError::NotFinite { index });
        }
        if values.len() > n {
            return Err(PotError::BadRecord("more exceedances than requests"));
        }
        if !(span.is_finite() && span > 0.0) || times[0] < 0.0 || times[times.len() - 1] > span {
            return Err(PotError::BadRecord("times lie outside the span"));
        }
        if times.windows(2).any(|t| t[1] < t[0]) {
            return Err(PotError::BadRecord("times are not in order"));
        }
        if floor.is_nan() || values.iter().any(|v| *v <= floor) {
            return Err(PotError::BadRecord("a value is not above the floor"));
        }
        let mut falling = values.clone();
        falling.sort_unstable_by(|a, b| b.total_cmp(a));
        Ok(Self { n, span, floor, times, values, falling })
    }

    /// Number of requests, exceedances or not.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// All latencies in the order of time; `None` where the record has only the largest.
    pub(super) fn series(&self) -> Option<&[f64]> {
        (self.values.len() == self.n).then_some(&self.values)
    }

    /// Level that `floor(n (1 - quantile))` values exceed (fewer where values are equal); `None`
    /// where the record does not reach down to it, or nothing lies above.
    #[must_use]
    pub fn threshold(&self, quantile: f64) -> Option<f64> {
        if !(quantile > 0.0 && quantile < 1.0) {
            return None;
        }
        let above = (self.n as f64 * (1.0 - quantile) + 1e-9).floor() as usize;
        match self.falling.get(above) {
            Some(u) => Some(*u),
            None => (above == self.falling.len() && self.floor.is_finite()).then_some(self.floor),
        }
    }

    pub(super) fn above(&self, threshold: f64) -> Exceedances {
        let scale = self.n as f64 / self.span;
        let high = |i: &usize| self.values[*i] > threshold;
        let (times, excesses) = (0..self.values.len())
            .filter(high)
            .map(|i| (self.times[i] * scale, self.values[i] - threshold))
            .unzip();
        Exceedances { times, excesses }
    }

    /// A length of time in units of the mean distance between two requests.
    pub(super) fn in_requests(&self, time: f64) -> f64 {
        time * self.n as f64 / self.span
    }

    /// The reverse of [`Record::in_requests`].
    pub(super) fn in_time(&self, requests: f64) -> f64 {
        requests * self.span / self.n as f64
    }
}
