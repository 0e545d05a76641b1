//! Tests whether a record is steady: the tail of an unsteady one predicts nothing for the next.
//!
//! Latencies that grow while they are measured are those of a queue that builds up: the next minute
//! is worse than any sample. Slow requests that all lie in one part of the record are one event,
//! however many clusters declustering makes of them (the intervals estimator takes a single bad
//! phase for independent exceedances, because nothing lies around it).

/// Number of equal parts of a record.
const BLOCKS: usize = 10;
/// Kendall's S of ten values in random order reaches this with probability 0.0046 (16 599 of the
/// 10! orders).
const GROWS: i32 = 29;
/// S of ten values that rise throughout.
pub(super) const MAX_S: i32 = (BLOCKS * (BLOCKS - 1) / 2) as i32;

/// Kendall's S of the medians of ten equal blocks (Mann, Econometrica 13, 1945), where it shows
/// growth: pairs of blocks of which the later one has the larger median, less those of which it has
/// the smaller one. `values` in the order of time. Latencies that fall are no danger to an upper
/// bound and are not reported.
#[must_use]
pub(super) fn growth(values: &[f64]) -> Option<i32> {
    let size = values.len() / BLOCKS;
    if size == 0 {
        return None;
    }
    let medians: Vec<f64> = values.chunks_exact(size).take(BLOCKS).map(median).collect();
    let later = |i: usize| medians[i + 1..].iter().map(move |m| (i, m));
    let s = (0..BLOCKS).flat_map(later).map(|(i, m)| m.total_cmp(&medians[i]) as i32).sum();
    (s >= GROWS).then_some(s)
}

/// Largest dispersion that is accepted: clusters that come independently are below it in 99 of 100
/// records, the quantile of chi-square with nine degrees of freedom.
pub(super) const EVEN: f64 = 21.666;

/// Dispersion of clusters over ten equal parts of a record of `n` requests: the Poisson dispersion
/// statistic (Cochran, Biometrics 10, 1954), 9 on average for clusters that come independently.
/// `starts` in requests, in [0, n].
#[must_use]
pub(super) fn unevenness(starts: impl Iterator<Item = f64>, n: usize) -> f64 {
    let mut counts = [0.0; BLOCKS];
    for start in starts {
        counts[((start / n as f64 * BLOCKS as f64) as usize).min(BLOCKS - 1)] += 1.0;
    }
    let mean = counts.iter().sum::<f64>() / BLOCKS as f64;
    if mean > 0.0 { counts.iter().map(|c: &f64| (c - mean).powi(2)).sum::<f64>() / mean } else { 0.0 }
}

fn median(block: &[f64]) -> f64 {
    let mut block = block.to_vec();
    let middle = block.len() / 2;
    *block.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;

    #[test]
    fn a_queue_that_builds_up_grows_and_noise_does_not() {
        let mut random = Random::new(8);
        let mut noise = |n: usize| (0..n).map(|_| -(1.0 - random.unit()).ln()).collect::<Vec<f64>>();
        let rising: Vec<f64> = noise(2_000).iter().enumerate().map(|(i, x)| x + i as f64 / 500.0).collect();
        assert_eq!(growth(&rising), Some(MAX_S));
        let falling: Vec<f64> = rising.iter().rev().copied().collect();
        assert_eq!(growth(&falling), None);
        assert_eq!(growth(&[5.0; 400]), None, "equal values do not grow");
        assert_eq!(growth(&noise(9)), None, "no ten blocks");
        // 0.46 % of 2000 series: 9, give or take 3.
        let found = (0..2_000).filter(|_| growth(&noise(100)).is_some()).count();
        assert!(found < 25, "{found}");
    }

    #[test]
    fn one_bad_phase_is_uneven() {
        let mut random = Random::new(2);
        let mut spread = |n: usize| unevenness((0..n).map(|_| random.unit() * 500.0), 500);
        let found = (0..2_000).filter(|_| spread(60) > EVEN).count();
        assert!((5..40).contains(&found), "1 % of 2000: {found}");
        assert!(unevenness((0..60).map(|i| 120.0 + f64::from(i)), 500) > 10.0 * EVEN);
        assert_eq!(unevenness(std::iter::repeat_n(500.0, 10), 500), 90.0, "the end is in the last part");
        assert_eq!(unevenness(std::iter::empty(), 500), 0.0);
    }

    /// Orders of ten values by inversions: S = 45 - 2 inversions.
    #[test]
    fn the_limit_is_what_its_probability_says() {
        let mut orders = vec![1u64];
        for n in 2..=BLOCKS {
            let mut next = vec![0; orders.len() + n - 1];
            for (i, count) in orders.iter().enumerate() {
                next[i..i + n].iter_mut().for_each(|x| *x += count);
            }
            orders = next;
        }
        let all: u64 = orders.iter().sum();
        let as_high: u64 = orders[..=((MAX_S - GROWS) / 2) as usize].iter().sum();
        assert_eq!((all, as_high), (3_628_800, 16_599));
    }
}
