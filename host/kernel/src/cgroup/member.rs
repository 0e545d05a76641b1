//! Cgroup for further processes whose I/O counts as the VM's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Cgroups, Hierarchy, remove_dir};
use crate::{HostError, Root};

/// Name of the child group that is made where the VM's own takes no process.
const NAME: &str = "rtvirtio-tasks";

/// Cgroup that takes processes, and whose weight and limits are the VM's. A child group that was
/// made for them is removed when this is dropped.
#[derive(Debug)]
pub struct MemberGroup {
    root: Root,
    dir: PathBuf,
    made: bool,
}

impl Cgroups {
    /// Returns the VM's cgroup itself where it takes processes. On v2 a cgroup that has controllers
    /// enabled for its children takes none (EBUSY; `Documentation/admin-guide/cgroup-v2.rst`, "No
    /// Internal Process Constraint"), such as the scope above libvirt's groups of threads: there a
    /// child group is made.
    ///
    /// # Errors
    /// When the cgroup is gone, or no child can be made.
    pub fn member_group(&self, root: &Root, cgroup: &Path) -> Result<MemberGroup, HostError> {
        let dir = self.dir(cgroup)?;
        let itself = MemberGroup { root: root.clone(), dir: dir.clone(), made: false };
        if self.hierarchy == Hierarchy::V1 || Self::is_root(cgroup) {
            return Ok(itself);
        }
        // The root of threaded groups takes processes whatever its children have: only threaded
        // controllers can be enabled there.
        let kind = root.read_optional(dir.join("cgroup.type"))?.unwrap_or_default();
        let enabled = root.read_optional(dir.join("cgroup.subtree_control"))?.unwrap_or_default();
        if kind.trim() == "domain threaded" || enabled.trim().is_empty() {
            return Ok(itself);
        }
        let child = dir.join(NAME);
        match fs::create_dir(root.at(&child)) {
            // Left by a run that was killed.
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                Err(HostError::Directory { action: "create", path: child, source: e })
            }
            _ => Ok(MemberGroup { root: root.clone(), dir: child, made: true }),
        }
    }
}

impl MemberGroup {
    /// Path of the file that takes processes.
    #[must_use]
    pub fn procs(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }
}

impl Drop for MemberGroup {
    fn drop(&mut self) {
        if self.made {
            // Removed with the VM's cgroup at the latest.
            let _ = remove_dir(&self.root, &self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directory that behaves like cgroups, where groups are empty.
    fn vm(kind: &str, enabled: &str) -> (tempfile::TempDir, Root, Cgroups) {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let scope = dir.path().join("sys/fs/cgroup/plc.scope");
        fs::create_dir_all(&scope).unwrap();
        fs::write(scope.join("cgroup.type"), kind).unwrap();
        fs::write(scope.join("cgroup.subtree_control"), enabled).unwrap();
        let cgroups = Cgroups {
            hierarchy: Hierarchy::V2,
            controller: "io",
            mount: "/sys/fs/cgroup".into(),
            mount_root: "/".into(),
        };
        (dir, root, cgroups)
    }

    #[test]
    fn a_child_is_made_only_where_the_vms_group_takes_no_process() {
        let vm_group = Path::new("/plc.scope");
        let itself = Path::new("/sys/fs/cgroup/plc.scope/cgroup.procs");
        for (kind, enabled) in [("domain\n", "\n"), ("domain threaded\n", "cpu\n")] {
            let (_dir, root, cgroups) = vm(kind, enabled);
            assert_eq!(cgroups.member_group(&root, vm_group).unwrap().procs(), itself);
        }
        let (dir, root, cgroups) = vm("domain\n", "cpu io memory\n");
        let child = dir.path().join("sys/fs/cgroup/plc.scope/rtvirtio-tasks");
        for _ in 0..2 {
            let group = cgroups.member_group(&root, vm_group).unwrap();
            assert_eq!(root.at(group.procs()), child.join("cgroup.procs"));
            assert!(child.exists());
            drop(group);
            assert!(!child.exists());
        }
        // Left by a run that was killed.
        fs::create_dir(&child).unwrap();
        drop(cgroups.member_group(&root, vm_group).unwrap());
        assert!(!child.exists());
        let v1 = Cgroups { hierarchy: Hierarchy::V1, ..cgroups };
        assert_eq!(v1.member_group(&root, vm_group).unwrap().procs(), itself);
    }
}
