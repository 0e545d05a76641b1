use proptest::prelude::*;

use super::*;
use crate::Random;

/// Rows of runs whose common level varies ten times as much as their rows; `size` gives the number
/// of rows of a level.
fn runs(count: usize, random: &mut Random, size: impl Fn(f64) -> usize) -> (Vec<f64>, Vec<usize>) {
    let (mut scores, mut groups) = (Vec::new(), Vec::new());
    for group in 0..count {
        let level = random.normal();
        for _ in 0..size(level) {
            scores.push(level + 0.1 * random.normal());
            groups.push(group);
        }
    }
    (scores, groups)
}

/// The quantile that takes rows as exchangeable: rank `ceil((n + 1) (1 - miss))`.
fn naive(scores: &[f64], miss: f64) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = ((sorted.len() + 1) as f64 * (1.0 - miss)).ceil() as usize;
    sorted[rank.min(sorted.len()) - 1]
}

/// Share of 5 000 seeds in which a row of a new run is below the bound: by groups, and by rows.
fn covered(count: usize, miss: f64, size: impl Fn(f64) -> usize + Copy) -> (f64, f64) {
    let seeds = 5_000;
    let (mut by_group, mut by_row) = (0, 0);
    for seed in 0..seeds {
        let mut random = Random::new(seed);
        let (scores, groups) = runs(count, &mut random, size);
        let (new, _) = runs(1, &mut random, size);
        by_group += u32::from(new[0] <= calibrate(&scores, &groups, miss).unwrap().score);
        by_row += u32::from(new[0] <= naive(&scores, miss));
    }
    (f64::from(by_group) / seeds as f64, f64::from(by_row) / seeds as f64)
}

/// Standard error of a share here: 0.004. At most one group's weight of 1 / (K + 1) more than
/// promised.
#[test]
fn new_runs_are_covered_where_rows_as_exchangeable_fail() {
    let (hierarchical, rows) = covered(20, 0.1, |_| 6);
    assert!((0.888..0.96).contains(&hierarchical), "{hierarchical}");
    assert!(rows < hierarchical - 0.015, "{rows}");
    // Slow runs finish fewer requests.
    let (hierarchical, rows) = covered(20, 0.1, |level| if level > 0.5 { 2 } else { 10 });
    assert!((0.888..0.96).contains(&hierarchical), "{hierarchical}");
    assert!(rows < 0.8, "{rows}");
    // The fewest groups possible: the largest score.
    let (hierarchical, _) = covered(9, 0.1, |_| 6);
    assert!((0.888..0.96).contains(&hierarchical), "{hierarchical}");
}

#[test]
fn weights_are_those_of_the_groups() {
    // Three groups of weight 1/4, in quarters: the row at 5 has 1/2 of a group before it.
    let (scores, groups) = ([1.0, 2.0, 5.0, 7.0, 3.0, 6.0], [0, 0, 0, 0, 1, 2]);
    let at = |miss| calibrate(&scores, &groups, miss).map(|q| q.score);
    assert_eq!(at(0.25), Ok(7.0));
    // 1 - miss = 1/4, 3/8, 1/2 of the whole are 1, 1.5 and 2 groups: rows at 1, 2 (half a group), 3
    // (a group and a half).
    assert_eq!(at(0.875), Ok(2.0));
    assert_eq!(at(0.75), Ok(3.0));
    assert_eq!(at(0.625), Ok(3.0));
    assert_eq!(at(0.5625), Ok(5.0));
    assert_eq!(at(0.4), Ok(6.0));
    assert_eq!(at(0.24), Err(ConformalError::TooFewGroups { have: 3, need: 4 }));
}

#[test]
fn groups_needed_by_level() {
    for (miss, need) in [(0.05, 19), (0.1, 9), (0.01, 99), (0.2, 4), (0.3, 3), (0.5, 1), (0.7, 1)] {
        assert_eq!(groups_needed(miss), Ok(need), "{miss}");
        let scores: Vec<f64> = (0..need).map(|i| i as f64).collect();
        let groups: Vec<usize> = (0..need).collect();
        assert!(calibrate(&scores, &groups, miss).is_ok(), "{miss}");
        if need > 1 {
            let have = need - 1;
            let short = calibrate(&scores[1..], &groups[1..], miss);
            assert_eq!(short, Err(ConformalError::TooFewGroups { have, need }), "{miss}");
        }
    }
    for miss in [0.0, 1.0, -0.1, f64::NAN, f64::INFINITY] {
        assert_eq!(groups_needed(miss), Err(ConformalError::BadLevel));
    }
}

