//! Unusable input is an error, never a panic or a plausible number.

use rtvirtio_stats::Rows;

use super::{curve, table};
use crate::mlp::*;

#[test]
fn corrupt_networks_are_refused() {
    let good = Mlp::new(3, &[4, 2], 1).expect("a network");
    assert_eq!(good.check(), Ok(()));
    let corruptions: [fn(&mut Mlp); 13] = [
        |net| net.layers.clear(),
        |net| net.layers.truncate(2),
        |net| net.layers.push(net.layers[2].clone()),
        |net| net.layers = vec![Layer { inputs: 1, outputs: 1, weights: vec![1.0], biases: vec![0.0] }; 17],
        |net| net.layers[1].inputs = 5,
        |net| net.layers[1].outputs = usize::MAX,
        |net| net.layers[0].inputs = 0,
        |net| net.layers.swap(0, 1),
        |net| net.layers[1].weights.push(0.0),
        |net| net.layers[1].biases.clear(),
        |net| net.layers[0].weights[3] = f64::NAN,
        |net| net.layers[2].biases[0] = f64::NEG_INFINITY,
        |net| net.layers[2].weights[1] = 1e10,
    ];
    for (index, corrupt) in corruptions.iter().enumerate() {
        let mut net = good.clone();
        corrupt(&mut net);
        assert!(net.check().is_err(), "corruption {index}");
        // Evaluated all the same, it does not panic.
        let _ = net.predict(&[1.0, 2.0, 3.0]);
        assert!(train(&mut net, &table(9, 3, 1, curve), None, &TrainOptions::default()).is_err());
    }
    let reversed = Layer { inputs: 4, outputs: 3, ..good.layers[0].clone() };
    assert!(Mlp { layers: vec![reversed] }.predict(&[1.0; 4]).is_nan());
    assert!(Mlp::new(0, &[3], 1).is_err() && Mlp::new(3, &[3, 0], 1).is_err());
    assert!(Mlp::new(WIDTH_MAX + 1, &[], 1).is_err() && Mlp::new(1, &[1; LAYERS_MAX], 1).is_err());
}

#[test]
fn the_largest_network_allowed_does_not_overflow() {
    let wide = |inputs| Layer {
        inputs,
        outputs: 64,
        weights: vec![WEIGHT_MAX; 64 * inputs],
        biases: vec![WEIGHT_MAX; 64],
    };
    let mut layers: Vec<Layer> = std::iter::repeat_n(wide(64), LAYERS_MAX - 1).collect();
    layers.push(Layer { outputs: 1, weights: vec![WEIGHT_MAX; 64], biases: vec![0.0], ..wide(64) });
    let net = Mlp { layers };
    assert_eq!(net.check(), Ok(()));
    assert!(net.predict(&[1e90; 64]).is_finite());
}

#[test]
fn tables_that_cannot_be_used_are_refused() {
    let good = table(5, 3, 1, curve);
    let corruptions: [fn(&mut Rows); 11] = [
        |rows| rows.x[4] = f64::NAN,
        |rows| rows.x[4] = f64::INFINITY,
        |rows| rows.y[2] = f64::NAN,
        |rows| rows.weight[2] = f64::NAN,
        |rows| rows.weight[2] = -1.0,
        |rows| rows.weight.fill(0.0),
        |rows| rows.width = 2,
        |rows| rows.width = 0,
        |rows| rows.x.truncate(14),
        |rows| rows.weight.truncate(4),
        |rows| *rows = Rows::new(3),
    ];
    let options = TrainOptions::default();
    for (index, corrupt) in corruptions.iter().enumerate() {
        let mut rows = good.clone();
        corrupt(&mut rows);
        let mut net = Mlp::new(3, &[4], 1).expect("a network");
        let before = net.clone();
        assert!(rows.check().is_err(), "corruption {index}");
        assert!(train(&mut net, &rows, None, &options).is_err(), "corruption {index}");
        assert!(train(&mut net, &good, Some(&rows), &options).is_err(), "corruption {index}");
        assert_eq!(net, before);
    }
    let mut narrow = Mlp::new(2, &[4], 1).expect("a network");
    let refused = train(&mut narrow, &good, None, &options);
    assert_eq!(refused, Err(RowsError::Width { what: "a row", found: 3, expected: 2 }.into()));
    let mut rows = good.clone();
    assert!(rows.push(&[1.0], 0.0, 1.0).is_err() && rows.push(&[1.0, 2.0, f64::NAN], 0.0, 1.0).is_err());
    assert!(rows.push(&[1.0; 3], f64::NAN, 1.0).is_err() && rows.push(&[1.0; 3], 0.0, -1.0).is_err());
    assert_eq!(rows, good);
    assert!(rows.row(99).is_empty());
}

#[test]
fn an_overflow_is_an_error_and_leaves_the_network() {
    let rows = table(20, 1, 1, |_, _| 1e200);
    let mut net = Mlp::new(1, &[3], 1).expect("a network");
    let before = net.clone();
    let refused = train(&mut net, &rows, None, &TrainOptions::default());
    assert_eq!(refused, Err(MlpError::Diverged { epoch: 0 }));
    assert_eq!(net, before);
}

#[test]
fn nan_and_wrong_widths_are_not_hidden_by_relu() {
    let net = Mlp::new(3, &[5, 5], 2).expect("a network");
    assert!(net.predict(&[0.0, f64::NAN, 1.0]).is_nan());
    assert!(net.predict(&[0.0, 1.0]).is_nan() && net.predict(&[]).is_nan());
    assert!(Mlp { layers: vec![] }.predict(&[]).is_nan());
}
