//! How often bounds held.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ConformalError, refuse, same_length};
use crate::bootstrap::{Interval, normal_quantile};

/// Confidence of the intervals of a coverage.
const CONFIDENCE: f64 = 0.95;

/// How many of how many values were at or below their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Values, at least one.
    pub n: usize,
    /// Those at or below their bounds.
    pub covered: usize,
    /// `covered / n`.
    pub share: f64,
    /// 95 % interval of the share by [`wilson`]. It takes rows as independent: rows of few runs are worth less.
    pub wilson: Interval,
}

/// Coverage overall and by category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// All rows.
    pub overall: Coverage,
    /// By category (or group), in rising order.
    pub categories: Vec<(usize, Coverage)>,
}

impl Evaluation {
    /// The category with the smallest share; the first one of equals.
    #[must_use]
    pub fn worst(&self) -> Option<(usize, Coverage)> {
        self.categories.iter().copied().reduce(|worst, c| if c.1.share < worst.1.share { c } else { worst })
    }
}

/// How many values are at or below their bounds. Bounds may be infinite.
///
/// # Errors
/// [`ConformalError`]: no rows, rows that do not match, values that are not finite, bounds that are NaN.
pub fn coverage(actual: &[f64], upper: &[f64]) -> Result<Coverage, ConformalError> {
    check(actual, upper)?;
    let covered = actual.iter().zip(upper).filter(|(a, u)| a <= u).count();
    count(actual.len(), covered)
}

/// The same, also for each category; `categories` names that of each row. Give groups instead to see the worst run.
///
/// # Errors
/// Those of [`coverage`].
pub fn coverage_by(
    actual: &[f64],
    upper: &[f64],
    categories: &[usize],
) -> Result<Evaluation, ConformalError> {
    let overall = coverage(actual, upper)?;
    same_length(actual.len(), categories.len())?;
    let mut counts: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for ((a, u), category) in actual.iter().zip(upper).zip(categories) {
        let (n, covered) = counts.entry(*category).or_default();
        *n += 1;
        *covered += usize::from(a <= u);
    }
    let one = |(category, (n, covered))| Ok((category, count(n, covered)?));
    Ok(Evaluation {
        overall,
        categories: counts.into_iter().map(one).collect::<Result<_, ConformalError>>()?,
    })
}

/// The score interval of a share (Wilson, JASA 22, 1927): `covered` of `n` at `confidence`. `None` without values, for
/// more covered than there are, or a confidence outside (0, 1).
#[must_use]
pub fn wilson(covered: usize, n: usize, confidence: f64) -> Option<Interval> {
    let (_, high) = Interval::tails(confidence)?;
    let z2 = normal_quantile(high)?.powi(2);
    if n == 0 || covered > n {
        return None;
    }
    let (n, share) = (n as f64, covered as f64 / n as f64);
    let centre = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = (z2 * (share * (1.0 - share) / n + z2 / (4.0 * n * n))).sqrt() / (1.0 + z2 / n);
    Some(Interval { low: (centre - half).max(0.0), high: (centre + half).min(1.0) })
}

fn check(actual: &[f64], upper: &[f64]) -> Result<(), ConformalError> {
    same_length(actual.len(), upper.len())?;
    super::finite(actual)?;
    refuse(upper, f64::is_nan, "NaN")
}

fn count(n: usize, covered: usize) -> Result<Coverage, ConformalError> {
    let wilson = wilson(covered, n, CONFIDENCE).ok_or(ConformalError::Empty)?;
    Ok(Coverage { n, covered, share: covered as f64 / n as f64, wilson })
}
