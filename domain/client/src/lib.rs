//! A vhost-user front end without a VM, for disks and network ports: connects to a back end's
//! socket, sets up virtqueues in memory of its own, and submits requests and frames.
//!
//! It measures a back end without a guest's overhead ([`load`]), and attacks it with messages that
//! no driver sends ([`Client::raw`]). It works with any back end, QEMU's storage daemon included.

mod client;
pub mod load;
mod log;
mod memory;
mod net;
mod queue;

pub use client::{Client, ClientError, Options};
pub use log::DirtyPages;
pub use memory::SharedMemory;
pub use net::{HEADER as NET_HEADER, NetClient};
pub use queue::{BlkCompletion, BlkRequest, ClientQueue};
