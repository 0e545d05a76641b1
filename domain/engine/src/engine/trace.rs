//! What the scheduler did with each request, for who wants to watch.
//!
//! The engine writes an event for each request that it answers into a ring, and somebody reads it at his leisure. Nobody ever waits for the other: when the ring is full the event is lost, and
//! counted. No one is woken either, the reader looks from time to time. While nobody watches a request costs one test of a field that is empty.
//!
//! The ring is `rtrb`'s. A ring with a flag per slot, as the I/O-domain paper has it, was measured
//! against it: as fast for single small items, slower for large items and for batches.

use std::fmt;

use rtvirtio_sched::{CompletedRequest, Op, Priority};
use rtvirtio_units::Nanos;

use super::table::InflightRequest;

/// One request, answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Whose, in the order of the device's disks.
    pub vm: usize,
    /// Which queue of it.
    pub queue: u16,
    /// What it asked.
    pub op: Op,
    /// Its length in bytes; 0 for a flush.
    pub len: u64,
    /// As the VM's rule read it.
    pub priority: Priority,
    /// Its first piece went by its reservation's deadline.
    pub reserved: bool,
    /// The virtio status that the guest got: 0 done, 1 an I/O error, 2 not supported.
    pub status: u8,
    /// When it was taken from its queue, on CLOCK_MONOTONIC.
    pub arrival: Nanos,
    /// From then until its first piece went to the device: caps, policy and window.
    pub wait: Nanos,
    /// From then until its last piece was back; requests of several pieces may have waited in between.
    pub device: Nanos,
}

impl TraceEvent {
    pub(super) fn new(
        time: Nanos,
        completed: &CompletedRequest,
        request: &InflightRequest,
        status: u8,
    ) -> Self {
        let arrival = completed.request.arrival;
        // Never negative: all three are from one clock.
        let given = request.submitted_at.0.max(arrival.0);
        Self {
            vm: completed.vm,
            queue: request.vring,
            op: request.op,
            len: request.len,
            priority: completed.request.priority,
            reserved: request.reserved,
            status,
            arrival,
            wait: Nanos(given - arrival.0),
            device: Nanos(time.0.saturating_sub(given)),
        }
    }

    pub(super) const EMPTY: Self = Self {
        vm: 0,
        queue: 0,
        op: Op::Flush,
        len: 0,
        priority: Priority::NORMAL,
        reserved: false,
        status: 0,
        arrival: Nanos(0),
        wait: Nanos(0),
        device: Nanos(0),
    };
}

/// The engine's end.
pub struct TraceWriter {
    pub(super) events: rtrb::Producer<TraceEvent>,
    /// Events that found no room.
    pub(super) dropped: u64,
}

impl fmt::Debug for TraceWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceWriter").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

impl TraceWriter {
    pub(super) fn add(&mut self, event: TraceEvent) {
        self.dropped += u64::from(self.events.push(event).is_err());
    }
}
