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

pub mod backing;
mod backing_error;
pub mod blk;
pub mod check;
pub mod confine;
mod disk_lock;
pub mod domain;
pub mod doubts;
pub mod engine;
pub mod feature;
pub mod handover;
pub mod handover_port;
pub mod histograms;
mod image_format;
pub mod inflight;
pub mod line_server;
pub mod listen;
pub mod log;
pub mod memory;
pub mod net;
mod network;
mod network_membership;
pub mod network_report;
pub mod reload;
pub mod report;
pub mod running;
mod running_state;
pub mod socket_group;
pub mod urgent;
pub mod vhost_user;

pub use rtvirtio_domain_config as config;
