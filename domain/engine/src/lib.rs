//! The I/O domain: serves the disks and network ports of many VMs over vhost-user, and schedules
//! every request and frame.
//!
//! ```text
//!  VM's memory: virtqueue ─kick─► engine thread of the device ──io_uring──► file or block device
//!                         ◄─call─   parse, scheduler
//!  VM's QEMU: socket ──► control thread of the VM ──commands──► engine
//! ```
//!
//! One engine thread per device parses the queues of all its VMs, asks
//! [`rtvirtio_sched::Scheduler`] for the next piece, and waits only for io_uring. A virtqueue is
//! itself a ring with one producer and one consumer in shared memory, so no request passes through
//! another thread. Operations that a VM's QEMU may delay (messages, mappings) run in that VM's
//! control thread.
//!
//! Input of guests and of QEMU is untrusted: see [`blk`] for requests and [`memory`] for memory,
//! and `docs/explanation/threat-model.md`.

pub mod blk;
mod closed;
pub mod confine;
mod disk;
pub mod domain;
pub mod end;
pub mod engine;
pub mod error;
pub mod feature;
mod growth;
mod histograms;
pub mod inflight;
pub mod line_server;
pub mod liveness;
pub mod log;
pub mod memory;
pub mod net;
mod network;
mod network_membership;
mod network_report;
mod places;
pub mod refusal;
pub mod reload;
mod report;
pub mod running;
mod running_state;
mod service_report;
pub mod urgent;
pub mod vhost_user;
