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

use rtvirtio_sched::{CompletedRequest, Op, Priority, VmId};
use rtvirtio_units::Nanos;

use super::table::InflightRequest;

/// A completed or refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Place of the VM on its device.
    pub vm: VmId,
    /// Number that no other VM on this device has or had; see [`super::Command::Member`].
    pub member: u32,
    /// Index of the queue.
    pub queue: u16,
    /// The operation; `None` of a request that was refused.
    pub op: Option<Op>,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// Priority after the VM's rule.
    pub priority: Priority,
    /// Whether the first piece was submitted under a reservation.
    pub reserved: bool,
    /// Name of the status counter of a refused request; `None` of others.
    pub refused: Option<&'static str>,
    /// The virtio status: 0 success, 1 an I/O error, 2 not supported.
    pub status: u8,
    /// Time of the fetch, on CLOCK_MONOTONIC.
    pub arrival: Nanos,
    /// Time from fetch to the submission of the first piece: caps, policy and window.
    pub wait: Nanos,
    /// Time from there to the last piece's completion; later pieces may have waited in between.
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
            queue: request.queue.0,
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
        vm: VmId(0),
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
    /// Event of a request or a frame.
    type Event: Copy + 'static;
    /// An event that fills the ring before it is used.
    const EMPTY: Self::Event;
    /// Makes the command that starts a trace.
    fn start_trace(writer: Box<TraceWriter<Self::Event>>, reply: TraceReply<Self::Event>) -> Self;
    /// Makes the command that stops it.
    fn stop_trace(reply: TraceReply<Self::Event>) -> Self;
}

/// Receives the writer when it is refused, or when the trace has stopped.
pub type TraceReply<E> = SyncSender<Option<Box<TraceWriter<E>>>>;

/// Writing end of a trace's ring.
pub struct TraceWriter<E = TraceEvent> {
    pub(super) events: rtrb::Producer<E>,
    /// Events that were dropped because the ring was full.
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
