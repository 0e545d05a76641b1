//! A model of one device on one host, learned from measured runs.
//!
//! A quantile regression forest maps the features of a task to the most similar measured tasks;
//! their tails give the median and a high quantile, their losses the share of the rate that is
//! kept. The upper bound is the high quantile plus a score calibrated on the trees that did not see
//! a run (conformalised quantile regression: Romano, Patterson and Candes, NeurIPS 2019; out of
//! bag: Johansson and others, Machine Learning 97, 2014). Fitting and measured coverage:
//! `docs/explanation/models.md`.

use std::borrow::Cow;
use std::sync::Arc;

use rtvirtio_spec::{Arrival, Pattern, Spec, Task, Vm};
use rtvirtio_stats::forest::{ForestError, Scratch};
use rtvirtio_units::{Nanos, Percentile, Ratio};

use super::estimate::{Estimate, estimate, outside};
use super::features::{WIDTH, features};
use super::guests::{self, GuestModel};
use super::non_idling::NonIdlingModel;
use super::regime::Regime;
use super::schema::HostModel;
use crate::device::{MIN_SLACK, declared_shares, service};
use crate::load::is_guest;
use crate::tail_model::check_bursts;
use crate::types::{Config, Forecast, Profile, Upper, UpperBasis, VmConfig};
use crate::{ModelError, TailModel};

/// Factor that widens a bound outside the measured range. Not proven; every report of the bound
/// says so.
const EXTRAPOLATED: f64 = 2.0;

impl HostModel {
    /// Estimate of one row from runs of process VMs.
    fn estimate(
        &self,
        row: &[f64; WIDTH],
        regime: Regime,
        scratch: &mut Scratch,
    ) -> Result<Estimate, ModelError> {
        match self.non_idling_in(regime) {
            Some(non_idling) => non_idling.estimate(row, scratch),
            None => estimate(&self.forest, self.high, row, scratch),
        }
        .map_err(|e| self.unusable(&e))
    }

    /// Spread of the predictions of a regime's trees for one row.
    pub fn spread(&self, row: &[f64; WIDTH], regime: Regime) -> Result<f64, ForestError> {
        self.non_idling_in(regime).map_or(&self.forest, |f| &f.forest).spread(row)
    }

    /// Separate forest of a non-idling regime; `None` where the main forest applies.
    fn non_idling_in(&self, regime: Regime) -> Option<&NonIdlingModel> {
        self.non_idling.as_ref().filter(|_| regime.is_non_idling())
    }

    fn unusable(&self, e: &dyn std::fmt::Display) -> ModelError {
        ModelError::BadProfile {
            device: self.profile.device.clone(),
            what: format!("its learned model fails: {e}"),
        }
    }

    /// Upper bound of a row from runs of process VMs.
    fn upper(
        &self,
        row: &[f64; WIDTH],
        of: &Load,
        estimate: &Estimate,
        unlike: Option<&'static str>,
    ) -> Upper {
        let non_idling = self.non_idling_in(of.regime);
        let (forest, bound, host) = non_idling
            .map_or((&self.forest, &self.bound, self.host_stalls), |f| (&f.forest, &f.bound, f.host_stalls));
        let outside = outside(forest, row, unlike);
        let widen = if outside.is_empty() { 1.0 } else { EXTRAPOLATED };
        let upper = estimate.upper(bound.score, of.stall) * widen;
        let basis = match &self.non_idling {
            _ if !outside.is_empty() => UpperBasis::Extrapolated,
            Some(_) => UpperBasis::Regime,
            None => UpperBasis::Pooled,
        };
        Upper {
            latency_ns: Nanos::from_secs_f64(upper),
            confidence: Ratio(self.confidence()),
            basis,
            host_ns: host.unwrap_or(Nanos(0)),
            outside,
            run_s: self.seconds,
        }
    }

    /// Estimate and bound of a task in a guest. Outside the measured range of guests, the worse of
    /// this and of the prediction for process VMs, which were measured with more VMs and more load;
    /// the bound of guests is widened there, as that of processes is.
    fn in_guest(
        &self,
        guests: &GuestModel,
        row: &[f64; WIDTH],
        of: &Load,
        unlike: Option<&'static str>,
        scratch: &mut Scratch,
    ) -> Result<(Estimate, Upper), ModelError> {
        let mut estimate = guests.estimate(row, scratch).map_err(|e| self.unusable(&e))?;
        let mut upper = Upper {
            latency_ns: Nanos::from_secs_f64(guests.upper(&estimate, of.stall)),
            confidence: Ratio(guests.confidence()),
            basis: UpperBasis::Guests,
            host_ns: Nanos(0),
            outside: outside(&guests.forest, row, unlike),
            run_s: self.seconds,
        };
        if !upper.outside.is_empty() {
            let process = self.estimate(row, of.regime, scratch)?;
            let of_process = self.upper(row, of, &process, unlike);
            let widened = Nanos((upper.latency_ns.0 as f64 * EXTRAPOLATED) as u64);
            // Bounds of guests include the host's own stalls.
            let as_measured = Nanos(of_process.latency_ns.0.saturating_add(of_process.host_ns.0));
            upper.latency_ns = widened.max(as_measured);
            upper.basis = UpperBasis::Extrapolated;
            estimate.middle = estimate.middle.max(process.middle);
            estimate.lost = estimate.lost.max(process.lost);
        }
        Ok((estimate, upper))
    }
}

