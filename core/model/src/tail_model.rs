//! What every model answers, and what all take for granted.

use rtvirtio_spec::{Spec, Task};
use rtvirtio_units::Percentile;

use crate::types::{Config, Forecast, ModelKind, Profile};

/// Why a model cannot predict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The model has no formula for this configuration; another model may have one.
    #[error("the {model} model has no formula for {what}: {remedy}")]
    NotCovered {
        /// Name of the model.
        model: &'static str,
        /// What it does not cover.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The profile lacks a measurement that every prediction needs, or holds one that cannot be.
    #[error("profile of {device}: {what}; measure again with `rtvirtio profile`")]
    BadProfile {
        /// Device name of the profile.
        device: String,
        /// What is missing or wrong.
        what: String,
    },
    /// The configuration does not fit the spec.
    #[error("configuration: {0}")]
    BadConfig(String),
    /// A learned model was asked for and none is there.
    #[error("no model was learned for this device yet: run `rtvirtio profile DEVICE --sweep 20m` first")]
    NotLearned,
    /// The learned model has no network of the paper's form.
    #[error(
        "the learned model has too few runs of the kind that the RT-VirtIO paper measured for its network: `rtvirtio-lab bench sweep --paper N` measures them"
    )]
    NoNetwork,
}

/// A model of tail latency.
pub trait TailModel {
    /// Which model this is.
    fn kind(&self) -> ModelKind;

    /// One forecast per task, in spec order.
    ///
    /// # Errors
    /// [`ModelError::NotCovered`] where the model has no formula, [`ModelError::BadProfile`] and
    /// [`ModelError::BadConfig`] for inputs that contradict themselves.
    fn forecast(&self, profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<Forecast>, ModelError>;
}

/// The percentile a task is judged at: its target's, or p99.99 without a target.
#[must_use]
pub fn percentile_of(task: &Task) -> Percentile {
    task.target.map_or(Percentile::P9999, |t| t.percentile)
}

/// Checks what both models take for granted.
pub(crate) fn check_config(spec: &Spec, config: &Config) -> Result<(), ModelError> {
    if config.vms.len() != spec.vms.len() {
        return Err(ModelError::BadConfig(format!(
            "it has {} VMs but the spec has {}; list one entry per VM in spec order",
            config.vms.len(),
            spec.vms.len()
        )));
    }
    for (vm, c) in spec.vms.iter().zip(&config.vms) {
        if !(1..=1000).contains(&c.weight) {
            return Err(ModelError::BadConfig(format!(
                "BFQ weight {} of VM {} is outside 1 to 1000; choose one inside",
                c.weight, vm.name
            )));
        }
        if c.cap.is_some_and(|cap| !cap.0.is_finite() || cap.0 < 1.0) {
            return Err(ModelError::BadConfig(format!(
                "the cap of VM {} is below one request per second; raise it or remove it",
                vm.name
            )));
        }
    }
    Ok(())
}
