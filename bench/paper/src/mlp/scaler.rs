//! Scales features and targets to mean 0 and deviation 1, and keeps the training range.

use rtvirtio_stats::{Rows, RowsError, check_finite};
use serde::{Deserialize, Serialize};

use super::MlpError;

/// Relative range below which a column counts as constant: its deviation is only rounding.
const CONSTANT: f64 = 1e-12;

/// Training statistics of a feature or of the target, in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// Mean of the rows, all of equal weight.
    pub mean: f64,
    /// Standard deviation (divided by n); 0 for a constant column.
    pub deviation: f64,
    /// Smallest value in training.
    pub low: f64,
    /// Largest value in training.
    pub high: f64,
}

/// The scales of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaler {
    /// Columns in the order of the features.
    pub features: Vec<Column>,
    pub target: Column,
    /// Whether features are held within the training range plus [`Scaler::margin`].
    pub clamp: bool,
    /// Share of the training range by which a clamped feature may exceed it.
    pub margin: f64,
}

impl Column {
    fn fit(values: impl Iterator<Item = f64> + Clone) -> Self {
        let (mut n, mut sum, mut low, mut high) = (0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY);
        for value in values.clone() {
            n += 1.0;
            sum += value;
            low = value.min(low);
            high = value.max(high);
        }
        let mean = sum / n;
        let constant = high - low <= CONSTANT * low.abs().max(high.abs());
        let square: f64 = values.map(|value| (value - mean) * (value - mean)).sum();
        let deviation = if constant { 0.0 } else { (square / n).sqrt() };
        Self { mean, deviation, low, high }
    }

    fn check(&self, what: &'static str) -> Result<(), MlpError> {
        check_finite(what, &[self.mean, self.deviation, self.low, self.high])?;
        if self.deviation < 0.0 || self.low > self.high {
            let allowed = "of no negative deviation and no empty range";
            return Err(MlpError::Option { name: what, value: self.deviation, allowed });
        }
        Ok(())
    }

    /// Value in deviations from the mean; 0 for a constant column.
    fn scale(&self, value: f64) -> f64 {
        if self.deviation > 0.0 { (value - self.mean) / self.deviation } else { 0.0 * value }
    }
}

impl Scaler {
    /// Takes the scales from a table.
    ///
    /// # Errors
    ///
    /// What [`Rows::check`] refuses, a margin that is negative or not finite, values so large that
    /// their squares overflow.
    pub fn fit(rows: &Rows, clamp: bool, margin: f64) -> Result<Self, MlpError> {
        rows.check()?;
        let column = |index| Column::fit(rows.x.iter().skip(index).step_by(rows.width).copied());
        let features = (0..rows.width).map(column).collect();
        let scaler = Self { features, target: Column::fit(rows.y.iter().copied()), clamp, margin };
        scaler.check()?;
        Ok(scaler)
    }

    /// Checks scales that came from a file.
    ///
    /// # Errors
    ///
    /// No features, a NaN or infinite number, a negative deviation, an empty range, a negative
    /// margin.
    pub fn check(&self) -> Result<(), MlpError> {
        super::check_width(self.features.len())?;
        self.features.iter().try_for_each(|column| column.check("scale of a feature"))?;
        self.target.check("scale of the target")?;
        if self.margin >= 0.0 && self.margin.is_finite() {
            return Ok(());
        }
        Err(MlpError::Option { name: "margin", value: self.margin, allowed: "finite and not negative" })
    }

    /// Writes the scaled features of `x` to `out`, clamped if [`Scaler::clamp`] is set. A NaN stays
    /// one.
    ///
    /// # Errors
    ///
    /// Another number of features than in training.
    pub fn scale_into(&self, x: &[f64], out: &mut Vec<f64>) -> Result<(), MlpError> {
        out.clear();
        let expected = self.features.len();
        if x.len() != expected {
            return Err(RowsError::Width { what: "the input", found: x.len(), expected }.into());
        }
        out.extend(
            self.features.iter().zip(x).map(|(column, value)| column.scale(self.limit(column, *value))),
        );
        Ok(())
    }

    /// The target of a number of deviations from the mean.
    #[must_use]
    pub fn unscale_target(&self, scaled: f64) -> f64 {
        self.target.mean + scaled * self.target.deviation
    }

    /// The table in scaled units, not clamped, with the same weights.
    pub(crate) fn scale_rows(&self, rows: &Rows) -> Rows {
        let cells = rows.x.iter().zip(self.features.iter().cycle());
        Rows {
            x: cells.map(|(value, column)| column.scale(*value)).collect(),
            width: rows.width,
            y: rows.y.iter().map(|y| self.target.scale(*y)).collect(),
            weight: rows.weight.clone(),
        }
    }

    fn limit(&self, column: &Column, value: f64) -> f64 {
        if !self.clamp {
            return value;
        }
        let margin = self.margin * (column.high - column.low);
        // Not `clamp`, which panics where a corrupt file has the range reversed.
        if value < column.low - margin {
            column.low - margin
        } else if value > column.high + margin {
            column.high + margin
        } else {
            value
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Rows {
        let mut rows = Rows::new(3);
        for i in 0..10 {
            let t = f64::from(i);
            rows.push(&[t, 0.1, 1e6 - 3e5 * t], 5.0 * t + 2.0, 1.0).expect("a row");
        }
        rows
    }

    #[test]
    fn columns_get_mean_0_and_deviation_1_and_constants_0() {
        let scaler = Scaler::fit(&rows(), false, 0.0).expect("a scaler");
        let scaled = scaler.scale_rows(&rows());
        for (column, deviation) in [(0, 1.0), (1, 0.0), (2, 1.0)] {
            let values: Vec<f64> = (0..10).map(|row| scaled.row(row)[column]).collect();
            let mean = values.iter().sum::<f64>() / 10.0;
            let square = values.iter().map(|v| v * v).sum::<f64>() / 10.0;
            assert!(mean.abs() < 1e-14 && (square - deviation).abs() < 1e-14, "{column}: {values:?}");
        }
        assert!(scaled.y.iter().sum::<f64>().abs() < 1e-13);
        assert!((scaler.unscale_target(scaler.target.scale(123.0)) - 123.0).abs() < 1e-12);
        let mut one = Vec::new();
        scaler.scale_into(rows().row(4), &mut one).expect("scaled");
        assert_eq!(one, scaled.row(4));
    }

    #[test]
    fn clamping_stops_at_the_margin() {
        let scale = |clamp, x: f64| {
            let scaler = Scaler::fit(&rows(), clamp, 0.5).expect("a scaler");
            let mut out = Vec::new();
            scaler.scale_into(&[x, 0.1, 0.0], &mut out).expect("scaled");
            out[0]
        };
        assert_eq!(scale(true, 100.0), scale(false, 13.5));
        assert_eq!(scale(true, -100.0), scale(false, -4.5));
        assert_eq!(scale(true, 12.0), scale(false, 12.0));
        assert!(scale(true, f64::NAN).is_nan());
    }

    #[test]
    fn what_cannot_be_scaled_is_refused() {
        assert!(Scaler::fit(&Rows::new(3), false, 0.0).is_err());
        assert!(Scaler::fit(&rows(), true, f64::NAN).is_err());
        let mut huge = rows();
        huge.x[0] = 1e300;
        assert!(Scaler::fit(&huge, false, 0.0).is_err());
        let scaler = Scaler::fit(&rows(), false, 0.0).expect("a scaler");
        assert!(scaler.scale_into(&[1.0], &mut Vec::new()).is_err());
    }
}
