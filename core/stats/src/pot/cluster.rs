//! Clusters of exceedances: stalls hit neighbouring requests together.

use std::ops::Range;

/// Runs declustering (Coles, An Introduction to Statistical Modeling of Extreme Values, 2001,
/// section 5.3.2): exceedances at most `gap` apart belong to one cluster. `times` in rising order,
/// in the unit of `gap`. Returns index ranges in the order of time.
pub(super) fn clusters(times: &[f64], gap: f64) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for i in 0..times.len() {
        match found.last_mut() {
            Some(last) if times[i] - times[i - 1] <= gap => last.end = i + 1,
            _ => found.push(i..i + 1),
        }
    }
    found
}

/// The extremal index by the intervals estimator of Ferro and Segers (JRSS B 65, 2003, equations 5
/// and 6): the reciprocal of the mean cluster size, 1 for independent exceedances. `times` in
/// rising order, in units of the mean distance between two requests. 1 for fewer than two
/// exceedances, which give no estimate.
pub(super) fn extremal_index(times: &[f64]) -> f64 {
    let waits = || times.windows(2).map(|t| t[1] - t[0]);
    let sums = |shift: f64, other: f64| {
        waits().fold((0.0, 0.0), |(a, b), t| (a + (t - shift), b + (t - shift) * (t - other)))
    };
    let longest = waits().fold(0.0, f64::max);
    // The second form removes the bias of first order, which needs waits beyond 2.
    let (sum, square) = if longest <= 2.0 { sums(0.0, 0.0) } else { sums(1.0, 2.0) };
    let count = times.len().saturating_sub(1) as f64;
    if square > 0.0 { (2.0 * sum * sum / (count * square)).min(1.0) } else { 1.0 }
}

/// The gap that makes `extremal_index` times the number of exceedances the number of clusters
/// (Ferro and Segers 2003, section 4). Unit of `times`.
pub(super) fn automatic_gap(times: &[f64], extremal_index: f64) -> f64 {
    let mut waits: Vec<f64> = times.windows(2).map(|t| t[1] - t[0]).collect();
    waits.sort_unstable_by(|a, b| b.total_cmp(a));
    // The longest C - 1 waits separate clusters, the next one is the gap; among equal waits none
    // separates.
    let separating = (extremal_index * times.len() as f64).floor() as usize;
    waits.get(separating).copied().unwrap_or(0.0)
}

/// Number of independent exceedances that the clusters are worth when all exceedances of one
/// cluster are fully correlated: `N^2 / sum size^2` (Kish, Survey Sampling, 1965, section 8.2). At
/// most the number of clusters, and less where their sizes differ.
pub(super) fn effective_number(clusters: &[Range<usize>]) -> f64 {
    let n: usize = clusters.iter().map(Range::len).sum();
    let squares: f64 = clusters.iter().map(|c| (c.len() as f64).powi(2)).sum();
    if n == 0 { 0.0 } else { (n as f64).powi(2) / squares }
}
