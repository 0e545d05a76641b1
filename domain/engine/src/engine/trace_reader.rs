//! The reading end of a trace.

use std::fmt;

use super::command::{Command, EngineGone, EngineHandle};
use super::trace::{TraceEvent, TraceWriter};

/// Why nothing is traced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The engine is gone.
    #[error(transparent)]
    EngineGone(#[from] EngineGone),
    /// One at a time.
    #[error("somebody else traces this device; wait until he is done")]
    Busy,
}

/// The reader's end. The engine stops writing when it is dropped.
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
    /// Makes an engine write events, with room for `capacity` between two looks.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn start(engine: &EngineHandle, capacity: usize) -> Result<Self, TraceError> {
        let (mut to, mut events) = rtrb::RingBuffer::new(capacity);
        // Every page is there before the engine comes to it.
        while to.push(TraceEvent::EMPTY).is_ok() {}
        while events.pop().is_ok() {}
        let writer = Box::new(TraceWriter { events: to, dropped: 0 });
        let refused = engine.ask(|reply| Command::StartTrace { writer, reply })?;
        if refused.is_some() {
            return Err(TraceError::Busy);
        }
        Ok(Self { engine: engine.clone(), events, running: true })
    }

    /// All events that are there now, oldest first; how many.
    pub fn drain(&mut self, each: impl FnMut(TraceEvent)) -> usize {
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
