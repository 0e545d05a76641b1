//! The lab: twin device, guest image, QEMU guests and process VMs, and the tasks that run on them.

mod app_disk;
pub mod boxed;
pub mod cluster;
mod file_disk;
mod host;
pub mod image;
mod kvm_verdict;
mod lab;
mod leftovers;
mod loops;
pub mod netns;
pub mod qemu;
mod ram_disk;
mod rig;
pub mod state;
pub mod twin;

pub use app_disk::AppDisk;
pub use file_disk::FileDisk;
pub use host::{AccelChoice, LabHost, choose_accel};
pub use lab::{
    DOMAIN_DIR, GuestImages, IodCommand, Lab, LabError, UpOptions, domain_socket, guest_kernels, vm_cgroup,
};
pub use leftovers::remove_leftovers;
pub use ram_disk::RamDisk;
