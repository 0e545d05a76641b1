//! The RT-VirtIO paper's network: its raw features, mean squared error of the latency itself, on
//! runs like the paper's.

use std::collections::BTreeSet;
use std::sync::Arc;

use rtvirtio_learn::condition::{conditions, inputs, lost, paper_domain};
use rtvirtio_learn::dataset::{Outcome, Point};
use rtvirtio_model::{Config, Elevator, Forecast, ModelError, Profile, Slice, TailModel};
use rtvirtio_spec::Spec;
use rtvirtio_stats::Rows;
use rtvirtio_units::Nanos;

use crate::ensemble::{Ensemble, EnsembleError, EnsembleOptions, Scratch};
use crate::mlp::{Loss, MlpError, TrainOptions};

/// Limit of epochs of the networks.
pub const EPOCHS: usize = 200;

/// Fewest conditions like the paper's for its network: with fewer, each of the five networks has
/// almost no data.
const FEWEST: usize = 20;

/// Number of [`features`] per task.
pub const WIDTH: usize = 8;

/// The network with the profile of the device that it was fitted on.
#[derive(Clone, Debug)]
pub struct Network {
    pub(crate) ensemble: Arc<Ensemble>,
    pub(crate) profile: Arc<Profile>,
}

impl TailModel for Network {
    fn forecast_tasks(
        &self,
        _given: &Profile,
        spec: &Spec,
        config: &Config,
    ) -> Result<Vec<Forecast>, ModelError> {
        if config.elevator != Elevator::Bfq {
            return Err(ModelError::NotCovered {
                model: "paper's network",
                what: "a host elevator other than bfq".to_owned(),
                remedy: "choose bfq or use the bound model",
            });
        }
        if let Some((vm, task)) = spec.tasks().find(|(_, task)| task.at_once() > 1) {
            return Err(ModelError::NotCovered {
                model: "paper's network",
                what: format!("requests of {}/{} that come {} at once", vm.name, task.name, task.at_once()),
                remedy: "use the slice model",
            });
        }
        let unusable = |e: EnsembleError| ModelError::BadProfile {
            device: self.profile.device.clone(),
            what: format!("its network fails: {e}"),
        };
        let slice = Slice.forecast_tasks(&self.profile, spec, config)?;
        let mut scratch = Scratch::default();
        let tasks = features(spec, config).into_iter().zip(slice);
        let forecast = |(row, slice): ([f64; WIDTH], Forecast)| {
            let s = self.ensemble.predict_with(&row, &mut scratch).map_err(unusable)?;
            // The network has no rates, and our model's rates are no part of the paper's planner.
            Ok(Forecast { rate_kept: 1.0, upper: None, ..slice.scaled_to(Nanos::from_secs_f64(s.max(1e-6))) })
        };
        tasks.map(forecast).collect()
    }
}

/// The raw inputs of the paper's network (its Tables I and II), a row for each task in spec order:
/// VM count, tasks, IOPS, weight, `slice_idle`, `timeout_sync`.
#[must_use]
pub fn features(spec: &Spec, config: &Config) -> Vec<[f64; WIDTH]> {
    let weights: f64 = config.vms.iter().map(|v| f64::from(v.weight)).sum();
    let offered: f64 = spec.tasks().filter_map(|(_, t)| t.rate).map(|r| r.0).sum();
    let mut rows = Vec::new();
    for (vm, c) in spec.vms.iter().zip(&config.vms) {
        let of_vm = vm.declared_rate().0;
        for task in &vm.tasks {
            rows.push([
                spec.vms.len() as f64,
                vm.tasks.len() as f64,
                task.rate.map_or(0.0, |r| r.0),
                of_vm,
                offered,
                f64::from(c.weight) / weights.max(1.0),
                config.bfq.slice_idle.as_millis_f64(),
                config.bfq.timeout_sync.as_millis_f64(),
            ]);
        }
    }
    rows
}

/// Options of networks of the paper's shape.
#[must_use]
pub fn options(epochs: usize, seed: u64, loss: Loss) -> EnsembleOptions {
    EnsembleOptions {
        train: TrainOptions { loss, epochs, weight_decay: 1e-3, seed, ..TrainOptions::default() },
        clamp: true,
        margin: 0.1,
        ..EnsembleOptions::default()
    }
}

/// A task with a rate of a run like the paper's.
pub struct Row {
    /// Index of the run's condition: rows of one are never on both sides of a fold.
    pub condition: usize,
    /// Features of the task.
    pub x: [f64; WIDTH],
    /// Measured tail, s, less the host's own stalls where they are known.
    pub actual: f64,
}

/// Rows of the runs like the paper's.
#[must_use]
pub fn rows(points: &[Point]) -> Vec<Row> {
    let mut out = Vec::new();
    for (condition, members) in conditions(points).into_iter().enumerate() {
        out.extend(members.into_iter().map(|i| (i, condition)));
    }
    out.sort_unstable();
    let of_point = |(i, condition): (usize, usize)| {
        let point = &points[i];
        let (spec, config) = inputs(point);
        let tasks = features(&spec, &config).into_iter().zip(point.tasks());
        let paced = tasks.filter(|(_, (_, stream, outcome))| lost(stream, outcome).is_some());
        let row = |(x, (_, _, outcome)): (_, (_, _, &Outcome))| Row {
            condition,
            x,
            actual: outcome.tail().as_secs_f64().max(1e-6),
        };
        paced.map(row).collect::<Vec<_>>()
    };
    out.into_iter().filter(|(i, _)| paper_domain(&points[*i])).flat_map(of_point).collect()
}

/// Fits the network to rows, as [`Ensemble::fit`]; `None` with too few conditions for the folds.
pub fn fit(rows: &[Row], options: &EnsembleOptions) -> Result<Option<(Ensemble, Vec<f64>)>, EnsembleError> {
    let mut table = Rows::new(WIDTH);
    for row in rows {
        table.push(&row.x, row.actual, 1.0).map_err(MlpError::from)?;
    }
    let groups: Vec<usize> = rows.iter().map(|row| row.condition).collect();
    if groups.iter().collect::<BTreeSet<_>>().len() < FEWEST {
        return Ok(None);
    }
    match Ensemble::fit(&table, &groups, options) {
        Ok(fitted) => Ok(Some(fitted)),
        Err(EnsembleError::Folds { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
