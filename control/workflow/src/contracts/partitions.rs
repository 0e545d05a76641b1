//! Partitions of cgroup v2's cpuset for VMs with `partition = true` in `cores`.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{Write, has_systemd};
use rtvirtio_cpu::{Backend, Cores, Grant, Partition, Probe, admit, choose, domain_of, partition_writes};
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_kernel::{PartitionError, Root, partition_fault, partition_support};
use rtvirtio_vmm::Thread;

use super::{Contracted, InForce, VmCpu};
use crate::error::{Context as _, Error, Kind, Result, bail};

/// Reason for which an agent of a cluster makes no partition.
const NOT_BY_AGENTS: &str = "`partition = true` in `cores` is for `rtvirtio apply` and rtvirtiod: the groups above the VM \
    have to be set for all partitions at once; use one of these, or leave `partition` out";

fn error(vm: &str, error: &PartitionError) -> Error {
    let kind = match error {
        PartitionError::Cannot { .. } => Kind::Infeasible,
        PartitionError::Host(_) => Kind::System,
    };
    Error::new(kind, format!("{vm}: its CPUs cannot be a partition: {error}"))
}

/// Checks that this kernel makes partitions, for a VM that may not run yet.
pub(super) fn check(root: &Root, vm: &str) -> Result<()> {
    partition_support(root).map_err(|e| error(vm, &e))
}

/// CPUs of all partitions that a spec asks for.
pub(super) fn cpus<'a>(all: impl Iterator<Item = &'a rtvirtio_spec::Cores>) -> BTreeSet<u32> {
    all.filter_map(rtvirtio_spec::Cores::partition).flatten().copied().collect()
}

/// Cores of a spec that has this partition.
pub(super) fn wanted(of: &Partition) -> rtvirtio_spec::Cores {
    rtvirtio_spec::Cores { cpus: Some(of.cpus.clone()), partition: true, ..rtvirtio_spec::Cores::default() }
}

/// CPUs of the root domain that a contract's deadline threads get; `None` without a partition.
fn own(one: &Contracted) -> Option<&BTreeSet<u32>> {
    let cores = one.cores.as_ref().filter(|_| one.backend == Backend::Deadline);
    cores.and_then(rtvirtio_spec::Cores::partition)
}

/// Admits contracts next to new partitions, which take the CPUs `partitions`: the kernel sums
/// deadline threads by root domain, and shares of other mechanisms over all CPUs.
pub(super) fn admit_all(probe: &Probe, contracts: &[Contracted], partitions: &BTreeSet<u32>) -> Result<()> {
    // The kernel tests reservations when they are set, and these are.
    let deadline = choose(probe, Some(Backend::Deadline), false).filter(|_| !partitions.is_empty());
    let rest = deadline.map(|found| found.grant.in_root_domain(None, partitions));
    if let Some(rest) = rest.filter(Grant::is_exceeded) {
        bail!(
            Infeasible,
            "a partition of CPUs {} would leave deadline threads of other programs too few CPUs: of each that is left, {}; list fewer CPUs",
            cpu_ranges(partitions),
            rest.describe(&[])
        );
    }
    for backend in contracts.iter().map(|one| one.backend).collect::<BTreeSet<_>>() {
        let found = choose(probe, Some(backend), false).context("the mechanism is gone")?;
        let ours = || contracts.iter().filter(|one| one.backend == backend);
        let fit = |there: Option<&BTreeSet<u32>>, is_there: &dyn Fn(&Contracted) -> bool| {
            let all = ours().filter(|one| is_there(one));
            let all: Vec<_> = all.map(|one| (one.vm.clone(), one.contract)).collect();
            admit(&found.grant.in_root_domain(there, partitions), &all).map(drop)
        };
        fit(None, &|one: &Contracted| own(one).is_none())?;
        for cpus in ours().filter_map(own) {
            fit(Some(cpus), &|one: &Contracted| own(one).is_some_and(|other| !other.is_disjoint(cpus)))?;
        }
    }
    Ok(())
}

