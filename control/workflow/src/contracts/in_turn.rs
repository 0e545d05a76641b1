//! Contracts that are admitted one after the other, each by what those before it leave.

use std::collections::BTreeSet;

use rtvirtio_cores::Use;
use rtvirtio_cpu::{Cores, Partition, Probe, probe};
use rtvirtio_kernel::Root;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::threads::discover_among;
use rtvirtio_vmm::{Thread, VmHandle};

use super::cores::{self, CoresAsk};
use super::ranks::rank;
use super::{ActiveContracts, Admitted, Contracted, InForce, VmNeed, fitting, forget_own, needs, partitions};
use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Kind, Result};
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
    let own = now.in_force.iter().map(|(of, _)| of).find(|of| of.vm == one.vm);
    let handle = (now.running)(&one.vm);
    let (false, Some(handle)) = (own.is_some_and(|of| has_them(of, one, wanted)), handle) else {
        return Ok(None);
    };
    let root = Root::default();
    // How many kernel threads serve it does not decide whether it fits.
    let threads = match discover_among(&root, &handle, &BTreeSet::new()) {
        Ok(threads) => threads,
        // It has just ended.
        Err(e) if e.is_gone() => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let others = others(&one.vm, now.in_force, placed);
    let pids: Vec<u32> = handle.pids.into_iter().collect();
    if let Some(cpus) = wanted.partition() {
        let partition = partition(&root, one, (cpus, own), &threads, &others)?;
        return Ok(Some((InForce { partition: Some(partition), ..InForce::planned(one, None) }, pids)));
    }
    let Some(ask) = CoresAsk::from_contract(one, &threads) else { return Ok(None) };
    let cores = cores::choose(&root, probe, &[ask], &others, &[])?.remove(&one.vm);
    Ok(Some((InForce::planned(one, cores), pids)))
}

/// Partition that a VM with these threads would get of the CPUs `cpus`, next to the contracts
/// `others`; `own` is its contract in force, which is put back before.
fn partition(
    root: &Root,
    one: &Contracted,
    (cpus, own): (&BTreeSet<u32>, Option<&InForce>),
    threads: &[Thread],
    others: &[(InForce, Vec<u32>)],
) -> Result<Partition> {
    partitions::check_free(&one.vm, cpus, others)?;
    let partition = Partition::of_threads(threads, cpus.clone());
    // While its group is a partition, the kernel's state does not tell whether it can be another.
    if own.and_then(|of| of.partition.as_ref()).is_none_or(|of| of.group != partition.group) {
        partitions::find(root, std::iter::once((one, threads)))?;
    }
    Ok(partition)
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

/// Whether a contract in force has the CPUs that an admitted one wants.
fn has_them(of: &InForce, one: &Contracted, wanted: &rtvirtio_spec::Cores) -> bool {
    let has = match wanted.partition() {
        Some(cpus) => of.partition.as_ref().is_some_and(|partition| partition.cpus == *cpus),
        None => of.cores.as_ref().is_some_and(|cores| is_for(cores, wanted)),
    };
    of.contract == one.contract && has
}

/// Whether these CPUs were chosen for what the spec wants.
fn is_for(cores: &Cores, wanted: &rtvirtio_spec::Cores) -> bool {
    cores.among == wanted.cpus && (cores.placement.request.each == Use::Whole) == wanted.whole
}

#[cfg(test)]
mod tests {
    use rtvirtio_kernel::task::Membership;

    use super::super::cores::tests::{auto, host, in_force, one, placed, put, threads};
    use super::*;

    fn partitioned(vm: &str, cpus: &[u32]) -> (Contracted, Partition) {
        let cpus: BTreeSet<u32> = cpus.iter().copied().collect();
        let wanted = rtvirtio_spec::Cores { cpus: Some(cpus.clone()), partition: true, ..auto() };
        (one(vm, 10, wanted), Partition { group: format!("/machine.slice/{vm}.scope").into(), cpus })
    }

    #[test]
    fn a_partition_is_admitted_where_its_cpus_are_free_and_counts_for_those_after_it() {
        let (_dir, root) = host();
        let (plc, expected) = partitioned("plc", &[4, 5]);
        put(&root, "/proc/sys/kernel/osrelease", "6.12.9\n");
        for file in ["cgroup.controllers", "cgroup.subtree_control", "machine.slice/cgroup.subtree_control"] {
            put(&root, format!("/sys/fs/cgroup/{file}"), "cpuset\n");
        }
        let mut of_plc = threads(100, 1);
        let membership = Membership { controllers: String::new(), path: expected.group.clone() };
        of_plc.iter_mut().for_each(|thread| thread.cgroups = vec![membership.clone()]);
        let cpus = &expected.cpus;
        let admitted = |own: Option<&InForce>, others: &[(InForce, Vec<u32>)]| {
            partition(&root, &plc, (cpus, own), &of_plc, others)
        };
        assert_eq!(admitted(None, &[]).unwrap(), expected);
        // Of a VM that was admitted before it, and of one that has CPUs of its own.
        let (hmi, of_hmi) = partitioned("hmi", &[5, 6]);
        let hmi = InForce { partition: Some(of_hmi), ..InForce::planned(&hmi, None) };
        let error = admitted(None, &[(hmi, Vec::new())]).unwrap_err();
        assert!(error.kind() == Kind::Infeasible && error.to_string().contains("CPU 5 "), "{error}");
        let web = (in_force(&one("web", 10, auto()), placed(&[4])), Vec::new());
        let error = admitted(None, &[web]).unwrap_err();
        assert!(error.to_string().contains("CPU 4 of its partition is of web"), "{error}");
        // The kernel's state of a group counts where it is not a partition of ours.
        let kind = "/sys/fs/cgroup/machine.slice/plc.scope/cpuset.cpus.partition";
        put(&root, kind, "root\n");
        put(&root, "/sys/fs/cgroup/machine.slice/plc.scope/cpuset.cpus.exclusive", "\n");
        let error = admitted(None, &[]).unwrap_err();
        assert!(error.to_string().contains("is a partition already"), "{error}");
        let own = InForce { partition: Some(expected.clone()), ..InForce::planned(&plc, None) };
        assert_eq!(admitted(Some(&own), &[]).unwrap(), expected);
    }

    #[test]
    fn a_contract_in_force_has_the_partition_that_it_wants() {
        let (plc, partition) = partitioned("plc", &[4, 5]);
        let wanted = plc.cores.clone().unwrap();
        let own = InForce { partition: Some(partition), ..InForce::planned(&plc, None) };
        assert!(has_them(&own, &plc, &wanted));
        assert!(!has_them(&own, &plc, &partitioned("plc", &[4]).0.cores.unwrap()));
        assert!(!has_them(&own, &one("plc", 5, wanted.clone()), &wanted));
        assert!(!has_them(&InForce { partition: None, ..own.clone() }, &plc, &wanted));
        let need = VmNeed::in_force(&own);
        assert_eq!(need.cores, Some(wanted), "its CPUs are a root domain of their own");
    }

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
