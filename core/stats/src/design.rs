//! Designs that fill a space evenly with few points.

use crate::Random;

/// Number of random candidates among which the best design is taken.
const CANDIDATES: usize = 16;
/// Most coordinate differences for the choice: well below a second.
const EFFORT: usize = 200_000_000;
/// Keeps points off the edges of their strata, where rounding could put them into the next one.
const EDGE: f64 = 1e-9;

/// `n` points in [0, 1)^`dims`: every coordinate has exactly one point in each of `n` equal strata
/// (McKay, Beckman and Conover, Technometrics 21, 1979).
///
/// Of 16 such designs the one with the largest smallest distance between two points is taken
/// (maximin: Johnson, Moore and Ylvisaker, Journal of Statistical Planning and Inference 26, 1990);
/// of fewer where that would take long, above some 1100 points in 10 dimensions. Empty for `n` = 0;
/// empty points for `dims` = 0.
#[must_use]
pub fn latin_hypercube(n: usize, dims: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut random = Random::new(seed);
    let mut best = one_design(n, dims, &mut random);
    let cost = n.saturating_mul(n).saturating_mul(dims).max(1);
    let candidates = CANDIDATES.min(EFFORT / cost);
    if n < 2 || candidates < 2 {
        return best;
    }
    let mut distance = smallest_distance(&best);
    for _ in 1..candidates {
        let design = one_design(n, dims, &mut random);
        let candidate = smallest_distance(&design);
        if candidate > distance {
            (best, distance) = (design, candidate);
        }
    }
    best
}

/// The level at a coordinate of a design: [0, 1) in equal parts.
///
/// With one point in each of `n` strata, levels get equally many points where their number divides
/// `n`, else counts that differ by at most 3. Coordinates outside [0, 1) get the nearest level;
/// `None` for no levels or a NaN.
#[must_use]
pub fn level<T>(u: f64, levels: &[T]) -> Option<&T> {
    if u.is_nan() {
        return None;
    }
    // The conversion saturates: 0 for negative numbers.
    let index = (u * levels.len() as f64) as usize;
    levels.get(index.min(levels.len().saturating_sub(1)))
}

fn one_design(n: usize, dims: usize, random: &mut Random) -> Vec<Vec<f64>> {
    let mut design = vec![Vec::with_capacity(dims); n];
    let mut strata: Vec<usize> = (0..n).collect();
    for _ in 0..dims {
        random.shuffle(&mut strata);
        for (point, stratum) in design.iter_mut().zip(&strata) {
            let within = EDGE + (1.0 - 2.0 * EDGE) * random.unit();
            point.push((*stratum as f64 + within) / n as f64);
        }
    }
    design
}

/// Squared distance between the two nearest points.
fn smallest_distance(design: &[Vec<f64>]) -> f64 {
    let mut smallest = f64::INFINITY;
    for (index, a) in design.iter().enumerate() {
        for b in &design[..index] {
            let distance: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
            smallest = smallest.min(distance);
        }
    }
    smallest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_stratum_of_each_dimension_has_one_point(n in 0usize..80, dims in 0usize..7, seed: u64) {
            let design = latin_hypercube(n, dims, seed);
            prop_assert_eq!(design.len(), n);
            for dim in 0..dims {
                let mut strata: Vec<usize> = design.iter().map(|p| (p[dim] * n as f64) as usize).collect();
                strata.sort_unstable();
                prop_assert_eq!(strata, (0..n).collect::<Vec<_>>());
            }
            prop_assert!(design.iter().all(|p| p.len() == dims && p.iter().all(|u| (0.0..1.0).contains(u))));
        }

        #[test]
        fn levels_share_the_points_evenly(n in 1usize..60, count in 1usize..9, seed: u64) {
            let levels: Vec<usize> = (0..count).collect();
            let mut hits = vec![0usize; count];
            for point in latin_hypercube(n, 1, seed) {
                hits[*level(point[0], &levels).expect("there are levels")] += 1;
            }
            let (low, high) = (*hits.iter().min().expect("one"), *hits.iter().max().expect("one"));
            prop_assert!(high - low <= if n % count == 0 { 0 } else { 3 }, "{:?}", hits);
        }
    }

    #[test]
    fn coordinates_are_not_aligned_and_fill_their_strata() {
        let n = 2000;
        let design = latin_hypercube(n, 2, 4);
        let within = |p: &Vec<f64>, dim: usize| (p[dim] * n as f64).fract();
        let mean = |f: &dyn Fn(&Vec<f64>) -> f64| design.iter().map(f).sum::<f64>() / n as f64;
        assert!((mean(&|p| within(p, 0)) - 0.5).abs() < 0.03);
        let variance = mean(&|p| (within(p, 1) - 0.5).powi(2));
        assert!((12.0 * variance - 1.0).abs() < 0.1, "{variance}");
        let covariance = mean(&|p| (p[0] - 0.5) * (p[1] - 0.5));
        assert!(covariance.abs() * 12.0 < 0.08, "correlation {}", covariance * 12.0);
    }

    #[test]
    fn the_design_is_better_spread_than_a_random_one() {
        let gain = |seed| {
            let first = one_design(30, 3, &mut Random::new(seed));
            smallest_distance(&latin_hypercube(30, 3, seed)) / smallest_distance(&first)
        };
        let gains: Vec<f64> = (0..20).map(gain).collect();
        assert!(gains.iter().all(|gain| *gain >= 1.0));
        assert!(gains.iter().filter(|gain| **gain > 1.5).count() > 10, "{gains:?}");
    }

    #[test]
    fn a_seed_is_a_design() {
        assert_eq!(latin_hypercube(20, 4, 9), latin_hypercube(20, 4, 9));
        assert_ne!(latin_hypercube(20, 4, 9), latin_hypercube(20, 4, 10));
    }

    #[test]
    fn distances_are_those_of_the_nearest_two() {
        let design = vec![vec![0.0, 0.0], vec![0.75, 0.0], vec![0.75, 0.5]];
        assert_eq!(smallest_distance(&design), 0.25);
    }

    #[test]
    fn levels_at_the_edges() {
        let levels = ["a", "b", "c", "d"];
        let at = |u| level(u, &levels).copied();
        assert_eq!([at(0.0), at(0.25), at(0.499), at(0.999)], [Some("a"), Some("b"), Some("b"), Some("d")]);
        assert_eq!([at(-1.0), at(1.0), at(f64::INFINITY)], [Some("a"), Some("d"), Some("d")]);
        assert_eq!(at(f64::NAN), None);
        assert_eq!(level::<u8>(0.5, &[]), None);
    }
}
