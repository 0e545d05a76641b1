//! Conformal bounds for grouped data: upper bounds that hold however poor the predictor is.
//!
//! A score measures by how much a prediction was exceeded: `ln(actual) - ln(predicted)`. A quantile
//! of the scores of runs that the predictor has not seen turns its predictions into upper bounds,
//! with no assumption about the predictor or the distribution (Vovk, Gammerman and Shafer,
//! Algorithmic Learning in a Random World, 2005; Papadopoulos et al., ECML 2002, for the split
//! form).
//!
//! Rows of one measured run resemble each other, so only whole runs (groups) are exchangeable. The
//! quantile is the one of Lee, Barber and Willett (Distribution-free inference with hierarchical
//! data, arXiv:2306.06342, 2023, section 3.1): each of K groups weighs `1 / (K + 1)`, spread evenly
//! over its rows, and the missing `1 / (K + 1)` lies at infinity. A random row of a new group is
//! then below its bound with probability at least `1 - miss`, on average over calibrations and new
//! groups. This needs `K >= 1 / miss - 1` groups (19 for 95 %); with fewer the bound is infinite,
//! and the result [`ConformalError::TooFewGroups`].
//!
//! Not promised: that share in every single group, or for runs of another kind than the calibrated
//! ones. Kinds that differ are calibrated separately (Mondrian conformal prediction: Vovk,
//! Gammerman and Shafer 2005, section 4.5).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Errors of calibration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConformalError {
    /// Too few groups for a bound at this level.
    #[error("{have} calibration groups, {need} needed at this level: measure more runs")]
    TooFewGroups {
        /// Number of different groups given.
        have: usize,
        /// Number of groups needed.
        need: usize,
    },
    /// Inputs that belong together differ in length.
    #[error("{left} and {right} rows do not match")]
    Length {
        /// Rows of the first list.
        left: usize,
        /// Rows of the other list.
        right: usize,
    },
    /// A number is NaN, infinite, or not above zero where it must be.
    #[error("row {index}: {what}")]
    BadNumber {
        /// Index of the row, from 0.
        index: usize,
        /// Violated requirement, such as `not a finite number`.
        what: &'static str,
    },
    /// The level is not inside (0, 1).
    #[error("the share that may be missed lies inside (0, 1)")]
    BadLevel,
    /// There are no rows.
    #[error("no rows")]
    Empty,
    /// A value read from a file contradicts itself.
    #[error("calibration: {0}")]
    BadFile(&'static str),
}

/// A calibrated quantile of scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantile {
    /// Score that a share `miss` of new rows may exceed.
    pub score: f64,
    /// Share of new rows above the bound, in (0, 1).
    pub miss: f64,
    /// Number of calibration groups.
    pub groups: usize,
    /// Number of calibration rows.
    pub rows: usize,
}

impl Quantile {
    /// Checks a value from an untrusted file.
    pub fn check(&self) -> Result<(), ConformalError> {
        if !self.score.is_finite() {
            return Err(ConformalError::BadFile("the score is not finite"));
        }
        if self.groups < groups_needed(self.miss)? {
            return Err(ConformalError::BadFile("too few groups for the level"));
        }
        if self.rows < self.groups {
            return Err(ConformalError::BadFile("fewer rows than groups"));
        }
        Ok(())
    }
}

/// Fewest groups that bound a share `miss`: `ceil(1 / miss) - 1`, at least 1.
///
/// # Errors
/// [`ConformalError::BadLevel`] unless `miss` is inside (0, 1).
pub fn groups_needed(miss: f64) -> Result<usize, ConformalError> {
    if !(miss > 0.0 && miss < 1.0) {
        return Err(ConformalError::BadLevel);
    }
    Ok(((1.0 / miss - ROUNDING).ceil() as usize).saturating_sub(1).max(1))
}

/// Undoes the rounding of 1 / 0.05 and of sums of weights; in units of one group's weight.
const ROUNDING: f64 = 1e-9;

/// The quantile of `scores` that a new row exceeds with probability at most `miss`. `groups` names
/// the group of each row; the names are arbitrary.
///
/// # Errors
/// [`ConformalError`]: too few groups, no rows, rows that do not match, scores that are not finite,
/// a level out of range.
pub fn calibrate(scores: &[f64], groups: &[usize], miss: f64) -> Result<Quantile, ConformalError> {
    same_length(scores.len(), groups.len())?;
    finite(scores)?;
    let need = groups_needed(miss)?;
    if scores.is_empty() {
        return Err(ConformalError::Empty);
    }
    let mut sizes: BTreeMap<usize, usize> = BTreeMap::new();
    groups.iter().for_each(|g| *sizes.entry(*g).or_default() += 1);
    let have = sizes.len();
    let too_few = ConformalError::TooFewGroups { have, need };
    if have < need {
        return Err(too_few);
    }
    let mut weighted: Vec<(f64, usize)> = scores.iter().zip(groups).map(|(s, g)| (*s, sizes[g])).collect();
    // Equal scores are added in the order of their weights, so that the order of rows cannot change
    // a sum's last bit.
    weighted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    // In units of 1 / (K + 1), the weight of one group.
    let wanted = (1.0 - miss) * (have + 1) as f64 - ROUNDING;
    let mut sum = 0.0;
    let reached = weighted.iter().find(|(_, size)| {
        sum += 1.0 / *size as f64;
        sum >= wanted
    });
    let (score, _) = reached.ok_or(too_few)?;
    Ok(Quantile { score: *score, miss, groups: have, rows: scores.len() })
}

fn same_length(left: usize, right: usize) -> Result<(), ConformalError> {
    if left == right { Ok(()) } else { Err(ConformalError::Length { left, right }) }
}

fn finite(values: &[f64]) -> Result<(), ConformalError> {
    refuse(values, |v| !v.is_finite(), "not a finite number")
}

fn refuse(values: &[f64], bad: impl Fn(f64) -> bool, what: &'static str) -> Result<(), ConformalError> {
    match values.iter().position(|v| bad(*v)) {
        Some(index) => Err(ConformalError::BadNumber { index, what }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
