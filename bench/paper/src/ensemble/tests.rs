use std::collections::BTreeSet;

use proptest::prelude::*;

use rtvirtio_stats::Random;

use super::*;
use crate::mlp::{Column, Layer};

/// `groups` runs of `size` rows each, with features that differ little within a run.
fn runs(groups: usize, size: usize, seed: u64, target: impl Fn(&[f64], f64) -> f64) -> (Rows, Vec<usize>) {
    let mut random = Random::new(seed);
    let mut rows = Rows::new(3);
    let mut group_of = Vec::new();
    for group in 0..groups {
        let centre: Vec<f64> = (0..3).map(|_| 2.0 * random.unit() - 1.0).collect();
        let luck = random.normal();
        for _ in 0..size {
            let x: Vec<f64> = centre.iter().map(|c| c + 0.01 * random.normal()).collect();
            rows.push(&x, target(&x, luck), 1.0).expect("a row");
            group_of.push(10 * group);
        }
    }
    (rows, group_of)
}

impl Ensemble {
    fn predict(&self, x: &[f64]) -> Result<f64, EnsembleError> {
        self.predict_with(x, &mut Scratch::default())
    }
}

fn smooth(x: &[f64], _: f64) -> f64 {
    500.0 + 100.0 * (x[0] * x[1] + (2.0 * x[2]).sin())
}

fn quick() -> EnsembleOptions {
    EnsembleOptions {
        train: TrainOptions { epochs: 60, ..TrainOptions::default() },
        ..EnsembleOptions::default()
    }
}

fn r_squared(y: &[f64], predicted: &[f64]) -> f64 {
    let mean = y.iter().sum::<f64>() / y.len() as f64;
    let left: f64 = y.iter().zip(predicted).map(|(y, p)| (y - p).powi(2)).sum();
    1.0 - left / y.iter().map(|y| (y - mean).powi(2)).sum::<f64>()
}

/// Networks of one input that predict 1, 2 and 6 deviations, whatever the input.
fn constant_nets() -> Ensemble {
    let net =
        |bias| Mlp { layers: vec![Layer { inputs: 1, outputs: 1, weights: vec![0.0], biases: vec![bias] }] };
    let column = Column { mean: 10.0, deviation: 2.0, low: 5.0, high: 15.0 };
    let scaler = Scaler { features: vec![column], target: column, clamp: false, margin: 0.0 };
    Ensemble { schema: SCHEMA.to_owned(), scaler, nets: vec![net(1.0), net(2.0), net(6.0)] }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn groups_are_never_split_and_every_fold_is_filled(
        groups in prop::collection::vec(0usize..40, 1..300), folds in 2usize..8, seed: u64,
    ) {
        let distinct = groups.iter().collect::<BTreeSet<_>>().len();
        let Ok(fold) = group_folds(&groups, folds, seed) else {
            prop_assert!(distinct < folds);
            return Ok(());
        };
        prop_assert!(distinct >= folds);
        prop_assert_eq!(fold.len(), groups.len());
        let pairs: BTreeSet<_> = groups.iter().zip(&fold).collect();
        prop_assert_eq!(pairs.len(), distinct);
        prop_assert_eq!(fold.iter().copied().collect::<BTreeSet<_>>(), (0..folds).collect());
        let count = |of: &[usize], value| of.iter().filter(|other| **other == value).count();
        let filled: Vec<usize> = (0..folds).map(|f| count(&fold, f)).collect();
        let largest = groups.iter().map(|g| count(&groups, *g)).max().unwrap_or(0);
        let (low, high) = (filled.iter().min().unwrap_or(&0), filled.iter().max().unwrap_or(&0));
        prop_assert!(high - low <= largest, "{:?}", filled);
    }
}

