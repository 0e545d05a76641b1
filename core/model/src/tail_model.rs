//! The interface of all models, and their common checks.

use rtvirtio_spec::{Spec, Task};
use rtvirtio_units::Percentile;

use crate::types::{Config, Forecast, Profile};

/// Errors of a prediction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The model has no formula for this configuration; another model may have one.
    #[error("the {model} model has no formula for {what}: {remedy}")]
    NotCovered {
        /// Name of the model.
        model: &'static str,
        /// Configuration or load that the model does not cover.
        what: String,
        /// Alternative for the user.
        remedy: &'static str,
    },
    /// The profile lacks a measurement that every prediction needs, or has an impossible one.
    #[error("profile of {device}: {what}; measure again with `rtvirtio profile`")]
    BadProfile {
        /// Device name of the profile.
        device: String,
        /// Fault of the profile.
        what: String,
    },
    /// A task syncs its writes, and the cost of a flush on this device was not measured.
    #[error(
        "{task} syncs its writes, and the profile of {device} has no syncs, so nothing is known of what a flush costs there: measure a device of the same kind without \
         data (`rtvirtio profile DEVICE --destroy-data -o FILE`) and give --profile FILE; `rtvirtio verify` measures the task itself without one"
    )]
    NoSyncs {
        /// Name of the task, `vm/task`.
        task: String,
        /// Device name of the profile.
        device: String,
    },
    /// The configuration does not fit the spec.
    #[error("configuration: {0}")]
    BadConfig(String),
    /// A learned model was asked for and none is there.
    #[error("no model was learned for this device yet: run `rtvirtio profile DEVICE --sweep 20m` first")]
    NotLearned,
}

/// A model of tail latency.
pub trait TailModel {
    /// Forecasts for each task at the percentile of its first target, in spec order.
    fn forecast_tasks(
        &self,
        profile: &Profile,
        spec: &Spec,
        config: &Config,
    ) -> Result<Vec<Forecast>, ModelError>;

    /// Forecasts for each target, and each task without one, in the order of [`Spec::goals`].
    ///
    /// # Errors
    /// [`ModelError::NotCovered`] where the model has no formula, [`ModelError::BadProfile`] and
    /// [`ModelError::BadConfig`] for contradictory inputs.
    fn forecast(&self, profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<Forecast>, ModelError> {
        let rest = further_targets(spec);
        let first = self.forecast_tasks(profile, spec, config)?;
        if rest.is_empty() {
            return Ok(first);
        }
        let mut layers = vec![first];
        for spec in &rest {
            layers.push(self.forecast_tasks(profile, spec, config)?);
        }
        Ok(by_goal(spec, layers))
    }
}

/// The spec with the second, third, ... target of each task alone; a task with fewer keeps its last
/// one. A model predicts one target of each task at a time, because targets do not change the load.
pub(crate) fn further_targets(spec: &Spec) -> Vec<Spec> {
    let most = spec.tasks().map(|(_, t)| t.targets.len()).max().unwrap_or(0);
    let only = |k: usize| {
        let mut spec = spec.clone();
        for task in spec.vms.iter_mut().flat_map(|vm| &mut vm.tasks) {
            task.targets = task.targets.get(k).or(task.targets.last()).copied().into_iter().collect();
        }
        spec
    };
    (1..most).map(only).collect()
}

/// Orders the answers of all layers (see [`further_targets`]) like [`Spec::goals`].
pub(crate) fn by_goal<T>(spec: &Spec, layers: Vec<Vec<T>>) -> Vec<T> {
    let mut layers: Vec<_> = layers.into_iter().map(Vec::into_iter).collect();
    let mut out = Vec::new();
    for (_, task) in spec.tasks() {
        let goals = task.targets.len().max(1);
        for (k, layer) in layers.iter_mut().enumerate() {
            // Every layer has an answer for every task, of which that of the last target may be a
            // copy.
            let answer = layer.next();
            out.extend(answer.filter(|_| k < goals));
        }
    }
    out
}

/// The percentile a task is forecast at: its first target's, or p99.99 without a target.
#[must_use]
pub fn percentile_of(task: &Task) -> Percentile {
    task.tightest_target().map_or(Percentile::P9999, |t| t.percentile)
}

/// Refuses a sync without a measurement: a flush takes from nothing on a drive whose cache is safe
/// to tens of milliseconds.
pub(crate) fn check_syncs(profile: &Profile, spec: &Spec) -> Result<(), ModelError> {
    match spec.tasks().find(|(_, task)| task.sync.is_some()) {
        Some((vm, task)) if profile.sync.is_empty() => Err(ModelError::NoSyncs {
            task: format!("{}/{}", vm.name, task.name),
            device: profile.device.clone(),
        }),
        _ => Ok(()),
    }
}

/// Refuses requests that come at once, for a model that takes them to come evenly.
pub(crate) fn check_bursts(model: &'static str, spec: &Spec) -> Result<(), ModelError> {
    match spec.tasks().find(|(_, task)| task.at_once() > 1) {
        Some((vm, task)) => Err(ModelError::NotCovered {
            model,
            what: format!("requests of {}/{} that come {} at once", vm.name, task.name, task.at_once()),
            remedy: "use the slice model",
        }),
        None => Ok(()),
    }
}

/// Checks the preconditions of all models.
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

#[cfg(test)]
mod tests {
    use rtvirtio_spec::{LabKind, Target};
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::slice::{Slice, SliceSearch};
    use crate::testkit::{config, flood, quick, spec, task, twin};
    use crate::types::{Bfq, Elevator};

    #[test]
    fn each_target_has_the_forecast_that_it_has_alone() {
        let target = |p: f64| Target { percentile: Percentile(p), latency: Nanos::from_millis(10) };
        let with = |targets: &[f64]| {
            let mut first = task("first", 200.0, 1);
            first.targets = targets.iter().map(|p| target(*p)).collect();
            let mut last = task("last", 100.0, 1);
            last.targets = vec![target(99.9)];
            spec(LabKind::Process, &[vec![first, flood(8)], vec![last]])
        };
        let several = with(&[50.0, 99.0, 99.99]);
        for config in
            [config(&several, Elevator::Bfq, Bfq::default()), config(&several, Elevator::Bfq, quick())]
        {
            let of = |spec: &Spec| Slice.forecast(&twin(), spec, &config).unwrap();
            let found = of(&several);
            // Three forecasts of the first task, one of the flood, one of the last.
            assert_eq!(found.len(), several.goals().count());
            for (k, p) in [50.0, 99.0, 99.99].into_iter().enumerate() {
                let alone = of(&with(&[p]));
                assert_eq!(found[k], alone[0], "p{p}");
                assert_eq!(found[3..], alone[1..], "p{p}");
            }
            assert!(found.windows(2).take(2).all(|w| w[0].latency_ns <= w[1].latency_ns));
            // A search has the same forecasts.
            let profile = twin();
            let briefs = SliceSearch::new(&profile, &several).unwrap().briefs(&config).unwrap();
            let pairs = briefs.iter().zip(&found);
            assert!(pairs.clone().all(|(b, f)| b.latency_ns == f.latency_ns && b.rate_kept == f.rate_kept));
            assert_eq!(pairs.len(), found.len());
        }
    }
}
