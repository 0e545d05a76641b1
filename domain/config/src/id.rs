//! Indices of the tables of a file.

use rtvirtio_sched::{Idx, VmId};

/// Index of a disk among those of its device in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub usize);

/// Index of a port among those of its network in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub usize);

impl DiskId {
    /// The disk's VM in [`crate::Device::sched`]. In an engine whose disks have come and gone the
    /// VM has another place.
    #[must_use]
    pub fn vm(self) -> VmId {
        VmId::from_usize(self.0)
    }
}

impl PortId {
    /// The port's VM in [`crate::Network::tx_sched`] and [`crate::Network::rx_sched`]. In an engine
    /// whose ports have come and gone the VM has another place.
    #[must_use]
    pub fn vm(self) -> VmId {
        VmId::from_usize(self.0)
    }
}
