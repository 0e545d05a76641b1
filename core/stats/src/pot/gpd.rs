//! The generalised Pareto distribution `P(Y > y) = (1 + shape y / scale)^(-1 / shape)` of excesses,
//! and its fit.

use super::sums::Sums;

/// Shapes that a fit may have. Below -1/2 maximum likelihood is not regular (Smith,
/// Biometrika 72, 1985); above 1 the distribution has no mean.
pub(super) const SHAPES: (f64, f64) = (-0.5, 1.0);

/// Methods of a fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpdFit {
    pub method: Method,
    /// Shape, in [-1/2, 1): above zero a heavy tail, below zero a tail with an end.
    pub shape: f64,
    /// Scale, above zero, in the unit of the excesses.
    pub scale: f64,
}

impl GpdFit {
    /// Excess that a share `exceedance` of all excesses is above. 0 for a share of 1 or more.
    #[must_use]
    pub fn quantile(&self, exceedance: f64) -> f64 {
        let depth = -exceedance.min(1.0).ln();
        self.scale * grow(self.shape, depth)
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

/// Fits excesses by maximum likelihood, else by probability-weighted moments.
pub(super) fn fit(sums: &Sums) -> GpdFit {
    let peak = sums.peak(SHAPES);
    let found = |method| GpdFit { method, shape: peak.shape, scale: peak.scale };
    if peak.inside {
        return found(Method::Likelihood);
    }
    moments(sums).unwrap_or(found(Method::Edge))
}

/// Probability-weighted moments (Hosking and Wallis, Technometrics 29, 1987, section 3.2 with
/// unbiased moments; there k is minus the shape). `None` for a shape outside [`SHAPES`] or a tail
/// that ends before the largest excess.
pub(super) fn moments(sums: &Sums) -> Option<GpdFit> {
    let (a0, a1) = sums.weighted_moments();
    let k = a0 / (a0 - 2.0 * a1) - 2.0;
    let scale = 2.0 * a0 * a1 / (a0 - 2.0 * a1);
    let admissible = scale.is_finite() && scale > 0.0 && -k > SHAPES.0 && -k < SHAPES.1;
    (admissible && k * sums.max() < scale).then_some(GpdFit { method: Method::Moments, shape: -k, scale })
}
