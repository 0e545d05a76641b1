//! Trace of completed requests, and of frames.
//!
//! The engine writes an event for each completed request or frame into a ring, which is drained
//! asynchronously. Neither end waits for the other: when the ring is full, the event is dropped and
//! counted. The reader polls, so the engine wakes no thread. Without a trace, a request costs one
//! test of an empty field.
//!
//! The ring is `rtrb`'s. A ring with a flag per slot, as in the I/O-domain paper, was measured in
//! comparison: as fast for single small items, slower for large items and for batches.

use std::fmt;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{CompletedRequest, Op, Priority};
use rtvirtio_units::Nanos;

use super::table::InflightRequest;

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Place of the VM on its device.
    pub vm: usize,
    /// Tells apart the VMs that had this place; see [`super::Command::Member`].
    pub member: u32,
    /// Index of the queue.
    pub queue: u16,
    /// The operation; `None` of a request that was refused.
    pub op: Option<Op>,
    /// Its length in bytes; 0 for a flush.
    pub len: u64,
    /// Its priority after the VM's rule.
    pub priority: Priority,
    /// Its first piece was submitted under a reservation.
    pub reserved: bool,
    /// The counter of the status in which a request is that was refused.
    pub refused: Option<&'static str>,
    /// The virtio status: 0 success, 1 an I/O error, 2 not supported.
    pub status: u8,
    /// When it was fetched, on CLOCK_MONOTONIC.
    pub arrival: Nanos,
    /// From fetch to the submission of its first piece: caps, policy and window.
    pub wait: Nanos,
    /// From there to the completion of its last piece; later pieces may have waited in between.
    pub device: Nanos,
}

impl TraceEvent {
    pub(super) fn new(
        time: Nanos,
        member: u32,
        completed: &CompletedRequest,
        request: &InflightRequest,
        status: u8,
    ) -> Self {
        let arrival = completed.request.arrival;
        // Never negative: all three are from one clock.
        let given = request.submitted_at.0.max(arrival.0);
        Self {
            vm: completed.vm,
            member,
            queue: request.vring,
            op: Some(request.op),
            len: request.len,
            priority: completed.request.priority,
            reserved: request.reserved,
            refused: None,
            status,
            arrival,
            wait: Nanos(given - arrival.0),
            device: Nanos(time.0.saturating_sub(given)),
        }
    }

    pub(super) const EMPTY: Self = Self {
        vm: 0,
        member: 0,
        queue: 0,
        op: None,
        len: 0,
        priority: Priority::NORMAL,
        reserved: false,
        refused: None,
        status: 0,
        arrival: Nanos(0),
        wait: Nanos(0),
        device: Nanos(0),
    };
}

/// An engine's commands that start and stop its trace.
pub trait TraceCommand: Sized {
    /// What is traced.
    type Event: Copy + 'static;
    /// An event that fills the ring before it is used.
    const EMPTY: Self::Event;
    /// Starts it.
    fn start_trace(writer: Box<TraceWriter<Self::Event>>, reply: TraceReply<Self::Event>) -> Self;
    /// Stops it.
    fn stop_trace(reply: TraceReply<Self::Event>) -> Self;
}

/// Sent the writer: when it is refused, or the trace has stopped.
pub type TraceReply<E> = SyncSender<Option<Box<TraceWriter<E>>>>;

/// The writing end.
pub struct TraceWriter<E = TraceEvent> {
    pub(super) events: rtrb::Producer<E>,
    /// Events that found no room.
    pub(super) dropped: u64,
}

impl<E> fmt::Debug for TraceWriter<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceWriter").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

impl<E> TraceWriter<E> {
    pub(crate) fn record(&mut self, event: E) {
        self.dropped += u64::from(self.events.push(event).is_err());
    }
}
