//! Reads on the shared page how urgent a guest's vCPUs are, and moves their threads within the
//! contract.
//!
//! [`find_page`] asks QEMU for the `ivshmem` device that holds the page, [`ServedVm`] looks at one
//! VM and moves its vCPUs, [`serve`] does so for all VMs at the times that matter. [`Server`] gives
//! QEMU the memory where the device has a doorbell. Which levels a
//! thread may have stands in the journal ([`rtvirtio_apply::Levels`]); what a look decides is
//! [`rtvirtio_urgency::Vcpu`]'s.

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
