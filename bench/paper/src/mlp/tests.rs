use rtvirtio_stats::Rows;

use super::*;

mod refused;

const LOSSES: [Loss; 2] = [Loss::Squared, Loss::Pinball { quantile: 0.9 }];

impl Mlp {
    pub(crate) fn predict(&self, x: &[f64]) -> f64 {
        self.predict_with(x, &mut Scratch::default())
    }
}

/// Uniform features in [-1, 1) with the targets of `target`.
fn table(n: usize, width: usize, seed: u64, target: impl Fn(&[f64], &mut Random) -> f64) -> Rows {
    let mut random = Random::new(seed);
    let mut rows = Rows::new(width);
    for _ in 0..n {
        let x: Vec<f64> = (0..width).map(|_| 2.0 * random.unit() - 1.0).collect();
        let y = target(&x, &mut random);
        rows.push(&x, y, 1.0).expect("a row");
    }
    rows
}

fn curve(x: &[f64], _: &mut Random) -> f64 {
    (3.0 * x[0]).sin() + x[1] * x[1] - x[0] * x[2]
}

fn r_squared(net: &Mlp, rows: &Rows) -> f64 {
    let mean = rows.y.iter().sum::<f64>() / rows.len() as f64;
    let total: f64 = rows.y.iter().map(|y| (y - mean).powi(2)).sum();
    let left: f64 = (0..rows.len()).map(|i| (rows.y[i] - net.predict(rows.row(i))).powi(2)).sum();
    1.0 - left / total
}

fn fit(rows: &Rows, hidden: &[usize], options: &TrainOptions) -> (Mlp, TrainReport) {
    let mut net = Mlp::new(rows.width, hidden, options.seed).expect("a network");
    let report = train(&mut net, rows, None, options).expect("training");
    (net, report)
}

fn parameter(net: &mut Mlp, mut index: usize) -> Option<&mut f64> {
    for layer in &mut net.layers {
        for list in [&mut layer.weights, &mut layer.biases] {
            if index < list.len() {
                return list.get_mut(index);
            }
            index -= list.len();
        }
    }
    None
}

/// Largest difference between back-propagation and central differences, over all weights and
/// biases.
fn gradient_error(net: &Mlp, loss: Loss, x: &[f64], y: f64) -> f64 {
    let mut gradient = net.zeros_like();
    let mut pass = backprop::Backprop::new(net);
    let slope = loss.slope(pass.forward(net, x), y);
    pass.backward(net, slope, &mut gradient);
    let mut worst: f64 = 0.0;
    for index in 0.. {
        let Some(exact) = parameter(&mut gradient, index).copied() else { break };
        let shifted = |by: f64| {
            let mut other = net.clone();
            *parameter(&mut other, index).expect("same shape") += by;
            loss.value(other.predict(x), y)
        };
        let numeric = (shifted(1e-6) - shifted(-1e-6)) / 2e-6;
        worst = worst.max((exact - numeric).abs() / (1.0 + exact.abs()));
    }
    worst
}

#[test]
fn gradients_are_those_of_finite_differences() {
    for hidden in [&[][..], &[7], &[6, 5], &[5, 4, 3]] {
        let mut net = Mlp::new(4, hidden, 11).expect("a network");
        // Away from zero biases, so that their derivatives are tested in general position.
        net.layers.iter_mut().flat_map(|layer| &mut layer.biases).enumerate().for_each(|(i, bias)| {
            *bias = 0.3 - 0.05 * i as f64;
        });
        let x = [0.7, -0.4, 1.3, 0.2];
        let prediction = net.predict(&x);
        for loss in LOSSES {
            for y in [prediction + 1.5, prediction - 2.5] {
                let error = gradient_error(&net, loss, &x, y);
                assert!(error < 1e-7, "{hidden:?} {loss:?} {y}: {error}");
            }
        }
    }
}