/// Partitions of the VMs that are to have one, by the VM's name, each checked on its own: no other
/// VM is in the group of one.
pub(super) fn find<'a>(
    root: &Root,
    all: impl Iterator<Item = (&'a Contracted, &'a [Thread])>,
) -> Result<BTreeMap<String, Partition>> {
    let (all, mut found) = (all.collect::<Vec<_>>(), BTreeMap::new());
    for (one, threads) in &all {
        let Some(cpus) = one.cores.as_ref().and_then(rtvirtio_spec::Cores::partition) else { continue };
        let partition = Partition::of_threads(threads, cpus.clone());
        partition_writes(root, &[(one.vm.as_str(), &partition)]).map_err(|e| error(&one.vm, &e))?;
        found.insert(one.vm.clone(), partition);
    }
    for (one, threads) in all.iter().filter(|(one, _)| !found.contains_key(&one.vm)) {
        let around = found.iter().find(|(_, partition)| threads.iter().any(|t| partition.has(t)));
        if let Some((of, partition)) = around {
            bail!(
                Infeasible,
                "{}: it runs in {}, which is to be the partition of {of}: start each VM in a cgroup of its own, e.g. with \
                 `systemd-run --scope`",
                one.vm,
                partition.group.display()
            );
        }
    }
    Ok(found)
}

/// Writes that make all of these partitions.
pub(super) fn writes(root: &Root, all: &BTreeMap<String, Partition>) -> Result<Vec<Write>> {
    let of: Vec<(&str, &Partition)> = all.iter().map(|(vm, partition)| (vm.as_str(), partition)).collect();
    let names: Vec<&str> = of.iter().map(|(vm, _)| *vm).collect();
    partition_writes(root, &of).map_err(|e| error(&names.join(", "), &e))
}

/// Writes that make the group of one VM a partition, where the groups above have what it needs.
pub(crate) fn of_one(root: &Root, vm: &str, partition: &Partition) -> Result<Vec<Write>> {
    let writes = partition_writes(root, &[(vm, partition)]).map_err(|e| error(vm, &e))?;
    let group = partition.group.strip_prefix("/").unwrap_or(&partition.group);
    let is_above = |w: &&Write| !w.target.path.parent().is_some_and(|dir| dir.ends_with(group));
    match writes.iter().find(is_above) {
        None => Ok(writes),
        Some(above) => {
            bail!(System, "{vm}: its CPUs cannot be a partition: another program has changed {}", above.knob)
        }
    }
}

/// Checks that a VM's partition would take no CPU that another VM has, or is to get.
pub(super) fn check_free(vm: &str, cpus: &BTreeSet<u32>, others: &[(InForce, Vec<u32>)]) -> Result<()> {
    for (of, _) in others {
        let placed = of.cores.iter().flat_map(|c| c.placement.vcpus.iter().chain(&c.placement.service));
        let theirs = placed.chain(of.partition.iter().flat_map(|p| &p.cpus));
        let shared: BTreeSet<u32> = theirs.filter(|cpu| cpus.contains(cpu)).copied().collect();
        if !shared.is_empty() {
            bail!(
                Infeasible,
                "{vm}: CPU {} of its partition is of {}: list other CPUs in its `cores`",
                cpu_ranges(&shared),
                of.vm
            );
        }
    }
    Ok(())
}

/// Checks that no other VM's threads were given CPUs of a partition.
pub(super) fn check_apart(
    partitions: &BTreeMap<String, Partition>,
    chosen: &BTreeMap<String, Cores>,
) -> Result<()> {
    for (vm, cores) in chosen {
        let placed: BTreeSet<u32> =
            cores.placement.vcpus.iter().chain(&cores.placement.service).copied().collect();
        for (of, partition) in partitions {
            let shared: BTreeSet<u32> = placed.intersection(&partition.cpus).copied().collect();
            if !shared.is_empty() {
                bail!(
                    Infeasible,
                    "{vm}: CPU {} would be its own and is in the partition of {of}: list other CPUs in its `cores`",
                    cpu_ranges(&shared)
                );
            }
        }
    }
    Ok(())
}

