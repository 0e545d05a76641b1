//! Steps to be carried out: a pure function of contracts, host, configuration and memory.

use rtvirtio_kernel::ProcessId;

use crate::config::{Config, DriftPolicy, Mode};
use crate::desired::{Contract, Desired};
use crate::host::Millis;
use crate::memory::Memory;
use crate::observed::{Drift, Observed, ObservedVm, Presence, ScopeState, ScopeView};
use crate::step::{Action, Step};

/// The steps that lead from the host as observed to the contracts. What is put back comes first, so
/// that there is room; then what keeps contracts in force, then new ones, of each the most critical
/// VM first. Steps that failed a short time ago are left out.
#[must_use]
pub fn reconcile(
    desired: &Desired,
    observed: &Observed,
    config: &Config,
    memory: &Memory,
    now: Millis,
) -> Vec<Step> {
    let in_force = |vm: &str| observed.vms.get(vm).is_some_and(|v| v.scope.is_some());
    let mut steps = Vec::new();
    for (name, vm) in &observed.vms {
        if desired.contract_of(name).is_none() && !desired.holds(name) && vm.scope.is_some() {
            let force = vm.scope.as_ref().is_some_and(|scope| config.puts_back_over(&scope.drift));
            steps.push(step(name, Action::PutBack { force }, "its contract was removed"));
        }
    }
    for contract in desired.by_criticality(in_force) {
        let name = &contract.vm.name;
        let Some(vm) = observed.vms.get(name) else { continue };
        steps.extend(match &vm.scope {
            Some(scope) => kept(contract, vm, scope, observed, config, memory, now),
            None => new(contract, vm, observed, config, memory),
        });
    }
    for (name, vm) in &observed.vms {
        if vm.lacks_plan && matches!(vm.presence, Presence::Running(_)) {
            steps.push(step(name, Action::Renew, "the VM was restarted, and a plan is in force"));
        }
    }
    steps.extend(drift(APPLIED, &observed.applied_drift, config, memory, now));
    steps.retain(|step| !memory.waits(step, now));
    // Steps for settings in force come before new contracts, of which there may be many.
    steps.sort_by_key(|step| match step.action {
        Action::PutBack { .. } => 0,
        Action::Apply => 2,
        _ => 1,
    });
    if config.mode == Mode::Observe { Vec::new() } else { steps }
}

/// Stands for the name of a VM in steps about what `rtvirtio apply` has put in force: no VM has it.
pub const APPLIED: &str = "(applied plan)";

/// Stands for the name of a VM in steps about the service's plan: no VM has it.
pub const PLAN: &str = "(plan)";

pub(crate) fn step(vm: &str, action: Action, reason: impl Into<String>) -> Step {
    Step { vm: vm.to_owned(), action, reason: reason.into() }
}

/// A VM for which nothing is in force.
fn new(
    contract: &Contract,
    vm: &ObservedVm,
    observed: &Observed,
    config: &Config,
    memory: &Memory,
) -> Option<Step> {
    let name = &contract.vm.name;
    let Presence::Running(_) = &vm.presence else { return None };
    let ready = contract.sets_something()
        && !vm.applied_by_hand
        && observed.admission.takes(name)
        && (config.mode != Mode::Ask || memory.is_accepted(name, &contract.id));
    ready.then(|| step(name, Action::Apply, format!("the contract in {}", contract.origin)))
}

/// A VM for which something is in force.
fn kept(
    contract: &Contract,
    vm: &ObservedVm,
    scope: &ScopeView,
    observed: &Observed,
    config: &Config,
    memory: &Memory,
    now: Millis,
) -> Option<Step> {
    let name = &contract.vm.name;
    let force = config.puts_back_over(&scope.drift);
    let put_back = |why: String| Some(step(name, Action::PutBack { force }, why));
    match &scope.state {
        ScopeState::Whole => {}
        ScopeState::Cut => return put_back("it was interrupted".to_owned()),
        ScopeState::Rebooted => return put_back("the host was restarted since".to_owned()),
        // Nothing is written where it is not known what was there before.
        ScopeState::Unusable(_) => return None,
    }
    match &vm.presence {
        Presence::Running(start) if !same_start(start, &scope.start) => {
            return put_back("the VM was restarted".to_owned());
        }
        Presence::Off(_) | Presence::Unknown(_) if !scope.start_alive => {
            return put_back("the VM has ended".to_owned());
        }
        Presence::Running(_) | Presence::Off(_) | Presence::Unknown(_) => {}
    }
    let accepted = config.mode != Mode::Ask || memory.is_accepted(name, &contract.id);
    let admission = &observed.admission;
    let is_changed = scope.contract != contract.id;
    // What is in force is never put back for a contract that is not known to fit.
    if is_changed && accepted && (admission.takes(name) || !contract.sets_something()) {
        return put_back("its contract was changed".to_owned());
    }
    // Where a contract is refused for its CPUs alone, settings without a CPU contract take nothing.
    let gives_way = if is_changed { accepted && scope.level.is_some() } else { true };
    if let Some(why) = admission.refused.get(name).filter(|_| gives_way) {
        return put_back(format!("it gives way: {why}"));
    }
    let level = admission.admitted.get(name).copied();
    if let (Some(now), Some(then)) = (level, scope.level) {
        if now != then && (!is_changed || admission.kept.contains_key(name)) {
            return Some(step(name, Action::Relevel, "other VMs were started or stopped"));
        }
    }
    if vm.new_threads {
        return Some(step(name, Action::TakeIn, "new threads"));
    }
    if vm.splits {
        return Some(step(name, Action::Split, "its threads use other shares now"));
    }
    drift(name, &scope.drift, config, memory, now)
}

/// Whether two lists are of one start of a VM: helpers come and go, its VMM stays.
fn same_start(now: &[ProcessId], then: &[ProcessId]) -> bool {
    now.iter().any(|process| then.contains(process))
}

/// Step about settings that another program has changed, by the policies for drift: those to leave
/// first, then those to set again.
pub(crate) fn drift(
    name: &str,
    all: &[Drift],
    config: &Config,
    memory: &Memory,
    now: Millis,
) -> Option<Step> {
    let with = |policy: DriftPolicy| {
        let of_policy = all.iter().filter(move |d| config.drift_policy(d) == policy);
        of_policy.collect::<Vec<_>>()
    };
    let words = |all: &[&Drift]| {
        let one = |d: &&Drift| format!("{} was changed from {} to {}", d.knob, d.wanted, d.found);
        all.iter().map(one).collect::<Vec<_>>().join("; ")
    };
    let paths = |all: &[&Drift]| all.iter().map(|d| d.path.clone()).collect();
    let left = with(DriftPolicy::Yield);
    if !left.is_empty() {
        return Some(step(name, Action::Release { paths: paths(&left) }, words(&left)));
    }
    let mut again = with(DriftPolicy::Restore);
    again.retain(|d| !memory.is_contested(name, &d.path, now));
    (!again.is_empty()).then(|| step(name, Action::Restore { paths: paths(&again) }, words(&again)))
}

#[cfg(test)]
mod tests;
