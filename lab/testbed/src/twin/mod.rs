//! The twin: an emulated block device whose service-time model is declared.
//!
//! A FUSE file completes its requests at the model's times; a loop device with direct I/O on top
//! makes it a block device with a request queue, so that the kernel's own I/O schedulers and cgroup
//! controllers act on it as on a disk.
//!
//! Limits: the twin runs on the host's CPUs, so a busy host delays its wake-ups, and it serves at
//! most about 15 000 requests per second on two cores.

mod device;
mod fs;
mod serve;

pub use device::{TwinDevice, TwinError, TwinHandle};
pub use fs::FILE_NAME;
pub use rtvirtio_twin::{
    Access, Arm, GarbageCollection, ProfileError, ServiceModel, Timing, TwinProfile, WriteCache, mean_service,
};
pub use serve::{ServeConfig, ServeError, serve};
