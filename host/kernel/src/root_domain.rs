//! CPUs over which the kernel balances deadline threads.
//!
//! A deadline thread must be allowed on all CPUs of its root domain
//! (`Documentation/scheduler/sched-deadline.rst`, section 5). That is the machine, or since cgroup
//! v2's cpuset a partition of it (`Documentation/admin-guide/cgroup-v2.rst`,
//! `cpuset.cpus.partition`). CPUs that are isolated, at boot (`isolcpus=`) or by partitions of that
//! type, form one root domain together. Root domains made with cpusets of cgroup v1 are not
//! detected: the whole machine is assumed there.

use std::collections::BTreeSet;
use std::path::Path;

use crate::mounts::mounts;
use crate::task::Membership;
use crate::topology::{cpus_in, isolated};
use crate::{HostError, Root, text};

const CPUS: &str = "/sys/devices/system/cpu";

/// CPUs of the root domain of a thread that is in these cgroups and may run on these CPUs
/// (`Cpus_allowed_list`).
pub fn root_domain(root: &Root, cgroups: &[Membership], affinity: &str) -> Result<BTreeSet<u32>, HostError> {
    let online = cpus_in(root, Path::new(&format!("{CPUS}/online")))?.unwrap_or_default();
    let isolated = isolated(root)?;
    let domain = partition(root, cgroups)?.unwrap_or(online);
    let mask = text::cpu_list(affinity).unwrap_or_default();
    if !mask.is_empty() && mask.is_subset(&isolated) {
        return Ok(isolated);
    }
    let rest: BTreeSet<u32> = domain.difference(&isolated).copied().collect();
    Ok(if rest.is_empty() { domain } else { rest })
}

/// CPUs of the nearest partition around the thread; the hierarchy's own root, which alone has no
/// file for that, always is one.
fn partition(root: &Root, cgroups: &[Membership]) -> Result<Option<BTreeSet<u32>>, HostError> {
    let mounts = mounts(root)?;
    let whole = mounts.iter().find(|m| m.fs == "cgroup2" && m.root == Path::new("/"));
    let (Some(mount), Some(own)) = (whole, cgroups.iter().find(|m| m.controllers.is_empty())) else {
        return Ok(None);
    };
    let file =
        |group: &Path, name: &str| mount.point.join(group.strip_prefix("/").unwrap_or(group)).join(name);
    let cpus = |group: &Path, name: &str| {
        Ok::<_, HostError>(cpus_in(root, &file(group, name))?.filter(|c| !c.is_empty()))
    };
    let top = Path::new("/");
    for group in own.path.ancestors() {
        let kind = root.read_optional(file(group, "cpuset.cpus.partition"))?;
        // `root invalid (...)` is no partition.
        match kind.as_deref().map(str::trim) {
            Some("root") => return cpus(group, "cpuset.cpus.effective"),
            // Before Linux 6.7 the kernel does not list the other isolated CPUs.
            Some("isolated") => {
                let all = cpus(top, "cpuset.cpus.isolated")?;
                return if all.is_some() { Ok(all) } else { cpus(group, "cpuset.cpus.effective") };
            }
            None if group == top => return cpus(group, "cpuset.cpus.effective"),
            _ => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    const GROUPS: &str = "/sys/fs/cgroup";

    fn host() -> TestRoot {
        TestRoot::new(&[
            ("/sys/devices/system/cpu/online", "0-3\n"),
            ("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ])
    }

    fn of(root: &Root, group: &str) -> Vec<u32> {
        let member = Membership { controllers: String::new(), path: group.into() };
        root_domain(root, &[member], "0-3").unwrap().into_iter().collect()
    }

    #[test]
    fn it_is_the_nearest_valid_partition() {
        let root = host();
        assert_eq!(of(&root, "/machine.slice/a.scope"), [0, 1, 2, 3], "no cpuset controller");
        root.put(&format!("{GROUPS}/cpuset.cpus.effective"), "0-1\n");
        root.put(&format!("{GROUPS}/machine.slice/cpuset.cpus.partition"), "root\n");
        root.put(&format!("{GROUPS}/machine.slice/cpuset.cpus.effective"), "2-3\n");
        root.put(&format!("{GROUPS}/machine.slice/a.scope/cpuset.cpus.partition"), "member\n");
        assert_eq!(of(&root, "/machine.slice/a.scope"), [2, 3]);
        assert_eq!(of(&root, "/system.slice"), [0, 1], "what the partition has left");
        let invalid = "root invalid (Cpu list in cpuset.cpus not exclusive)\n";
        root.put(&format!("{GROUPS}/machine.slice/cpuset.cpus.partition"), invalid);
        assert_eq!(of(&root, "/machine.slice/a.scope"), [0, 1]);
    }

    #[test]
    fn isolated_cpus_are_a_domain_together() {
        let root = host();
        root.put(&format!("{GROUPS}/cpuset.cpus.effective"), "0-1\n");
        for (group, cpu) in [("a", "2\n"), ("b", "3\n")] {
            root.put(&format!("{GROUPS}/{group}/cpuset.cpus.partition"), "isolated\n");
            root.put(&format!("{GROUPS}/{group}/cpuset.cpus.effective"), cpu);
        }
        assert_eq!(of(&root, "/a"), [2], "an older kernel");
        root.put(&format!("{GROUPS}/cpuset.cpus.isolated"), "2-3\n");
        assert_eq!(of(&root, "/a"), [2, 3]);
        // CPUs isolated at boot.
        root.put("/sys/devices/system/cpu/isolated", "1\n");
        assert_eq!(of(&root, "/"), [0]);
        let pinned: Vec<u32> = root_domain(&root, &[], "1").unwrap().into_iter().collect();
        assert_eq!(pinned, [1]);
        // A mount of a part of the hierarchy, whose root is no partition.
        root.put(&format!("{GROUPS}/cpuset.cpus.partition"), "member\n");
        assert_eq!(of(&root, "/c"), [0, 2, 3]);
    }

    #[test]
    fn without_cgroup_v2_it_is_the_machine() {
        let root = host();
        root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
        assert_eq!(of(&root, "/"), [0, 1, 2, 3]);
    }
}
