//! Networks from k-fold cross-validation, one for each fold, and their mean.
//!
//! The shape and the averaging are those of the RT-VirtIO paper's performance model (sections V and
//! VII-A): 3 layers, 15 neurons in each hidden layer, ReLU, 5-fold cross-validation, the mean of
//! the five networks. "3 layers" is read as two hidden layers and the output layer;
//! [`EnsembleOptions::hidden`] takes others.

use rtvirtio_stats::{Rows, RowsError, check_finite};
use serde::{Deserialize, Serialize};

use crate::mlp::{self, Mlp, MlpError, Scaler, TrainOptions};

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
#[derive(Clone, Debug)]
pub struct EnsembleOptions {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// Folds, and so networks; at least 2.
    pub folds: usize,
    /// Training of each network, in scaled units. The seed determines everything: folds, first
    /// weights, order of the rows.
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

/// Buffers of [`Ensemble::predict_with`]; they grow in the first call.
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
    /// Returns also, for each row, the prediction of the network that did not learn from it, in the
    /// target's unit: slightly better than on new data, as the same fold chose when that network's
    /// training ended, and the scales come from all rows.
    ///
    /// # Errors
    ///
    /// Rows or options that cannot be used, fewer groups than folds, a training that diverges.
    pub fn fit(
        rows: &Rows,
        groups: &[usize],
        options: &EnsembleOptions,
    ) -> Result<(Self, Vec<f64>), EnsembleError> {
        let scaler = Scaler::fit(rows, options.clamp, options.margin)?;
        let fold = group_folds(groups, options.folds, sub_seed(options.train.seed, 0))?;
        let scaled = scaler.scale_rows(rows);
        let mut nets = Vec::with_capacity(options.folds);
        for held_out in 0..options.folds {
            let net = fit_net(&scaled, &fold, held_out, options);
            nets.push(net.map_err(|source| EnsembleError::Fold { fold: held_out, source })?);
        }
        let out_of_fold = predict_out_of_fold(&scaler, &nets, &scaled, &fold);
        Ok((Self { schema: SCHEMA.to_owned(), scaler, nets }, out_of_fold))
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

    /// The mean of the networks, in the target's unit, without an allocation once the buffers have
    /// grown.
    ///
    /// # Errors
    ///
    /// An input of another width, a NaN or infinite value in it, no networks, or no finite result.
    pub fn predict_with(&self, x: &[f64], scratch: &mut Scratch) -> Result<f64, EnsembleError> {
        check_finite("the input", x).map_err(MlpError::from)?;
        self.scaler.scale_into(x, &mut scratch.scaled)?;
        // A running mean needs no list of the predictions.
        let (mut n, mut mean) = (0.0, 0.0);
        for net in &self.nets {
            n += 1.0;
            mean += (net.predict_with(&scratch.scaled, &mut scratch.net) - mean) / n;
        }
        let mean = self.scaler.unscale_target(mean);
        if n > 0.0 && mean.is_finite() { Ok(mean) } else { Err(EnsembleError::Overflow) }
    }
}

/// Trains the network that does not learn from fold `held_out`.
fn fit_net(
    scaled: &Rows,
    fold: &[usize],
    held_out: usize,
    options: &EnsembleOptions,
) -> Result<Mlp, MlpError> {
    let learn = scaled.filter(|row| fold[row] != held_out);
    let validation = scaled.filter(|row| fold[row] == held_out);
    let seed = |part| sub_seed(options.train.seed, 2 * held_out as u64 + part);
    let mut net = Mlp::new(scaled.width, &options.hidden, seed(1))?;
    let train = TrainOptions { seed: seed(2), ..options.train };
    mlp::train(&mut net, &learn, Some(&validation), &train)?;
    Ok(net)
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
