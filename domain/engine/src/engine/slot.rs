//! What a queue's place holds from one start of the queue to the next.
//!
//! A queue can be stopped and started as often as its QEMU likes, and each start arms a poll of the
//! kick descriptor and writes to a call descriptor. The kernel keeps both operations until they
//! end, whatever becomes of the queue: a write to an eventfd that is full waits for ever. So a
//! place has at most one poll and one write: the next start waits until the kernel has given those
//! of the last one back, and the descriptors stay open until then.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::command::VringStart;
use super::vring::Vring;

/// A queue that was stopped, and of which the kernel still holds an operation.
#[derive(Debug)]
pub struct Draining {
    /// Of the queue that was stopped.
    pub generation: u32,
    /// The poll of this descriptor is armed.
    pub kick: Option<File>,
    /// The write to this descriptor is under way.
    pub call: Option<Arc<File>>,
    /// Written after that, for completions that the guest was not notified of yet.
    pub final_call: Option<Arc<File>>,
}

impl Draining {
    /// Whether the kernel has given everything back.
    pub fn is_done(&self) -> bool {
        self.kick.is_none() && self.call.is_none() && self.final_call.is_none()
    }
}

/// A start that waits for the kernel, and where its result goes.
pub type PendingStart = (Box<VringStart>, SyncSender<Result<(), String>>);

/// The place of one queue of one VM.
#[derive(Debug, Default)]
pub struct QueueSlot {
    /// The queue that is served.
    pub vring: Option<Vring>,
    /// What is left of the one before.
    pub draining: Option<Draining>,
    /// The start of the next one.
    pub pending: Option<PendingStart>,
}

impl QueueSlot {
    /// The queue that is served, if this is its generation.
    pub fn serving(&mut self, generation: u16) -> Option<&mut Vring> {
        self.vring.as_mut().filter(|v| v.generation as u16 == generation)
    }

    /// What is left of the queue of this generation.
    pub fn draining(&mut self, generation: u16) -> Option<&mut Draining> {
        self.draining.as_mut().filter(|d| d.generation as u16 == generation)
    }
}