#[test]
fn bad_rows_are_refused() {
    let not_finite = |index| ConformalError::BadNumber { index, what: "not a finite number" };
    assert_eq!(calibrate(&[1.0, f64::NAN], &[0, 1], 0.5), Err(not_finite(1)));
    assert_eq!(calibrate(&[f64::INFINITY], &[0], 0.5), Err(not_finite(0)));
    assert_eq!(calibrate(&[1.0], &[0, 1], 0.5), Err(ConformalError::Length { left: 1, right: 2 }));
    assert_eq!(calibrate(&[], &[], 0.5), Err(ConformalError::Empty));
}

#[test]
fn files_are_checked() {
    let (scores, groups) = runs(20, &mut Random::new(2), |_| 5);
    let good = calibrate(&scores, &groups, 0.1).unwrap();
    assert_eq!(good.check(), Ok(()));
    let text = serde_json::to_string(&good).unwrap();
    assert_eq!(serde_json::from_str::<Quantile>(&text).unwrap(), good);
    type Spoil = (&'static str, fn(&mut Quantile));
    let spoil: [Spoil; 4] = [
        ("score", |q| q.score = f64::NAN),
        ("level", |q| q.miss = 0.0),
        ("groups", |q| q.groups = 8),
        ("rows", |q| q.rows = 3),
    ];
    for (what, change) in spoil {
        let mut bad = good;
        change(&mut bad);
        assert!(bad.check().is_err(), "{what}");
    }
}

fn rows() -> impl Strategy<Value = (Vec<f64>, Vec<usize>)> {
    proptest::collection::vec((-20i32..20, 0usize..12), 30..120)
        .prop_map(|rows| rows.into_iter().map(|(s, g)| (f64::from(s) / 4.0, g)).unzip())
}

proptest! {
    #[test]
    fn bounds_rise_with_the_level((scores, groups) in rows(), a in 0.1f64..0.9, b in 0.1f64..0.9) {
        let (strict, loose) = (calibrate(&scores, &groups, a.min(b)), calibrate(&scores, &groups, a.max(b)));
        if let (Ok(strict), Ok(loose)) = (strict, loose) {
            prop_assert!(strict.score >= loose.score);
        }
    }

    #[test]
    fn the_order_of_rows_does_not_matter((scores, groups) in rows(), miss in 0.1f64..0.9, seed in 0u64..1000) {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        Random::new(seed).shuffle(&mut order);
        let shuffled: (Vec<f64>, Vec<usize>) = order.iter().map(|i| (scores[*i], groups[*i])).unzip();
        prop_assert_eq!(calibrate(&scores, &groups, miss), calibrate(&shuffled.0, &shuffled.1, miss));
    }

    /// The mass at infinity only raises it.
    #[test]
    fn the_bound_is_not_below_the_weighted_quantile((scores, groups) in rows(), miss in 0.1f64..0.9) {
        if let Ok(bound) = calibrate(&scores, &groups, miss) {
            let size = |g: usize| groups.iter().filter(|o| **o == g).count() as f64;
            let all = bound.groups as f64;
            let share = |limit: f64| -> f64 {
                scores.iter().zip(&groups).filter(|(s, _)| **s <= limit).map(|(_, g)| 1.0 / size(*g) / all).sum()
            };
            let mut sorted = scores.clone();
            sorted.sort_by(f64::total_cmp);
            let plain = sorted.iter().copied().find(|s| share(*s) >= 1.0 - miss - 1e-9).unwrap();
            prop_assert!(bound.score >= plain);
            prop_assert!(share(bound.score) * all / (all + 1.0) >= 1.0 - miss - 1e-9);
        }
    }
}
