//! Intervals and the normal quantile that approximate ones need.

use serde::{Deserialize, Serialize};

/// A two-sided interval, in the unit of the bracketed quantity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end, included.
    pub low: f64,
    /// Upper end, not below `low`.
    pub high: f64,
}

impl Interval {
    /// Whether a value lies inside, ends included.
    #[must_use]
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// The two levels that leave equal tails outside; `None` unless `confidence` is inside (0, 1).
    #[must_use]
    pub fn tails(confidence: f64) -> Option<(f64, f64)> {
        (confidence > 0.0 && confidence < 1.0).then_some((0.5 - 0.5 * confidence, 0.5 + 0.5 * confidence))
    }
}

/// Quantile of the standard normal distribution, to about 1e-12; `None` for `p` within 1e-12 of 0
/// or 1 or beyond.
#[must_use]
pub fn normal_quantile(p: f64) -> Option<f64> {
    if !(1e-12..=1.0 - 1e-12).contains(&p) {
        return None;
    }
    let (sign, tail) = if p < 0.5 { (-1.0, p) } else { (1.0, 1.0 - p) };
    let (mut low, mut high) = (0.0f64, 8.0f64);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if upper_tail(middle) > tail { low = middle } else { high = middle }
    }
    Some(sign * 0.5 * (low + high))
}

/// `P(Z > x)` for `x >= 0`: the power series of Abramowitz and Stegun (1964) 26.2.11 in the middle,
/// the continued fraction 26.2.14 outside, where the series would cancel.
fn upper_tail(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if x < 2.5 {
        let (mut term, mut sum, mut k) = (x, x, 1.0);
        while term > 1e-17 * sum {
            k += 2.0;
            term *= x * x / k;
            sum += term;
        }
        return 0.5 - density * sum;
    }
    density / (1..=120).rev().fold(x, |below, k| x + f64::from(k) / below)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 26.1 and 26.5 of Abramowitz and Stegun (1964).
    #[test]
    fn known_normal_quantiles() {
        for (p, z) in [
            (0.5, 0.0),
            (0.95, 1.644_853_626_951),
            (0.975, 1.959_963_984_540),
            (0.995, 2.575_829_303_549),
            (0.9999, 3.719_016_485_456),
            (0.999_999, 4.753_424_308_823),
        ] {
            let got = normal_quantile(p).unwrap();
            assert!((got - z).abs() < 1e-9, "{p}: {got} for {z}");
            assert!((normal_quantile(1.0 - p).unwrap() + z).abs() < 1e-9);
        }
        assert!([0.0, 1.0, -1.0, f64::NAN].iter().all(|p| normal_quantile(*p).is_none()));
    }
}
