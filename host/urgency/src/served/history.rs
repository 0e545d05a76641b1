//! Record of a VM's reports and level changes. For measurements only: production use follows VMs
//! without it.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Level, Reason};

/// Event with its time and vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Time by the host's clock ([`crate::now`]).
    pub at: Nanos,
    /// Number of the vCPU.
    pub vcpu: usize,
    /// Event at this time.
    pub event: Event,
}

/// Event of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A new report was read, written at this time of the guest's clock.
    Report(Nanos),
    /// The thread was set to this level, for this reason.
    Level(Level, Reason),
}

/// All events in their order, up to the capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    moments: Vec<Moment>,
    missed: u64,
}

impl History {
    /// Allocates room for this number of events now, and not while pages are followed.
    pub(super) fn with_room(moments: usize) -> Self {
        Self { moments: Vec::with_capacity(moments), missed: 0 }
    }

    pub(super) fn push(&mut self, at: Nanos, vcpu: usize, event: Event) {
        if self.moments.len() < self.moments.capacity() {
            self.moments.push(Moment { at, vcpu, event });
        } else {
            self.missed = self.missed.saturating_add(1);
        }
    }

    /// Recorded events, the earliest first.
    #[must_use]
    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    /// Number of events beyond the capacity.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted() {
        let mut history = History::with_room(4);
        let room = history.moments.capacity();
        for at in 0..room as u64 + 3 {
            history.push(Nanos(at), 1, Event::Report(Nanos(7)));
        }
        assert_eq!((history.moments().len(), history.missed()), (room, 3));
        assert_eq!(history.moments().last().map(|m| m.at), Some(Nanos(room as u64 - 1)));
        assert_eq!(history.moments.capacity(), room, "no memory was asked for");
    }
}
