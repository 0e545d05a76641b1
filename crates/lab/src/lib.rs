//! The lab: twin device, guest image, QEMU guests and process VMs.

pub mod proc;
pub mod twin;
