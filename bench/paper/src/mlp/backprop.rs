//! The gradient of a network's output by its weights (Rumelhart, Hinton and Williams,
//! Nature 323, 1986).

use super::{Layer, Mlp, relu};

/// Buffers of one pass through a network.
pub(super) struct Backprop {
    /// Input of the network, then the output of every layer (after ReLU where there is one).
    values: Vec<Vec<f64>>,
    /// Derivative by the output of the present layer, and by its input.
    delta: Vec<f64>,
    below: Vec<f64>,
}

impl Backprop {
    /// For a network that passed [`Mlp::check`].
    pub(super) fn new(net: &Mlp) -> Self {
        Self { values: vec![Vec::new(); net.layers.len() + 1], delta: Vec::new(), below: Vec::new() }
    }

    /// Output of the network for `x`; keeps the values that [`Backprop::backward`] needs.
    pub(super) fn forward(&mut self, net: &Mlp, x: &[f64]) -> f64 {
        self.values[0].clear();
        self.values[0].extend_from_slice(x);
        let last = net.layers.len() - 1;
        for (index, layer) in net.layers.iter().enumerate() {
            let (done, todo) = self.values.split_at_mut(index + 1);
            if layer.affine(&done[index], &mut todo[0]).is_none() {
                return f64::NAN;
            }
            if index < last {
                todo[0].iter_mut().for_each(relu);
            }
        }
        self.values[last + 1].first().copied().unwrap_or(f64::NAN)
    }

    /// Adds `slope` times the gradient of the output of the last [`Backprop::forward`] to
    /// `gradient`.
    pub(super) fn backward(&mut self, net: &Mlp, slope: f64, gradient: &mut Mlp) {
        self.delta.clear();
        self.delta.push(slope);
        for (index, (layer, gradient)) in net.layers.iter().zip(&mut gradient.layers).enumerate().rev() {
            let input = &self.values[index];
            add_outer(gradient, &self.delta, input);
            if index > 0 {
                back_through(layer, &self.delta, input, &mut self.below);
                std::mem::swap(&mut self.delta, &mut self.below);
            }
        }
    }
}

/// Adds the derivative by a layer's weights and biases.
fn add_outer(gradient: &mut Layer, delta: &[f64], input: &[f64]) {
    let rows = gradient.weights.chunks_exact_mut(gradient.inputs);
    for ((row, bias), delta) in rows.zip(&mut gradient.biases).zip(delta) {
        // Many units are switched off by ReLU, and add nothing.
        if *delta != 0.0 {
            add_scaled(row, *delta, input);
            *bias += delta;
        }
    }
}

/// The derivative by a layer's input, which came out of a ReLU: 0 where that is switched off.
fn back_through(layer: &Layer, delta: &[f64], input: &[f64], below: &mut Vec<f64>) {
    below.clear();
    below.resize(layer.inputs, 0.0);
    for (row, delta) in layer.weights.chunks_exact(layer.inputs).zip(delta) {
        if *delta != 0.0 {
            add_scaled(below, *delta, row);
        }
    }
    for (below, input) in below.iter_mut().zip(input) {
        if *input <= 0.0 {
            *below = 0.0;
        }
    }
}

fn add_scaled(sum: &mut [f64], factor: f64, values: &[f64]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += factor * value;
    }
}
