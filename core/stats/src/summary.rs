//! Five statistics of a sample, as Spyridakis and Raho report start-up times (*On Application
//! Responsiveness and Storage Latency in Virtualized Environments*, section V-B).

use serde::Serialize;

/// Student's t at 97.5 % for 1 to 30 degrees of freedom (Abramowitz and Stegun, table 26.10).
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Quantile beyond the table: that of the normal distribution, 4 % too small at 31.
const NORMAL: f64 = 1.96;

/// Student's t at 97.5 %; infinite without a degree of freedom.
#[must_use]
pub fn student_t(freedom: usize) -> f64 {
    match freedom.checked_sub(1) {
        Some(row) => T.get(row).copied().unwrap_or(NORMAL),
        None => f64::INFINITY,
    }
}

/// Minimum, maximum, mean, standard deviation, and half of the 95 % interval of the mean.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of values.
    pub n: usize,
    /// Smallest of the values.
    pub min: f64,
    /// Largest of the values.
    pub max: f64,
    /// Mean of the values.
    pub mean: f64,
    /// Standard deviation of a sample; 0 for one value.
    pub deviation: f64,
    /// Half-width of the 95 % interval of the mean; infinite for one value.
    pub interval: f64,
}

impl Summary {
    /// Statistics of `values`; `None` for an empty list.
    #[must_use]
    pub fn from_values(values: &[f64]) -> Option<Self> {
        let n = values.len();
        if n == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / n as f64;
        let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
        let deviation = if n > 1 { (squares / (n - 1) as f64).sqrt() } else { 0.0 };
        let interval = if n > 1 { student_t(n - 1) * deviation / (n as f64).sqrt() } else { f64::INFINITY };
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Self { n, min, max, mean, deviation, interval })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_values_as_by_hand() {
        let s = Summary::from_values(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!((s.n, s.min, s.max, s.mean), (5, 1.0, 5.0, 3.0));
        assert!((s.deviation - 2.5f64.sqrt()).abs() < 1e-12);
        // 2.776 * 1.5811 / sqrt(5)
        assert!((s.interval - 1.963).abs() < 1e-3, "{}", s.interval);
        assert!(Summary::from_values(&[]).is_none());
        let one = Summary::from_values(&[2.0]).unwrap();
        assert!(one.interval.is_infinite() && one.deviation == 0.0);
        assert!(Summary::from_values(&[1.0; 100]).unwrap().interval == 0.0);
        assert_eq!((student_t(1), student_t(30), student_t(31)), (12.706, 2.042, NORMAL));
        assert!(student_t(0).is_infinite());
    }
}
