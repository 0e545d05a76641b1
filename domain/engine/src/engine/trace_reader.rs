//! The reading end of a trace.

use std::fmt;

use super::command::Command;
use super::thread::{EngineGone, EngineHandle};
use super::trace::{TraceCommand, TraceWriter};

/// Reasons for which a trace does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The engine has ended.
    #[error(transparent)]
    EngineGone(#[from] EngineGone),
    /// A trace of this device or network runs already.
    #[error("another trace of it runs; wait until it ends")]
    Busy,
}

/// Reading end of a trace's ring. The trace stops when it is dropped.
pub struct TraceReader<C: TraceCommand = Command> {
    engine: EngineHandle<C>,
    events: rtrb::Consumer<C::Event>,
    running: bool,
}

impl<C: TraceCommand> fmt::Debug for TraceReader<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceReader").field("running", &self.running).finish_non_exhaustive()
    }
}

impl<C: TraceCommand> TraceReader<C> {
    /// Starts a trace, with room for `capacity` events between two reads.
    pub fn start(engine: &EngineHandle<C>, capacity: usize) -> Result<Self, TraceError> {
        let (mut to, mut events) = rtrb::RingBuffer::new(capacity);
        // Touches every page before the engine does.
        while to.push(C::EMPTY).is_ok() {}
        while events.pop().is_ok() {}
        let writer = Box::new(TraceWriter { events: to, dropped: 0 });
        let refused = engine.ask(|reply| C::start_trace(writer, reply))?;
        if refused.is_some() {
            return Err(TraceError::Busy);
        }
        Ok(Self { engine: engine.clone(), events, running: true })
    }

    /// Drains all events, oldest first; returns their number.
    pub fn drain(&mut self, each: impl FnMut(C::Event)) -> usize {
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
        let writer = self.engine.ask(C::stop_trace)?;
        Ok(writer.map_or(0, |t| t.dropped))
    }
}

impl<C: TraceCommand> Drop for TraceReader<C> {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}