/// Inputs that all bounds under one spec and configuration have in common.
struct Load {
    regime: Regime,
    /// Longest delay by a stall of the drive; 0 where nothing writes.
    stall: Nanos,
}

/// Longest delay of a request by a write stall, during the stall or in the backlog after it: no
/// longer than the busy period that the stall begins, `stall / (1 - load)`, whatever the order of
/// service, as long as the device does not idle (fluid limit of the busy period: Kleinrock,
/// Queueing Systems I, 1975, chapter 5).
fn held_up(profile: &Profile, spec: &Spec, config: &Config) -> Result<Nanos, ModelError> {
    let load: f64 = declared_shares(profile, spec, config)?.iter().sum();
    let stall = service(profile)?.write_stall.as_secs_f64();
    Ok(Nanos::from_secs_f64(stall / (1.0 - load).max(MIN_SLACK)))
}

/// Whether any task of a spec writes.
#[must_use]
pub fn writes(spec: &Spec) -> bool {
    spec.tasks().any(|(_, task)| task.op.write_share() > 0.0)
}

/// [`TailModel`] of a [`HostModel`]: the expected tail with its upper bound.
#[derive(Clone, Debug)]
pub struct Learned {
    model: Arc<HostModel>,
}

impl Learned {
    /// The expected tail and its upper bound, by the forests.
    #[must_use]
    pub fn bound(model: Arc<HostModel>) -> Self {
        Self { model }
    }
}

impl TailModel for Learned {
    /// Forecasts by the profile that the model was learned with. Of `given` only the guest's part
    /// counts, unless runs in such guests were learned from.
    fn forecast_tasks(
        &self,
        given: &Profile,
        spec: &Spec,
        config: &Config,
    ) -> Result<Vec<Forecast>, ModelError> {
        check_bursts("learned", spec)?;
        let model = &self.model;
        let guests = model.guests.as_ref().filter(|g| spec.vms.iter().any(is_guest) && g.is_of(given));
        let guest = guests.map_or_else(|| given.guest.clone(), |g| Some(g.guest.clone()));
        let profile = if guest == model.profile.guest {
            Cow::Borrowed(&model.profile)
        } else {
            Cow::Owned(Profile { guest, ..model.profile.clone() })
        };
        let (rows, slice) = features(&profile, spec, config, model.seconds)?;
        let stall = if writes(spec) { held_up(&model.profile, spec, config)? } else { Nanos(0) };
        let of = Load { regime: Regime::from_config(spec, config), stall };
        let mut scratch = Scratch::default();
        let vms =
            spec.vms.iter().zip(&config.vms).flat_map(|(vm, set)| vm.tasks.iter().map(move |t| (vm, set, t)));
        rows.iter()
            .zip(slice)
            .zip(vms)
            .map(|((row, slice), (vm, set, task))| {
                let in_guest = || guests.and_then(|_| guests::unlike_measured(vm, set, given));
                let unlike = if held_below_its_rates(vm, set) {
                    Some("limit below the declared rates")
                } else {
                    unlike_measured(task).or_else(in_guest)
                };
                let (estimate, upper) = match guests.filter(|_| is_guest(vm)) {
                    Some(guests) => model.in_guest(guests, row, &of, unlike, &mut scratch)?,
                    None => {
                        let estimate = model.estimate(row, of.regime, &mut scratch)?;
                        let upper = model.upper(row, &of, &estimate, unlike);
                        (estimate, upper)
                    }
                };
                let kept = kept(&estimate, &upper, held_below_its_rates(vm, set).then_some(slice.rate_kept));
                let expected = Nanos::from_secs_f64(estimate.middle.exp());
                Ok(Forecast { rate_kept: kept, upper: Some(upper), ..slice.scaled_to(expected) })
            })
            .collect()
    }
}

/// Share of the declared rate that is kept, 0 to 1: the expected share, or that which the bound
/// implies where it is larger. A request's latency counts from its due time, so a task that loses a
/// share of its rate through a run is late by that share of the run at its end: a tail of p99.99
/// below the bound leaves no room for a larger loss, but in a run that ends within a wait. Outside
/// the measured range a bound implies nothing. `capped` is the share under a limit below the VM's
/// rates, which no run was measured with.
fn kept(estimate: &Estimate, upper: &Upper, capped: Option<f64>) -> f64 {
    let latest = upper.latency_ns.as_secs_f64() + upper.host_ns.as_secs_f64();
    let room = if upper.outside.is_empty() { latest / upper.run_s } else { 1.0 };
    (1.0 - estimate.lost.clamp(0.0, 1.0).min(room)).min(capped.unwrap_or(1.0))
}

/// Whether a VM's cap is below its declared rates, as for a VM that a plan gives up: no sweep
/// limits a VM with rates so far.
fn held_below_its_rates(vm: &Vm, set: &VmConfig) -> bool {
    set.cap.is_some_and(|cap| cap.0 < vm.declared_rate().0)
}

/// Property of a task that no measured run had and no feature shows: sweeps run synchronous random
/// tasks and learn p99.99.
fn unlike_measured(task: &Task) -> Option<&'static str> {
    if crate::percentile_of(task) != Percentile::P9999 {
        Some("percentile")
    } else if task.sync.is_some() {
        Some("sync")
    } else if !task.mix.is_empty() {
        Some("mix of sizes")
    } else if task.rate.is_some() && (task.depth != 1 || task.arrival == Arrival::Open) {
        Some("depth")
    } else if task.rate.is_some() && task.pattern == Pattern::Sequential {
        Some("pattern")
    } else {
        None
    }
}
