//! Errors of a network, its rows or its options.

use rtvirtio_stats::RowsError;

/// A network, a table or an option that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MlpError {
    /// A table or list cannot be used.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// A size is zero or too large.
    #[error("{what}: {found} is not in 1 to {max}")]
    Size {
        /// Name of the size.
        what: &'static str,
        /// Size as given.
        found: usize,
        /// Largest size that is accepted.
        max: usize,
    },
    /// A layer does not fit the one before it, or its lists do not fit its widths.
    #[error("the shape of layer {index} is not consistent")]
    Layer {
        /// Index of the layer, from 0 at the input.
        index: usize,
    },
    /// A hyperparameter is outside its range.
    #[error("{name} = {value}: must be {allowed}")]
    Option {
        /// Name of the hyperparameter.
        name: &'static str,
        /// Value as given.
        value: f64,
        /// Description of the allowed values.
        allowed: &'static str,
    },
    /// The loss or a weight overflowed; the data may need scaling, or the learning rate is too
    /// high.
    #[error("training diverged in epoch {epoch}: scale the data or lower the learning rate")]
    Diverged {
        /// Index of the epoch, from 0.
        epoch: usize,
    },
}
