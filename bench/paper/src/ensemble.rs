//! Networks from k-fold cross-validation, one for each fold, and their mean.
//!
//! The shape and the averaging are those of the RT-VirtIO paper's performance model (sections V and
//! VII-A): 3 layers, 15 neurons in each hidden layer, ReLU, 5-fold cross-validation, the mean of
//! the five networks. "3 layers" is read as two hidden layers and the output layer;
//! [`EnsembleOptions::hidden`] takes others.

use rtvirtio_stats::{Rows, RowsError, check_finite};
use serde::{Deserialize, Serialize};

use crate::mlp::{self, Mlp, MlpError, Scaler, TrainOptions, TrainReport};

mod folds;
#[cfg(test)]
mod tests;

pub use folds::group_folds;

/// Format version of a serialised [`Ensemble`].
pub const SCHEMA: &str = "rtvirtio.ensemble.v1";
/// Most networks that [`Ensemble::check`] accepts.
pub const NETS_MAX: usize = 1024;

/// A fitted model. Its file must be written and read with exact floats (`float_roundtrip` of
/// `serde_json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ensemble {
    /// Format version, always [`SCHEMA`].
    pub schema: String,
    /// The scales of the features and of the target, common to all networks.
    pub scaler: Scaler,
    /// Networks by fold, in scaled units.
    pub nets: Vec<Mlp>,
}

/// Options of a fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnsembleOptions {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// Folds, and so networks; at least 2.
    pub folds: usize,
    /// Training of each network, in scaled units: a Huber `delta` counts in deviations of the
    /// target. The seed determines everything: folds, first weights, order of the rows.
    pub train: TrainOptions,
    /// Whether predictions limit features to the training range; see [`Scaler::clamp`].
    pub clamp: bool,
    /// Share of the range by which features may exceed it; see [`Scaler::margin`].
    pub margin: f64,
}

impl Default for EnsembleOptions {
    fn default() -> Self {
        Self { hidden: vec![15, 15], folds: 5, train: TrainOptions::default(), clamp: false, margin: 0.0 }
    }
}

/// Result of a fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitReport {
    /// The fold of each row: network `fold[i]` did not learn from row `i`.
    pub fold: Vec<usize>,
    /// For each row the prediction of the network that did not learn from it, in the target's unit.
    ///
    /// Slightly better than on new data: the same fold chose when that network's training ended,
    /// and the scales come from all rows.
    pub out_of_fold: Vec<f64>,
    /// Training reports of the networks; losses in scaled units.
    pub nets: Vec<TrainReport>,
}

/// Prediction of the networks for one input, in the target's unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Mean of the networks' predictions.
    pub mean: f64,
    /// Standard deviation of the predictions (divided by k - 1); 0 for a single network.
    pub spread: f64,
}

/// Buffers of [`Ensemble::estimate_with`]; they grow in the first call.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    scaled: Vec<f64>,
    net: mlp::Scratch,
}

/// Errors of fitting, reading or evaluating an ensemble.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EnsembleError {
    /// Rows, options, scales or a network are not usable.
    #[error(transparent)]
    Mlp(#[from] MlpError),
    /// The network of one fold could not be trained.
    #[error("fold {fold}: {source}")]
    Fold {
        /// Index of the fold, from 0.
        fold: usize,
        /// Error of the training.
        source: MlpError,
    },
    /// Not every row has a group.
    #[error("{groups} group numbers for {rows} rows")]
    Groups {
        /// Number of group numbers given.
        groups: usize,
        /// Number of rows given.
        rows: usize,
    },
    /// Cross-validation is not possible.
    #[error("{groups} groups cannot make {folds} folds: at least 2 folds, and a group for each, are needed")]
    Folds {
        /// Number of folds asked for.
        folds: usize,
        /// Number of different groups in the rows.
        groups: usize,
    },
    /// The file has another format.
    #[error("schema `{found}` is not `{SCHEMA}`")]
    Schema {
        /// Format in the file.
        found: String,
    },
    /// The number of networks is zero or too large.
    #[error("{found} networks: 1 to {NETS_MAX} are possible")]
    Nets {
        /// Number of networks in the file.
        found: usize,
    },
    /// The prediction for this input is not finite.
    #[error("the networks give no finite prediction for this input")]
    Overflow,
}

impl Ensemble {
    /// Fits by cross-validation: network `i` learns from all folds but `i`, whose loss ends its
    /// training.
    ///
    /// `groups` has a number for each row; rows of equal number (one measured run) stay in one
    /// fold. The same rows, groups and options give the same bits.
    ///
    /// # Errors
    ///
    /// Rows or options that cannot be used, fewer groups than folds, a training that diverges.
    pub fn fit(
        rows: &Rows,
        groups: &[usize],
        options: &EnsembleOptions,
    ) -> Result<(Self, FitReport), EnsembleError> {
        options.train.check()?;
        let scaler = Scaler::fit(rows, options.clamp, options.margin)?;
        if groups.len() != rows.len() {
            return Err(EnsembleError::Groups { groups: groups.len(), rows: rows.len() });
        }
        let fold = group_folds(groups, options.folds, sub_seed(options.train.seed, 0))?;
        let scaled = scaler.scale_rows(rows);
        let mut nets = Vec::with_capacity(options.folds);
        let mut reports = Vec::with_capacity(options.folds);
        for held_out in 0..options.folds {
            let (net, report) = fit_net(&scaled, &fold, held_out, options)
                .map_err(|source| EnsembleError::Fold { fold: held_out, source })?;
            nets.push(net);
            reports.push(report);
        }
        let out_of_fold = predict_out_of_fold(&scaler, &nets, &scaled, &fold);
        let report = FitReport { fold, out_of_fold, nets: reports };
        Ok((Self { schema: SCHEMA.to_owned(), scaler, nets }, report))
    }

