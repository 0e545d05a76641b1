//! Which CPUs the kernel balances deadline threads over.
//!
//! A deadline thread must be allowed on all CPUs of its root domain (`Documentation/scheduler/sched-deadline.rst`, section 5). That is the machine, or
//! since cgroup v2's cpuset a partition of it (`Documentation/admin-guide/cgroup-v2.rst`, `cpuset.cpus.partition`). Domains made with cpusets of
//! cgroup v1 are not known here: there the machine is meant.

use std::collections::BTreeSet;
use std::path::Path;

use crate::mounts::mounts;
use crate::task::Membership;
use crate::{HostError, Root, text};

/// CPUs of the root domain of a thread that is in these cgroups.
///
/// # Errors
/// When the mounts or the list of CPUs that are online cannot be read.
pub fn root_domain(root: &Root, cgroups: &[Membership]) -> Result<BTreeSet<u32>, HostError> {
    let online = text::cpu_list(&root.read("/sys/devices/system/cpu/online")?).unwrap_or_default();
    Ok(partition(root, cgroups)?.unwrap_or(online))
}

/// CPUs of the nearest partition around the thread; the hierarchy's own root always is one.
fn partition(root: &Root, cgroups: &[Membership]) -> Result<Option<BTreeSet<u32>>, HostError> {
    let mounts = mounts(root)?;
    let whole = mounts.iter().find(|m| m.fs == "cgroup2" && m.root == Path::new("/"));
    let (Some(mount), Some(own)) = (whole, cgroups.iter().find(|m| m.controllers.is_empty())) else {
        return Ok(None);
    };
    for group in own.path.ancestors() {
        let dir = mount.point.join(group.strip_prefix("/").unwrap_or(group));
        let read = |file: &str| root.read_optional(dir.join(file)).ok().flatten();
        let is_root = group == Path::new("/");
        // `root invalid (...)` is none.
        if is_root || read("cpuset.cpus.partition").is_some_and(|p| p.trim() == "root") {
            let cpus = read("cpuset.cpus.effective").and_then(|t| text::cpu_list(&t));
            return Ok(cpus.filter(|c| !c.is_empty()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "/sys/fs/cgroup";

    fn host() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        put(&root, "/sys/devices/system/cpu/online", "0-3\n");
        put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        (dir, root)
    }

    fn put(root: &Root, path: &str, text: &str) {
        let path = root.at(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn of(root: &Root, group: &str) -> Vec<u32> {
        let member = Membership { controllers: String::new(), path: group.into() };
        root_domain(root, &[member]).unwrap().into_iter().collect()
    }

    #[test]
    fn it_is_the_nearest_valid_partition() {
        let (_dir, root) = host();
        assert_eq!(of(&root, "/machine.slice/a.scope"), [0, 1, 2, 3], "no cpuset controller");
        put(&root, &format!("{GROUPS}/cpuset.cpus.effective"), "0-1\n");
        put(&root, &format!("{GROUPS}/machine.slice/cpuset.cpus.partition"), "root\n");
        put(&root, &format!("{GROUPS}/machine.slice/cpuset.cpus.effective"), "2-3\n");
        put(&root, &format!("{GROUPS}/machine.slice/a.scope/cpuset.cpus.partition"), "member\n");
        assert_eq!(of(&root, "/machine.slice/a.scope"), [2, 3]);
        assert_eq!(of(&root, "/system.slice"), [0, 1], "what the partition has left");
        let invalid = "root invalid (Cpu list in cpuset.cpus not exclusive)\n";
        put(&root, &format!("{GROUPS}/machine.slice/cpuset.cpus.partition"), invalid);
        assert_eq!(of(&root, "/machine.slice/a.scope"), [0, 1]);
    }

    #[test]
    fn without_cgroup_v2_it_is_the_machine() {
        let (_dir, root) = host();
        put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
        assert_eq!(of(&root, "/"), [0, 1, 2, 3]);
    }
}
