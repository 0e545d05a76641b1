//! One queue of one VM.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use super::command::{Stopped, VringStart};
use crate::inflight::Inflight;
use crate::memory::GuestMem;

/// A queue that is served.
#[derive(Debug)]
pub struct Vring {
    pub queue: Queue,
    pub mem: Arc<GuestMem>,
    pub kick: File,
    pub call: Option<Arc<File>>,
    pub inflight: Option<Inflight>,
    pub write_through: bool,
    pub generation: u32,
    /// Requests taken and not answered.
    pub outstanding: u32,
    /// There may be more in it.
    pub active: bool,
    /// Answers were put into it that the guest does not know of.
    pub tell: bool,
    /// The guest is to be called whatever its event index says: nobody knows what it was told before.
    pub must_call: bool,
    /// The poll of the kick descriptor is armed.
    pub kick_armed: bool,
    /// The write of a call to this descriptor is under way; another one must follow.
    pub calling: Option<Arc<File>>,
    pub call_again: bool,
    /// The guest broke it.
    pub broken: bool,
    /// No more is taken from it; who waits for it to be empty.
    pub stopping: Option<SyncSender<Stopped>>,
    /// Heads that were in flight when our predecessor ended: made again before anything new.
    pub again: Vec<u16>,
}

impl Vring {
    /// Ready to be served.
    pub fn new(start: VringStart, generation: u32) -> Result<Self, String> {
        let VringStart {
            mem,
            size,
            desc,
            avail,
            used,
            base,
            event_idx,
            write_through,
            kick,
            call,
            mut inflight,
        } = start;
        let mut queue = Queue::new(size.max(1)).map_err(|e| format!("queue of {size} descriptors: {e}"))?;
        let wrong = |e: virtio_queue::Error| format!("ring addresses: {e}");
        queue.try_set_desc_table_address(desc).map_err(wrong)?;
        queue.try_set_avail_ring_address(avail).map_err(wrong)?;
        queue.try_set_used_ring_address(used).map_err(wrong)?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if avail == GuestAddress(0) || !queue.is_valid(&mem.mem) {
            return Err("the rings do not lie in the guest's memory".into());
        }
        let used = queue.used_idx(&mem.mem, Ordering::Acquire).map_err(wrong)?.0;
        queue.set_next_used(used);
        let again = inflight.as_mut().map_or_else(Vec::new, |i| i.recover(used));
        // What our predecessor took is not in the available ring any more; the specification gives the place where to go on.
        let next = if inflight.is_some() { used.wrapping_add(again.len() as u16) } else { base };
        queue.set_next_avail(next);
        Ok(Self {
            queue,
            mem,
            kick,
            call: call.map(Arc::new),
            inflight,
            write_through,
            generation,
            outstanding: 0,
            active: true,
            tell: false,
            // Our predecessor may have answered and been killed before it called.
            must_call: true,
            kick_armed: false,
            calling: None,
            call_again: false,
            broken: false,
            stopping: None,
            again: again.into_iter().rev().collect(),
        })
    }

    /// Puts an answer of `len` bytes into the used ring.
    pub fn answer(&mut self, head: u16, len: u32) {
        if let Some(inflight) = &mut self.inflight {
            inflight.answering(head);
        }
        if self.queue.add_used(&self.mem.mem, head, len).is_err() {
            self.broken = true;
            return;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.answered(head, self.queue.next_used());
        }
        self.tell = true;
    }

    /// Whether something is to be taken from it.
    pub fn wants(&self) -> bool {
        self.active && !self.broken && self.stopping.is_none()
    }
}
