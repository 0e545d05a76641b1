//! The transmission of frames on a link of a declared rate, as a virtual clock.
//!
//! Taps and packet sockets accept a frame at once and report no completion, so a queue would form
//! behind them, where nobody orders it. Here a frame of cost c (its time on the wire) that is
//! handed over at t completes at `max(f, t - u) + c`, with f the completion of the frame before it
//! and u the *catch-up*. While frames are queued the sum of costs in any interval of length x is
//! thus at most `x + u` and one frame more, and a thread that is late by no more than u loses no
//! rate.

use std::collections::VecDeque;

use rtvirtio_units::Nanos;

use crate::request::Piece;

/// The frames that the link transmits.
#[derive(Clone, Debug)]
pub struct VirtualLink {
    /// Completion of the last frame.
    free_at: Nanos,
    catch_up: Nanos,
    /// In order of completion.
    frames: VecDeque<(Nanos, Piece)>,
}

impl VirtualLink {
    /// An idle link. `window` is the number of frames that it has at once.
    #[must_use]
    pub fn new(window: u32, catch_up: Nanos) -> Self {
        Self { free_at: Nanos(0), catch_up, frames: VecDeque::with_capacity(window as usize + 1) }
    }

    /// Transmits a frame that is handed over at `now`; returns the moment of its completion.
    pub fn submit(&mut self, now: Nanos, piece: Piece) -> Nanos {
        let begin = self.free_at.max(Nanos(now.0.saturating_sub(self.catch_up.0)));
        self.free_at = Nanos(begin.0.saturating_add(piece.cost));
        self.frames.push_back((self.free_at, piece));
        self.free_at
    }

    /// The next frame that is complete at `now`, and the moment of its completion.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<(Nanos, Piece)> {
        let &(at, _) = self.frames.front()?;
        if at <= now { self.frames.pop_front() } else { None }
    }

    /// When the next frame completes; `None` for an idle link.
    #[must_use]
    pub fn next_completion(&self) -> Option<Nanos> {
        self.frames.front().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Op, Priority};

    fn frame(cost: u64) -> Piece {
        Piece {
            vm: 0,
            slot: 0,
            tag: 0,
            op: Op::Write,
            offset: 0,
            len: 60,
            priority: Priority::default(),
            cost,
            reserved: false,
            eligible_at: Nanos(0),
            due: Nanos(0),
        }
    }

    #[test]
    fn frames_follow_each_other() {
        let mut link = VirtualLink::new(2, Nanos(0));
        assert_eq!(link.submit(Nanos(1_000), frame(100)), Nanos(1_100));
        assert_eq!(link.submit(Nanos(1_010), frame(100)), Nanos(1_200));
        assert_eq!(link.pop_completed(Nanos(1_099)), None);
        assert_eq!(link.next_completion(), Some(Nanos(1_100)));
        assert_eq!(link.pop_completed(Nanos(1_200)).map(|(at, _)| at), Some(Nanos(1_100)));
        assert_eq!(link.pop_completed(Nanos(1_200)).map(|(at, _)| at), Some(Nanos(1_200)));
        assert_eq!(link.next_completion(), None);
        assert_eq!(link.submit(Nanos(5_000), frame(100)), Nanos(5_100));
    }

    proptest! {
        /// In any interval the link transmits no more than its length, the catch-up, and a frame.
        #[test]
        fn the_rate_is_kept(
            catch_up in 0u64..5_000,
            steps in prop::collection::vec((0u64..3_000, 1u64..1_000), 1..60),
        ) {
            let mut link = VirtualLink::new(64, Nanos(catch_up));
            let (mut now, mut sent) = (Nanos(10_000), Vec::new());
            for (pause, cost) in steps {
                now = Nanos(now.0 + pause);
                // As a window of one: the next frame is handed over when the last one is complete.
                now = now.max(link.next_completion().unwrap_or(now));
                while link.pop_completed(now).is_some() {}
                link.submit(now, frame(cost));
                sent.push((now, cost));
                let mut sum = 0;
                for (at, cost) in sent.iter().rev() {
                    sum += cost;
                    prop_assert!(sum <= now.0 - at.0 + catch_up + 1_000, "{sum} since {at}");
                }
            }
        }
    }
}
