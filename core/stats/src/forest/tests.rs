use super::*;

/// Rows of a law with two regimes: `y = 2 a + noise`, ten times as noisy where b is large.
fn rows(groups: usize, seed: u64) -> (Rows, Vec<f64>, Vec<usize>) {
    let mut random = Random::new(seed);
    let mut rows = Rows::new(4);
    let (mut secondary_targets, mut of) = (Vec::new(), Vec::new());
    for group in 0..groups {
        for _ in 0..3 {
            let x = [random.unit(), random.unit(), random.unit(), 7.0];
            let y = 2.0 * x[0] + scale(x[1]) * random.normal();
            rows.push(&x, y, 1.0 / 3.0).unwrap();
            secondary_targets.push(x[0]);
            of.push(group);
        }
    }
    (rows, secondary_targets, of)
}

fn scale(b: f64) -> f64 {
    if b > 0.5 { 0.5 } else { 0.05 }
}

const LEVELS: [f64; 3] = [0.05, 0.5, 0.95];

#[test]
fn quantiles_follow_mean_and_spread() {
    let (table, secondary_targets, groups) = rows(400, 1);
    let (forest, report) =
        Forest::fit(&table, &secondary_targets, &groups, &LEVELS, &ForestOptions::default()).unwrap();
    forest.check().unwrap();
    let mut scratch = Scratch::default();
    let mut q = [0.0; 3];
    for b in [0.25, 0.75] {
        let (mut off, mut width) = (0.0, 0.0);
        for i in 1..10 {
            let a = f64::from(i) / 10.0;
            let secondary = forest.predict_with(&[a, b, 0.5, 7.0], &LEVELS, &mut scratch, &mut q).unwrap();
            assert!((secondary - a).abs() < 0.15, "{a}: {secondary}");
            off += (q[1] - 2.0 * a) / 9.0;
            // 5 % to 95 % of a normal distribution are 3.29 deviations; x[0] differs inside a leaf
            // too.
            width += (q[2] - q[0]) / (3.29 * scale(b)) / 9.0;
        }
        assert!(off.abs() < 0.3 * scale(b) + 0.05 && (0.6..3.0).contains(&width), "{b}: {off} {width}");
    }
    // Out of bag, the quantiles hold on rows that their trees have not seen.
    let below = |level: usize| {
        let n = report.quantiles.iter().zip(&table.y).filter(|(q, y)| **y <= q[level]).count();
        n as f64 / table.len() as f64
    };
    for (level, share) in LEVELS.iter().enumerate() {
        assert!((below(level) - share).abs() < 0.04, "{share}: {}", below(level));
    }
}

#[test]
fn the_same_seed_gives_the_same_forest_and_a_file_brings_it_back() {
    let (table, secondary_targets, groups) = rows(40, 2);
    let options = ForestOptions { trees: 20, ..ForestOptions::default() };
    let fit = |options| Forest::fit(&table, &secondary_targets, &groups, &[0.5], options).unwrap().0;
    let forest = fit(&options);
    assert_eq!(forest, fit(&options));
    assert_ne!(forest, fit(&ForestOptions { seed: 2, ..options }));
    let text = serde_json::to_string(&forest).unwrap();
    let back: Forest = serde_json::from_str(&text).unwrap();
    back.check().unwrap();
    assert_eq!(back, forest);
}

#[test]
fn rows_of_a_group_stay_together_out_of_bag() {
    // Every group has a target of its own and its name as a feature: a row that has been seen gives
    // its group's target away.
    let mut table = Rows::new(1);
    let mut groups = Vec::new();
    let mut random = Random::new(3);
    for group in 0..60 {
        let y = random.normal();
        for _ in 0..4 {
            table.push(&[f64::from(group)], y, 1.0).unwrap();
            groups.push(group as usize);
        }
    }
    let options = ForestOptions { leaf: 1, ..ForestOptions::default() };
    let none = vec![0.0; table.len()];
    let (_, report) = Forest::fit(&table, &none, &groups, &[0.5], &options).unwrap();
    let exact = report.quantiles.iter().zip(&table.y).filter(|(q, y)| q[0] == **y).count();
    assert!(exact < table.len() / 10, "{exact} of {} were known", table.len());
}

#[test]
fn what_cannot_be_is_refused() {
    let (table, secondary_targets, groups) = rows(20, 4);
    let fit = |secondary_targets: &[f64], groups: &[usize], options: ForestOptions| {
        Forest::fit(&table, secondary_targets, groups, &[0.5], &options).unwrap_err().to_string()
    };
    let few = ForestOptions { trees: 12, ..ForestOptions::default() };
    assert!(fit(&secondary_targets, &groups, ForestOptions { trees: 3, ..few }).contains("10 to"));
    assert!(fit(&secondary_targets, &groups, ForestOptions { leaf: 0, ..few }).contains("leaf"));
    assert!(fit(&secondary_targets, &groups, ForestOptions { share: 1.0, ..few }).contains("below 1"));
    assert!(fit(&secondary_targets, &groups[1..], few).contains("59 group numbers for 60 rows"));
    assert!(fit(&secondary_targets[1..], &groups, few).contains("secondary targets"));
    assert!(fit(&secondary_targets, &vec![0; 60], few).contains("1 groups"));
    let (forest, _) = Forest::fit(&table, &secondary_targets, &groups, &[0.5], &few).unwrap();
    let mut scratch = Scratch::default();
    for wrong in [&[0.0; 3][..], &[0.0, f64::NAN, 0.0, 0.0]] {
        let refused = forest.predict_with(wrong, &[], &mut scratch, &mut []).unwrap_err();
        assert_eq!(refused, ForestError::BadInput { width: 4 });
        assert!(forest.spread(wrong).is_err());
    }
    assert_eq!(forest.outside(&[0.5, 2.0, 0.5, 7.0]), [1]);
    assert_eq!(forest.outside(&[0.5, 0.5, 0.5, 7.1]), [3]);
    let damaged = |edit: &dyn Fn(&mut Forest)| {
        let mut f = forest.clone();
        edit(&mut f);
        f.check().unwrap_err().to_string()
    };
    assert!(damaged(&|f| f.targets.reverse()).contains("order"));
    assert!(damaged(&|f| f.weights[0] = 0.0).contains("number"));
    // Sums of which are not finite, and then no prediction is.
    assert!(damaged(&|f| f.weights[0] = 1e308).contains("number"));
    assert!(damaged(&|f| f.weights[0] = 5e-324).contains("number"));
    assert!(damaged(&|f| *f.targets.last_mut().unwrap() = 1e308).contains("number"));
    assert!(damaged(&|f| f.trees[0].splits[0].2 = 0).contains("nowhere"));
    assert!(damaged(&|f| f.trees[0].splits[0].0 = 9).contains("nowhere"));
    assert!(damaged(&|f| f.trees[0].leaves[0] = vec![10_000]).contains("leaf"));
    assert!(damaged(&|f| f.trees.clear()).contains("trees"));
}
