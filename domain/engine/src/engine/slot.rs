//! The place of a queue, which outlives its starts and stops.
//!
//! A QEMU can stop and start a queue as often as it likes, and each start arms a poll of the kick
//! descriptor and writes to a call descriptor. The kernel keeps both operations until they end,
//! whatever happens to the queue: a write to a full eventfd waits for ever. So a slot has at most
//! one poll and one write: the next start waits until the kernel has completed those of the last
//! one, and the descriptors stay open until then.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::kick::Kick;
use super::queue_id::QueueToken;
use super::vring::{StartError, Vring, VringStart};

/// A stopped queue with operations in flight in the kernel.
#[derive(Debug)]
pub struct Draining {
    /// Generation of the stopped queue.
    pub generation: u32,
    /// The poll of this descriptor is armed.
    pub kick: Option<Kick>,
    /// A write to this descriptor is in flight.
    pub call: Option<Arc<File>>,
    /// The next write, for completions that the guest was not notified of.
    pub final_call: Option<Arc<File>>,
}

impl Draining {
    /// Whether no operation is in flight.
    pub fn is_done(&self) -> bool {
        self.kick.is_none() && self.call.is_none() && self.final_call.is_none()
    }
}

/// A start that waits for the kernel, and where to send its result.
pub type PendingStart = (Box<VringStart>, SyncSender<Result<u16, StartError>>);

/// The slot of one queue of one VM.
#[derive(Debug, Default)]
pub struct QueueSlot {
    /// The queue that is served.
    pub vring: Option<Vring>,
    /// Operations of the last queue that are still in flight.
    pub draining: Option<Draining>,
    /// Next start, which waits for `draining`.
    pub pending: Option<PendingStart>,
}

impl QueueSlot {
    /// The served queue, if this is its start.
    pub fn serving(&mut self, token: QueueToken) -> Option<&mut Vring> {
        self.vring.as_mut().filter(|v| token.is_of(v.generation))
    }

    /// The draining queue, if this is its start.
    pub fn draining(&mut self, token: QueueToken) -> Option<&mut Draining> {
        self.draining.as_mut().filter(|d| token.is_of(d.generation))
    }
}
