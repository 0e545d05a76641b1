//! Virtqueue of a VM's disk.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::kick::Kick;
use super::queue_id::QueueId;
use crate::blk::{self, Limits, Malformed, Parsed, Segments};
use crate::inflight::Inflight;
use crate::memory::{GuestMem, LOST};

/// A queue to serve.
#[derive(Debug)]
pub struct VringStart {
    /// Guest memory that holds rings and buffers.
    pub mem: Arc<GuestMem>,
    /// Number of descriptors in the rings.
    pub size: u16,
    /// Address of the descriptor table.
    pub desc: GuestAddress,
    /// Address of the available ring.
    pub avail: GuestAddress,
    /// Address of the used ring.
    pub used: GuestAddress,
    /// Next index in the available ring.
    pub base: u16,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Feature bits that were negotiated.
    pub features: u64,
    /// The guest's notification of new requests. Guests that are polled, without a kick descriptor,
    /// are not served.
    pub kick: Kick,
    /// The notification of completions; `None` for a guest that polls.
    pub call: Option<File>,
    /// Shared memory that tracks requests in flight.
    pub inflight: Option<Inflight>,
}

/// Flag `VIRTQ_AVAIL_F_NO_INTERRUPT` of the available ring.
const NO_INTERRUPT: u16 = 1;

/// The index in the available ring at which a queue stopped.
pub type VringBase = u16;

/// Reason why a queue is not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The disk has no such queue.
    #[error("there is no queue {0}")]
    NoQueue(QueueId),
    /// The queue is served already.
    #[error("queue {0} runs already")]
    Running(QueueId),
    /// An invalid number of descriptors.
    #[error("queue of {size} descriptors: {source}")]
    Size {
        /// Number of descriptors as given.
        size: u16,
        source: virtio_queue::Error,
    },
    /// A misaligned or unreadable ring address.
    #[error("ring addresses: {0}")]
    Address(#[source] virtio_queue::Error),
    /// A ring outside of guest memory.
    #[error("the rings do not lie in the guest's memory")]
    OutsideMemory,
}

/// A virtqueue that is served.
#[derive(Debug)]
pub struct Vring {
    pub queue: Queue,
    pub mem: Arc<GuestMem>,
    pub kick: Kick,
    pub call: Option<Arc<File>>,
    pub inflight: Option<Inflight>,
    /// Feature bits that the guest accepted.
    pub features: u64,
    /// Whether writes are stable before they complete, for guests that do not flush.
    pub write_through: bool,
    pub generation: u32,
    /// Requests fetched and not completed.
    pub outstanding: u32,
    /// Whether the queue may hold more requests.
    pub active: bool,
    /// Whether the used ring has entries that the guest was not notified of.
    pub notify_pending: bool,
    /// Whether the event index is ignored for the next notification: earlier ones are unknown.
    pub force_notify: bool,
    /// Whether the poll of the kick descriptor is armed.
    pub kick_armed: bool,
    /// Whether kicks are ignored: a poll that ends is not armed again.
    pub paused: bool,
    /// A write to this call descriptor is in flight; another one must follow.
    pub call_write: Option<Arc<File>>,
    pub call_again: bool,
    /// Whether the guest corrupted the queue.
    pub broken: bool,
    /// Set when no more is fetched; the reply is sent when nothing is outstanding.
    pub stopping: Option<SyncSender<VringBase>>,
    /// Requests that another process fetched and did not complete: the guest still waits for them.
    pub lost: u16,
    /// Whether it may go on elsewhere after that.
    pub stops_for_good: bool,
    /// Heads that were in flight in the previous process: resubmitted before new requests.
    pub resubmit: Vec<u16>,
}

impl Vring {
    /// Checks the rings and recovers requests in flight.
    pub fn new(start: VringStart, generation: u32) -> Result<Self, StartError> {
        let VringStart { mem, size, desc, avail, used, base, event_idx, features, kick, call, mut inflight } =
            start;
        let mut queue = Queue::new(size).map_err(|source| StartError::Size { size, source })?;
        let wrong = StartError::Address;
        queue.try_set_desc_table_address(desc).map_err(wrong)?;
        queue.try_set_avail_ring_address(avail).map_err(wrong)?;
        queue.try_set_used_ring_address(used).map_err(wrong)?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if avail == GuestAddress(0) || !queue.is_valid(&mem.mem) {
            return Err(StartError::OutsideMemory);
        }
        let used = queue.used_idx(&mem.mem, Ordering::Acquire).map_err(wrong)?.0;
        queue.set_next_used(used);
        let resubmit = inflight.as_mut().map_or_else(Vec::new, |i| i.recover(used));
        // Requests of the previous process are not in the available ring any more; the
        // specification defines the index to go on with. Where the memory knows of none, and some
        // were fetched, that was elsewhere, as before a guest was saved: these are not known, and
        // the others must not be served twice.
        let ahead = if inflight.is_some() && resubmit.is_empty() { base.wrapping_sub(used) } else { 0 };
        let lost = if ahead <= size { ahead } else { 0 };
        let next =
            if inflight.is_some() && lost == 0 { used.wrapping_add(resubmit.len() as u16) } else { base };
        queue.set_next_avail(next);
        // A process that was killed may have put a completion into the ring and not into the log.
        let ring_bytes = 6 + 8 * usize::from(size);
        mem.mark_written(GuestAddress(queue.used_ring()), ring_bytes);
        Ok(Self {
            queue,
            mem,
            kick,
            call: call.map(Arc::new),
            inflight,
            features,
            write_through: features & crate::feature::blk::FLUSH == 0,
            generation,
            outstanding: 0,
            active: true,
            notify_pending: false,
            // The previous process may have been killed between the used ring and the notification.
            force_notify: true,
            kick_armed: false,
            paused: false,
            call_write: None,
            call_again: false,
            broken: false,
            stopping: None,
            stops_for_good: false,
            lost,
            resubmit: resubmit.into_iter().rev().collect(),
        })
    }

