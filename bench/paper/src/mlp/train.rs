//! Training: Adam on shuffled mini-batches, with early stopping by validation rows.

use rtvirtio_stats::{Random, Rows, RowsError};

use super::adam::Adam;
use super::backprop::Backprop;
use super::{Loss, Mlp, MlpError, Scratch};

/// Hyperparameters; sizes are above zero, shares within [0, 1].
#[derive(Clone, Copy, Debug)]
pub struct TrainOptions {
    /// Loss that is minimised.
    pub loss: Loss,
    /// Most passes over the rows; also the length of the learning rate's decay.
    pub epochs: usize,
    /// Most rows in a mini-batch; the batches of an epoch are of equal size.
    pub batch: usize,
    /// Adam's learning rate in the first epoch.
    pub learning_rate: f64,
    /// Learning rate of the last epoch as a share of the first's, in [0, 1]; the way there is half
    /// a cosine (Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts). 1 keeps
    /// it constant.
    pub final_rate: f64,
    /// Share of each weight that a step subtracts, times the learning rate.
    pub weight_decay: f64,
    /// Epochs without a better validation loss after which training ends.
    pub patience: usize,
    /// Seed of the order of the rows.
    pub seed: u64,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            loss: Loss::Squared,
            epochs: 300,
            batch: 32,
            learning_rate: 5e-3,
            final_rate: 0.01,
            weight_decay: 0.0,
            patience: 40,
            seed: 0,
        }
    }
}

/// The losses of one pass over the rows, each the weighted mean over its rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epoch {
    /// Loss of the training rows, each evaluated just before the step of its batch.
    pub train: f64,
    /// Loss of the validation rows after the pass; `None` without any.
    pub validation: Option<f64>,
}

/// Result of training.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainReport {
    /// Losses in the order of the epochs.
    pub epochs: Vec<Epoch>,
    /// Index of the epoch, from 0, whose weights the network has now.
    pub best: usize,
    /// Whether training ended by `patience` before the last epoch.
    pub stopped_early: bool,
}

impl TrainOptions {
    fn rate(&self, epoch: usize) -> f64 {
        let done = epoch as f64 / (self.epochs - 1).max(1) as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * cosine)
    }
}

/// Trains a network, starting from its present weights.
///
/// With `validation` rows it ends with the weights of their lowest loss, without them with the last
/// ones. Features and target should be near mean 0 and deviation 1: see [`super::Scaler`].
///
/// # Errors
///
/// Rows or a network that their `check` refuses, rows of another width than the network's
/// input, or a loss that overflows. The network is then as it was.
pub fn train(
    net: &mut Mlp,
    rows: &Rows,
    validation: Option<&Rows>,
    options: &TrainOptions,
) -> Result<TrainReport, MlpError> {
    net.check()?;
    for table in [Some(rows), validation].into_iter().flatten() {
        table.check()?;
        if table.width != net.inputs() {
            let (found, expected) = (table.width, net.inputs());
            return Err(RowsError::Width { what: "a row", found, expected }.into());
        }
    }
    let (best, report) = Trainer::new(net.clone(), rows, options).run(validation)?;
    *net = best;
    Ok(report)
}

/// The weighted mean of a loss over checked rows.
fn mean_loss(net: &Mlp, rows: &Rows, loss: Loss) -> f64 {
    let mut scratch = Scratch::default();
    let mut sum = 0.0;
    for (index, (y, weight)) in rows.y.iter().zip(&rows.weight).enumerate() {
        sum += weight * loss.value(net.predict_with(rows.row(index), &mut scratch), *y);
    }
    sum / rows.weight_sum()
}

/// The state of a training, on checked input.
struct Trainer<'a> {
    net: Mlp,
    rows: &'a Rows,
    options: &'a TrainOptions,
    adam: Adam,
    pass: Backprop,
    gradient: Mlp,
    order: Vec<usize>,
    random: Random,
    /// Factor that brings the mean weight of a row to 1, so that steps do not depend on the unit of
    /// the weights.
    unit: f64,
}

impl<'a> Trainer<'a> {
    fn new(net: Mlp, rows: &'a Rows, options: &'a TrainOptions) -> Self {
        Self {
            rows,
            options,
            adam: Adam::new(&net),
            pass: Backprop::new(&net),
            gradient: net.zeros_like(),
            order: (0..rows.len()).collect(),
            random: Random::new(options.seed),
            unit: rows.len() as f64 / rows.weight_sum(),
            net,
        }
    }

    fn run(mut self, validation: Option<&Rows>) -> Result<(Mlp, TrainReport), MlpError> {
        let mut report = TrainReport { epochs: Vec::new(), best: 0, stopped_early: false };
        let mut best: Option<(f64, Mlp)> = None;
        for epoch in 0..self.options.epochs {
            let train = self.epoch(self.options.rate(epoch));
            let held_out = validation.map(|rows| mean_loss(&self.net, rows, self.options.loss));
            if !train.is_finite()
                || held_out.is_some_and(|loss| !loss.is_finite())
                || self.net.check().is_err()
            {
                return Err(MlpError::Diverged { epoch });
            }
            report.epochs.push(Epoch { train, validation: held_out });
            let Some(loss) = held_out else { continue };
            if best.as_ref().is_none_or(|(lowest, _)| loss < *lowest) {
                report.best = epoch;
                best = Some((loss, self.net.clone()));
            } else if epoch - report.best >= self.options.patience {
                report.stopped_early = epoch + 1 < self.options.epochs;
                break;
            }
        }
        match best {
            Some((_, net)) => Ok((net, report)),
            None => {
                report.best = report.epochs.len() - 1;
                Ok((self.net, report))
            }
        }
    }

    /// Makes a pass over the rows; returns their weighted mean loss.
    fn epoch(&mut self, rate: f64) -> f64 {
        let mut order = std::mem::take(&mut self.order);
        self.random.shuffle(&mut order);
        let batches = order.len().div_ceil(self.options.batch);
        let sum: f64 = order.chunks(order.len().div_ceil(batches)).map(|batch| self.batch(batch, rate)).sum();
        self.order = order;
        sum / self.rows.len() as f64
    }

    /// Makes a step; returns the summed loss of its rows.
    fn batch(&mut self, batch: &[usize], rate: f64) -> f64 {
        for layer in &mut self.gradient.layers {
            layer.weights.fill(0.0);
            layer.biases.fill(0.0);
        }
        let (loss, share) = (self.options.loss, 1.0 / batch.len() as f64);
        let mut sum = 0.0;
        for &index in batch {
            let (y, weight) = (self.rows.y[index], self.unit * self.rows.weight[index]);
            let prediction = self.pass.forward(&self.net, self.rows.row(index));
            sum += weight * loss.value(prediction, y);
            let slope = share * weight * loss.slope(prediction, y);
            self.pass.backward(&self.net, slope, &mut self.gradient);
        }
        self.adam.step(&mut self.net, &self.gradient, rate, self.options.weight_decay);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_follows_half_a_cosine() {
        let options =
            TrainOptions { epochs: 11, learning_rate: 0.5, final_rate: 0.1, ..TrainOptions::default() };
        for (epoch, rate) in [(0, 0.5), (5, 0.275), (10, 0.05)] {
            assert!((options.rate(epoch) - rate).abs() < 1e-15, "{epoch}");
        }
        assert_eq!(TrainOptions { epochs: 1, ..options }.rate(0), 0.5);
    }
}
