//! Common parts of the tests of several crates: skipping by name, the programs in directories of
//! their own, a QEMU without a guest system, a libvirt daemon, files that texts name, descriptions
//! of interfaces, and the removal of leftovers of dead tests.

mod child;
mod help;
mod libvirt;
mod loop_device;
mod machine;
mod name;
mod need;
pub mod openapi;
mod owner;
mod reference;
mod silent_disk;
pub mod site;
mod small_disk;
mod stuck_disk;
mod sweep;

pub use child::ChildGuard;
pub use help::{help, missing_files};
pub use libvirt::Libvirt;
pub use loop_device::LoopDevice;
pub use machine::{Machine, ThreadCpus, vm_spec};
pub use name::{disk_dir, tempdir, tempdir_in, unique};
pub use need::{Need, has, skip};
pub use reference::{anchor, check_reference};
pub use silent_disk::SilentDisk;
pub use small_disk::SmallDisk;
pub use stuck_disk::StuckDisk;
pub use sweep::{remove_vm_group, sweep};

/// Time after which a test counts as hung. No test asserts that anything is fast: a busy machine is
/// slow, and time limits belong to benchmarks.
pub const HANG: std::time::Duration = std::time::Duration::from_secs(300);
