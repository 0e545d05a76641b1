//! A plan that divides the device by io.cost in place of BFQ.
//!
//! Nothing of it is searched: the model comes from the profile, the targets of io.cost from those
//! of the spec, and weights from the device time that the declared rates need. No model of ours
//! covers io.cost, so such a plan predicts nothing, and its targets are not counted as met.

use rtvirtio_model::{Config, Elevator, Profile, declared_shares, io_cost};
use rtvirtio_spec::Spec;
use rtvirtio_units::Enforcement;
use rtvirtio_units::io_cost::{CostModel, CostQos, Hundredths, QosTargets};

use crate::convert::check_actable;
use crate::{Infeasible, IoCostFile, Knob, Plan, PlanError, PlanOptions, Setting};

/// Id of the scheme.
const SCHEME: &str = "io-cost";
/// Lowest and highest rate, in parts of the measured one. A stray latency costs no more than half
/// of the device, and requests of more than half as much again do not queue up in the drive.
const RATES: (Hundredths, Hundredths) = (Hundredths(5_000), Hundredths(15_000));
/// Latency where no task has a target, us: the kernel's own for flash drives. Without a share it
/// only sets the length of io.cost's periods.
const NO_TARGET: u32 = 25_000;
/// Sum of the VMs' weights, as far as none of them is below 1.
const WEIGHTS: f64 = 1_000.0;
/// Share of the device that is left for VMs that declare no rate, at least.
const LEAST_LEFT: f64 = 0.01;

/// Reason why nothing is predicted for a device.
pub(crate) const NO_MODEL: &str = "io.cost divides the device, and no model covers that";

/// Report of a plan whose targets are not known to be met; `None` without any.
pub(crate) fn not_predicted(spec: &Spec, why: &str) -> Option<Infeasible> {
    let has_targets = spec.goals().any(|(_, _, target)| target.is_some());
    has_targets.then(|| Infeasible {
        sacrificed: Vec::new(),
        conflict: Vec::new(),
        relaxation: Vec::new(),
        reason: format!("not predicted: {why}. `rtvirtio verify` measures whether the targets are met"),
    })
}

/// A plan of this scheme for which nothing was searched, and `why` nothing is predicted.
pub(crate) fn unpredicted_plan(
    (scheme, why): (&str, &str),
    spec: &Spec,
    options: &PlanOptions,
    settings: Vec<Setting>,
) -> Result<Plan, PlanError> {
    check_actable(spec, &options.placements, &options.start, &settings)?;
    let infeasible = not_predicted(spec, why);
    Ok(Plan {
        scheme: scheme.to_owned(),
        model: options.model,
        settings,
        tasks: Vec::new(),
        feasible: infeasible.is_none(),
        infeasible,
        evaluated: 0,
    })
}

impl Plan {
    /// Whether a model covers the device under the plan: none does where the plan uses io.cost or
    /// io.latency, or io.cost divides the device already.
    #[must_use]
    pub fn is_predicted(&self) -> bool {
        let is_unmodelled = |s: &Setting| {
            matches!(s.knob, Knob::HostIoCost(_) | Knob::VmIoWeight { .. } | Knob::VmIoLatency { .. })
        };
        !self.settings.iter().any(is_unmodelled) && self.tasks.iter().all(|task| task.not_predicted.is_none())
    }
}

