//! The lab: twin device, guest image, QEMU guests and process VMs, and the tasks that run on them.

pub mod boxed;
pub mod image;
mod lab;
pub mod proc;
pub mod qemu;
pub mod state;
pub mod twin;
pub mod workload;

pub use lab::{Lab, LabError, UpOptions};
