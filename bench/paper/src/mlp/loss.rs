//! Loss functions.

use serde::{Deserialize, Serialize};

use super::MlpError;

/// The cost of one prediction; `e` below is the target minus the prediction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Loss {
    /// e² / 2: learns the mean.
    Squared,
    /// `quantile` · e for positive e, (`quantile` − 1) · e for negative: learns that quantile
    /// (Koenker and Bassett, "Regression Quantiles", Econometrica 46, 1978, equation 3.1).
    Pinball {
        /// In (0, 1); 0.9 has 90 % of the targets below the prediction.
        quantile: f64,
    },
    /// e² / 2 up to `delta`, linear with the same slope beyond: the mean, with less weight for
    /// outliers (Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical
    /// Statistics 35, 1964).
    Huber {
        /// Error at which the loss becomes linear, in the target's unit; positive.
        delta: f64,
    },
}

impl Loss {
    /// Checks the parameter.
    ///
    /// # Errors
    ///
    /// A quantile outside (0, 1), a `delta` that is not positive and finite.
    pub fn check(self) -> Result<(), MlpError> {
        let (name, value, ok, allowed) = match self {
            Self::Squared => return Ok(()),
            Self::Pinball { quantile } => {
                ("quantile", quantile, quantile > 0.0 && quantile < 1.0, "between 0 and 1")
            }
            Self::Huber { delta } => {
                ("delta", delta, delta > 0.0 && delta.is_finite(), "positive and finite")
            }
        };
        if ok { Ok(()) } else { Err(MlpError::Option { name, value, allowed }) }
    }

    /// The cost of a prediction.
    #[must_use]
    pub fn value(self, prediction: f64, target: f64) -> f64 {
        let e = target - prediction;
        match self {
            Self::Squared => e * e / 2.0,
            Self::Pinball { quantile } => (quantile * e).max((quantile - 1.0) * e),
            Self::Huber { delta } if e.abs() > delta => delta * (e.abs() - delta / 2.0),
            Self::Huber { .. } => e * e / 2.0,
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
            Self::Huber { delta } if e.abs() > delta => -delta.copysign(e),
            Self::Huber { .. } => -e,
        }
    }
}
