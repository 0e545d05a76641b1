//! Contracts that are admitted one after the other, each by what those before it leave.

use std::collections::BTreeSet;

use rtvirtio_cores::Use;
use rtvirtio_cpu::{Cores, Probe, probe};
use rtvirtio_kernel::Root;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::discover_among;

use super::cores::{self, CoresAsk};
use super::partitions::BY_APPLY_ALONE;
use super::ranks::rank;
use super::{ActiveContracts, Admitted, Contracted, InForce, VmNeed, fitting, forget_own, needs};
use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::progress::Progress;

/// VMs as they are while contracts are admitted, for the CPUs of those with `cores`.
pub struct VmsNow<'a> {
    /// A VM that runs and was found; its CPUs cannot be counted otherwise.
    pub running: &'a dyn Fn(&str) -> Option<VmHandle>,
    /// A VM with other settings in force, which are put back before its contract is applied.
    pub replaces: &'a dyn Fn(&str) -> bool,
    /// All contracts in force, each with the processes of its VM.
    pub in_force: &'a [(InForce, Vec<u32>)],
}

/// Result of admitting contracts one after the other.
pub struct AdmittedInTurn {
    /// Admitted contracts, feasible all together.
    pub admitted: Admitted,
    /// VMs whose new contract is not admitted, each with the reason; `admitted` has the one in
    /// force instead.
    pub kept: Vec<(String, Error)>,
    /// VMs without an admitted contract, each with the reason.
    pub refused: Vec<(String, Error)>,
    /// VMs with `cores` that are admitted although their CPUs could not be counted, each with the
    /// reason.
    pub uncounted: Vec<(String, Error)>,
}

/// Like [`super::of_vms`], but VM by VM: a contract that does not fit next to those before it is
/// refused alone. The result replaces `ours`, the contracts in force; where a VM's new contract
/// does not fit and its contract in force does, the latter is admitted.
///
/// CPUs are counted for VMs that run: free are those that no VM has, and no VM before it in turn
/// gets. Nothing gives way for them. Where they cannot be counted the contract is admitted without,
/// and applying it reports why; but one that replaces settings in force is not admitted.
///
/// # Errors
/// When the kernel's mechanisms cannot be read.
pub fn of_vms_in_turn<'v>(
    vms: impl Iterator<Item = &'v Vm> + Clone,
    ours: &'v ActiveContracts,
    now: &VmsNow<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<AdmittedInTurn> {
    let mut probe = probe(&Root::default())?;
    let names = vms.clone().map(|vm| vm.name.as_str());
    forget_own(&mut probe, names.chain(ours.contracts.iter().map(|of| of.vm.as_str())), ours)?;
    let mut turn = Turn {
        probe: &probe,
        taken: Vec::new(),
        contracts: Vec::new(),
        placed: Vec::new(),
        uncounted: Vec::new(),
    };
    let (mut kept, mut refused) = (Vec::new(), Vec::new());
    for vm in vms.filter(|vm| vm.cpu.need.is_some()) {
        let asked = needs(std::slice::from_ref(vm), &probe, &[], dirs, progress);
        let asked = asked.and_then(|need| need.into_iter().try_for_each(|need| turn.take(need, now)));
        let Err(e) = asked else { continue };
        let in_force = ours.contracts.iter().find(|of| of.vm == vm.name);
        let stays = in_force.is_some_and(|of| turn.take(VmNeed::in_force(of), now).is_ok());
        let not_had = if stays { &mut kept } else { &mut refused };
        not_had.push((vm.name.clone(), e));
    }
    let Turn { mut contracts, uncounted, .. } = turn;
    // Only of all together: with each one again, hundreds of VMs would take seconds.
    rank(&mut contracts);
    Ok(AdmittedInTurn { admitted: Admitted { probe, contracts }, kept, refused, uncounted })
}

/// The contracts that are admitted so far.
struct Turn<'v, 'p> {
    probe: &'p Probe,
    taken: Vec<VmNeed<'v>>,
    contracts: Vec<Contracted>,
    /// CPUs for contracts that are not in force, each with the processes of its VM.
    placed: Vec<(InForce, Vec<u32>)>,
    /// VMs whose CPUs could not be counted, each with the reason.
    uncounted: Vec<(String, Error)>,
}