#[test]
fn the_seed_decides_the_folds() {
    let groups: Vec<usize> = (0..100).map(|row| row / 4).collect();
    assert_eq!(group_folds(&groups, 5, 1), group_folds(&groups, 5, 1));
    assert_ne!(group_folds(&groups, 5, 1), group_folds(&groups, 5, 2));
}

#[test]
fn a_function_is_learnt_and_out_of_fold_is_of_the_net_that_did_not_see_the_row() {
    let (rows, groups) = runs(150, 4, 1, smooth);
    let (model, out_of_fold) = Ensemble::fit(&rows, &groups, &quick()).expect("a fit");
    assert_eq!(model.check(), Ok(()));
    let r2 = r_squared(&rows.y, &out_of_fold);
    assert!(r2 > 0.93, "R² = {r2}");
    let (unseen, _) = runs(300, 1, 2, smooth);
    let predicted: Vec<f64> = (0..300).map(|i| model.predict(unseen.row(i)).expect("a number")).collect();
    let r2 = r_squared(&unseen.y, &predicted);
    assert!(r2 > 0.95, "R² = {r2}");
    let fold = group_folds(&groups, 5, sub_seed(0, 0)).expect("folds");
    for row in [0, 77, 599] {
        let mut scaled = Vec::new();
        model.scaler.scale_into(rows.row(row), &mut scaled).expect("scaled");
        let own = model.scaler.unscale_target(model.nets[fold[row]].predict(&scaled));
        assert_eq!(own, out_of_fold[row]);
    }
    assert_eq!((model.nets.len(), model.nets[0].layers.len(), model.nets[0].layers[1].outputs), (5, 3, 15));
}

#[test]
fn a_net_learns_nothing_from_its_own_fold() {
    // The target is random by run: only rows of the same run could predict it.
    let (rows, groups) = runs(40, 8, 3, |_, luck| luck);
    let options = EnsembleOptions { hidden: vec![40, 40], ..quick() };
    let score = |groups: &[usize]| {
        let (_, out_of_fold) = Ensemble::fit(&rows, groups, &options).expect("a fit");
        r_squared(&rows.y, &out_of_fold)
    };
    let each_alone: Vec<usize> = (0..rows.len()).collect();
    let (grouped, leaking) = (score(&groups), score(&each_alone));
    assert!(grouped < 0.3 && leaking > 0.6, "{grouped} {leaking}");
}

#[test]
fn the_prediction_is_the_mean_of_the_nets() {
    let model = constant_nets();
    assert_eq!(model.check(), Ok(()));
    // Mean 3 in units of 2 around 10.
    assert!((model.predict(&[7.0]).expect("a number") - 16.0).abs() < 1e-12);
    let single = Ensemble { nets: model.nets[..1].to_vec(), ..model };
    assert_eq!(single.predict(&[7.0]), Ok(12.0));
}

#[test]
fn clamped_features_stay_near_the_rows() {
    let (rows, groups) = runs(100, 3, 5, smooth);
    let held = EnsembleOptions { clamp: true, ..quick() };
    let (clamped, _) = Ensemble::fit(&rows, &groups, &held).expect("a fit");
    assert_eq!(clamped.predict(&[6.0, -6.0, 6.0]), clamped.predict(&[60.0, -60.0, 60.0]));
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let (rows, groups) = runs(30, 3, 5, smooth);
    let run = |seed| {
        let train = TrainOptions { epochs: 5, seed, ..TrainOptions::default() };
        Ensemble::fit(&rows, &groups, &EnsembleOptions { train, ..EnsembleOptions::default() })
            .expect("a fit")
    };
    let text = |seed| serde_json::to_string(&run(seed)).expect("json");
    assert_eq!(text(1), text(1));
    assert_ne!(run(1).0.nets, run(2).0.nets);
}

#[test]
fn neighbouring_seeds_have_no_part_in_common() {
    let all = (0..50).flat_map(|seed| (0..50).map(move |purpose| sub_seed(seed, purpose)));
    assert_eq!(all.collect::<BTreeSet<u64>>().len(), 2500);
}

