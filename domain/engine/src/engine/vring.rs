//! One queue of one VM.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::command::{VringBase, VringStart};
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
    /// RequestTable taken and not answered.
    pub outstanding: u32,
    /// There may be more in it.
    pub active: bool,
    /// Answers were put into it that the guest does not know of.
    pub notify_pending: bool,
    /// The guest is to be called whatever its event index says: nobody knows what it was told before.
    pub force_notify: bool,
    /// The poll of the kick descriptor is armed.
    pub kick_armed: bool,
    /// The write of a call to this descriptor is under way; another one must follow.
    pub call_write: Option<Arc<File>>,
    pub call_again: bool,
    /// The guest broke it.
    pub broken: bool,
    /// No more is taken from it; who waits for it to be empty.
    pub stopping: Option<SyncSender<VringBase>>,
    /// Heads that were in flight when our predecessor ended: made again before anything new.
    pub resubmit: Vec<u16>,
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
        let resubmit = inflight.as_mut().map_or_else(Vec::new, |i| i.recover(used));
        // What our predecessor took is not in the available ring any more; the specification gives the place where to go on.
        let next = if inflight.is_some() { used.wrapping_add(resubmit.len() as u16) } else { base };
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
            notify_pending: false,
            // Our predecessor may have answered and been killed before it called.
            force_notify: true,
            kick_armed: false,
            call_write: None,
            call_again: false,
            broken: false,
            stopping: None,
            resubmit: resubmit.into_iter().rev().collect(),
        })
    }

    /// Puts an answer of `len` bytes into the used ring.
    pub fn add_used(&mut self, head: u16, len: u32) {
        if let Some(inflight) = &mut self.inflight {
            inflight.pre_put(head);
        }
        if self.queue.add_used(&self.mem.mem, head, len).is_err() {
            self.broken = true;
            return;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.post_put(head, self.queue.next_used());
        }
        self.notify_pending = true;
    }

    /// Completes a request: its status byte, then the used ring.
    pub fn complete(&mut self, head: u16, status: GuestAddress, code: u8, len: u64) {
        let mem = Arc::clone(&self.mem);
        let written = mem.mem.write_obj(code, status).is_ok();
        // Nothing was written where the status is not in the guest's memory.
        self.add_used(head, if written { u32::try_from(len + 1).unwrap_or(u32::MAX) } else { 0 });
    }

    /// Whether something is to be taken from it.
    pub fn needs_fetch(&self) -> bool {
        self.active && !self.broken && self.stopping.is_none()
    }
}
