//! Names that libvirt gives to the disks of its domains.

use std::sync::Arc;

use rtvirtio_kernel::Root;
use rtvirtio_vmm::libvirt::{Lookup, RunningDomain, Virsh};

use super::{FoundReach, FoundVm};

/// The running domain of a VM that libvirt started; `Err` is a sentence that says why it is not
/// found.
pub(super) fn running(root: &Root, uri: &str, vm: &FoundVm) -> Result<Option<RunningDomain>, String> {
    let FoundReach::Domain(name) = &vm.reach else { return Ok(None) };
    let of_another = format!("libvirt at {uri} does not run it: name its daemon by `--uri`");
    match RunningDomain::find(Arc::new(Virsh::new(uri)), root, name) {
        Ok(Lookup::Running(domain)) if domain.process.pid == vm.pid => Ok(Some(domain)),
        Ok(_) => Err(of_another),
        Err(e) => Err(format!("libvirt does not answer ({e})")),
    }
}

/// Notes the names that libvirt gives to the disks of a domain.
pub(super) fn targets(root: &Root, uri: &str, vm: &mut FoundVm) {
    match running(root, uri, vm) {
        Ok(None) => {}
        Ok(Some(domain)) => {
            for disk in &mut vm.disks {
                let same = domain.xml.disks.iter().find(|d| d.source.as_ref() == Some(&disk.path));
                disk.target = same.map(|d| d.target.clone());
            }
        }
        Err(why) => vm.notes.push(why),
    }
}