#[test]
fn losses_have_the_values_of_their_definitions() {
    let at = |loss: Loss, e: f64| loss.value(2.0 - e, 2.0);
    assert_eq!([at(Loss::Squared, 3.0), at(Loss::Squared, -2.0)], [4.5, 2.0]);
    let pinball = Loss::Pinball { quantile: 0.75 };
    assert_eq!([at(pinball, 4.0), at(pinball, -4.0), at(pinball, 0.0)], [3.0, 1.0, 0.0]);
    assert_eq!(pinball.slope(1.0, 1.0), 0.0);
    for loss in LOSSES {
        assert!(loss.value(f64::NAN, 1.0).is_nan() && loss.slope(f64::NAN, 1.0).is_nan(), "{loss:?}");
    }
}

#[test]
fn initial_weights_have_hes_variance() {
    let net = Mlp::new(50, &[200], 3).expect("a network");
    let weights = &net.layers[0].weights;
    let variance = weights.iter().map(|w| w * w).sum::<f64>() / weights.len() as f64;
    assert!((variance / (2.0 / 50.0) - 1.0).abs() < 0.05, "{variance}");
    assert!(net.layers.iter().flat_map(|layer| &layer.biases).all(|bias| *bias == 0.0));
}

#[test]
fn prediction_is_the_formula() {
    let hidden = Layer { inputs: 2, outputs: 2, weights: vec![1.0, 2.0, -1.0, 1.0], biases: vec![0.5, -4.0] };
    let output = Layer { inputs: 2, outputs: 1, weights: vec![3.0, 100.0], biases: vec![-1.0] };
    let net = Mlp { layers: vec![hidden, output] };
    assert_eq!(net.check(), Ok(()));
    assert_eq!(net.predict(&[1.0, 2.0]), 3.0 * 5.5 - 1.0);
    assert_eq!(net.predict(&[-1.0, 5.0]), 3.0 * 9.5 + 100.0 * 2.0 - 1.0);
    let mut scratch = Scratch::default();
    let wide = Mlp::new(9, &[30, 3], 1).expect("a network");
    assert!(wide.predict_with(&[1.0; 9], &mut scratch).is_finite());
    assert_eq!(net.predict_with(&[1.0, 2.0], &mut scratch), 15.5);
}

#[test]
fn scalar_products_of_all_lengths() {
    for n in 0..13 {
        let a: Vec<f64> = (1..=n).map(f64::from).collect();
        assert_eq!(dot(&a, &a), f64::from(n * (n + 1) * (2 * n + 1) / 6));
    }
}

#[test]
fn a_nonlinear_function_is_learnt() {
    let (rows, unseen) = (table(800, 3, 1, curve), table(400, 3, 2, curve));
    let options = TrainOptions { epochs: 200, ..TrainOptions::default() };
    let (net, report) = fit(&rows, &[15, 15], &options);
    let r2 = r_squared(&net, &unseen);
    assert!(r2 > 0.98, "R² = {r2}");
    assert_eq!((report.epochs.len(), report.best, report.stopped_early), (200, 199, false));
    assert!(report.epochs[199].train < report.epochs[0].train / 20.0);
    // Without a hidden layer it cannot be.
    assert!(r_squared(&fit(&rows, &[], &options).0, &unseen) < 0.8);
}

#[test]
fn pinball_learns_the_quantile_everywhere() {
    let noisy = |x: &[f64], random: &mut Random| x[0] + (0.2 + x[0].abs()) * random.normal();
    let (rows, unseen) = (table(3000, 1, 5, noisy), table(6000, 1, 6, noisy));
    let loss = Loss::Pinball { quantile: 0.9 };
    let options = TrainOptions { loss, epochs: 60, final_rate: 0.0, ..TrainOptions::default() };
    let (net, _) = fit(&rows, &[10, 10], &options);
    let below = |range: std::ops::Range<f64>| {
        let inside: Vec<usize> = (0..unseen.len()).filter(|i| range.contains(&unseen.row(*i)[0])).collect();
        let below = inside.iter().filter(|i| unseen.y[**i] <= net.predict(unseen.row(**i))).count();
        below as f64 / inside.len() as f64
    };
    let all = below(-1.0..1.0);
    assert!((all - 0.9).abs() < 0.02, "{all}");
    // A constant or a line would be right on the whole only.
    for range in [-1.0..-0.5, -0.5..0.0, 0.0..0.5, 0.5..1.0] {
        let share = below(range.clone());
        assert!((share - 0.9).abs() < 0.05, "{range:?}: {share}");
    }
}

