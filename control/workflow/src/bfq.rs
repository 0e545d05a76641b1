//! BFQ where it is a module, as on Debian.

use std::process::Command;

use rtvirtio_kernel::{Root, Stack};

use crate::error::Result;
use crate::host::kernel_release;
use crate::progress::Progress;

/// Loads BFQ where it is a module and reports it. The module stays loaded; it does nothing to
/// devices that do not use it.
///
/// # Errors
/// When a disk of the device does not offer BFQ then.
pub fn load(device: &Stack, progress: &dyn Progress) -> Result<()> {
    let root = Root::default();
    if lacks_module(device, &root) {
        // The result is checked below.
        let done = Command::new("modprobe").args(["-q", "bfq"]).status();
        if done.is_ok_and(|status| status.success()) {
            // A change of the host that `revert` does not undo.
            progress.warn("module bfq is loaded and stays loaded");
        }
    }
    Ok(device.offers(&root, "bfq")?)
}

/// Whether a disk that has a choice of elevators lacks BFQ, and this kernel has it as a module.
pub(crate) fn lacks_module(device: &Stack, root: &Root) -> bool {
    let lacks = |offered: Vec<String>| offered.iter().all(|name| name != "bfq");
    !device.disks.is_empty()
        && device.offered(root).is_ok_and(lacks)
        && has_module(root, &kernel_release(), "bfq")
}

/// Whether a kernel's modules, as depmod(8) lists them, include this one. A list that cannot be
/// read lists none: then nothing is loaded, and what the device offers is taken as it is.
fn has_module(root: &Root, release: &str, module: &str) -> bool {
    let list = root.read(format!("/lib/modules/{release}/modules.dep")).unwrap_or_default();
    let names = list.lines().filter_map(|line| line.split(':').next()?.rsplit('/').next());
    names.filter_map(|file| file.split_once(".ko")).any(|(name, _)| name == module)
}

#[cfg(test)]
#[path = "bfq_tests.rs"]
mod tests;
