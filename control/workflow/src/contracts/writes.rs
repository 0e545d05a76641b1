//! From admitted contracts to writes on this host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::{Write, append};
use rtvirtio_cpu::{
    Ask, Backend, Contract, Cores, Partition, Probe, outside, room_beyond, settings_in, with_levels,
};
use rtvirtio_kernel::Root;
use rtvirtio_units::Enforcement;
use rtvirtio_vmm::threads::{discover, discover_among};
use rtvirtio_vmm::{Thread, VmHandle};

use super::cores::{self, CoresAsk};
use super::{Admitted, Contracted, DemandChoice, InForce, VmCpu, partitions, shared_cpus};
use crate::error::{Context as _, Result};
use crate::find::HostVm;
use crate::progress::Progress;
use crate::started;

/// Time for which threads are observed before a budget is split over them: load moves between a
/// VM's threads within seconds.
const OBSERVED: Duration = Duration::from_secs(1);
/// A VM that uses less than this part of one CPU, all threads together, is idle.
const IDLE: u32 = 10;

/// Writes to the cgroups above those of these VMs, where no such writes are in force.
pub(crate) fn ancestor_capacity(probe: &Probe, all: &[VmCpu]) -> Result<Vec<Write>> {
    let budgets = |v: &VmCpu| Some((v.settings.backend, v.settings.group.clone()?, v.contract));
    room_for(&Root::default(), probe, all.iter().filter_map(budgets), &|_| None)
}

/// The writes for all VMs that have a contract, and each contract's settings; without writes to the
/// cgroups above managed VMs': what these need follows from all contracts together, also those of
/// other journals. CPUs are chosen next to those of the contracts `others`, which other journals
/// have, each with the processes of its VM.
///
/// # Errors
/// [`Kind::NotRunning`](crate::Kind::NotRunning) for a VM that does not run.
pub(crate) fn writes(
    admitted: Admitted,
    vms: &[&HostVm],
    others: &[(InForce, Vec<u32>)],
    progress: &dyn Progress,
) -> Result<(Vec<Write>, Vec<VmCpu>)> {
    let root = Root::default();
    let Admitted { probe, contracts } = admitted;
    let contracted: Vec<_> = contracts
        .into_iter()
        .map(|one| {
            let vm = vms.iter().find(|vm| vm.name == one.vm).context("a VM without a name")?;
            let handle = vm.handle(progress)?;
            let before =
                if one.backend == Backend::Deadline { discover(&root, &handle)? } else { Vec::new() };
            Ok((one, handle, before))
        })
        .collect::<Result<_>>()?;
    if contracted.iter().any(|(one, ..)| one.backend == Backend::Deadline) {
        progress.step("observing which threads use the CPU, to split the budget over them");
        std::thread::sleep(OBSERVED);
    }
    let discovered: Vec<_> = contracted
        .into_iter()
        .map(|(one, handle, before)| Ok((one, discover(&root, &handle)?, before)))
        .collect::<Result<_>>()?;
    let asks: Vec<CoresAsk<'_>> =
        discovered.iter().filter_map(|(one, threads, _)| CoresAsk::from_contract(one, threads)).collect();
    let own: BTreeSet<u32> = discovered.iter().flat_map(|(_, threads, _)| threads).map(|t| t.pid).collect();
    let names: Vec<&str> = discovered.iter().map(|(one, ..)| one.vm.as_str()).collect();
    let mut chosen = cores::choose(&root, &probe, &asks, &of_other_vms(others, &names, &own), &[])?;
    let of = discovered.iter().map(|(one, threads, _)| (one, threads.as_slice()));
    let mut partitions = partitions::find(&root, of)?;
    partitions::check_apart(&partitions, &chosen)?;
    let taken: BTreeSet<u32> = partitions.values().flat_map(|partition| &partition.cpus).copied().collect();
    let (mut all, mut out) = (partitions::writes(&root, &partitions)?, Vec::new());
    for (one, threads, before) in discovered {
        let used = cpu_time_since(&before, &threads);
        let on = (chosen.remove(&one.vm), partitions.remove(&one.vm));
        let held = hold(&root, &probe, one, on, &taken, &threads, &used)?;
        append(&mut all, held.settings.writes.clone());
        out.push(held);
    }
    Ok((all, out))
}

/// The contracts among `others` that are of other VMs than these, by name and process.
fn of_other_vms(
    others: &[(InForce, Vec<u32>)],
    names: &[&str],
    own: &BTreeSet<u32>,
) -> Vec<(InForce, Vec<u32>)> {
    let is_own = |(of, pids): &&(InForce, Vec<u32>)| {
        names.contains(&of.vm.as_str()) || pids.iter().any(|pid| own.contains(pid))
    };
    others.iter().filter(|other| !is_own(other)).cloned().collect()
}

