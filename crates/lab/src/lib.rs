//! The lab: twin device, guest image, QEMU guests and process VMs.

pub mod image;
pub mod proc;
pub mod twin;
