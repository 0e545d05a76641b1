//! A vhost-user-blk front end without a VM: connects to a back end's socket, sets up virtqueues in
//! memory of its own, and submits requests.
//!
//! It measures a back end without a guest's overhead ([`load`]), and attacks it with messages that
//! no driver sends ([`Client::raw`]). It works with any back end, QEMU's storage daemon included.

mod client;
pub mod load;
mod memory;
mod queue;

pub use client::{Client, ClientError, Options};
pub use memory::SharedMemory;
pub use queue::{BlkCompletion, BlkRequest, ClientQueue};
