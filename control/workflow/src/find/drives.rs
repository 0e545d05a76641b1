//! Drives of a VM: limits and counters, as its VMM has them.

use rtvirtio_kernel::Root;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::throttle::Drive;

use super::{HostReach, HostVm};
use crate::error::Result;

impl HostVm {
    /// Drives with their throttling: for a domain of libvirt by libvirt, which asks QEMU, else by
    /// the monitor. `None` without either.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub(crate) fn drives(&self) -> Result<Option<Vec<Drive>>> {
        let root = Root::default();
        match &self.reach {
            HostReach::Domain(..) => Ok(Some(self.domain(&root)?.drives()?)),
            _ => self.monitor(&root)?.map(|mut qmp| Ok(qmp.query_drives()?)).transpose(),
        }
    }

    /// Counters of its disks by the monitor; `None` without one, and for a domain of libvirt, which
    /// that taints.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub(crate) fn disk_stats(&self) -> Result<Option<Vec<DiskStats>>> {
        match &self.reach {
            HostReach::Domain(..) => Ok(None),
            _ => self.monitor(&Root::default())?.map(|mut qmp| Ok(qmp.disk_stats()?)).transpose(),
        }
    }
}
