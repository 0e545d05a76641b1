//! A small feed-forward network: ReLU hidden layers and one linear output, in f64.
//!
//! Results have the same bits for the same seed on the same build; another platform's `ln` and
//! `cos` may differ in the last place.

use rtvirtio_stats::{Random, RowsError};
use serde::{Deserialize, Serialize};

mod adam;
mod backprop;
mod error;
mod loss;
mod scaler;
#[cfg(test)]
mod tests;
mod train;

pub use error::MlpError;
pub use loss::Loss;
pub use scaler::{Column, Scaler};
pub use train::{TrainOptions, TrainReport, train};

/// Most layers that [`Mlp::check`] accepts.
pub const LAYERS_MAX: usize = 16;
/// Most inputs or outputs of a layer that [`Mlp::check`] accepts.
pub const WIDTH_MAX: usize = 4096;
/// Largest magnitude of a weight or bias that [`Mlp::check`] accepts.
///
/// With the two limits above, the prediction for inputs below 1e90 cannot overflow.
pub const WEIGHT_MAX: f64 = 1e9;

/// A fully connected layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Number of input values.
    pub inputs: usize,
    /// Number of output values.
    pub outputs: usize,
    /// Row-major, `outputs` rows of `inputs` weights.
    pub weights: Vec<f64>,
    /// Biases in the order of the outputs.
    pub biases: Vec<f64>,
}

/// A network; every layer but the last is followed by ReLU, the last has one output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Layers from the input to the output.
    pub layers: Vec<Layer>,
}

/// Buffers of [`Mlp::predict_with`], of any network; they grow in the first call.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    now: Vec<f64>,
    next: Vec<f64>,
}

impl Layer {
    /// He initialisation: normal weights of variance 2 / inputs, zero biases
    /// (He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", ICCV 2015, equation 10).
    fn he(inputs: usize, outputs: usize, random: &mut Random) -> Self {
        let deviation = (2.0 / inputs as f64).sqrt();
        let weights = (0..inputs * outputs).map(|_| deviation * random.normal()).collect();
        Self { inputs, outputs, weights, biases: vec![0.0; outputs] }
    }

    fn zeros_like(&self) -> Self {
        Self { weights: vec![0.0; self.weights.len()], biases: vec![0.0; self.biases.len()], ..*self }
    }

    fn shape_is_consistent(&self) -> bool {
        self.inputs > 0
            && self.outputs > 0
            && self.biases.len() == self.outputs
            && self.inputs.checked_mul(self.outputs) == Some(self.weights.len())
    }

    /// Writes the affine map of `x` to `out`; `None` for an input or a layer of another shape.
    fn affine(&self, x: &[f64], out: &mut Vec<f64>) -> Option<()> {
        out.clear();
        if x.len() != self.inputs || !self.shape_is_consistent() {
            return None;
        }
        let rows = self.weights.chunks_exact(self.inputs);
        out.extend(rows.zip(&self.biases).map(|(row, bias)| bias + dot(row, x)));
        Some(())
    }
}

impl Mlp {
    /// A network with random weights: `inputs` values, hidden layers of the given widths, one
    /// output.
    ///
    /// # Errors
    ///
    /// A width of zero, or a shape beyond [`LAYERS_MAX`] or [`WIDTH_MAX`].
    pub fn new(inputs: usize, hidden: &[usize], seed: u64) -> Result<Self, MlpError> {
        check_layers(hidden.len() + 1)?;
        std::iter::once(&inputs).chain(hidden).try_for_each(|width| check_width(*width))?;
        let mut random = Random::new(seed);
        let mut below = inputs;
        let mut layers = Vec::with_capacity(hidden.len() + 1);
        for width in hidden.iter().copied().chain([1]) {
            layers.push(Layer::he(below, width, &mut random));
            below = width;
        }
        Ok(Self { layers })
    }

    /// Width of the input; 0 without layers.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.inputs)
    }

    /// The output for one input, without an allocation once the buffers have grown.
    ///
    /// NaN for an input of another width, for a NaN in it, and for a network whose shape is
    /// corrupt.
    #[must_use]
    pub fn predict_with(&self, x: &[f64], scratch: &mut Scratch) -> f64 {
        let Some((last, hidden)) = self.layers.split_last() else { return f64::NAN };
        let Scratch { now, next } = scratch;
        now.clear();
        now.extend_from_slice(x);
        for layer in hidden {
            if layer.affine(now, next).is_none() {
                return f64::NAN;
            }
            next.iter_mut().for_each(relu);
            std::mem::swap(now, next);
        }
        match last.affine(now, next) {
            Some(()) if next.len() == 1 => next[0],
            _ => f64::NAN,
        }
    }

    /// Checks a network that came from a file: consistent shapes, finite weights of sane size.
    ///
    /// # Errors
    ///
    /// The first fault, from the input to the output.
    pub fn check(&self) -> Result<(), MlpError> {
        check_layers(self.layers.len())?;
        let mut below = self.inputs();
        for (index, layer) in self.layers.iter().enumerate() {
            check_width(layer.inputs)?;
            check_width(layer.outputs)?;
            if layer.inputs != below || !layer.shape_is_consistent() {
                return Err(MlpError::Layer { index });
            }
            check_weights("weights", &layer.weights)?;
            check_weights("biases", &layer.biases)?;
            below = layer.outputs;
        }
        if below != 1 {
            return Err(RowsError::Width { what: "the output", found: below, expected: 1 }.into());
        }
        Ok(())
    }

    fn zeros_like(&self) -> Self {
        Self { layers: self.layers.iter().map(Layer::zeros_like).collect() }
    }
}

/// ReLU in place; a NaN stays one, where `max` would turn it into a plausible 0.
fn relu(value: &mut f64) {
    if *value < 0.0 {
        *value = 0.0;
    }
}

/// Scalar product with four running sums, so that the compiler can use vector instructions.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a4, b4) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a4.remainder().iter().zip(b4.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a4.zip(b4) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *sum += x * y;
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3]) + rest
}

fn check_layers(count: usize) -> Result<(), MlpError> {
    if count == 0 || count > LAYERS_MAX {
        return Err(MlpError::Size { what: "layers", found: count, max: LAYERS_MAX });
    }
    Ok(())
}

fn check_width(width: usize) -> Result<(), MlpError> {
    if width == 0 || width > WIDTH_MAX {
        return Err(MlpError::Size { what: "width of a layer", found: width, max: WIDTH_MAX });
    }
    Ok(())
}

fn check_weights(what: &'static str, values: &[f64]) -> Result<(), MlpError> {
    match values.iter().position(|value| value.is_nan() || value.abs() > WEIGHT_MAX) {
        Some(index) => Err(RowsError::NotFinite { what, index }.into()),
        None => Ok(()),
    }
}