#[test]
fn json_keeps_every_bit() {
    let (rows, groups) = runs(30, 3, 5, smooth);
    let (model, _) = Ensemble::fit(&rows, &groups, &quick()).expect("a fit");
    let read: Ensemble =
        serde_json::from_str(&serde_json::to_string(&model).expect("json")).expect("a model");
    assert_eq!(read, model);
    assert_eq!(read.predict(&[0.1, 0.2, 0.3]), model.predict(&[0.1, 0.2, 0.3]));
}

#[test]
fn corrupt_ensembles_are_refused() {
    let corruptions: [fn(&mut Ensemble); 9] = [
        |model| model.schema.push('2'),
        |model| model.nets.clear(),
        |model| model.nets = vec![model.nets[0].clone(); NETS_MAX + 1],
        |model| model.nets[1].layers[0].weights[0] = f64::NAN,
        |model| model.nets[2] = Mlp::new(2, &[], 1).expect("a network"),
        |model| model.scaler.features.clear(),
        |model| model.scaler.features[0].deviation = -1.0,
        |model| model.scaler.target.mean = f64::INFINITY,
        |model| model.scaler.margin = f64::NAN,
    ];
    for (index, corrupt) in corruptions.iter().enumerate() {
        let mut model = constant_nets();
        corrupt(&mut model);
        assert!(model.check().is_err(), "corruption {index}");
        // Evaluated all the same, it does not panic.
        let _ = model.predict(&[1.0]);
    }
}

#[test]
fn inputs_without_meaning_are_errors() {
    let model = constant_nets();
    assert!(matches!(
        model.predict(&[1.0, 2.0]),
        Err(EnsembleError::Mlp(MlpError::Rows(RowsError::Width { .. })))
    ));
    assert!(matches!(
        model.predict(&[f64::NAN]),
        Err(EnsembleError::Mlp(MlpError::Rows(RowsError::NotFinite { .. })))
    ));
    assert!(model.predict(&[f64::INFINITY]).is_err());
    assert_eq!(Ensemble { nets: vec![], ..model }.predict(&[1.0]), Err(EnsembleError::Overflow));
}

#[test]
fn rows_and_options_without_meaning_are_errors() {
    let (rows, groups) = runs(6, 2, 1, smooth);
    let fit = |rows: &Rows, groups: &[usize], options: &EnsembleOptions| {
        Ensemble::fit(rows, groups, options).expect_err("refused")
    };
    let mut nan = rows.clone();
    nan.x[3] = f64::NAN;
    assert!(matches!(
        fit(&nan, &groups, &quick()),
        EnsembleError::Mlp(MlpError::Rows(RowsError::NotFinite { .. }))
    ));
    let folds = |folds| EnsembleOptions { folds, ..quick() };
    for count in [0, 1, 7, usize::MAX] {
        let refused = fit(&rows, &groups, &folds(count));
        assert_eq!(refused, EnsembleError::Folds { folds: count, groups: 6 });
    }
    let zero_width = EnsembleOptions { hidden: vec![0], ..quick() };
    assert!(matches!(fit(&rows, &groups, &zero_width), EnsembleError::Fold { fold: 0, .. }));
    assert!(matches!(
        fit(&rows, &groups, &EnsembleOptions { margin: -1.0, ..quick() }),
        EnsembleError::Mlp(_)
    ));
}

#[test]
fn constant_targets_are_predicted_exactly() {
    let (rows, groups) = runs(10, 2, 1, |_, _| 0.1);
    let (model, out_of_fold) = Ensemble::fit(&rows, &groups, &quick()).expect("a fit");
    assert!((model.predict(&[0.3, 0.2, 0.1]).expect("a number") - 0.1).abs() < 1e-15);
    assert!(out_of_fold.iter().all(|y| (y - 0.1).abs() < 1e-15));
}