    /// Checks an ensemble that came from a file.
    ///
    /// # Errors
    ///
    /// Another schema, scales or networks that are corrupt, or that do not fit each other.
    pub fn check(&self) -> Result<(), EnsembleError> {
        if self.schema != SCHEMA {
            return Err(EnsembleError::Schema { found: self.schema.clone() });
        }
        if self.nets.is_empty() || self.nets.len() > NETS_MAX {
            return Err(EnsembleError::Nets { found: self.nets.len() });
        }
        self.scaler.check()?;
        let expected = self.scaler.features.len();
        for net in &self.nets {
            net.check()?;
            if net.inputs() != expected {
                let what = "a network's input";
                return Err(MlpError::from(RowsError::Width { what, found: net.inputs(), expected }).into());
            }
        }
        Ok(())
    }

    /// The mean of the networks, in the target's unit.
    ///
    /// # Errors
    ///
    /// As of [`Ensemble::estimate_with`].
    pub fn predict(&self, x: &[f64]) -> Result<f64, EnsembleError> {
        self.predict_with(x, &mut Scratch::default())
    }

    /// [`Ensemble::predict`] without an allocation once the buffers have grown.
    ///
    /// # Errors
    ///
    /// As of [`Ensemble::estimate_with`].
    pub fn predict_with(&self, x: &[f64], scratch: &mut Scratch) -> Result<f64, EnsembleError> {
        Ok(self.estimate_with(x, scratch)?.mean)
    }

    /// Standard deviation over the networks, in the target's unit: large where the model is unsure.
    ///
    /// Not a confidence interval: networks that share most of their rows can be wrong together.
    ///
    /// # Errors
    ///
    /// As of [`Ensemble::estimate_with`].
    pub fn spread(&self, x: &[f64]) -> Result<f64, EnsembleError> {
        Ok(self.estimate_with(x, &mut Scratch::default())?.spread)
    }

    /// Mean and spread at once, without an allocation once the buffers have grown.
    ///
    /// # Errors
    ///
    /// An input of another width, a NaN or infinite value in it, no networks, or no finite result.
    pub fn estimate_with(&self, x: &[f64], scratch: &mut Scratch) -> Result<Estimate, EnsembleError> {
        check_finite("the input", x).map_err(MlpError::from)?;
        self.scaler.scale_into(x, &mut scratch.scaled)?;
        // Welford's running mean and squares (Technometrics 4, 1962) need no list of the
        // predictions.
        let (mut n, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for net in &self.nets {
            let value = net.predict_with(&scratch.scaled, &mut scratch.net);
            n += 1.0;
            let off = value - mean;
            mean += off / n;
            squares += off * (value - mean);
        }
        let deviation = if n > 1.0 { f64::sqrt(squares / (n - 1.0)) } else { 0.0 };
        let mean = self.scaler.unscale_target(mean);
        let spread = deviation * self.scaler.target.deviation;
        if n > 0.0 && mean.is_finite() && spread.is_finite() {
            Ok(Estimate { mean, spread })
        } else {
            Err(EnsembleError::Overflow)
        }
    }
}

/// Trains the network that does not learn from fold `held_out`.
fn fit_net(
    scaled: &Rows,
    fold: &[usize],
    held_out: usize,
    options: &EnsembleOptions,
) -> Result<(Mlp, TrainReport), MlpError> {
    let learn = scaled.filter(|row| fold[row] != held_out);
    let validation = scaled.filter(|row| fold[row] == held_out);
    let seed = |part| sub_seed(options.train.seed, 2 * held_out as u64 + part);
    let mut net = Mlp::new(scaled.width, &options.hidden, seed(1))?;
    let train = TrainOptions { seed: seed(2), ..options.train };
    let report = mlp::train(&mut net, &learn, Some(&validation), &train)?;
    Ok((net, report))
}

fn predict_out_of_fold(scaler: &Scaler, nets: &[Mlp], scaled: &Rows, fold: &[usize]) -> Vec<f64> {
    let mut scratch = mlp::Scratch::default();
    let predict = |(row, fold): (usize, &usize)| {
        scaler.unscale_target(nets[*fold].predict_with(scaled.row(row), &mut scratch))
    };
    fold.iter().enumerate().map(predict).collect()
}

/// A seed for each purpose. The odd multiplier (2^64 over the golden ratio) keeps the seeds of one
/// ensemble apart from those of the ensemble with the next seed.
fn sub_seed(seed: u64, purpose: u64) -> u64 {
    seed.wrapping_add(purpose.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}
