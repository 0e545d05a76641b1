//! Errors of a network, its rows or its options.

/// A network, a table or an option that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MlpError {
    /// A value is NaN, infinite, or (a weight) too large to be sane.
    #[error("value {index} of {what} is not a finite number of sane size")]
    NotFinite {
        /// Name of the list.
        what: &'static str,
        /// Index in the list, from 0.
        index: usize,
    },
    /// A list has another length than its partner.
    #[error("{what} has {found} values, not {expected}")]
    Width {
        /// Name of the list.
        what: &'static str,
        /// Length of the list.
        found: usize,
        /// Length that would fit.
        expected: usize,
    },
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
    /// There is nothing to learn from.
    #[error("no rows of positive weight")]
    NoRows,
    /// The loss or a weight overflowed; the data may need scaling, or the learning rate is too
    /// high.
    #[error("training diverged in epoch {epoch}: scale the data or lower the learning rate")]
    Diverged {
        /// Index of the epoch, from 0.
        epoch: usize,
    },
}
