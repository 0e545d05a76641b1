//! Whether each VM has an I/O cgroup in which weights and limits can act on it alone.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::Finding;
#[cfg(test)]
use super::Level;
use crate::{Cgroups, Root};

const WHY: &str = "weights and limits of I/O act between cgroups: without one of its own a VM can be given nothing and held to nothing";
const ALONE: &str =
    "start it in a cgroup of its own, e.g. with `systemd-run --scope`, or below machine.slice";

/// Findings for VMs in the root cgroup, VMs that share a cgroup, and VMs with one of their own.
pub(super) fn findings(root: &Root, pids: &[u32]) -> Vec<Finding> {
    // A missing hierarchy is a finding of its own, `cgroup.io`.
    let Ok(cgroups) = Cgroups::detect(root) else { return Vec::new() };
    let mut by_cgroup: BTreeMap<PathBuf, Vec<u32>> = BTreeMap::new();
    let mut found = Vec::new();
    for &pid in pids {
        match cgroups.of_pid(root, pid) {
            Ok(cgroup) => by_cgroup.entry(Cgroups::unit_of(&cgroup)).or_default().push(pid),
            Err(e) if e.is_gone() => {}
            Err(e) => found.push(Finding::unknown(&format!("vm.cgroup.{pid}"), &e, WHY)),
        }
    }
    for (cgroup, pids) in by_cgroup {
        let name = |pid: &u32| format!("VM {pid}{}", vm_name(root, *pid));
        match pids.as_slice() {
            all if Cgroups::is_root(&cgroup) => found.extend(all.iter().map(|pid| {
                let what = format!("{} is in the root cgroup: no weights or limits can act", name(pid));
                Finding::warn(&format!("vm.cgroup.{pid}"), what, WHY, ALONE)
            })),
            [pid] => {
                let what = format!("{} has the cgroup {}", name(pid), cgroup.display());
                found.push(Finding::ok(&format!("vm.cgroup.{pid}"), what, WHY));
            }
            all => {
                let names: Vec<String> = all.iter().map(name).collect();
                let what = format!(
                    "{} share the cgroup {}: no weights or limits can act on one of them",
                    names.join(" and "),
                    cgroup.display()
                );
                found.push(Finding::warn(&format!("vm.cgroup.{}", all[0]), what, WHY, ALONE));
            }
        }
    }
    found
}

/// ` (database)`, from QEMU's `-name guest=database,debug-threads=on`; nothing without it.
pub(super) fn vm_name(root: &Root, pid: u32) -> String {
    let line = fs::read(root.at(format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let given = words.find(|word| word == "-name").and_then(|_| words.next());
    let name = given.as_deref().and_then(|given| given.split(',').next());
    name.map_or_else(String::new, |name| format!(" ({})", name.strip_prefix("guest=").unwrap_or(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    #[test]
    fn a_vm_without_a_cgroup_of_its_own_is_named() {
        let root = TestRoot::new(&[]);
        root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        root.put("/sys/fs/cgroup/cgroup.controllers", "io\n");
        let vm = |pid: u32, name: &str, cgroup: &str| {
            root.put(&format!("/proc/{pid}/cgroup"), &format!("0::{cgroup}\n"));
            root.put(
                &format!("/proc/{pid}/cmdline"),
                &format!("qemu\0-name\0guest={name},debug-threads=on\0-m\01\0"),
            );
        };
        vm(1, "database", "/");
        vm(2, "plc", "/machine.slice/machine-qemu.scope/libvirt/emulator");
        vm(3, "a", "/user.slice/session-1.scope");
        vm(4, "b", "/user.slice/session-1.scope");
        let found = findings(&root, &[1, 2, 3, 4, 5]);
        let lines: Vec<_> = found.iter().map(|f| (f.level, f.id.as_str(), f.what.as_str())).collect();
        assert_eq!(
            lines,
            [
                (
                    Level::Warn,
                    "vm.cgroup.1",
                    "VM 1 (database) is in the root cgroup: no weights or limits can act"
                ),
                (Level::Ok, "vm.cgroup.2", "VM 2 (plc) has the cgroup /machine.slice/machine-qemu.scope"),
                (
                    Level::Warn,
                    "vm.cgroup.3",
                    "VM 3 (a) and VM 4 (b) share the cgroup /user.slice/session-1.scope: no weights or limits can act on one of them"
                ),
            ]
        );
        assert!(found[0].remedy.contains("systemd-run --scope"));
    }
}
