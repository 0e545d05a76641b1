//! Coverage of bounds of percentiles, by seeds.

use proptest::prelude::*;

use super::super::profile::Profile;
use super::super::*;
use super::exponential;
use crate::Random;

const P: f64 = 0.9999;
const SEEDS: u64 = 200;

fn lognormal(n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.normal().exp()).collect()
}

/// 97 % lognormal around 1, 3 % Pareto from 10 with index 2.5.
pub(super) fn mixture(n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    let mut one = || {
        let heavy = random.unit() < 0.03;
        if heavy { 10.0 * (1.0 - random.unit()).powf(-0.4) } else { (0.5 * random.normal()).exp() }
    };
    (0..n).map(|_| one()).collect()
}

/// Latency within a stall.
#[derive(Clone, Copy)]
enum Stall {
    /// Equal for all requests, up to 10 %.
    Level,
    /// Falling to zero, as requests that arrive later wait less.
    Falling,
}

const START: f64 = 0.01;
const LENGTH: f64 = 6.0;
/// A geometric number, from 1.
const ON: f64 = 1.0 - 1.0 / LENGTH;

/// Markov-modulated stalls: one begins at a free request with probability 1 %, lasts a geometric
/// number of requests (mean 6) and has a Pareto height from 10 with index 3.
fn stalls(n: usize, seed: u64, kind: Stall) -> Vec<f64> {
    let mut random = Random::new(seed);
    let (mut left, mut length, mut height) = (0usize, 1usize, 0.0);
    let mut next = || {
        if left == 0 && random.unit() < START {
            length = 1 + ((1.0 - random.unit()).ln() / ON.ln()) as usize;
            (left, height) = (length, 10.0 * (1.0 - random.unit()).powf(-1.0 / 3.0));
        }
        let free = (0.5 * random.normal()).exp();
        if left == 0 {
            return free;
        }
        let stalled = match kind {
            Stall::Level => height * (0.1 * random.normal()).exp(),
            Stall::Falling => height * left as f64 / length as f64,
        };
        left -= 1;
        stalled.max(free)
    };
    (0..n).map(|_| next()).collect()
}

/// p99.99 of [`stalls`]: far above 10 a share `stalled E[V^3] (10 / x)^3` of all requests is above
/// x, V being the height's factor.
fn stalls_p9999(kind: Stall) -> f64 {
    let stalled = LENGTH / (LENGTH + (1.0 - START) / START);
    let cubes = match kind {
        Stall::Level => (0.5f64 * 0.09).exp(),
        // Mean over requests of (j / length)^3, stalls weighted by their length.
        Stall::Falling => {
            let of_length =
                |l: i32| (1..=l).map(|j| f64::from(j).powi(3)).sum::<f64>() / f64::from(l).powi(3);
            (1..400).map(|l| ON.powi(l - 1) * (1.0 - ON) * of_length(l)).sum::<f64>() / LENGTH
        }
    };
    10.0 * (stalled * cubes / (1.0 - P)).cbrt()
}

/// Nominal 95 %; at least 90 % required, by a bound whose median is less than `width` times the
/// truth, of at least 90 % of the seeds.
fn assert_kept(truth: f64, series: impl Fn(u64) -> Vec<f64>, width: f64) {
    let pots = (0..SEEDS).filter_map(|seed| Pot::fit(&series(seed)).ok());
    let mut widths: Vec<f64> = pots.map(|pot| pot.tail_quantile(P, 0.95).unwrap().upper / truth).collect();
    widths.sort_by(f64::total_cmp);
    let answers = widths.len() as f64;
    let upper = widths.iter().filter(|width| **width >= 1.0).count() as f64 / answers;
    let found = widths[widths.len() / 2];
    assert!(answers / SEEDS as f64 >= 0.9, "{answers} answers");
    assert!(upper >= 0.9, "upper bound keeps {upper}");
    assert!(found < width, "bound of {found} times the truth");
}

#[test]
fn bounds_hold_for_lognormal_latencies() {
    assert_kept(3.719_016_485_f64.exp(), |s| lognormal(5_000, s), 2.2);
}

#[test]
fn bounds_hold_for_a_mixture() {
    assert_kept(10.0 * (0.03f64 / (1.0 - P)).powf(0.4), |s| mixture(5_000, s), 4.2);
}

#[test]
fn bounds_hold_for_stalls_of_one_level() {
    assert_kept(stalls_p9999(Stall::Level), |s| stalls(10_000, s, Stall::Level), 8.0);
}

#[test]
fn bounds_hold_for_stalls_that_fall() {
    assert_kept(stalls_p9999(Stall::Falling), |s| stalls(5_000, s, Stall::Falling), 5.5);
}

