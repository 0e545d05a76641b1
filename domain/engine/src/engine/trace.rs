//! What the scheduler did with each request, for who wants to watch.
//!
//! The engine writes an event for each request that it answers into a ring, and somebody reads it at his leisure. Nobody ever waits for the other: when the ring is full the event is lost, and
//! counted. No one is woken either, the reader looks from time to time. While nobody watches a request costs one test of a field that is empty.
//!
//! The ring is `rtrb`'s. A ring with a flag per slot, as the I/O-domain paper has it, was measured
//! against it: as fast for single small items, slower for large items and for batches.

use std::fmt;

use rtvirtio_sched::{Finished, Op, Priority};
use rtvirtio_units::Nanos;

use super::command::{Command, EngineHandle, Gone};
use super::table::Taken;

/// One request, answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
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

impl Event {
    pub(super) fn of(time: Nanos, finished: &Finished, taken: &Taken, status: u8) -> Self {
        let arrival = finished.request.arrival;
        // Never negative: all three are from one clock.
        let given = taken.given.0.max(arrival.0);
        Self {
            vm: finished.vm,
            queue: taken.vring,
            op: taken.op,
            len: taken.len,
            priority: finished.request.priority,
            reserved: taken.reserved,
            status,
            arrival,
            wait: Nanos(given - arrival.0),
            device: Nanos(time.0.saturating_sub(given)),
        }
    }

    const EMPTY: Self = Self {
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
pub struct Tracer {
    events: rtrb::Producer<Event>,
    dropped: u64,
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

impl Tracer {
    pub(super) fn add(&mut self, event: Event) {
        self.dropped += u64::from(self.events.push(event).is_err());
    }
}

/// Why nothing is traced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The engine is gone.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// One at a time.
    #[error("somebody else traces this device; wait until he is done")]
    Busy,
}

/// The reader's end. The engine stops writing when it is dropped.
pub struct Trace {
    engine: EngineHandle,
    events: rtrb::Consumer<Event>,
    runs: bool,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("runs", &self.runs).finish_non_exhaustive()
    }
}

impl Trace {
    /// Makes an engine write events, with room for `capacity` between two looks.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn start(engine: &EngineHandle, capacity: usize) -> Result<Self, TraceError> {
        let (mut to, mut events) = rtrb::RingBuffer::new(capacity);
        // Every page is there before the engine comes to it.
        while to.push(Event::EMPTY).is_ok() {}
        while events.pop().is_ok() {}
        let tracer = Box::new(Tracer { events: to, dropped: 0 });
        let refused = engine.ask(|reply| Command::Trace { tracer, reply })?;
        if refused.is_some() {
            return Err(TraceError::Busy);
        }
        Ok(Self { engine: engine.clone(), events, runs: true })
    }

    /// All events that are there now, oldest first; how many.
    pub fn take(&mut self, each: impl FnMut(Event)) -> usize {
        let n = self.events.slots();
        self.events.read_chunk(n).map_or(0, |chunk| {
            chunk.into_iter().for_each(each);
            n
        })
    }

    /// Ends it; how many events were lost for want of room. What was written until then can still be taken.
    ///
    /// # Errors
    /// The engine is gone, and nobody knows.
    pub fn stop(&mut self) -> Result<u64, Gone> {
        if !std::mem::take(&mut self.runs) {
            return Ok(0);
        }
        let tracer = self.engine.ask(|reply| Command::Untrace { reply })?;
        Ok(tracer.map_or(0, |t| t.dropped))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}
