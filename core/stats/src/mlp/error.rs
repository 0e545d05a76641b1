//! What a network, its rows or its options can be refused for.

/// A network, a table or an option that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MlpError {
    /// A value is NaN, infinite, or (a weight) too large to be sane.
    #[error("value {index} of {what} is not a finite number of sane size")]
    NotFinite {
        /// Which list.
        what: &'static str,
        /// Its place, from 0.
        index: usize,
    },
    /// A list has another length than its partner.
    #[error("{what} has {found} values, not {expected}")]
    Width {
        /// Which list.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// A size is zero or too large.
    #[error("{what}: {found} is not in 1 to {max}")]
    Size {
        /// Which size.
        what: &'static str,
        /// What was given.
        found: usize,
        /// The largest one.
        max: usize,
    },
    /// A layer does not fit the one before it, or its lists do not fit its widths.
    #[error("the shape of layer {index} is not consistent")]
    Layer {
        /// Its place, from 0 at the input.
        index: usize,
    },
    /// A hyperparameter has no meaning.
    #[error("{name} = {value}: must be {allowed}")]
    Option {
        /// The hyperparameter.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// There is nothing to learn from.
    #[error("no rows of positive weight")]
    NoRows,
    /// The loss or a weight overflowed; the data may need scaling, or the learning rate is too
    /// high.
    #[error("training diverged in epoch {epoch}: scale the data or lower the learning rate")]
    Diverged {
        /// The epoch, from 0.
        epoch: usize,
    },
}
