//! Data of one VM in an engine: its disk, queues, requests and counters.

use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{Idx, IndexVec};
use rtvirtio_stats::LatencyRecorder;
use rtvirtio_units::Nanos;

use super::Disk;
use super::blocks::BlockWrites;
use super::buffers::VmBuffers;
use super::queue_id::QueueId;
use super::room::WaitingForRoom;
use super::slot::QueueSlot;
use super::table::RequestTable;
use super::urgency_eventfd::UrgencyEventfd;
use super::vring::Vring;
use crate::blk::Refused;

/// A VM, or a vacant place: the index of a VM never changes.
pub(super) struct Vm {
    /// `None` in a vacant place.
    pub(super) disk: Option<Disk>,
    /// Tells apart the VMs that had this place.
    pub(super) member: u32,
    /// Places of its queues, up to the last one that was used.
    pub(super) slots: IndexVec<QueueId, QueueSlot>,
    /// The queue that is fetched from first.
    pub(super) next_queue: usize,
    /// Fetched from after all others, because it exceeded a round's budget of work without device
    /// time.
    pub(super) deferred: bool,
    pub(super) requests: RequestTable,
    pub(super) latencies: [LatencyRecorder; 2],
    pub(super) faults: Faults,
    /// Requests under a reservation: real-time ones, then the others.
    pub(super) promises: [PromiseCounters; 2],
    pub(super) urgency: UrgencyEventfd,
    /// Writes, on a device with blocks larger than the guest's.
    pub(super) block_writes: BlockWrites,
    /// Writes that wait for room on the file system.
    pub(super) room: WaitingForRoom,
    /// Memory that is registered with the ring.
    pub(super) buffers: VmBuffers,
    /// All requests of its depth are outstanding, and its queues may hold more.
    pub(super) depth_exhausted: bool,
    /// Answered when nothing of the VM is in flight after a disconnect.
    pub(super) disconnect_reply: Option<SyncSender<()>>,
}

impl Vm {
    /// A VM with this disk, all of its memory reserved.
    pub(super) fn new(disk: Disk, depth: u32) -> Self {
        Self { disk: Some(disk), ..Self::of_depth(depth) }
    }

    /// A place without a VM.
    pub(super) fn vacant() -> Self {
        Self::of_depth(0)
    }

    fn of_depth(depth: u32) -> Self {
        Self {
            disk: None,
            member: 0,
            slots: IndexVec::new(),
            next_queue: 0,
            deferred: false,
            requests: RequestTable::new(depth),
            latencies: Default::default(),
            faults: Faults::default(),
            promises: [PromiseCounters::default(); 2],
            urgency: UrgencyEventfd::default(),
            block_writes: BlockWrites::default(),
            room: WaitingForRoom::default(),
            buffers: VmBuffers::default(),
            depth_exhausted: false,
            disconnect_reply: None,
        }
    }

    /// The place of a queue, which is made when it is first used: few guests use all that a disk
    /// offers. `None` for a queue that it does not offer.
    pub(super) fn slot(&mut self, queue: QueueId) -> Option<&mut QueueSlot> {
        let offered = self.disk.as_ref().map_or(0, |disk| disk.queues);
        if queue >= self.slots.next_idx() && queue.0 < offered {
            self.slots.resize_with(queue.index() + 1, QueueSlot::default);
        }
        self.slots.get_mut(queue)
    }

    /// Whether one of its queues may hold requests.
    pub(super) fn needs_fetch(&self) -> bool {
        self.slots.iter().filter_map(|s| s.vring.as_ref()).any(Vring::needs_fetch)
    }
}

/// Requests that were not carried out, each in one counter; those whose header or status is outside
/// of the shared memory are in two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Chains that are no valid requests.
    pub malformed: u64,
    /// Requests that were answered without the device.
    pub refused: RefusedRequests,
    /// Requests that the device failed.
    pub errors: u64,
    /// Result of the last of these: a negative error number, or the bytes of a piece that ended
    /// early.
    pub last_error: Option<i32>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken_queues: u64,
}

/// Requests of which every piece was submitted under a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromiseCounters {
    /// Number of completed requests.
    pub requests: u64,
    /// Requests of these that took longer than the reservation's deadline.
    pub missed: u64,
    /// The longest, from when the reservation covered it.
    pub worst: Nanos,
}

impl PromiseCounters {
    pub(crate) fn record(&mut self, took: Nanos, missed: bool) {
        self.requests += 1;
        self.missed += u64::from(missed);
        self.worst = self.worst.max(took);
    }
}

/// Requests that were answered without the device, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedRequests([u64; Refused::ALL.len()]);

impl RefusedRequests {
    pub(crate) fn count(&mut self, why: Refused) {
        self.0[why as usize] += 1;
    }

    /// Requests refused for this reason.
    #[must_use]
    pub fn count_of(&self, why: Refused) -> u64 {
        self.0[why as usize]
    }
}
