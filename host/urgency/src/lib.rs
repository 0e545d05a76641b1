//! Reads the urgency of a guest's vCPUs from the shared page, and moves their threads within the
//! contract.
//!
//! [`find_page`] asks QEMU for the `ivshmem` device that has the page, [`ServedVm`] polls one VM
//! and moves its vCPUs, [`serve`] does so for all VMs at the relevant times. [`Server`] gives QEMU
//! the memory where the device has a doorbell. The journal has the levels that a thread may have
//! ([`rtvirtio_apply::Levels`]); the decision of each poll is [`rtvirtio_urgency::Vcpu`]'s.

mod device;
mod error;
mod kvm;
mod memory;
mod served;
mod server;
mod serving;
mod thread;

pub use device::{Page, find_page};
pub use error::UrgencyError;
pub use kvm::KvmInterrupts;
pub use memory::FileMemory;
pub use served::{Delays, Event, History, Moment, Monitor, Raises, ServedVm, VcpuStatus, VmStatus};
pub use server::{DOORBELL, Server, memory_file};
pub use serving::{Ended, LOOK, LOOK_BOOSTED, serve, serve_newcomers};

pub use thread::now;
