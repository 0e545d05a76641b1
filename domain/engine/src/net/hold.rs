//! What a port costs the thread in a round, and until when it is not served.

use rtvirtio_sched::Backoff;
use rtvirtio_units::Nanos;

/// The account of a port.
#[derive(Debug, Default)]
pub struct Hold {
    /// Kicks of this round.
    pub kicks: u32,
    /// Frames of this round that were passed on, and those of the VM that were refused.
    pub useful: u32,
    pub fruitless: u32,
    /// Time of this round, by the wall clock.
    pub work: Nanos,
    /// It is not served before this moment: its queues wait, its kicks are not listened to.
    pub until: Option<Nanos>,
    pub backoff: Backoff,
}

impl Hold {
    /// Closes a round. Returns until when the port has to wait because its work led nowhere, and
    /// its time.
    pub fn end_round(&mut self, now: Nanos) -> (Option<Nanos>, Nanos) {
        let (kicks, useful) = (std::mem::take(&mut self.kicks), std::mem::take(&mut self.useful));
        // A kick is of use for the frame that it announces.
        let fruitless = std::mem::take(&mut self.fruitless) + kicks.saturating_sub(useful);
        let work = std::mem::take(&mut self.work);
        let until = (useful + fruitless > 0).then(|| self.backoff.record(now, useful, fruitless)).flatten();
        (until, work)
    }
}
