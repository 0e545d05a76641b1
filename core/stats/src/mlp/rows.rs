//! Training table of a network or forest.

use super::{MlpError, check_finite};

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
    pub fn push(&mut self, x: &[f64], y: f64, weight: f64) -> Result<(), MlpError> {
        if x.len() != self.width {
            return Err(MlpError::Width { what: "a row", found: x.len(), expected: self.width });
        }
        check_finite("a row", x)?;
        check_finite("the targets", &[y])?;
        check_weight(weight)?;
        self.x.extend_from_slice(x);
        self.y.push(y);
        self.weight.push(weight);
        Ok(())
    }

    /// Number of rows.
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
    pub fn check(&self) -> Result<(), MlpError> {
        super::check_width(self.width)?;
        if self.is_empty() {
            return Err(MlpError::NoRows);
        }
        let cells = self.len().saturating_mul(self.width);
        for (what, found, expected) in
            [("the features", self.x.len(), cells), ("the weights", self.weight.len(), self.len())]
        {
            if found != expected {
                return Err(MlpError::Width { what, found, expected });
            }
        }
        check_finite("the features", &self.x)?;
        check_finite("the targets", &self.y)?;
        self.weight.iter().try_for_each(|weight| check_weight(*weight))?;
        if self.weight_sum() > 0.0 { Ok(()) } else { Err(MlpError::NoRows) }
    }

    /// The rows for which `keep` holds.
    pub(crate) fn filter(&self, keep: impl Fn(usize) -> bool) -> Self {
        let mut kept = Self::new(self.width);
        for index in (0..self.len()).filter(|index| keep(*index)) {
            kept.x.extend_from_slice(self.row(index));
            kept.y.push(self.y[index]);
            kept.weight.push(self.weight[index]);
        }
        kept
    }

    pub(super) fn weight_sum(&self) -> f64 {
        self.weight.iter().sum()
    }
}

/// The upper limit keeps sums finite.
fn check_weight(weight: f64) -> Result<(), MlpError> {
    if (0.0..=1e100).contains(&weight) {
        return Ok(());
    }
    Err(MlpError::Option { name: "weight of a row", value: weight, allowed: "between 0 and 1e100" })
}
