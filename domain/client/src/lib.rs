//! The other side of a vhost-user-blk backend, without a VM: connects to its socket, sets up queues
//! in memory of its own, and asks.
//!
//! So a backend is measured without a guest's cost ([`load`]), and attacked by what no driver would
//! do ([`Client::raw`]). Any backend will do: QEMU's storage daemon as well as ours.

mod client;
pub mod load;
mod memory;
mod queue;

pub use client::{Client, ClientError, Options};
pub use memory::SharedMemory;
pub use queue::{BlkCompletion, BlkRequest, ClientQueue};
