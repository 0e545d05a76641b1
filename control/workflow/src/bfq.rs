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
    load_under(&Root::default(), device, progress)
}

fn load_under(root: &Root, device: &Stack, progress: &dyn Progress) -> Result<()> {
    if lacks_module(device, root) {
        // Whether the device offers it is checked below.
        match Command::new("modprobe").arg("bfq").output() {
            // A change of the host that `revert` does not undo.
            Ok(done) if done.status.success() => progress.warn("module bfq is loaded and stays loaded"),
            Ok(done) => {
                let why = String::from_utf8_lossy(&done.stderr);
                let why = why.lines().next().unwrap_or("it gives no reason");
                progress.warn(&format!("module bfq cannot be loaded: {}", rtvirtio_vmm::shown(why.trim())));
            }
            Err(e) => progress.warn(&format!("module bfq cannot be loaded: modprobe: {e}")),
        }
    }
    Ok(device.offers(root, "bfq")?)
}

/// Like [`load`], for a plan that can do without: warns where the device does not offer BFQ.
pub(crate) fn load_or_warn(device: &Stack, root: &Root, progress: &dyn Progress) {
    if let Err(e) = load_under(root, device, progress) {
        progress.warn(&format!("the plan does without BFQ: {e:#}"));
    }
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
