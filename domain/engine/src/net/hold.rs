//! Work of a port in a round, and the time for which the port is held.

use rtvirtio_sched::Backoff;
use rtvirtio_units::Nanos;

/// The account of a port.
#[derive(Debug, Default)]
pub struct Hold {
    /// Kicks of this round.
    pub kicks: u32,
    /// Frames of this round that were passed on, and frames of the VM that were refused.
    pub useful: u32,
    pub fruitless: u32,
    /// Wall-clock time of this round.
    pub work: Nanos,
    /// End of the hold: queues are not served before, and kicks are ignored.
    pub until: Option<Nanos>,
    pub backoff: Backoff,
}

impl Hold {
    /// Closes a round. Returns the end of the delay of a port with too much fruitless work (see
    /// [`Backoff`]), and its time in the round.
    pub fn end_round(&mut self, now: Nanos) -> (Option<Nanos>, Nanos) {
        let (kicks, useful) = (std::mem::take(&mut self.kicks), std::mem::take(&mut self.useful));
        // A kick is useful for the frame that it announces.
        let fruitless = std::mem::take(&mut self.fruitless) + kicks.saturating_sub(useful);
        let work = std::mem::take(&mut self.work);
        let until = (useful + fruitless > 0).then(|| self.backoff.record(now, useful, fruitless)).flatten();
        (until, work)
    }
}
