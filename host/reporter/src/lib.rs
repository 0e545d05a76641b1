//! Guest side of urgency reports: vCPUs on the shared page, start-ups on a port.
//!
//! The page is the shared memory of an `ivshmem` device ([`Device`]). [`bpf::Watch`] reports the
//! tasks of the guest's scheduler, by two BPF programs in the guest's kernel; [`run`] reports a
//! command as urgent for as long as it runs. [`start`] announces on a virtio-serial port that a
//! command is being started. [`Echo`] answers the frames of the host's verification. Nothing here
//! depends on the host side's crates: the program that links this is copied into guests.

pub mod bpf;
mod child;
mod device;
mod echo;
mod error;
mod reporter;
mod run;
mod slice_idle;
mod start;

pub use device::Device;
pub use echo::{Echo, EchoOptions};
pub use error::ReporterError;
pub use reporter::{Reporter, now};
pub use run::{RunOptions, run};
pub use start::{StartOptions, start};
