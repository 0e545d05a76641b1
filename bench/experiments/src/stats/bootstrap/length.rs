//! The block length for a series.

use super::{BootstrapError, Scheme, check_finite};

/// Mean block length, in values, that minimises the mean squared error of the bootstrap variance of
/// the mean: Politis and White (Econometric Reviews 23, 2004, section 3) with the corrected
/// constant of Patton, Politis and White (28, 2009). At least 1; at most
/// `ceil(min(3 sqrt(n), n / 3))`, the cap of the latter's authors. 1 for a constant series, which
/// has nothing to keep together.
///
/// For a tail quantile give the series of zeros and ones that says where the threshold was
/// exceeded.
///
/// # Errors
/// [`BootstrapError::TooFew`] below 10 values, [`BootstrapError::NotFinite`] for NaN and
/// infinities.
pub fn block_length(series: &[f64], scheme: Scheme) -> Result<f64, BootstrapError> {
    check_finite(series)?;
    let n = series.len();
    if n < 10 {
        return Err(BootstrapError::TooFew { have: n, need: 10 });
    }
    let nf = n as f64;
    let cap = (3.0 * nf.sqrt()).min(nf / 3.0).ceil();
    let autocovariances = autocovariances(series);
    let window = 2 * last_correlated(&autocovariances, n);
    if autocovariances[0] <= 0.0 || window == 0 {
        return Ok(1.0);
    }
    // Equations (9) and (10) of the paper: the weighted sums that estimate the spectrum at zero and
    // its bend.
    let (mut spectrum, mut bend) = (autocovariances[0], 0.0);
    for (lag, r) in autocovariances.iter().enumerate().take(window + 1).skip(1) {
        let weighted = 2.0 * flat_top(lag as f64 / window as f64) * r;
        spectrum += weighted;
        bend += weighted * lag as f64;
    }
    let variance = match scheme {
        Scheme::Moving => 4.0 / 3.0 * spectrum * spectrum,
        Scheme::Stationary => 2.0 * spectrum * spectrum,
    };
    let best = (2.0 * bend * bend / variance * nf).cbrt();
    // A spectrum of zero leaves the length undefined or infinite; the cap is then the conservative
    // choice.
    Ok(if best.is_nan() { cap } else { best.clamp(1.0, cap) })
}

/// Consecutive lags that must be uncorrelated before all longer lags count as uncorrelated.
fn quiet_lags(n: usize) -> usize {
    (n as f64).log10().sqrt().ceil().max(5.0) as usize
}

/// Autocovariances from lag 0, as far as the choice of the window needs them.
fn autocovariances(series: &[f64]) -> Vec<f64> {
    let n = series.len();
    let mean = series.iter().sum::<f64>() / n as f64;
    let centred: Vec<f64> = series.iter().map(|v| v - mean).collect();
    let lags = (2 * ((n as f64).sqrt().ceil() as usize + quiet_lags(n))).min(n - 1);
    let at = |lag: usize| centred.iter().zip(&centred[lag..]).map(|(a, b)| a * b).sum::<f64>() / n as f64;
    (0..=lags).map(at).collect()
}

/// The last lag before a run of uncorrelated ones (|correlation| below `2 sqrt(log10(n) / n)`), at
/// most half of the lags known, so that the window fits.
fn last_correlated(autocovariances: &[f64], n: usize) -> usize {
    let limit = 2.0 * ((n as f64).log10() / n as f64).sqrt() * autocovariances[0];
    let longest = (autocovariances.len() - 1) / 2;
    let (mut last, mut quiet) = (0, 0);
    for (lag, r) in autocovariances.iter().enumerate().skip(1) {
        if r.abs() > limit {
            (last, quiet) = (lag, 0);
        } else {
            quiet += 1;
        }
        if quiet == quiet_lags(n) {
            break;
        }
    }
    last.min(longest)
}

/// The trapezoidal lag window of Politis and Romano (1995): flat up to one half, then falling to
/// zero at one.
fn flat_top(t: f64) -> f64 {
    if t <= 0.5 { 1.0 } else { (2.0 * (1.0 - t)).max(0.0) }
}
