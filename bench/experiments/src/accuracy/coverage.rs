//! Coverage of upper bounds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use rtvirtio_stats::conformal::ConformalError;
use rtvirtio_stats::{Interval, normal_quantile};

/// Confidence of the intervals of a coverage.
const CONFIDENCE: f64 = 0.95;

/// Number and share of values at or below their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Number of values, at least one.
    pub n: usize,
    /// Number of values at or below their bounds.
    pub covered: usize,
    /// Ratio `covered / n`, 0 to 1.
    pub share: f64,
    /// 95 % interval of the share by [`wilson`]. Rows are taken as independent, so for several rows
    /// per run it is too narrow.
    pub wilson: Interval,
}

/// Coverage overall and by category.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Coverage of all rows.
    pub overall: Coverage,
    /// By category (or group), in rising order.
    pub categories: Vec<(usize, Coverage)>,
}

/// Counts values at or below their bounds. Bounds may be infinite.
///
/// # Errors
/// [`ConformalError`]: no rows, rows that do not match, values that are not finite, bounds that are
/// NaN.
pub fn coverage(actual: &[f64], upper: &[f64]) -> Result<Coverage, ConformalError> {
    check(actual, upper)?;
    let covered = actual.iter().zip(upper).filter(|(a, u)| a <= u).count();
    count(actual.len(), covered)
}

/// Coverage overall and by category; `categories` has one entry per row. Groups as categories show
/// the worst run.
///
/// # Errors
/// As of [`coverage`].
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

/// Wilson's score interval of a share (JASA 22, 1927): `covered` of `n` at `confidence`. `None` for
/// `n` = 0, `covered` > `n`, or a confidence outside (0, 1).
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

fn same_length(left: usize, right: usize) -> Result<(), ConformalError> {
    if left == right { Ok(()) } else { Err(ConformalError::Length { left, right }) }
}

fn check(actual: &[f64], upper: &[f64]) -> Result<(), ConformalError> {
    same_length(actual.len(), upper.len())?;
    let bad = |values: &[f64], bad: fn(&f64) -> bool, what| match values.iter().position(bad) {
        Some(index) => Err(ConformalError::BadNumber { index, what }),
        None => Ok(()),
    };
    bad(actual, |v| !v.is_finite(), "not a finite number")?;
    bad(upper, |v| v.is_nan(), "NaN")
}

fn count(n: usize, covered: usize) -> Result<Coverage, ConformalError> {
    let wilson = wilson(covered, n, CONFIDENCE).ok_or(ConformalError::Empty)?;
    Ok(Coverage { n, covered, share: covered as f64 / n as f64, wilson })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_rows_are_refused() {
        let not_finite = ConformalError::BadNumber { index: 0, what: "not a finite number" };
        assert_eq!(coverage(&[f64::NAN], &[1.0]), Err(not_finite));
        assert!(matches!(coverage(&[1.0], &[f64::NAN]), Err(ConformalError::BadNumber { index: 0, .. })));
        assert_eq!(coverage(&[], &[]), Err(ConformalError::Empty));
        assert_eq!(
            coverage_by(&[1.0], &[1.0], &[]).unwrap_err(),
            ConformalError::Length { left: 1, right: 0 }
        );
    }

    /// Table of Newcombe (Statistics in Medicine 17, 1998), method 3: 81 of 263, 15 of 148, 0
    /// of 20, 29 of 29.
    #[test]
    fn known_wilson_intervals() {
        for (covered, n, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (29, 29, 0.8830, 1.0),
        ] {
            let found = wilson(covered, n, 0.95).unwrap();
            assert!(
                (found.low - low).abs() < 5e-5 && (found.high - high).abs() < 5e-5,
                "{covered}/{n}: {found:?}"
            );
        }
        assert!(wilson(0, 0, 0.95).is_none() && wilson(3, 2, 0.95).is_none() && wilson(1, 2, 1.0).is_none());
    }

    #[test]
    fn coverage_counts_each_category() {
        let actual = [1.0, 2.0, 3.0, 4.0, 5.0];
        let upper = [1.0, 1.5, f64::INFINITY, 4.5, 4.0];
        let found = coverage_by(&actual, &upper, &[2, 2, 5, 5, 5]).unwrap();
        assert_eq!((found.overall.n, found.overall.covered, found.overall.share), (5, 3, 0.6));
        let counted: Vec<_> = found.categories.iter().map(|(c, v)| (*c, v.covered, v.n)).collect();
        assert!(counted.contains(&(2, 1, 2)), "{counted:?}");
        assert!(found.overall.wilson.contains(0.6));
    }
}
