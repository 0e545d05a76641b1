//! The reading end of a trace.

use std::fmt;

use super::command::{Command, EngineGone, EngineHandle};
use super::trace::{TraceEvent, TraceWriter};

/// Why a trace does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The engine has ended.
    #[error(transparent)]
    EngineGone(#[from] EngineGone),
    /// Another trace of this device runs.
    #[error("another trace of this device runs; wait until it ends")]
    Busy,
}

/// The reading end. The trace stops when it is dropped.
pub struct TraceReader {
    engine: EngineHandle,
    events: rtrb::Consumer<TraceEvent>,
    running: bool,
}

impl fmt::Debug for TraceReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceReader").field("running", &self.running).finish_non_exhaustive()
    }
}

impl TraceReader {
    /// Starts a trace, with room for `capacity` events between two reads.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn start(engine: &EngineHandle, capacity: usize) -> Result<Self, TraceError> {
        let (mut to, mut events) = rtrb::RingBuffer::new(capacity);
        // Touches every page before the engine does.
        while to.push(TraceEvent::EMPTY).is_ok() {}
        while events.pop().is_ok() {}
        let writer = Box::new(TraceWriter { events: to, dropped: 0 });
        let refused = engine.ask(|reply| Command::StartTrace { writer, reply })?;
        if refused.is_some() {
            return Err(TraceError::Busy);
        }
        Ok(Self { engine: engine.clone(), events, running: true })
    }

    /// Drains all events, oldest first; returns their number.
    pub fn drain(&mut self, each: impl FnMut(TraceEvent)) -> usize {
        let n = self.events.slots();
        self.events.read_chunk(n).map_or(0, |chunk| {
            chunk.into_iter().for_each(each);
            n
        })
    }

    /// Stops the trace; returns the number of dropped events. Events written until then can still
    /// be drained.
    ///
    /// # Errors
    /// The engine has ended, and the number is unknown.
    pub fn stop(&mut self) -> Result<u64, EngineGone> {
        if !std::mem::take(&mut self.running) {
            return Ok(0);
        }
        let writer = self.engine.ask(|reply| Command::StopTrace { reply })?;
        Ok(writer.map_or(0, |t| t.dropped))
    }
}

impl Drop for TraceReader {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}
