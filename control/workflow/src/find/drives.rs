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

    /// Drives as of [`HostVm::drives`], with their counters by the same connection. Those of a
    /// domain of libvirt have no counters: asking its monitor taints it.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub(crate) fn drives_and_stats(&self) -> Result<(Option<Vec<Drive>>, Vec<DiskStats>)> {
        if let HostReach::Domain(..) = &self.reach {
            return Ok((self.drives()?, Vec::new()));
        }
        let Some(mut qmp) = self.monitor(&Root::default())? else { return Ok((None, Vec::new())) };
        // Limits are known without counters.
        Ok((Some(qmp.query_drives()?), qmp.disk_stats().unwrap_or_default()))
    }
}
