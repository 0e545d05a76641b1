//! VMs that run, and whether they still do: a helper may outlive its VM in the VM's cgroup.

use std::collections::BTreeSet;

use rtvirtio_cpu::is_helper_process;
use rtvirtio_kernel::{ProcessId, Root, task};
use rtvirtio_vmm::VmHandle;

/// A VM that runs.
pub(super) struct FoundVm {
    pub(super) handle: VmHandle,
    pub(super) processes: Vec<ProcessId>,
    /// The processes without helpers, such as the VM's TPM; all where it has no others.
    pub(super) lasting: Vec<ProcessId>,
    pub(super) tids: BTreeSet<u32>,
}

impl FoundVm {
    /// A VM with the threads that its processes have now.
    pub(super) fn new(root: &Root, handle: VmHandle, processes: Vec<ProcessId>) -> Self {
        let tids = tids(root, &processes);
        let is_lasting = |of: &&ProcessId| !is_helper_process(root, of.pid);
        let mut lasting: Vec<ProcessId> = processes.iter().filter(is_lasting).cloned().collect();
        if lasting.is_empty() {
            lasting.clone_from(&processes);
        }
        Self { handle, processes, lasting, tids }
    }

    /// Whether a process other than a helper is still there.
    pub(super) fn runs(&self) -> bool {
        self.lasting.iter().any(ProcessId::is_alive)
    }
}

/// Whether a start of a VM has not ended: a process other than a helper is there, or all are.
pub(super) fn start_lives(root: &Root, start: &[ProcessId]) -> bool {
    let lasts = |of: &ProcessId| of.is_alive() && !is_helper_process(root, of.pid);
    start.iter().any(lasts) || (!start.is_empty() && start.iter().all(ProcessId::is_alive))
}

/// The threads of these processes.
pub(super) fn tids(root: &Root, processes: &[ProcessId]) -> BTreeSet<u32> {
    processes.iter().flat_map(|p| task::tids(root, p.pid).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn a_helper_that_stays_is_not_the_vm() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let name = |of: &ProcessId, name: &str| {
            let proc = root.at(format!("/proc/{}", of.pid));
            std::fs::create_dir_all(&proc).unwrap();
            // Any process may have this name.
            std::fs::write(proc.join("comm"), "swtpm\n").unwrap();
            let exe = proc.join("exe");
            let _ = std::fs::remove_file(&exe);
            std::os::unix::fs::symlink(format!("/usr/bin/{name}"), exe).unwrap();
        };
        let there = ProcessId::find(std::process::id()).unwrap().unwrap();
        let ended = ProcessId { pid: u32::MAX, start_time: 1 };
        let found = || FoundVm::new(&root, VmHandle::of_pid(ended.pid), vec![ended.clone(), there.clone()]);
        name(&ended, "qemu-system-x86_64");
        name(&there, "swtpm");
        assert_eq!(found().lasting, slice::from_ref(&ended));
        name(&there, "swtpm (deleted)");
        assert_eq!(found().lasting, slice::from_ref(&ended));
        assert!(!found().runs() && !start_lives(&root, &found().processes));
        // A VM that the user names by the process of a helper has no other.
        let alone = FoundVm::new(&root, VmHandle::of_pid(there.pid), vec![there.clone()]);
        assert!(alone.runs() && start_lives(&root, &alone.processes));
        assert!(!start_lives(&root, &[]));
        name(&ended, "swtpm");
        name(&there, "qemu-system-x86_64");
        assert_eq!(found().lasting, slice::from_ref(&there));
        assert!(found().runs() && start_lives(&root, &found().processes));
    }
}
