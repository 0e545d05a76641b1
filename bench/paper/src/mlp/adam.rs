//! Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1), with
//! the decoupled weight decay of Loshchilov and Hutter (ICLR 2019, algorithm 2).

use super::Mlp;

/// Defaults of the paper by Kingma and Ba.
const FIRST_DECAY: f64 = 0.9;
const SECOND_DECAY: f64 = 0.999;
const EPSILON: f64 = 1e-8;

/// Moments of the gradient so far.
pub(super) struct Adam {
    first: Mlp,
    second: Mlp,
    /// Decay rates to the power of the steps so far, for the bias correction.
    first_power: f64,
    second_power: f64,
}

/// Factors of one step.
struct Step {
    rate: f64,
    first_unbias: f64,
    second_unbias: f64,
    shrink: f64,
}

impl Adam {
    pub(super) fn new(net: &Mlp) -> Self {
        Self { first: net.zeros_like(), second: net.zeros_like(), first_power: 1.0, second_power: 1.0 }
    }

    /// Moves the network one step against the gradient. Biases are not decayed.
    pub(super) fn step(&mut self, net: &mut Mlp, gradient: &Mlp, rate: f64, decay: f64) {
        self.first_power *= FIRST_DECAY;
        self.second_power *= SECOND_DECAY;
        let (first_unbias, second_unbias) = (1.0 - self.first_power, 1.0 - self.second_power);
        let weights = Step { rate, first_unbias, second_unbias, shrink: 1.0 - rate * decay };
        let biases = Step { shrink: 1.0, ..weights };
        let moments = self.first.layers.iter_mut().zip(&mut self.second.layers);
        for ((layer, gradient), (first, second)) in net.layers.iter_mut().zip(&gradient.layers).zip(moments) {
            weights.take(&mut layer.weights, &gradient.weights, &mut first.weights, &mut second.weights);
            biases.take(&mut layer.biases, &gradient.biases, &mut first.biases, &mut second.biases);
        }
    }
}

impl Step {
    fn take(&self, values: &mut [f64], gradient: &[f64], first: &mut [f64], second: &mut [f64]) {
        for (((value, g), m), v) in values.iter_mut().zip(gradient).zip(first).zip(second) {
            *m = FIRST_DECAY * *m + (1.0 - FIRST_DECAY) * g;
            *v = SECOND_DECAY * *v + (1.0 - SECOND_DECAY) * g * g;
            let step = (*m / self.first_unbias) / ((*v / self.second_unbias).sqrt() + EPSILON);
            *value = self.shrink * *value - self.rate * step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlp::Layer;

    #[test]
    fn the_first_step_of_adam_is_the_learning_rate() {
        // In the paper, bias correction makes the first step's size the rate, whatever the
        // gradient.
        let mut net =
            Mlp { layers: vec![Layer { inputs: 1, outputs: 1, weights: vec![2.0], biases: vec![1.0] }] };
        let mut gradient = net.clone();
        gradient.layers[0].weights[0] = 1e3;
        gradient.layers[0].biases[0] = -1e-3;
        Adam::new(&net).step(&mut net, &gradient, 0.1, 0.5);
        let layer = &net.layers[0];
        assert!((layer.weights[0] - (2.0 * 0.95 - 0.1)).abs() < 1e-9, "{layer:?}");
        assert!((layer.biases[0] - 1.1).abs() < 1e-5, "{layer:?}");
    }
}
