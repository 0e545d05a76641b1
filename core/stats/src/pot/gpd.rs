//! The generalised Pareto distribution `P(Y > y) = (1 + shape y / scale)^(-1 / shape)` of excesses,
//! and its fit.

use serde::{Deserialize, Serialize};

use super::PotError;
use super::sums::Sums;

/// Shapes that a fit may have. Below -1/2 maximum likelihood is not regular (Smith,
/// Biometrika 72, 1985); above 1 the distribution has no mean.
pub(super) const SHAPES: (f64, f64) = (-0.5, 1.0);

/// Methods of a fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Maximum of the likelihood.
    Likelihood,
    /// Probability-weighted moments: the likelihood had no maximum with a shape inside (-1/2, 1).
    Moments,
    /// Maximum likelihood with the shape fixed at the edge of the admissible ones, because the
    /// moments gave none either. In practice that is -1/2 for a tail that is shorter: quantiles are
    /// then too high rather than too low.
    Edge,
}

/// A fitted generalised Pareto distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpdFit {
    pub method: Method,
    /// Shape, in [-1/2, 1): above zero a heavy tail, below zero a tail with an end.
    pub shape: f64,
    /// Scale, above zero, in the unit of the excesses.
    pub scale: f64,
    /// Standard error of the shape; `None` where the method has none.
    pub shape_error: Option<f64>,
    /// Standard error of the scale; `None` where the method has none.
    pub scale_error: Option<f64>,
}

impl GpdFit {
    /// Excess that a share `exceedance` of all excesses is above. 0 for a share of 1 or more.
    #[must_use]
    pub fn quantile(&self, exceedance: f64) -> f64 {
        let depth = -exceedance.min(1.0).ln();
        self.scale * grow(self.shape, depth)
    }

    /// Share of excesses up to `excess`.
    #[must_use]
    pub fn cdf(&self, excess: f64) -> f64 {
        let x = excess.max(0.0) / self.scale;
        -(-shrink(self.shape, x)).exp_m1()
    }
}

/// `(e^(shape depth) - 1) / shape`, continuous at shape 0.
pub(super) fn grow(shape: f64, depth: f64) -> f64 {
    if (shape * depth).abs() < 1e-12 { depth } else { (shape * depth).exp_m1() / shape }
}

/// The inverse of [`grow`]: `ln(1 + shape x) / shape`, infinite beyond the end of the distribution.
pub(super) fn shrink(shape: f64, x: f64) -> f64 {
    if (shape * x).abs() < 1e-12 {
        x
    } else if shape * x <= -1.0 {
        f64::INFINITY
    } else {
        (shape * x).ln_1p() / shape
    }
}

/// Fits excesses, all above zero, by maximum likelihood, else by probability-weighted moments.
/// `effective` is the number of independent excesses they are worth, for the standard errors.
///
/// # Errors
/// [`PotError::TooFew`] below 5 excesses or when fewer than 3 of them differ,
/// [`PotError::NotFinite`] and [`PotError::BadRecord`] for excesses that are not finite or not
/// above zero, [`PotError::BadSetting`] for an `effective` number that is not.
pub fn fit(excesses: &[f64], effective: f64) -> Result<GpdFit, PotError> {
    let sums = Sums::new(excesses)?;
    if !(effective.is_finite() && effective > 0.0) {
        return Err(PotError::BadSetting("the number of independent excesses is above zero"));
    }
    Ok(fit_sums(&sums, effective))
}

pub(super) fn fit_sums(sums: &Sums, effective: f64) -> GpdFit {
    let peak = sums.peak(SHAPES);
    if peak.inside {
        return likelihood(peak.shape, peak.scale, effective);
    }
    let edge = GpdFit {
        method: Method::Edge,
        shape: peak.shape,
        scale: peak.scale,
        shape_error: None,
        scale_error: None,
    };
    moments(sums, effective).unwrap_or(edge)
}

/// A fit with the errors of the expected information (Smith 1985; Davison and Smith, JRSS
/// B 52, 1990, section 2).
fn likelihood(shape: f64, scale: f64, effective: f64) -> GpdFit {
    GpdFit {
        method: Method::Likelihood,
        shape,
        scale,
        shape_error: Some((1.0 + shape) / effective.sqrt()),
        scale_error: Some(scale * (2.0 * (1.0 + shape) / effective).sqrt()),
    }
}

/// Probability-weighted moments (Hosking and Wallis, Technometrics 29, 1987, section 3.2 with
/// unbiased moments; there k is minus the shape). `None` for a shape outside [`SHAPES`] or a tail
/// that ends before the largest excess.
pub(super) fn moments(sums: &Sums, effective: f64) -> Option<GpdFit> {
    let (a0, a1) = sums.weighted_moments();
    let k = a0 / (a0 - 2.0 * a1) - 2.0;
    let scale = 2.0 * a0 * a1 / (a0 - 2.0 * a1);
    let admissible = scale.is_finite() && scale > 0.0 && -k > SHAPES.0 && -k < SHAPES.1;
    if !admissible || k * sums.max() >= scale {
        return None;
    }
    // The asymptotic errors (their equation 13) exist for shapes below 1/2 only.
    let known = k > -0.5;
    let base = (1.0 + 2.0 * k) * (3.0 + 2.0 * k) * effective;
    let shape_error = ((1.0 + k) * (2.0 + k).powi(2) * (1.0 + k + 2.0 * k * k) / base).sqrt();
    let scale_error = scale * ((7.0 + 18.0 * k + 11.0 * k * k + 2.0 * k.powi(3)) / base).sqrt();
    Some(GpdFit {
        method: Method::Moments,
        shape: -k,
        scale,
        shape_error: known.then_some(shape_error),
        scale_error: known.then_some(scale_error),
    })
}
