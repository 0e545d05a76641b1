//! Difference between what a spec asks for now and what was applied.

use rtvirtio_cpu::Contract;
use rtvirtio_spec::{CpuNeed, Device, HostHandle, HostSpec, Reach, Vm};
use rtvirtio_workflow::contracts::{self, InForce};
use rtvirtio_workflow::is_there;
use rtvirtio_workflow::named::load_host_with_text;

use super::applied_spec;
use super::parameters::Parameters;
use crate::PacemakerError;

/// Contract that the spec asks for, where it is not the one that was applied.
pub(super) struct Asked {
    /// Difference from what was applied, in words.
    pub what: String,
    /// Whether this text of the spec could not be applied before.
    pub is_refused: bool,
}

/// Difference between the spec now and what was applied; `None` where it makes none for the
/// contract, as a comment or a target.
///
/// # Errors
/// When one of the two cannot be read.
pub(super) fn asked_now(p: &Parameters) -> Result<Option<Asked>, PacemakerError> {
    let own = p.own();
    let (now, text) = load_host_with_text(&p.spec)?;
    let mut what = None;
    if is_there(&own.state.join(contracts::IN_FORCE_FILE))? {
        what = beside_contracts(&contracts::in_force(&own.state)?, &now);
    }
    if what.is_none() {
        let then = applied_spec::applied(&own, &p.spec)?;
        what = then.and_then(|(then, _)| difference(&then, &now, p.disk));
    }
    let Some(what) = what else { return Ok(None) };
    Ok(Some(Asked { what, is_refused: applied_spec::is_refused(&own, &text)? }))
}

/// Difference between the spec's CPU contracts and those in force.
fn beside_contracts(applied: &[InForce], now: &HostSpec) -> Option<String> {
    for vm in now.vms() {
        let Some(CpuNeed::Contract { budget, period }) = vm.cpu.need else { continue };
        let asked = Contract::new(budget, period);
        let then = applied.iter().find(|a| a.vm == vm.name).map(|a| a.contract);
        if asked != then {
            let words = |c: Option<Contract>| c.map_or_else(|| "nothing".to_owned(), |c| c.to_string());
            return Some(format!(
                "{}: the spec asks for {} now, {} was applied",
                vm.name,
                words(asked),
                words(then)
            ));
        }
    }
    let is_asked = |a: &InForce| now.vms().iter().any(|vm| vm.name == a.vm && vm.cpu.need.is_some());
    let gone = applied.iter().find(|a| !is_asked(a))?;
    Some(format!("{}: the spec asks for nothing now, {} was applied", gone.vm, gone.contract))
}

/// Difference between two specs in what makes a contract; with `disk` in that of disks too, targets
/// and load aside.
fn difference(then: &HostSpec, now: &HostSpec, disk: bool) -> Option<String> {
    let (before, after) = (covered(then, disk), covered(now, disk));
    for vm in &after {
        let Some(old) = before.iter().find(|old| old.name == vm.name) else {
            return Some(format!("{}: the spec asks for it now, it was not applied", vm.name));
        };
        if let Some(part) = changed(old, vm, disk) {
            return Some(format!("{}: the spec has another {part} now than was applied", vm.name));
        }
    }
    if let Some(gone) = before.iter().find(|old| !after.iter().any(|vm| vm.name == old.name)) {
        return Some(format!("{}: it was applied, the spec does not ask for it now", gone.name));
    }
    (disk && devices(then) != devices(now))
        .then(|| "the spec names other devices now than were applied".to_owned())
}

/// VMs that are given something.
fn covered(host: &HostSpec, disk: bool) -> Vec<&Vm> {
    host.vms().iter().filter(|vm| disk || vm.cpu.need.is_some()).collect()
}

fn devices(host: &HostSpec) -> Vec<&Device> {
    host.parts().iter().map(|part| &part.spec.device).collect()
}

/// Name of the part of a VM's contract that differs.
fn changed(then: &Vm, now: &Vm, disk: bool) -> Option<&'static str> {
    let parts = [
        ("CPU time", then.cpu.need != now.cpu.need),
        ("value of `cores`", then.cpu.cores != now.cpu.cores),
        ("value of `priorities`", then.cpu.priorities != now.cpu.priorities),
        ("value of `urgency`", then.cpu.urgency != now.cpu.urgency),
        ("VM of this name", handle(then) != handle(now)),
        ("disk or guest agent", disk && then.reach != now.reach),
        ("value of `traffic`", disk && then.traffic != now.traffic),
    ];
    parts.into_iter().find_map(|(part, differs)| differs.then_some(part))
}

fn handle(vm: &Vm) -> Option<&HostHandle> {
    match &vm.reach {
        Reach::Existing { host, .. } => Some(host),
        Reach::Lab(_) => None,
    }
}
