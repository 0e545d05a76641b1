//! CPUs of a VM as a partition of cgroup v2's cpuset: there SCHED_DEADLINE needs no other CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{Form, Target, Write};
use rtvirtio_kernel::text::{cpu_list, cpu_ranges};
use rtvirtio_kernel::{
    Cgroups, HostError, PartitionError, PartitionFile, PartitionStep, Root, ancestor_steps, cpuset,
    partition_steps,
};
use rtvirtio_vmm::Thread;
use serde::{Deserialize, Serialize};

use crate::ask::main_of;

/// Partition for the threads of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// The VM's cgroup, below the root of the hierarchy.
    pub group: PathBuf,
    /// CPUs that the group has, and no group next to it.
    pub cpus: BTreeSet<u32>,
}

impl Partition {
    /// Partition of these CPUs for the cgroup of a VM with these threads: of the systemd unit
    /// around them where there is one. The root where no cgroup of v2 is known.
    #[must_use]
    pub fn of_threads(threads: &[Thread], cpus: BTreeSet<u32>) -> Self {
        let group = main_of(threads).and_then(of_v2).map(Cgroups::unit_of);
        Self { group: group.unwrap_or_else(|| PathBuf::from("/")), cpus }
    }

    /// The threads as they are once the partition is made: a thread in the group has its CPUs, as
    /// far as no program has pinned it, and any other one none of them.
    pub fn entered(&self, root: &Root, threads: &[Thread]) -> Result<Vec<Thread>, HostError> {
        let online = cpuset(root, &[])?;
        let entered = |t: &Thread| {
            if !self.has(t) {
                return Ok(without(t, &self.cpus, &online));
            }
            let Some(mask) = cpu_list(&t.affinity) else { return Ok(t.clone()) };
            let unpinned: BTreeSet<u32> = cpuset(root, &t.cgroups)?;
            let left: BTreeSet<u32> = mask.intersection(&self.cpus).copied().collect();
            let is_pinned = !unpinned.is_subset(&mask) && !left.is_empty();
            let cpus = if is_pinned { &left } else { &self.cpus };
            Ok::<_, HostError>(Thread { affinity: cpu_ranges(cpus), ..t.clone() })
        };
        threads.iter().map(entered).collect()
    }

    /// Whether a thread is in the group, or in one below it.
    #[must_use]
    pub fn has(&self, thread: &Thread) -> bool {
        of_v2(thread).is_some_and(|group| group.starts_with(&self.group))
    }
}

/// The threads of a VM that is in no new partition as they are once all of these are made, which
/// take the CPUs `taken`.
pub fn outside(root: &Root, threads: &[Thread], taken: &BTreeSet<u32>) -> Result<Vec<Thread>, HostError> {
    let online = cpuset(root, &[])?;
    Ok(threads.iter().map(|t| without(t, taken, &online)).collect())
}

/// A thread in no partition that takes these CPUs: what no other group may use is not left to the
/// threads of the kernel either.
fn without(t: &Thread, taken: &BTreeSet<u32>, online: &BTreeSet<u32>) -> Thread {
    let Some(mask) = cpu_list(&t.affinity) else { return t.clone() };
    let left: BTreeSet<u32> = mask.difference(taken).copied().collect();
    let left = if left.is_empty() { online.difference(taken).copied().collect() } else { left };
    Thread { affinity: cpu_ranges(&left), ..t.clone() }
}

/// Cgroup of a thread in the hierarchy of v2.
fn of_v2(thread: &Thread) -> Option<&Path> {
    thread.cgroups.iter().find(|m| m.controllers.is_empty()).map(|m| m.path.as_path())
}

/// Writes that make the partitions of these VMs, to be made before those of their contracts. The
/// journal puts them back in the opposite order.
pub fn partition_writes(root: &Root, all: &[(&str, &Partition)]) -> Result<Vec<Write>, PartitionError> {
    let wanted: Vec<_> = all.iter().map(|(_, of)| (of.group.as_path(), &of.cpus)).collect();
    let steps = partition_steps(root, &wanted)?;
    let name = |group: &Path| {
        let of = all.iter().find(|(_, partition)| partition.group == group);
        of.map_or_else(|| group.display().to_string(), |(vm, _)| (*vm).to_owned())
    };
    Ok(steps.into_iter().map(|step| write(&name(&step.group), step)).collect())
}

/// Writes that give the groups above these partitions what all of them need together, to be made
/// before those of each, and with fewer of them once one was put back; `before` as in
/// [`ancestor_steps`].
pub fn ancestor_writes(
    root: &Root,
    all: &[&Partition],
    before: &BTreeMap<PathBuf, BTreeSet<u32>>,
) -> Result<Vec<Write>, PartitionError> {
    let wanted: Vec<_> = all.iter().map(|of| (of.group.as_path(), &of.cpus)).collect();
    let steps = ancestor_steps(root, &wanted, before)?;
    Ok(steps.into_iter().map(|step| write(&step.group.display().to_string(), step)).collect())
}

/// Write of a step for the group or VM `name`.
fn write(name: &str, step: PartitionStep) -> Write {
    let (what, form) = match step.what {
        PartitionFile::Controllers => ("cpuset controller below", Form::CpusetEnabled),
        PartitionFile::Exclusive => ("exclusive CPUs of", Form::CpuList),
        PartitionFile::Kind => ("partition of", Form::Partition),
    };
    let target = Target::host(step.file, form);
    Write { created_by: step.created_by, ..Write::new(format!("{what} {name}"), target, step.value) }
}
