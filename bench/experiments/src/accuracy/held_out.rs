//! Tasks that a model was not fitted on, each with the forecasts of every predictor.

use std::sync::Arc;

use rtvirtio_learn::condition::{inputs, lost};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::train::TrainError;
use rtvirtio_model::learned::{Regime, writes};
use rtvirtio_model::{Analytical, Elevator, Learned, Profile, TailModel, UpperBasis};
use serde::Serialize;

use super::judge::Models;

/// A held-out task with its forecasts.
#[derive(Clone, Debug, Serialize)]
pub struct HeldOut {
    /// Name of the run.
    pub id: String,
    /// Index of the task in the run.
    pub task: usize,
    /// VMs with paced tasks.
    pub vms: usize,
    /// Name of the run's regime.
    pub regime: &'static str,
    /// Elevator of the host's disk.
    pub elevator: Elevator,
    /// Whether the task or one alongside it writes.
    pub writes: bool,
    /// Utilisation by declared rates, 0 to 1.
    pub load: f64,
    /// Measured tail, ms, without the host's own stalls where they are known: the models' target.
    pub actual_ms: f64,
    /// Measured tail with the host's stalls, ms.
    pub with_host_ms: f64,
    /// Expected tail by the learned model, ms.
    pub expected_ms: f64,
    /// Upper bound by the learned model, ms.
    pub upper_ms: f64,
    /// Upper bound with the host's own stalls, ms; `None` where they are not known.
    pub upper_with_host_ms: Option<f64>,
    /// Whether the bound is extrapolated: the run lies outside of the learned range.
    pub extrapolated: bool,
    /// Tail by the slice model, ms.
    pub slice_ms: f64,
    /// Tail by the paper's equations with its Table III, ms; `None` for elevators that they do not
    /// cover.
    pub analytical_ms: Option<f64>,
    /// Tail by the paper's equations with coefficients fitted on this host, ms.
    pub fitted_ms: Option<f64>,
    /// Tail by the paper's network, ms.
    pub mlp_ms: Option<f64>,
    /// Longest stall of the host itself during the run, ms.
    pub host_stall_ms: f64,
    /// Share of the declared rate that was kept, 0 to 1.
    pub kept: f64,
    /// Kept share of the rate as expected by the learned model, 0 to 1.
    pub expected_kept: f64,
}

impl HeldOut {
    /// Whether a task ran where BFQ does not idle.
    #[must_use]
    pub fn is_non_idling(&self) -> bool {
        Regime::ALL.into_iter().any(|r| r.is_non_idling() && r.name() == self.regime)
    }

    /// Ratio of bound to measured tail; 1 or more where the bound holds.
    #[must_use]
    pub fn bound_over_tail(&self) -> f64 {
        self.upper_ms / self.actual_ms.max(1e-6)
    }
}

/// Forecasts for the tasks with a rate of points that the model was not fitted on.
///
/// # Errors
/// [`TrainError::Point`] for a run that no model covers.
pub fn predict_held_out(
    models: &Models,
    test: &[Point],
    profile: &Profile,
) -> Result<Vec<HeldOut>, TrainError> {
    let fitted = models.paper.fitted_coefficients();
    let fitted = fitted.map(|coefficients| Analytical { coefficients, ..Analytical::default() });
    let stalls_known = models.host.host_stalls.is_some();
    let (ours, network) = (Learned::bound(Arc::clone(&models.host)), models.paper.network());
    let mut held = Vec::new();
    for point in test {
        let (spec, config) = inputs(point);
        let bad = |source| TrainError::Point { id: point.id.clone(), source };
        let learned = ours.forecast(profile, &spec, &config).map_err(bad)?;
        let slice = rtvirtio_model::Slice.forecast(profile, &spec, &config).map_err(bad)?;
        let equations = Analytical::default().forecast(profile, &spec, &config).ok();
        let calibrated = fitted.as_ref().and_then(|m| m.forecast(profile, &spec, &config).ok());
        let mlp = network.as_ref().and_then(|m| m.forecast(profile, &spec, &config).ok());
        let (x, _) =
            rtvirtio_model::learned::features(profile, &spec, &config, point.seconds).map_err(bad)?;
        let load_at = rtvirtio_model::learned::NAMES.iter().position(|n| *n == "load").unwrap_or(0);
        for (i, (_, stream, outcome)) in point.tasks().enumerate() {
            let Some(lost) = lost(stream, outcome) else { continue };
            held.push(HeldOut {
                id: point.id.clone(),
                task: i,
                vms: point.vms.iter().filter(|vm| vm.iter().any(|s| s.rate.is_some())).count(),
                regime: Regime::from_config(&spec, &config).name(),
                elevator: config.elevator,
                writes: writes(&spec),
                load: x[i][load_at],
                actual_ms: outcome.tail().as_millis_f64(),
                with_host_ms: outcome.p9999.as_millis_f64(),
                expected_ms: learned[i].latency_ns.as_millis_f64(),
                upper_ms: learned[i].judged().as_millis_f64(),
                upper_with_host_ms: stalls_known.then(|| learned[i].promised().as_millis_f64()),
                extrapolated: learned[i].upper.as_ref().is_some_and(|u| u.basis == UpperBasis::Extrapolated),
                slice_ms: slice[i].latency_ns.as_millis_f64(),
                analytical_ms: equations.as_ref().map(|f| f[i].latency_ns.as_millis_f64()),
                fitted_ms: calibrated.as_ref().map(|f| f[i].latency_ns.as_millis_f64()),
                mlp_ms: mlp.as_ref().map(|f| f[i].latency_ns.as_millis_f64()),
                host_stall_ms: point.noise.max_ns.as_millis_f64(),
                kept: 1.0 - lost,
                expected_kept: learned[i].rate_kept,
            });
        }
    }
    Ok(held)
}