/// CPUs of the root domain of a VM that is in none of the new partitions, once these have taken
/// theirs.
pub(super) fn left(
    root: &Root,
    vm: &str,
    threads: &[Thread],
    taken: &BTreeSet<u32>,
) -> Result<BTreeSet<u32>> {
    let domain = domain_of(root, threads)?;
    let left: BTreeSet<u32> = domain.difference(taken).copied().collect();
    if left.is_empty() {
        bail!(
            Infeasible,
            "{vm}: new partitions take all of its CPUs, {}: leave it at least one",
            cpu_ranges(&domain)
        );
    }
    Ok(left)
}

/// Note to the user on a partition that is about to be made.
pub(super) fn note(root: &Root, partition: &Partition) -> Result<String> {
    let mut text = format!(
        "its threads have CPUs {} together, as a partition of its cgroup {}: no other group's threads run there, except those of the \
         kernel that are bound to one of these CPUs",
        cpu_ranges(&partition.cpus),
        partition.group.display()
    );
    if has_systemd(root)? {
        text += "; where no unit of systemd asks for the cpuset controller (`AllowedCPUs=`), `systemctl daemon-reload` may take it away, \
                 and the partition with it: `rtvirtio keep` and `rtvirtio status` say so";
    }
    Ok(text)
}

/// Refuses contracts with partitions, for an agent of a cluster, which makes none.
pub(crate) fn refuse(held: &[VmCpu]) -> Result<()> {
    match held.iter().find(|of| of.partition.is_some()) {
        Some(of) => bail!(Argument, "{}: {NOT_BY_AGENTS}", of.vm),
        None => Ok(()),
    }
}

/// Sentence on the partition of a contract in force where it is not valid now; `None` where it is,
/// or the contract has none.
pub(crate) fn fault(root: &Root, of: &InForce) -> Option<(BTreeSet<u32>, String)> {
    let partition = of.partition.as_ref()?;
    let (vm, cpus) = (&of.vm, cpu_ranges(&partition.cpus));
    let text = match partition_fault(root, &partition.group) {
        Ok(None) => return None,
        Ok(Some(why)) => format!(
            "{vm}: its CPUs {cpus} are no valid partition now ({why}), and its contract is no guarantee until they are: `rtvirtio revert`, \
             and apply it again (rtvirtiod makes one of its own again, by its policy for drift)"
        ),
        Err(e) => format!("{vm}: whether its CPUs {cpus} are a valid partition is not known: {e}"),
    };
    Some((partition.cpus.clone(), text))
}

#[cfg(test)]
mod tests {
    use rtvirtio_cpu::{Level, Order, Settings};
    use rtvirtio_kernel::task::Membership;
    use rtvirtio_units::Enforcement;

    use super::super::cores::tests::{auto, host, in_force, one, placed, put, threads};
    use super::*;

    const SCOPE: &str = "/sys/fs/cgroup/machine.slice/plc.scope";

    fn partition() -> Partition {
        Partition { group: "/machine.slice/plc.scope".into(), cpus: BTreeSet::from([4, 5]) }
    }

    #[test]
    fn a_partition_that_is_not_valid_is_named_with_the_kernels_reason() {
        let (_dir, root) = host();
        let none = in_force(&one("plc", 10, auto()), placed(&[4]));
        assert_eq!(fault(&root, &none), None);
        let of = InForce { partition: Some(partition()), ..none };
        put(&root, format!("{SCOPE}/cpuset.cpus.partition"), "root\n");
        assert_eq!(fault(&root, &of), None);
        let reason = "root invalid (Parent unable to distribute cpu downstream)";
        put(&root, format!("{SCOPE}/cpuset.cpus.partition"), &format!("{reason}\n"));
        let (cpus, text) = fault(&root, &of).unwrap();
        assert_eq!(cpus, partition().cpus);
        assert!(text.contains(reason) && text.contains("no guarantee"), "{text}");
        put(&root, "/proc/self/mountinfo", "damaged\n");
        let (_, text) = fault(&root, &of).unwrap();
        assert!(text.starts_with("plc: "), "{text}");
    }

