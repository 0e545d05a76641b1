//! The disks, uplinks and sockets of an I/O domain: checked, locked and opened, by its own process
//! at a start or by another one for a running I/O domain.
//!
//! A running I/O domain opens no files: `rtvirtio iod reload` opens what a configuration adds, with
//! the checks of a start, and passes descriptors over the control socket ([`handover`]). No guest
//! is served here; the engine does that with what is open.

pub mod backing;
mod backing_error;
pub mod check;
pub mod disk_lock;
pub mod disks;
pub mod doubts;
pub mod error;
pub mod handover;
pub mod handover_port;
mod image_format;
pub mod listen;
mod partitions;
pub mod socket_group;
pub mod uplink;
pub mod use_lock;

pub use error::OpenError;
