//! Computation of a plan from a spec and a profile.

use rtvirtio_model::Profile;
use rtvirtio_spec::Spec;
use rtvirtio_units::Percentile;

use crate::convert::{check_actable, settings_of};
use crate::cpu_room::{CpuRoom, is_counted};
use crate::evaluate::{Evaluator, Problem};
use crate::throttled::throttled;
use crate::types::{Knob, Plan, Setting, TaskOutlook};
use crate::{Placements, PlanError, PlanOptions, explain, infeasible, io_cost, search};

/// Finds settings for `spec` on the host that `profile` describes, starting from the configuration
/// in force.
///
/// The same input always gives the same plan. The model decides the search and the scheme, see
/// [`scheme_of`](crate::scheme_of). Without any target the plan is empty.
///
/// # Errors
/// [`PlanError::Model`] when the model refuses the profile or the start configuration, or covers
/// nothing in the space.
pub fn plan(spec: &Spec, profile: &Profile, options: &PlanOptions) -> Result<Plan, PlanError> {
    options.check()?;
    let problem = Problem::new(spec, options);
    let mut evaluator = Evaluator::new(profile, spec, options)?;
    let found = search::search(&problem, &mut evaluator)?;
    let infeasible = if options.placements.is_under_io_cost() {
        io_cost::not_predicted(spec, io_cost::NO_MODEL)
    } else if found.missed == 0 {
        None
    } else {
        Some(infeasible::describe(&problem, &mut evaluator, &found)?)
    };
    let mut settings = settings_of(spec, &options.start, &found.config);
    explain::explain(&problem, &mut evaluator, &found, &mut settings);
    for held in throttled(spec, profile, &options.start, &settings)? {
        let of_vm = |s: &&mut Setting| matches!(&s.knob, Knob::VmLimit { vm, .. } if *vm == held.vm);
        if let Some(setting) = settings.iter_mut().find(of_vm) {
            setting.reason.push_str(&format!("; {held}"));
        }
    }
    check_actable(spec, &options.placements, &options.start, &settings)?;
    let forecasts = evaluator.forecast(&found.config)?;
    let mut tasks = outlook(spec, forecasts);
    mark_not_predicted(&mut tasks, &options.placements);
    Ok(Plan {
        scheme: crate::scheme_of(options.model).to_owned(),
        model: options.model,
        settings,
        tasks,
        feasible: infeasible.is_none(),
        infeasible,
        evaluated: evaluator.evaluated(),
    })
}

/// Rank of a configuration by the planner's criteria.
#[derive(Clone, Debug, PartialEq)]
pub struct Quality {
    /// Targets missed per VM, most urgent VM first.
    pub missed: Vec<u32>,
    /// Smallest remaining share of a target; negative when one is missed.
    pub margin: f64,
}

/// Judges a configuration as [`plan`] does.
pub fn quality(
    spec: &Spec,
    profile: &Profile,
    options: &PlanOptions,
    config: &rtvirtio_model::Config,
) -> Result<Quality, PlanError> {
    let problem = Problem::new(spec, options);
    let mut evaluator = Evaluator::new(profile, spec, options)?;
    match evaluator.outcome(&problem, config.clone()) {
        Some(o) => Ok(Quality { missed: o.missed_by_urgency, margin: o.margin }),
        None => Err(evaluator.forecast(config).err().map_or_else(
            || PlanError::BadOptions("the budget allows no evaluation".to_owned()),
            PlanError::Model,
        )),
    }
}

/// The forecasts with the targets, in the order of [`Spec::goals`].
#[must_use]
pub fn outlook(spec: &Spec, forecasts: Vec<rtvirtio_model::Forecast>) -> Vec<TaskOutlook> {
    spec.goals()
        .zip(forecasts)
        .map(|((vm, task, target), forecast)| {
            let target_ns = target.map(|t| t.latency);
            let signed = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
            TaskOutlook {
                vm: vm.name.clone(),
                task: task.name.clone(),
                percentile: target.map_or(Percentile::P9999, |t| t.percentile),
                target_ns,
                margin_ns: target_ns.map(|t| signed(t.0) - signed(forecast.judged().0)),
                forecast,
                cpu: None,
                cpu_wait: None,
                cpu_unknown: None,
                not_predicted: None,
            }
        })
        .collect()
}

/// Says of tasks on a device that io.cost divides that nothing is predicted for them.
pub fn mark_not_predicted(tasks: &mut [TaskOutlook], placements: &Placements) {
    if placements.is_under_io_cost() {
        tasks.iter_mut().for_each(|task| task.not_predicted = Some(io_cost::NO_MODEL.to_owned()));
    }
}

/// Adds the CPU time of guests to their tasks: those of the VMs whose names are of these.
pub fn add_cpu_room(tasks: &mut [TaskOutlook], spec: &Spec, room: &CpuRoom, is_of: &dyn Fn(&str) -> bool) {
    let is_counted = |name: &str| spec.vms.iter().any(|vm| vm.name == name && is_counted(vm));
    let of_guests = tasks.iter_mut().filter(|task| is_counted(&task.vm) && is_of(&task.vm));
    of_guests.for_each(|task| task.cpu = Some(*room));
}

/// Says of tasks whose requests compete for CPUs that it is not known whether these suffice.
pub fn add_cpu_unknown(tasks: &mut [TaskOutlook], spec: &Spec, why: &str) {
    let is_counted = |name: &str| spec.vms.iter().any(|vm| vm.name == name && is_counted(vm));
    let of_guests = tasks.iter_mut().filter(|task| is_counted(&task.vm));
    of_guests.for_each(|task| task.cpu_unknown = Some(why.to_owned()));
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Forecast;
    use rtvirtio_spec::{CpuNeed, LabKind};
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::tests::{self as fixtures, task};

    #[test]
    fn tasks_of_vms_that_compete_are_marked() {
        let tasks = || vec![task("control", 600.0, Some(20))];
        let mut spec = fixtures::spec(LabKind::Qemu, &[tasks(), tasks()]);
        spec.vms[1].cpu.need =
            Some(CpuNeed::Contract { budget: Nanos::from_millis(10), period: Nanos::from_millis(20) });
        let forecast = || Forecast { latency_ns: Nanos(1), rate_kept: 1.0, terms: Vec::new(), upper: None };
        let mut tasks = outlook(&spec, vec![forecast(), forecast()]);
        let room =
            CpuRoom { cpus: 2, needed: 0.3, free: 0.2, rate: 600.0, each_ns: Nanos(500_000), margin: 1.2 };
        add_cpu_room(&mut tasks, &spec, &room, &|_| true);
        assert_eq!(tasks.iter().map(TaskOutlook::lacks_cpu).collect::<Vec<_>>(), [true, false]);
        add_cpu_room(&mut tasks, &spec, &CpuRoom { free: 1.0, ..room }, &|_| true);
        assert!(tasks.iter().all(TaskOutlook::holds));
        add_cpu_unknown(&mut tasks, &spec, "they may use different CPUs");
        assert_eq!(tasks.iter().map(TaskOutlook::holds).collect::<Vec<_>>(), [false, true]);
    }
}