    #[test]
    fn a_vm_without_a_group_of_its_own_is_named() {
        let (_dir, root) = host();
        put(&root, "/proc/sys/kernel/osrelease", "6.12.9\n");
        for (file, text) in [("cgroup.controllers", "cpuset\n"), ("cgroup.subtree_control", "cpuset\n")] {
            put(&root, format!("/sys/fs/cgroup/{file}"), text);
        }
        put(&root, format!("{SCOPE}/cgroup.procs"), "100\n");
        put(&root, "/sys/fs/cgroup/machine.slice/cgroup.subtree_control", "cpuset\n");
        let wanted = rtvirtio_spec::Cores { cpus: Some(partition().cpus), partition: true, ..auto() };
        let (plc, web) = (one("plc", 10, wanted), one("web", 10, auto()));
        let (mut of_plc, mut of_web) = (threads(100, 1), threads(200, 1));
        let in_group = |group: &str| Membership { controllers: String::new(), path: group.into() };
        let found = |of_plc: &[Thread], of_web: &[Thread]| {
            let all = [(&plc, of_plc), (&web, of_web)];
            find(&root, all.into_iter())
        };
        let error = found(&of_plc, &of_web).unwrap_err();
        assert!(
            error.to_string().starts_with("plc: its CPUs cannot be a partition: it runs in the root"),
            "{error}"
        );
        of_plc.iter_mut().for_each(|thread| thread.cgroups = vec![in_group("/machine.slice/plc.scope")]);
        of_web[1].cgroups = vec![in_group("/machine.slice/plc.scope/web")];
        let error = found(&of_plc, &of_web).unwrap_err();
        assert!(
            error.to_string().starts_with("web: it runs in /machine.slice/plc.scope, which is"),
            "{error}"
        );
        of_web[1].cgroups = vec![in_group("/machine.slice/web.scope")];
        let found = found(&of_plc, &of_web).unwrap();
        assert_eq!(found, BTreeMap::from([("plc".to_owned(), partition())]));
        let files: Vec<String> =
            writes(&root, &found).unwrap().iter().map(|write| write.target.to_string()).collect();
        assert_eq!(files.last().unwrap(), &format!("{SCOPE}/cpuset.cpus.partition"));
    }

    #[test]
    fn agents_make_no_partitions() {
        let one = one("plc", 10, auto());
        let settings = Settings {
            backend: Backend::Deadline,
            strength: Enforcement::Guarantee,
            writes: Vec::new(),
            group: None,
            outside: Vec::new(),
            notes: Vec::new(),
        };
        let held = |partition| VmCpu {
            vm: one.vm.clone(),
            contract: one.contract,
            order: Order::Contract,
            level: Level::ALONE,
            settings: settings.clone(),
            found: None,
            urgency: None,
            cores: None,
            partition,
        };
        refuse(&[held(None)]).unwrap();
        let error = refuse(&[held(None), held(Some(partition()))]).unwrap_err();
        assert!(
            error.kind() == Kind::Argument && error.to_string().contains("`rtvirtio apply` and rtvirtiod"),
            "{error}"
        );
    }

    #[test]
    fn no_other_vm_gets_a_cpu_of_a_partition() {
        let partitions = BTreeMap::from([("plc".to_owned(), partition())]);
        let of = |cpus: &[u32]| BTreeMap::from([("web".to_owned(), placed(cpus))]);
        check_apart(&partitions, &of(&[0, 1])).unwrap();
        let error = check_apart(&partitions, &of(&[1, 4])).unwrap_err();
        assert!(error.kind() == Kind::Infeasible && error.to_string().contains("CPU 4"), "{error}");
    }

    #[test]
    fn a_spec_with_a_partition_is_refused_where_the_kernel_makes_none() {
        let (_dir, root) = host();
        put(&root, "/sys/fs/cgroup/cgroup.controllers", "cpu\n");
        let error = check(&root, "plc").unwrap_err();
        assert!(error.kind() == Kind::Infeasible && error.to_string().contains("cgroup_no_v1"), "{error}");
        put(&root, "/sys/fs/cgroup/cgroup.controllers", "cpuset cpu\n");
        put(&root, "/proc/sys/kernel/osrelease", "6.1.0\n");
        let error = check(&root, "plc").unwrap_err();
        assert!(error.to_string().contains("comes with Linux 6.7"), "{error}");
        put(&root, "/proc/sys/kernel/osrelease", "6.12.9\n");
        check(&root, "plc").unwrap();
    }
}
