//! Training table of a forest or network.

/// A table that cannot be learned from.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RowsError {
    /// A value is NaN, infinite, or too large to be sane.
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
    /// A weight is negative, or so large that sums overflow.
    #[error("the weight of a row is {0}: it must be between 0 and 1e100")]
    Weight(f64),
    /// There is nothing to learn from.
    #[error("no rows of positive weight, or no features")]
    NoRows,
}

/// Rows of features, each with a target and a weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Features of all rows, row-major.
    pub x: Vec<f64>,
    /// Number of features in a row.
    pub width: usize,
    /// Targets in the order of the rows.
    pub y: Vec<f64>,
    /// Weights in the order of the rows: not negative, not all zero. Only their ratios matter.
    pub weight: Vec<f64>,
}

impl Rows {
    /// An empty table of `width` features.
    #[must_use]
    pub fn new(width: usize) -> Self {
        Self { width, ..Self::default() }
    }

    /// Adds a row.
    ///
    /// # Errors
    ///
    /// Another width, a NaN or infinite value, a negative weight; the table stays as it was.
    pub fn push(&mut self, x: &[f64], y: f64, weight: f64) -> Result<(), RowsError> {
        if x.len() != self.width {
            return Err(RowsError::Width { what: "a row", found: x.len(), expected: self.width });
        }
        check_finite("a row", x)?;
        check_finite("the targets", &[y])?;
        check_weight(weight)?;
        self.x.extend_from_slice(x);
        self.y.push(y);
        self.weight.push(weight);
        Ok(())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.y.len()
    }

    /// Whether the table has no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.y.is_empty()
    }

    /// The features of a row; empty for a row that does not exist.
    #[must_use]
    pub fn row(&self, index: usize) -> &[f64] {
        let start = index.saturating_mul(self.width);
        self.x.get(start..start.saturating_add(self.width)).unwrap_or(&[])
    }

    /// Checks a table whose fields were filled by hand.
    ///
    /// # Errors
    ///
    /// No features, lists that do not fit each other, NaN or infinite values, a negative weight, no
    /// row of positive weight.
    pub fn check(&self) -> Result<(), RowsError> {
        if self.width == 0 || self.is_empty() {
            return Err(RowsError::NoRows);
        }
        let cells = self.len().saturating_mul(self.width);
        for (what, found, expected) in
            [("the features", self.x.len(), cells), ("the weights", self.weight.len(), self.len())]
        {
            if found != expected {
                return Err(RowsError::Width { what, found, expected });
            }
        }
        check_finite("the features", &self.x)?;
        check_finite("the targets", &self.y)?;
        self.weight.iter().try_for_each(|weight| check_weight(*weight))?;
        if self.weight_sum() > 0.0 { Ok(()) } else { Err(RowsError::NoRows) }
    }

    /// The rows for which `keep` holds.
    #[must_use]
    pub fn filter(&self, keep: impl Fn(usize) -> bool) -> Self {
        let mut kept = Self::new(self.width);
        for index in (0..self.len()).filter(|index| keep(*index)) {
            kept.x.extend_from_slice(self.row(index));
            kept.y.push(self.y[index]);
            kept.weight.push(self.weight[index]);
        }
        kept
    }

    #[must_use]
    pub fn weight_sum(&self) -> f64 {
        self.weight.iter().sum()
    }
}

/// The upper limit keeps sums finite.
fn check_weight(weight: f64) -> Result<(), RowsError> {
    if (0.0..=1e100).contains(&weight) {
        return Ok(());
    }
    Err(RowsError::Weight(weight))
}

/// Refuses a NaN or an infinite value in a list, which the error names.
pub fn check_finite(what: &'static str, values: &[f64]) -> Result<(), RowsError> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(RowsError::NotFinite { what, index }),
        None => Ok(()),
    }
}