    /// Takes the next chain and parses it; its data segments replace the contents of `segments`.
    /// `None` when the ring is empty, for which the guest then kicks, or corrupted.
    pub fn pop_request(
        &mut self,
        mem: &GuestMem,
        limits: &Limits,
        segments: &mut Segments,
    ) -> Option<(u16, Result<Parsed, Malformed>)> {
        if let Some(head) = self.resubmit.pop() {
            let table = GuestAddress(self.queue.desc_table());
            let chain = blk::chain_at(&mem.mem, table, self.queue.size(), head);
            return Some((head, blk::parse(&mem.mem, chain, limits, segments)));
        }
        for retry in [false, true] {
            let Ok(mut chains) = self.queue.iter(&mem.mem) else { break };
            if let Some(chain) = chains.next() {
                let head = chain.head_index();
                if let Some(inflight) = &mut self.inflight {
                    inflight.mark_inflight(head);
                }
                return Some((head, blk::parse(&mem.mem, chain, limits, segments)));
            }
            match self.queue.enable_notification(&mem.mem) {
                Ok(false) => {
                    self.active = false;
                    return None;
                }
                // The ring holds something; when it cannot be read after this, it never can.
                Ok(true) if !retry && self.queue.disable_notification(&mem.mem).is_ok() => {}
                _ => break,
            }
        }
        self.broken = true;
        None
    }

    /// Puts a completion of `len` bytes into the used ring.
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
        // Without a valid status address no byte counts as written.
        self.add_used(head, if written { u32::try_from(len + 1).unwrap_or(u32::MAX) } else { 0 });
    }

    /// Reads the available index, for guests that add requests without a kick.
    pub fn poll(&mut self) {
        let there = self.queue.avail_idx(&self.mem.mem, Ordering::Acquire);
        if there.is_ok_and(|i| i.0 != self.queue.next_avail()) {
            self.active = true;
        }
    }

    /// Logs why a queue is given up, if its front end took memory away.
    pub fn log_loss(&self, name: &str) {
        if self.broken && self.mem.is_lost() {
            crate::log::write_line(format_args!("{name}: {LOST}"));
        }
    }

    /// Whether the guest wants to know of the completions since the last call of this.
    pub fn wants_call(&mut self) -> bool {
        // Orders the write of the used index before the read of what the guest wants.
        let wants = self.queue.needs_notification(&self.mem.mem).unwrap_or(true);
        if self.features & crate::feature::EVENT_IDX != 0 {
            return wants;
        }
        // The crate does not know the flag of drivers that poll.
        let flags = GuestAddress(self.queue.avail_ring());
        let flags: Result<u16, _> = self.mem.mem.load(flags, Ordering::Relaxed);
        flags.map_or(true, |flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }

    /// Whether the guest may have to be notified.
    pub fn may_notify(&self) -> bool {
        self.notify_pending || self.force_notify
    }

    /// Whether the queue may hold requests that can be fetched.
    pub fn needs_fetch(&self) -> bool {
        self.active && !self.broken && (self.stopping.is_none() || self.ends_recovery())
    }

    /// Whether it stops for a guest that goes on elsewhere: a live migration does not take the
    /// memory of requests in flight along.
    pub fn moves(&self) -> bool {
        self.stops_for_good && self.mem.is_logged()
    }

    /// Whether it stops, and before that serves what the previous process has fetched: the guest
    /// moves.
    pub fn ends_recovery(&self) -> bool {
        self.stopping.is_some() && self.moves() && !self.resubmit.is_empty()
    }

    /// Whether a stop has nothing to wait for.
    pub fn is_drained(&self) -> bool {
        self.outstanding == 0 && (self.broken || !self.ends_recovery())
    }
}