/// Checks that there are CPUs for the VMs with `cores`, next to those of other VMs, of which the
/// contracts `others` are in force; nothing that these VMs have now counts, nor what the contracts
/// in force in this state directory have.
pub(crate) fn check_cpus(
    admitted: &Admitted,
    vms: &[HostVm],
    state: &Path,
    others: &[(InForce, Vec<u32>)],
    progress: &dyn Progress,
) -> Result<()> {
    let root = Root::default();
    let started = started::started(state)?;
    let leaving: Vec<_> = started.iter().flat_map(|vm| vm.processes.iter().cloned()).collect();
    let threads_of = |one: &Contracted| -> Result<Vec<Thread>> {
        let vm = vms.iter().find(|vm| vm.name == one.vm).context("a VM without a name")?;
        Ok(discover(&root, &vm.handle(progress)?)?)
    };
    let all: Vec<_> =
        admitted.contracts.iter().map(|one| Ok((one, threads_of(one)?))).collect::<Result<_>>()?;
    let asks: Vec<CoresAsk<'_>> =
        all.iter().filter_map(|(one, threads)| CoresAsk::from_contract(one, threads)).collect();
    let of_threads = all.iter().flat_map(|(_, threads)| threads).map(|t| t.pid);
    let own: BTreeSet<u32> = of_threads.chain(leaving.iter().map(|process| process.pid)).collect();
    let mut names: Vec<&str> = started.iter().map(|vm| vm.vm.as_str()).collect();
    names.extend(admitted.contracts.iter().map(|one| one.vm.as_str()));
    let others = of_other_vms(others, &names, &own);
    cores::choose(&root, &admitted.probe, &asks, &others, &leaving).map(drop)
}

/// Settings of one VM's contract and the VM's threads, without writes to the cgroups above a
/// managed VM's, and without those that make its partition. A budget that is split over threads is
/// split by their CPU time so far. Kernel threads that work for the VM are searched among
/// `processes`; CPUs are chosen next to those of the contracts `others`, each with the processes of
/// its VM. The fair server is left as it is.
pub fn writes_of_one(
    probe: &Probe,
    one: Contracted,
    vm: &VmHandle,
    processes: &BTreeSet<u32>,
    others: &[(InForce, Vec<u32>)],
) -> Result<(VmCpu, Vec<Thread>)> {
    let root = Root::default();
    let threads = discover_among(&root, vm, processes)?;
    let partition = partitions::find(&root, std::iter::once((&one, threads.as_slice())))?.remove(&one.vm);
    if let Some(partition) = &partition {
        partitions::check_free(&one.vm, &partition.cpus, others)?;
    }
    let ask = CoresAsk::from_contract(&one, &threads);
    let cores = cores::choose(&root, probe, ask.as_slice(), others, &[])?.remove(&one.vm);
    let wants_off = one.cores.as_ref().is_some_and(|cores| cores.fair_server_off);
    let mut held = hold(&root, probe, one, (cores, partition), &BTreeSet::new(), &threads, &[])?;
    held.settings.notes.extend(wants_off.then(|| cores::FAIR_SERVER_STAYS.to_owned()));
    Ok((held, threads))
}

/// Settings of a contract next to new partitions, which take the CPUs `taken`.
fn hold(
    root: &Root,
    probe: &Probe,
    one: Contracted,
    (cores, partition): (Option<Cores>, Option<Partition>),
    taken: &BTreeSet<u32>,
    threads: &[Thread],
    used: &[(u32, Duration)],
) -> Result<VmCpu> {
    let (contract, order, level) = (one.contract, one.order, one.level);
    let (placed, domain) = match (&cores, &partition) {
        (_, Some(partition)) => (Some(partition.entered(root, threads)?), Some(partition.cpus.clone())),
        (Some(cores), None) => (Some(cores.pinned(threads)), None),
        (None, None) if taken.is_empty() => (None, None),
        (None, None) => {
            let left = partitions::left(root, &one.vm, threads, taken)?;
            (Some(outside(root, threads, taken)?), Some(left))
        }
    };
    let threads = placed.as_deref().unwrap_or(threads);
    let ask = Ask { vm: &one.vm, threads, contract, order, level, used };
    let mut settings = settings_in(root, probe, (one.backend, domain.as_ref()), &ask)?;
    settings.notes.extend(one.notes);
    settings.notes.extend(shared_cpus::note(threads, one.backend));
    if let Some(range) = &one.urgency {
        with_levels(root, &one.vm, threads, one.backend, range, &mut settings.writes)?;
    }
    if let Some(cores) = &cores {
        cores::add(cores, probe, &one.vm, threads, &mut settings);
    }
    if let Some(partition) = &partition {
        settings.notes.push(partitions::note(root, partition)?);
    }
    let (vm, found, urgency) = (one.vm, one.found, one.urgency);
    Ok(VmCpu { vm, contract, order, level, settings, found, urgency, cores, partition })
}

