//! The lab: twin device, guest image, QEMU guests and process VMs, and the tasks that run on them.

mod app_disk;
pub mod boxed;
mod file_disk;
pub mod image;
pub mod iod;
mod lab;
mod loops;
pub mod proc;
pub mod qemu;
mod ram_disk;
mod rig;
pub mod state;
pub mod twin;

pub use app_disk::AppDisk;
pub use file_disk::FileDisk;
pub use lab::{GuestImages, IodCommand, Lab, LabError, UpOptions, guest_kernels};
pub use ram_disk::RamDisk;
