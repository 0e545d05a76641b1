//! Admission of contracts, by the host as the service sees it.

use rtvirtio_workflow::contracts::{ActiveContracts, AdmittedInTurn, InForce, VmsNow, of_vms_in_turn};
use rtvirtio_workflow::scope_files::VmInForce;

use super::{LinuxHost, Quiet};
use crate::arrivals::Arrival;
use crate::desired::{Contract, Desired};
use crate::observed::Admission;

impl LinuxHost {
    /// The CPU contracts in force for these VMs, each with the processes of its VM.
    pub(super) fn in_force_with_processes(&self, of: impl Fn(&str) -> bool) -> Vec<(InForce, Vec<u32>)> {
        let saved = self.tracked.iter().filter(|(vm, _)| of(vm)).filter_map(|(_, t)| t.saved.as_ref());
        // Another process may have the number of one that has ended.
        let pids = |of: &VmInForce| of.processes.iter().filter(|p| p.is_alive()).map(|p| p.pid).collect();
        saved.filter_map(|saved| Some((saved.cpu.clone()?, pids(saved)))).collect()
    }

    /// Admits the contracts in turn. Of equally critical ones those in force come first, then
    /// changed ones, then new ones: so none takes anything from an earlier one.
    pub(super) fn admit(&self, desired: &Desired) -> rtvirtio_workflow::Result<AdmittedInTurn> {
        self.admit_with(desired, self.arrivals.all())
    }

    /// Admits the contracts with these reservations, which count like contracts in force.
    pub(super) fn admit_with(
        &self,
        desired: &Desired,
        arrivals: &[Arrival],
    ) -> rtvirtio_workflow::Result<AdmittedInTurn> {
        let scope = |vm: &str| self.tracked.get(vm).and_then(|t| t.scope.as_ref());
        let arriving = self.counted_arrivals(desired, arrivals);
        let mut ordered = desired.by_criticality(|vm| scope(vm).is_some());
        // Metadata of an earlier start here give way to what the VM brings along.
        ordered.retain(|c| !arriving.iter().any(|of| of.is_of(c)));
        ordered.extend(arriving.iter().map(|of| &of.contract));
        let is_changed = |c: &Contract| scope(&c.vm.name).is_some_and(|scope| scope.contract != c.id);
        let arrives = |c: &Contract| arriving.iter().any(|of| std::ptr::eq(&of.contract, c));
        let is_new = |c: &Contract| scope(&c.vm.name).is_none() && !arrives(c);
        ordered.sort_by_key(|c| (std::cmp::Reverse(c.criticality()), is_new(c), is_changed(c)));
        // A contract in force whose file cannot be read stays, so its share is still taken.
        let is_replaced = |vm: &str| desired.contract_of(vm).is_some() || !desired.holds(vm);
        let replaced = self.tracked.iter().filter(|(vm, _)| is_replaced(vm));
        let saved = replaced.filter_map(|(_, t)| t.saved.as_ref());
        let ours: ActiveContracts =
            saved.filter_map(|saved| Some((saved.cpu.clone()?, saved.processes.clone()))).collect();
        let running = |vm: &str| Some(self.tracked.get(vm)?.found.as_ref()?.handle.clone());
        let replaces = |vm: &str| desired.contract_of(vm).is_some_and(is_changed);
        let in_force = self.in_force_with_processes(|_| true);
        let now = VmsNow { running: &running, replaces: &replaces, in_force: &in_force };
        of_vms_in_turn(ordered.iter().map(|c| &c.vm), &ours, &now, &self.places.dirs, &Quiet::default())
    }
}

/// Whether a contract with `cores` is not admitted, perhaps for its CPUs, or admitted without them.
pub(super) fn lacks_cpus(of: &AdmittedInTurn, desired: &Desired) -> bool {
    let has_cores = |vm: &str| desired.contract_of(vm).is_some_and(|c| c.vm.cpu.cores.is_some());
    of.refused.iter().chain(&of.kept).chain(&of.uncounted).any(|(vm, _)| has_cores(vm))
}

pub(super) fn admission(of: &AdmittedInTurn) -> Admission {
    let words = |all: &[(String, rtvirtio_workflow::Error)]| {
        all.iter().map(|(vm, e)| (vm.clone(), format!("{e:#}"))).collect()
    };
    Admission {
        admitted: of.admitted.contracts.iter().map(|c| (c.vm.clone(), c.level)).collect(),
        kept: words(&of.kept),
        refused: words(&of.refused),
    }
}
