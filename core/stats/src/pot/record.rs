//! Measured record: latencies in the order of time.

use super::PotError;

/// A complete series. Unit-free: thresholds, scales and quantiles come out in the unit of the
/// values; the number of a request is its time.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) values: Vec<f64>,
    /// The values in falling order.
    falling: Vec<f64>,
}

/// Exceedances of one threshold.
pub(super) struct Exceedances {
    /// Numbers of the requests, in rising order.
    pub(super) times: Vec<f64>,
    /// Heights above the threshold in the order of the times, above zero.
    pub(super) excesses: Vec<f64>,
}

impl Record {
    pub(super) fn new(latencies: &[f64]) -> Result<Self, PotError> {
        if latencies.is_empty() {
            return Err(PotError::TooFew { have: 0, need: 1 });
        }
        if let Some(index) = latencies.iter().position(|v| !v.is_finite()) {
            return Err(PotError::NotFinite { index });
        }
        let mut falling = latencies.to_vec();
        falling.sort_unstable_by(|a, b| b.total_cmp(a));
        Ok(Self { values: latencies.to_vec(), falling })
    }

    /// Number of requests.
    pub(super) fn n(&self) -> usize {
        self.values.len()
    }

    /// Level that `floor(n (1 - quantile))` values exceed (fewer where values are equal), for a
    /// quantile inside (0, 1).
    pub(super) fn threshold(&self, quantile: f64) -> f64 {
        self.falling[(self.n() as f64 * (1.0 - quantile) + 1e-9).floor() as usize]
    }

    pub(super) fn above(&self, threshold: f64) -> Exceedances {
        let high = self.values.iter().enumerate().filter(|(_, value)| **value > threshold);
        let (times, excesses) = high.map(|(i, value)| (i as f64, value - threshold)).unzip();
        Exceedances { times, excesses }
    }
}