impl<'v> Turn<'v, '_> {
    /// Admits one more contract, or leaves all as it was.
    fn take(&mut self, need: VmNeed<'v>, now: &VmsNow<'_>) -> Result<()> {
        let vm = need.vm;
        self.taken.push(need);
        let admitted = fitting(self.probe, &self.taken.iter().collect::<Vec<_>>()).and_then(|all| {
            let one = all.iter().find(|one| one.vm == vm).context("a contract without its VM")?;
            let placed = match place(self.probe, one, now, &self.placed) {
                Err(e) if may_be_uncounted(&e, vm, now) => Err(e),
                placed => Ok(placed?),
            };
            Ok((placed, all))
        });
        match admitted {
            Ok((placed, all)) => {
                match placed {
                    Ok(placed) => self.placed.extend(placed),
                    Err(e) => self.uncounted.push((vm.to_owned(), e)),
                }
                self.contracts = all;
                Ok(())
            }
            Err(e) => {
                self.taken.pop();
                Err(e)
            }
        }
    }
}

/// Whether a contract is admitted although its CPUs could not be counted.
fn may_be_uncounted(error: &Error, vm: &str, now: &VmsNow<'_>) -> bool {
    error.kind() != Kind::Infeasible && !(now.replaces)(vm)
}

/// CPUs for a VM whose contract would be put in force now, with its processes; `None` where it has
/// them, wants none or does not run.
fn place(
    probe: &Probe,
    one: &Contracted,
    now: &VmsNow<'_>,
    placed: &[(InForce, Vec<u32>)],
) -> Result<Option<(InForce, Vec<u32>)>> {
    let Some(wanted) = &one.cores else { return Ok(None) };
    if wanted.partition {
        bail!(Infeasible, "{}: {BY_APPLY_ALONE}", one.vm);
    }
    let own = now.in_force.iter().find(|(of, _)| of.vm == one.vm);
    let has_them = |(of, _): &(InForce, Vec<u32>)| {
        of.contract == one.contract && of.cores.as_ref().is_some_and(|cores| is_for(cores, wanted))
    };
    let handle = (now.running)(&one.vm);
    let (false, Some(handle)) = (own.is_some_and(has_them), handle) else { return Ok(None) };
    let root = Root::default();
    // How many kernel threads serve it does not decide whether it fits.
    let threads = match discover_among(&root, &handle, &BTreeSet::new()) {
        Ok(threads) => threads,
        // It has just ended.
        Err(e) if e.is_gone() => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let Some(ask) = CoresAsk::from_contract(one, &threads) else { return Ok(None) };
    let others = others(&one.vm, now.in_force, placed);
    let cores = cores::choose(&root, probe, &[ask], &others, &[])?.remove(&one.vm);
    Ok(Some((InForce::planned(one, cores), handle.pids.into_iter().collect())))
}

/// Contracts next to which a VM's CPUs are chosen: those in force, and in place of these the ones
/// that were admitted before it.
fn others(
    vm: &str,
    in_force: &[(InForce, Vec<u32>)],
    placed: &[(InForce, Vec<u32>)],
) -> Vec<(InForce, Vec<u32>)> {
    let is_replaced = |of: &InForce| of.vm == vm || placed.iter().any(|(new, _)| new.vm == of.vm);
    in_force.iter().filter(|(of, _)| !is_replaced(of)).chain(placed).cloned().collect()
}

/// Whether these CPUs were chosen for what the spec wants.
fn is_for(cores: &Cores, wanted: &rtvirtio_spec::Cores) -> bool {
    cores.among == wanted.cpus && (cores.placement.request.each == Use::Whole) == wanted.whole
}

#[cfg(test)]
mod tests {
    use super::super::cores::tests::{auto, in_force, one, placed};
    use super::*;

    #[test]
    fn of_a_contract_that_is_set_anew_only_the_new_cpus_count() {
        let of = |vm: &str, cpus: &[u32]| (in_force(&one(vm, 10, auto()), placed(cpus)), vec![7]);
        let (old, new, other) = (of("x", &[0]), of("x", &[1]), of("z", &[2]));
        let in_force = [old.clone(), other.clone()];
        assert_eq!(others("y", &in_force, &[]), [old, other.clone()]);
        assert_eq!(others("y", &in_force, std::slice::from_ref(&new)), [other.clone(), new]);
        assert_eq!(others("x", &in_force, &[]), [other]);
    }
}
