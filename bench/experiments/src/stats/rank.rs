//! Quantiles of samples, by nearest rank.

/// The smallest sorted sample with at least this share at or below it; `None` without samples.
#[must_use]
pub fn nearest_rank<T: Copy>(sorted: &[T], share: f64) -> Option<T> {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_the_right_one() {
        let all: Vec<u64> = (1..=1_000).collect();
        let of = |share| nearest_rank(&all, share);
        assert_eq!((of(0.5), of(0.999), of(1.0), of(0.0)), (Some(500), Some(999), Some(1_000), Some(1)));
        assert_eq!(nearest_rank::<f64>(&[], 0.5), None);
    }
}
