//! Loss functions.

/// The cost of one prediction; `e` below is the target minus the prediction.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// e² / 2: learns the mean.
    Squared,
    /// `quantile` · e for positive e, (`quantile` − 1) · e for negative: learns that quantile
    /// (Koenker and Bassett, "Regression Quantiles", Econometrica 46, 1978, equation 3.1).
    Pinball {
        /// In (0, 1); 0.9 has 90 % of the targets below the prediction.
        quantile: f64,
    },
}

impl Loss {
    /// The cost of a prediction.
    #[must_use]
    pub fn value(self, prediction: f64, target: f64) -> f64 {
        let e = target - prediction;
        match self {
            Self::Squared => e * e / 2.0,
            Self::Pinball { quantile } => (quantile * e).max((quantile - 1.0) * e),
        }
    }

    /// The derivative of [`Loss::value`] by the prediction; at the kink of the pinball loss 0, a
    /// subgradient.
    #[must_use]
    pub fn slope(self, prediction: f64, target: f64) -> f64 {
        let e = target - prediction;
        match self {
            Self::Squared => -e,
            Self::Pinball { quantile } if e > 0.0 => -quantile,
            Self::Pinball { quantile } if e < 0.0 => 1.0 - quantile,
            // 0 at the kink, and a NaN stays one.
            Self::Pinball { .. } => e,
        }
    }
}
