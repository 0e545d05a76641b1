//! CPUs that cpusets leave to threads, and CPUs that other VMs' vCPUs have to themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::mounts::{Mount, mounts};
use crate::task::{self, Membership, vcpus_in_name};
use crate::topology::cpus_in;
use crate::{HostError, Root, text, unless_gone};

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// CPUs that a thread in these cgroups may be given: those of its cpuset that are online, all that
/// are online where no cpuset is seen to limit it.
pub fn cpuset(root: &Root, cgroups: &[Membership]) -> Result<BTreeSet<u32>, HostError> {
    let online = cpus_in(root, Path::new(ONLINE))?.unwrap_or_default();
    let mounts = mounts(root)?;
    let whole = |mount: &&Mount| mount.root == Path::new("/");
    let file = |mount: &Mount, group: &Path, name: &str| -> PathBuf {
        mount.point.join(group.strip_prefix("/").unwrap_or(group)).join(name)
    };
    let v1 = |mount: &&Mount| mount.fs == "cgroup" && mount.options.iter().any(|o| o == "cpuset");
    let limit = if let (Some(mount), Some(own)) =
        (mounts.iter().filter(whole).find(v1), cgroups.iter().find(|m| m.has("cpuset")))
    {
        cpus_in(root, &file(mount, &own.path, "cpuset.effective_cpus"))?
    } else if let (Some(mount), Some(own)) = (
        mounts.iter().filter(whole).find(|m| m.fs == "cgroup2"),
        cgroups.iter().find(|m| m.controllers.is_empty()),
    ) {
        // The nearest group that has the controller.
        let mut nearest = None;
        for group in own.path.ancestors() {
            nearest = cpus_in(root, &file(mount, group, "cpuset.cpus.effective"))?;
            if nearest.is_some() {
                break;
            }
        }
        nearest
    } else {
        None
    };
    Ok(match limit.filter(|cpus| !cpus.is_empty()) {
        Some(cpus) => cpus.intersection(&online).copied().collect(),
        None => online,
    })
}

/// CPUs to which a process's threads are pinned, where one of them is a vCPU that has one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedCpus {
    /// CPUs of vCPUs that have one each.
    pub vcpus: BTreeSet<u32>,
    /// CPUs of other threads that may not use all.
    pub others: BTreeSet<u32>,
}

/// Pinned threads of a process, by the names of its threads; none in one without a pinned vCPU, or
/// that ends meanwhile. `online` are the CPUs that are online.
pub fn pinned_cpus(root: &Root, pid: u32, online: &BTreeSet<u32>) -> Result<PinnedCpus, HostError> {
    let mut pinned = PinnedCpus::default();
    let tids = unless_gone(task::tids(root, pid))?.unwrap_or_default();
    let is_vcpu = |tid: u32| {
        let stat = task::stat(root, pid, tid)?;
        Ok::<_, HostError>(!stat.ended && vcpus_in_name(&stat.comm).is_some())
    };
    let (mut vcpus, mut others) = (Vec::new(), Vec::new());
    for tid in tids {
        match unless_gone(is_vcpu(tid))? {
            Some(true) => vcpus.push(tid),
            Some(false) => others.push(tid),
            None => {}
        }
    }
    let cpus = |tid: u32| {
        let list = unless_gone(task::affinity(root, pid, tid))?;
        Ok::<_, HostError>(list.and_then(|list| text::cpu_list(&list)).unwrap_or_default())
    };
    for tid in vcpus {
        pinned.vcpus.extend(Some(cpus(tid)?).filter(|cpus| cpus.len() == 1).into_iter().flatten());
    }
    for tid in others.into_iter().filter(|_| !pinned.vcpus.is_empty()) {
        pinned.others.extend(Some(cpus(tid)?).filter(|cpus| !online.is_subset(cpus)).into_iter().flatten());
    }
    Ok(pinned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    fn of(root: &Root, controllers: &str, group: &str) -> Vec<u32> {
        let member = Membership { controllers: controllers.to_owned(), path: group.into() };
        cpuset(root, &[member]).unwrap().into_iter().collect()
    }

    #[test]
    fn the_nearest_cpuset_counts_and_what_is_offline_does_not() {
        let root = TestRoot::new(&[]);
        root.put(ONLINE, "0-2\n");
        root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [0, 1, 2], "no controller");
        root.put("/sys/fs/cgroup/machine.slice/cpuset.cpus.effective", "1-3\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [1, 2]);
        root.put("/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.effective", "2\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [2]);
        root.put("/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.effective", "none\n");
        let member = Membership { controllers: String::new(), path: "/machine.slice/a.scope".into() };
        assert!(cpuset(&root, &[member]).is_err(), "unreadable is not the same as no limit");
        let v1 = "38 31 0:35 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        root.put("/proc/self/mountinfo", v1);
        root.put("/sys/fs/cgroup/cpuset/vm/cpuset.effective_cpus", "0,2\n");
        assert_eq!(of(&root, "cpuset", "/vm"), [0, 2]);
    }

    #[test]
    fn a_vcpu_with_one_cpu_has_it_to_itself() {
        let root = TestRoot::new(&[]);
        let online = BTreeSet::from([0, 1, 2, 3]);
        assert_eq!(pinned_cpus(&root, 7, &online).unwrap(), PinnedCpus::default(), "it has ended");
        for (tid, name, cpus) in
            [(7, "qemu", "0"), (8, "CPU 0/KVM", "3"), (9, "CPU 1/KVM", "0-3"), (10, "worker", "1")]
        {
            let dir = format!("/proc/7/task/{tid}");
            let stat = format!("{tid} ({name}) S 1 {}\n", "0 ".repeat(60));
            root.put(&format!("{dir}/stat"), &stat);
            root.put(&format!("{dir}/status"), &format!("Name:\t{name}\nCpus_allowed_list:\t{cpus}\n"));
        }
        let pinned = pinned_cpus(&root, 7, &online).unwrap();
        assert_eq!((pinned.vcpus, pinned.others), (BTreeSet::from([3]), BTreeSet::from([0, 1])));
        // Without a pinned vCPU nothing of it counts.
        root.put("/proc/7/task/8/status", "Cpus_allowed_list:\t0-3\n");
        assert_eq!(pinned_cpus(&root, 7, &online).unwrap(), PinnedCpus::default());
    }
}
