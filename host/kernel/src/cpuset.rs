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
///
/// # Errors
/// When the mounts, the CPUs that are online or the cpuset cannot be read.
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

/// CPUs to which vCPUs of a process are pinned, one each, by the names of its threads. A process
/// that ends meanwhile has none.
///
/// # Errors
/// When a thread cannot be read.
pub fn pinned_vcpus(root: &Root, pid: u32) -> Result<Vec<u32>, HostError> {
    let mut pinned = Vec::new();
    for tid in unless_gone(task::tids(root, pid))?.unwrap_or_default() {
        let read = || {
            let stat = task::stat(root, pid, tid)?;
            let runs = !stat.ended && vcpus_in_name(&stat.comm).is_some();
            if runs { task::affinity(root, pid, tid).map(Some) } else { Ok(None) }
        };
        let list = unless_gone(read())?.flatten().and_then(|list| text::cpu_list(&list));
        pinned.extend(list.filter(|cpus| cpus.len() == 1).into_iter().flatten());
    }
    Ok(pinned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Root, path: &str, text: &str) {
        let path = root.at(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn of(root: &Root, controllers: &str, group: &str) -> Vec<u32> {
        let member = Membership { controllers: controllers.to_owned(), path: group.into() };
        cpuset(root, &[member]).unwrap().into_iter().collect()
    }

    #[test]
    fn the_nearest_cpuset_counts_and_what_is_offline_does_not() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        put(&root, ONLINE, "0-2\n");
        put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [0, 1, 2], "no controller");
        put(&root, "/sys/fs/cgroup/machine.slice/cpuset.cpus.effective", "1-3\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [1, 2]);
        put(&root, "/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.effective", "2\n");
        assert_eq!(of(&root, "", "/machine.slice/a.scope"), [2]);
        put(&root, "/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.effective", "none\n");
        let member = Membership { controllers: String::new(), path: "/machine.slice/a.scope".into() };
        assert!(cpuset(&root, &[member]).is_err(), "unreadable is not the same as no limit");
        let v1 = "38 31 0:35 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        put(&root, "/proc/self/mountinfo", v1);
        put(&root, "/sys/fs/cgroup/cpuset/vm/cpuset.effective_cpus", "0,2\n");
        assert_eq!(of(&root, "cpuset", "/vm"), [0, 2]);
    }

    #[test]
    fn a_vcpu_with_one_cpu_has_it_to_itself() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        assert_eq!(pinned_vcpus(&root, 7).unwrap(), [] as [u32; 0], "it has ended");
        for (tid, name, cpus) in
            [(7, "qemu", "0"), (8, "CPU 0/KVM", "3"), (9, "CPU 1/KVM", "0-3"), (10, "worker", "1")]
        {
            let dir = format!("/proc/7/task/{tid}");
            let stat = format!("{tid} ({name}) S 1 {}\n", "0 ".repeat(60));
            put(&root, &format!("{dir}/stat"), &stat);
            put(&root, &format!("{dir}/status"), &format!("Name:\t{name}\nCpus_allowed_list:\t{cpus}\n"));
        }
        assert_eq!(pinned_vcpus(&root, 7).unwrap(), [3]);
    }
}
