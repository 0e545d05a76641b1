//! Goodness of fit of a generalised Pareto distribution to the excesses.

use super::gpd::{GpdFit, shrink};

/// The Anderson-Darling statistic of `rising` excesses under a fit; large when it does not fit.
#[must_use]
pub(super) fn anderson_darling(rising: &[f64], gpd: &GpdFit) -> f64 {
    let n = rising.len();
    // -ln(1 - z) of every excess; a point beyond the end of the distribution counts as very far
    // out.
    let depths: Vec<f64> = rising.iter().map(|y| shrink(gpd.shape, y / gpd.scale).min(700.0)).collect();
    let sum: f64 = (0..n)
        .map(|i| (2 * i + 1) as f64 * ((-(-depths[i]).exp_m1()).max(1e-300).ln() - depths[n - 1 - i]))
        .sum();
    -(n as f64) - sum / n as f64
}

/// Upper tail probabilities of the columns of [`TABLE`].
const LEVELS: [f64; 5] = [0.5, 0.25, 0.1, 0.05, 0.01];

/// Upper tail points of the statistic by shape: the maximum of the likelihood in 20 000 samples
/// of 400 excesses each.
const TABLE: [(f64, [f64; 5]); 7] = [
    (-0.45, [0.452, 0.663, 0.942, 1.151, 1.669]),
    (-0.25, [0.424, 0.617, 0.873, 1.064, 1.530]),
    (0.0, [0.395, 0.566, 0.791, 0.960, 1.380]),
    (0.25, [0.372, 0.527, 0.728, 0.880, 1.260]),
    (0.5, [0.355, 0.500, 0.685, 0.822, 1.171]),
    (0.75, [0.344, 0.480, 0.654, 0.787, 1.104]),
    (0.95, [0.338, 0.470, 0.636, 0.766, 1.070]),
];

/// Probability of a statistic at least this large when the distribution fits and both its
/// parameters were estimated (the test of Choulakian and Stephens, Technometrics 43, 2001; table of
/// our own). Interpolated in the logarithm.
#[must_use]
pub(super) fn p_value(statistic: f64, shape: f64) -> f64 {
    let points = points(shape);
    let (mut from, mut log_from) = (0.0, 0.0);
    let mut slope = 0.0;
    for (to, level) in points.into_iter().zip(LEVELS) {
        slope = (level.ln() - log_from) / (to - from);
        if statistic <= to {
            break;
        }
        (from, log_from) = (to, level.ln());
    }
    (log_from + slope * (statistic - from)).exp().clamp(0.0, 1.0)
}

/// The row of the table at a shape, interpolated.
fn points(shape: f64) -> [f64; 5] {
    let last = TABLE.len() - 1;
    let upper = TABLE.iter().position(|(s, _)| *s >= shape).unwrap_or(last).max(1);
    let ((s0, low), (s1, high)) = (TABLE[upper - 1], TABLE[upper]);
    let share = ((shape - s0) / (s1 - s0)).clamp(0.0, 1.0);
    std::array::from_fn(|i| low[i] + share * (high[i] - low[i]))
}
