//! Removes a lab, also after a crash.

use std::io;
use std::path::Path;

use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_workflow::inventory::Inventory;

use crate::state::LabState;

use super::{DOMAIN_DIR, GUESTS, Lab, LabError, STOP_PATIENCE};

impl Lab {
    /// Stops the guests and removes cgroups and device. Safe to call again.
    ///
    /// # Errors
    /// The first part that cannot be removed; the state stays, so that it can be tried again.
    pub fn down(&mut self) -> Result<(), LabError> {
        let root = Root::default();
        Inventory::remove(&self.run_dir)?;
        for vm in &mut self.state.vms {
            if let Some(qemu) = vm.qemu.take() {
                qemu.kill()?;
            }
        }
        if let Some(iod) = self.state.iod.take() {
            iod.stop(STOP_PATIENCE);
        }
        if !self.state.cgroups.is_empty() {
            let cgroups = Cgroups::detect(&root)?;
            for cgroup in self.state.cgroups.iter().rev() {
                if root.exists(cgroups.dir(cgroup)?)? {
                    // A crash between starting a process and saving its id leaves it only here. The
                    // groups are the lab's own.
                    for pid in cgroups.pids(&root, cgroup)? {
                        stop_in(&cgroups, &root, cgroup, pid)?;
                    }
                    cgroups.remove(&root, cgroup)?;
                }
            }
        }
        self.state.cgroups.clear();
        for file in self.state.io_enabled.iter().rev() {
            // Files below the removed cgroups are gone with them. Refused (EBUSY) when another
            // program uses the controller below by now: then the controller stays on.
            if root.exists(file)? {
                let _ = root.write(file, "-io");
            }
        }
        self.state.io_enabled.clear();
        if let Some(twin) = &mut self.state.twin {
            twin.remove()?;
        }
        self.state.twin = None;
        if let Some(file) = &mut self.state.file {
            file.remove()?;
        }
        self.state.file = None;
        // Only a log.
        let _ = std::fs::remove_file(self.run_dir.join("twin.log"));
        // Sockets and logs of guests after a crash; the guests themselves ended with their cgroups.
        for dir in [GUESTS, DOMAIN_DIR] {
            match std::fs::remove_dir_all(self.run_dir.join(dir)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.state_error(e)),
                _ => {}
            }
        }
        LabState::forget(&self.run_dir).map_err(|source| self.state_error(source))
    }
}

/// Stops a process that was listed in a cgroup, if the process that has this id is still in it.
fn stop_in(cgroups: &Cgroups, root: &Root, cgroup: &Path, pid: u32) -> Result<(), LabError> {
    let failed = |source| LabError::State { path: format!("/proc/{pid}").into(), source };
    let Some(process) = Process::open(pid).map_err(failed)? else { return Ok(()) };
    // The pidfd is of the process that is in the list now, not of one that got the id since the
    // first read of the list.
    if cgroups.pids(root, cgroup)?.contains(&pid) {
        // A process that does not end keeps the cgroup busy, which its removal reports.
        process.stop(STOP_PATIENCE).map_err(failed)?;
    }
    Ok(())
}