/// With every exceedance counted as independent the bound of the same threshold holds less often.
#[test]
fn clusters_have_to_count_less() {
    let truth = stalls_p9999(Stall::Level);
    let (mut counted, mut plain, mut sizes) = (0, 0, 0.0);
    let answers = (0..200).filter_map(|seed| Pot::fit(&stalls(10_000, seed, Stall::Level)).ok());
    for pot in answers.take(100) {
        let (threshold, sums) = &pot.chosen_and_above()[0];
        let weight = threshold.effective / sums.count();
        let bound = |weight| {
            let profile = Profile { sums, n: 10_000.0, weight, exceedance: 1.0 - P };
            threshold.level + profile.end(1.645)
        };
        counted += u32::from(bound(weight) >= truth);
        plain += u32::from(bound(1.0) >= truth);
        sizes += threshold.exceedances as f64 / threshold.clusters as f64 / 100.0;
        assert!(threshold.effective <= threshold.clusters as f64);
    }
    assert!((sizes / LENGTH - 1.0).abs() < 0.25, "mean cluster size {sizes}");
    assert!(counted >= 80 && plain <= 65, "{counted} and {plain} of 100");
}

/// Exact: p^n = 0.05 and 0.01 at n = 29 955.8 and 46 049.4. (-ln(0.05) / 1e-4 = 29 957.3 is the
/// rule of thumb.)
#[test]
fn samples_that_order_statistics_need() {
    assert_eq!(samples_needed(0.9999, 0.95), Some(29_956));
    assert_eq!(samples_needed(0.9999, 0.99), Some(46_050));
    assert_eq!(samples_needed(0.99, 0.95), Some(299));
    assert_eq!(samples_needed(0.5, 0.75), Some(2));
    for (n, spare) in
        [(29_955, None), (29_956, Some(0)), (47_436, Some(0)), (47_437, Some(1)), (105_128, Some(5))]
    {
        assert_eq!(spare_samples(n, 0.9999, 0.95), spare, "{n}");
    }
    assert_eq!((spare_samples(46_049, 0.9999, 0.99), spare_samples(46_050, 0.9999, 0.99)), (None, Some(0)));
    assert_eq!((can_carry(9_999, 0.9999), can_carry(10_000, 0.9999)), (false, true));
    for (p, c) in [(0.0, 0.9), (1.0, 0.9), (f64::NAN, 0.9), (0.9, 0.0), (0.9, 1.0), (0.9, f64::NAN)] {
        assert_eq!((samples_needed(p, c), spare_samples(100, p, c)), (None, None));
    }
    assert!(!can_carry(100, f64::NAN) && !can_carry(0, 0.5));
}

/// Against the binomial distribution summed the other way round: by Pascal's rule over n, in plain
/// numbers.
#[test]
fn spare_samples_are_those_of_the_binomial_distribution() {
    for p in [0.3, 0.5, 0.9, 0.97] {
        let mut below = vec![1.0f64];
        for n in 1..=300usize {
            let previous = below.clone();
            below.push(0.0);
            for k in 0..=n {
                let stay = if k < n { previous[k] * p } else { 0.0 };
                below[k] = stay + if k > 0 { previous[k - 1] * (1.0 - p) } else { 0.0 };
            }
            let mut sum = 0.0;
            let exact = (0..n)
                .take_while(|m| {
                    sum += below[*m];
                    sum <= 0.05
                })
                .last();
            assert_eq!(spare_samples(n, p, 0.95), exact, "{n} {p}");
        }
    }
    // The probabilities themselves underflow here: 0.5^20 000. The normal approximation is good to
    // one.
    let spare = spare_samples(20_000, 0.5, 0.95).unwrap();
    assert!((spare as f64 - (10_000.0 - 0.5 - 1.644_854 * 5_000f64.sqrt())).abs() < 1.5, "{spare}");
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let pot = Pot::fit(&mixture(5_000, 1)).unwrap();
    let again = Pot::fit(&mixture(5_000, 1)).unwrap();
    assert_eq!(pot.tail_quantile(P, 0.95), again.tail_quantile(P, 0.95));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn bounds_are_in_order_and_follow_the_unit(seed in 0u64..10_000, heavy in proptest::bool::ANY, unit in 1e-9f64..1e9) {
        let series = if heavy { mixture(4_000, seed) } else { exponential(4_000, seed) };
        if let Ok(pot) = Pot::fit(&series) {
            let at = |confidence| pot.tail_quantile(P, confidence).unwrap();
            let (low, high) = (at(0.8), at(0.99));
            prop_assert!(low.estimate <= low.upper && low.upper <= high.upper);
            let scaled: Vec<f64> = series.iter().map(|x| x * unit).collect();
            let other = Pot::fit(&scaled).unwrap().tail_quantile(P, 0.99).unwrap();
            for (a, b) in [(high.estimate, other.estimate), (high.upper, other.upper)] {
                prop_assert!((b / unit / a - 1.0).abs() < 1e-2, "{} {}", a, b / unit);
            }
        }
    }
}