/// Targets for io.cost: of each direction the shortest latency that a task has as its target, with
/// that target's percentile.
///
/// io.cost counts a request from its allocation to its end, less what its size costs
/// (`ioc_rqos_done()`): neither what it held the request back before, nor guest and VMM.
fn io_cost_targets(spec: &Spec) -> QosTargets {
    let of = |writes: bool| {
        let has = |share: f64| if writes { share > 0.0 } else { share < 1.0 };
        let goals = spec.goals().filter(|(_, task, _)| has(task.op.write_share()));
        goals.filter_map(|(_, _, target)| target).min_by_key(|target| target.latency)
    };
    let (read, write) = (of(false), of(true));
    let us = |target: Option<rtvirtio_spec::Target>, other: Option<rtvirtio_spec::Target>| {
        let latency = target.or(other).map(|t| t.latency.0.div_ceil(1_000).max(1));
        latency.map_or(NO_TARGET, |us| u32::try_from(us).unwrap_or(u32::MAX))
    };
    let share = |target: Option<rtvirtio_spec::Target>| {
        // Rounded down to what the kernel keeps: 99.9999 would be 100, which no device meets.
        Hundredths(target.map_or(0, |t| (t.percentile.0 * 100.0 + 1e-6).floor() as u32))
    };
    QosTargets {
        rpct: share(read),
        rlat: us(read, write),
        wpct: share(write),
        wlat: us(write, read),
        min: RATES.0,
        max: RATES.1,
    }
}

/// Weight of each VM for io.cost, in the spec's order: in proportion to the device time that its
/// declared rates take. What these leave is divided equally among the VMs that have a task without
/// a rate.
fn io_cost_weights(spec: &Spec, profile: &Profile, start: &Config) -> Result<Vec<u32>, PlanError> {
    // As measured without BFQ, which does not act next to io.cost.
    let config = Config { elevator: Elevator::None, ..start.clone() };
    let mut shares = declared_shares(profile, spec, &config)?;
    let floods: Vec<bool> = spec.vms.iter().map(|vm| vm.tasks.iter().any(|t| t.rate.is_none())).collect();
    let left = (1.0 - shares.iter().sum::<f64>()).max(LEAST_LEFT);
    let count = floods.iter().filter(|flood| **flood).count().max(1) as f64;
    for (share, _) in shares.iter_mut().zip(&floods).filter(|(_, flood)| **flood) {
        *share += left / count;
    }
    let sum: f64 = shares.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    Ok(shares.iter().map(|share| (share / sum * WEIGHTS).round().max(1.0) as u32).collect())
}

/// A plan for the device by io.cost.
///
/// # Errors
/// [`PlanError::Model`] without a usable measurement; [`PlanError::CannotAct`] where the VMs'
/// cgroups cannot have weights.
pub fn io_cost_plan(spec: &Spec, profile: &Profile, options: &PlanOptions) -> Result<Plan, PlanError> {
    let measured = io_cost(profile)?;
    let mut settings = Vec::new();
    let mut push = |knob, value: String, reason: String| {
        settings.push(Setting { knob, value, reason, strength: Enforcement::Hint });
    };
    if options.start.elevator == Elevator::Bfq {
        let reason = "BFQ divides the device too, and of the two neither share would hold";
        push(Knob::HostElevator, Elevator::None.name().to_owned(), reason.to_owned());
    }
    let mut reason =
        "cost of a request, as measured; sequential ones count as random ones, which alone were measured"
            .to_owned();
    if !measured.has_writes {
        reason.push_str("; writes were not measured and count as reads");
    }
    push(Knob::HostIoCost(IoCostFile::Model), CostModel::User(measured.model).to_string(), reason);
    let qos = CostQos { enable: true, targets: Some(io_cost_targets(spec)) };
    let reason = "the shortest targets of the spec, as latencies of the device; its rate stays between half and one and a half of \
                  the measured one";
    push(Knob::HostIoCost(IoCostFile::Qos), qos.to_string(), reason.to_owned());
    if spec.vms.len() > 1 {
        for (vm, weight) in spec.vms.iter().zip(io_cost_weights(spec, profile, &options.start)?) {
            let reason =
                format!("the part of the device that the rates of {} take, while VMs compete", vm.name);
            push(Knob::VmIoWeight { vm: vm.name.clone() }, weight.to_string(), reason);
        }
    }
    unpredicted_plan((SCHEME, NO_MODEL), spec, options, settings)
}

#[cfg(test)]
mod tests;