#[test]
fn weights_of_rows_count() {
    let mut rows = Rows::new(1);
    for _ in 0..40 {
        rows.push(&[1.0], 1.0, 3.0).expect("a row");
        rows.push(&[1.0], 0.0, 1.0).expect("a row");
        rows.push(&[1.0], 1e6, 0.0).expect("a row");
    }
    let options = TrainOptions { batch: 8, final_rate: 0.0, ..TrainOptions::default() };
    let (net, report) = fit(&rows, &[], &options);
    assert!((net.predict(&[1.0]) - 0.75).abs() < 0.01, "{}", net.predict(&[1.0]));
    // Half the weighted variance of the two targets.
    assert!((report.epochs[299].train - 0.75 * 0.25 / 2.0).abs() < 1e-3);
    let mut doubled = rows.clone();
    doubled.weight.iter_mut().for_each(|weight| *weight *= 2.0);
    assert_eq!(fit(&doubled, &[], &options).0, net);
}

#[test]
fn weight_decay_makes_weights_smaller() {
    let rows = table(300, 3, 1, curve);
    let size = |weight_decay| {
        let options = TrainOptions { weight_decay, epochs: 40, ..TrainOptions::default() };
        let (net, _) = fit(&rows, &[8], &options);
        net.layers.iter().flat_map(|layer| &layer.weights).map(|w| w * w).sum::<f64>()
    };
    assert!(size(0.5) < 0.7 * size(0.0));
}

#[test]
fn training_stops_early_with_the_best_weights() {
    let noise = |_: &[f64], random: &mut Random| random.normal();
    let (rows, held_out) = (table(60, 4, 1, noise), table(60, 4, 2, noise));
    let options = TrainOptions { patience: 5, ..TrainOptions::default() };
    let mut net = Mlp::new(4, &[20, 20], 1).expect("a network");
    let report = train(&mut net, &rows, Some(&held_out), &options).expect("training");
    assert!(report.stopped_early && report.epochs.len() == report.best + 6, "{report:?}");
    let losses: Vec<f64> = report.epochs.iter().filter_map(|epoch| epoch.validation).collect();
    let lowest = losses.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(lowest, losses[report.best]);
    let mean = (0..60).map(|i| Loss::Squared.value(net.predict(held_out.row(i)), held_out.y[i])).sum::<f64>();
    assert!((mean / 60.0 - lowest).abs() < 1e-12);
}

#[test]
fn the_seed_decides_the_order_of_the_rows() {
    let rows = table(200, 3, 1, curve);
    let from_one_start = |seed| {
        let mut net = Mlp::new(3, &[8], 1).expect("a network");
        train(&mut net, &rows, None, &TrainOptions { epochs: 2, seed, ..TrainOptions::default() })
            .expect("training");
        net
    };
    assert_eq!(from_one_start(1), from_one_start(1));
    assert_ne!(from_one_start(1), from_one_start(2));
}

#[test]
fn json_keeps_every_bit_and_refuses_strangers() {
    let (net, _) = fit(&table(50, 3, 1, curve), &[6], &TrainOptions { epochs: 3, ..TrainOptions::default() });
    let text = serde_json::to_string(&net).expect("json");
    assert_eq!(serde_json::from_str::<Mlp>(&text).expect("a network"), net);
    let strange = text.replacen("\"inputs\"", "\"more\":1,\"inputs\"", 1);
    assert!(serde_json::from_str::<Mlp>(&strange).is_err());
}
