//! Index of a VM.

use std::fmt;

use oxc_index::Idx;

/// Index of a VM among those of a device or network: its place in a scheduler and its
/// configuration. A VM with several disks at a device, or ports at a network, has one for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u16);

impl Idx for VmId {
    const MAX: usize = u16::MAX as usize;

    unsafe fn from_usize_unchecked(index: usize) -> Self {
        Self(index as u16)
    }

    fn index(self) -> usize {
        self.0.into()
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
