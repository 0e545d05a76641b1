//! Leftovers of labs whose state is lost.

use std::path::Path;

use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{Root, cgroup};
use rtvirtio_workflow::leftovers::{lab_groups, lab_twins};

use crate::lab::{LabError, STOP_PATIENCE};
use crate::twin::TwinHandle;

/// Removes leftovers of labs whose state is lost: their cgroups with all processes in them, and
/// their twins. False when there was none.
pub fn remove_leftovers() -> Result<bool, LabError> {
    let root = Root::default();
    let mut any = false;
    for group in lab_groups(&root)? {
        remove_group(&root, &group.dir)?;
        any = true;
    }
    for mount in lab_twins(&root)? {
        TwinHandle { mount, ..TwinHandle::default() }.remove()?;
        any = true;
    }
    Ok(any)
}

/// Removes a cgroup, those below it, and their processes.
fn remove_group(root: &Root, dir: &Path) -> Result<(), LabError> {
    for name in root.list(dir)? {
        let below = dir.join(name);
        if root.at(&below).is_dir() {
            remove_group(root, &below)?;
        }
    }
    let pids = || -> Result<Vec<u32>, LabError> {
        let text = match root.read(dir.join("cgroup.procs")) {
            // A threaded group's processes belong to another group, whose processes are not ended.
            Err(e) if e.is_unsupported() => String::new(),
            text => text?,
        };
        Ok(text.lines().filter_map(|pid| pid.trim().parse().ok()).collect())
    };
    for pid in pids()? {
        let failed = |source| LabError::State { path: format!("/proc/{pid}").into(), source };
        let Some(process) = Process::open(pid).map_err(failed)? else { continue };
        // The pidfd is of the process that is in the list now.
        if pids()?.contains(&pid) {
            process.stop(STOP_PATIENCE).map_err(failed)?;
        }
    }
    Ok(cgroup::remove_dir(root, dir)?)
}