/// Writes to the cgroups above those of managed VMs, to be made before the VMs' own; `before` as in
/// [`room_beyond`].
pub(crate) fn room_for(
    root: &Root,
    probe: &Probe,
    all: impl Iterator<Item = (Backend, PathBuf, Contract)>,
    before: &dyn Fn(&Path) -> Option<u64>,
) -> Result<Vec<Write>> {
    let mut of: BTreeMap<Backend, Vec<(PathBuf, Contract)>> = BTreeMap::new();
    for (backend, group, contract) in all {
        of.entry(backend).or_default().push((group, contract));
    }
    let mut writes = Vec::new();
    for (backend, groups) in of {
        let groups: Vec<_> = groups.iter().map(|(group, contract)| (group.as_path(), *contract)).collect();
        append(&mut writes, room_beyond(root, probe, &groups, backend, before)?);
    }
    Ok(writes)
}

/// CPU time that each thread used since `before`; empty for an idle VM, whose threads' total CPU
/// time is the better basis. A booting VM is not idle: its total is that of QEMU's start, and a
/// vCPU with a part by that would not come up.
fn cpu_time_since(before: &[Thread], now: &[Thread]) -> Vec<(u32, Duration)> {
    let since = |t: &Thread| {
        let old = before.iter().find(|b| (b.tid, b.start) == (t.tid, t.start))?;
        Some((t.tid, t.cpu_time.saturating_sub(old.cpu_time)))
    };
    let used: Vec<_> = now.iter().filter_map(since).collect();
    if used.iter().map(|u| u.1).sum::<Duration>() < OBSERVED / IDLE { Vec::new() } else { used }
}

/// Derivation of a contract from a demand, as text.
pub fn demand_text(vm: &str, found: &DemandChoice) -> String {
    format!("{vm}: {}", found.choice.description(&found.demand))
}

/// Reports how each contract is held, and what is outside of it.
pub fn explain(all: &[VmCpu], progress: &dyn Progress) {
    for VmCpu { vm, settings: s, found, cores, .. } in all {
        if let Some(found) = found {
            progress.step(&demand_text(vm, found));
        }
        let worth = match s.strength {
            Enforcement::Hint => format!("a hint only, by {}", s.backend),
            firm => format!("enforced by {} ({})", s.backend, firm.name()),
        };
        progress.step(&format!("{vm}: its CPU contract is {worth}"));
        if let Some(cores) = cores {
            progress.step(&format!("{vm}: {cores}"));
        }
        for note in &s.notes {
            progress.step(&format!("{vm}: {note}"));
        }
        for (tid, why) in &s.outside {
            progress.step(&format!("{vm}: thread {tid} is outside of it: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_kernel::sched::Attr;

    use super::*;
    use crate::contracts::cores_tests::{auto, host, in_force, one, placed, probe, threads, whole};

    #[test]
    fn a_budget_next_to_a_new_partition_is_that_of_the_cpus_that_are_left() {
        let (_dir, root) = host();
        let threads = threads(100, 7);
        let runtimes = |taken: &[u32]| {
            let one = Contracted { backend: Backend::Deadline, cores: None, ..one("web", 10, auto()) };
            let taken = taken.iter().copied().collect();
            let held = hold(&root, &probe(), one, (None, None), &taken, &threads, &[])?;
            let runtime = |write: &Write| write.value.parse::<Attr>().unwrap().reservation.unwrap().runtime;
            Ok::<u64, crate::Error>(held.settings.writes.iter().map(runtime).sum())
        };
        // 10 ms on each CPU, of eight, then of six.
        let all = runtimes(&[]).unwrap();
        assert!((79_000_000..=80_000_000).contains(&all), "{all}");
        let left = runtimes(&[4, 5]).unwrap();
        assert!((59_000_000..=60_000_000).contains(&left), "{left}");
        let error = runtimes(&[0, 1, 2, 3, 4, 5, 6, 7]).unwrap_err().to_string();
        assert!(error.starts_with("web: new partitions take all of its CPUs"), "{error}");
    }

    #[test]
    fn a_vms_own_contract_of_another_journal_takes_no_cpus_from_it() {
        let of = |vm: &str, cpus: &[u32]| in_force(&one(vm, 10, whole()), placed(cpus));
        let others = [(of("a", &[2]), vec![7]), (of("b", &[4]), vec![8, 9]), (of("c", &[6]), Vec::new())];
        let left = |names: &[&str], own: &[u32]| -> Vec<String> {
            let own = own.iter().copied().collect();
            of_other_vms(&others, names, &own).into_iter().map(|(of, _)| of.vm).collect()
        };
        assert_eq!(left(&["d"], &[10]), ["a", "b", "c"]);
        assert_eq!(left(&["a"], &[9]), ["c"]);
    }
}
