//! The transmission of frames on a link of a declared rate, as a virtual clock.
//!
//! Taps and packet sockets accept a frame at once and report no completion, so a queue would form
//! behind them, in arrival order. Here a frame of cost c (its time on the wire) that is submitted
//! at t completes at `max(f, t - u) + c`, with f the completion of the frame before it and u the
//! *catch-up*. While frames are queued the sum of costs in any interval of length x is thus at most
//! `x + u` and one frame more, and a thread that is late by no more than u loses no rate.

use std::collections::VecDeque;

use rtvirtio_units::{Bytes, BytesPerSec, Nanos, SHORTEST_FRAME, WIRE_OVERHEAD};

use crate::bound::{self, Deallocations, Flow};
use crate::bucket::Reservation;
use crate::cost::Line;
use crate::request::Piece;

/// Share of the link that is used, so that frames queue here and not in the interface, whose clock
/// may be slower than declared.
pub const LINK_SHARE: f64 = 0.99;
/// Most frames at the interface at once.
pub const LINK_WINDOW: u32 = 2;
/// Longest lateness of the thread that it catches up.
pub const CATCH_UP: Nanos = Nanos::from_micros(500);
/// Longest time in which the host does not run the thread, where nothing else is known.
pub const LINK_STALL: Nanos = Nanos::from_micros(500);

/// A link for the scheduler and its admission: the device time of a frame is its time on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Declared rate, of which [`LINK_SHARE`] is used.
    pub rate: BytesPerSec,
    /// Longest time in which the host does not run the thread that sends.
    pub stall: Nanos,
    /// Largest frame of any port, in bytes without its FCS.
    pub largest_frame: u64,
}

impl Link {
    fn ns_per_byte(&self) -> f64 {
        1e9 / (self.rate.0 * LINK_SHARE)
    }

    /// Time of a frame on the link.
    #[must_use]
    pub fn line(&self) -> Line {
        let ns = self.ns_per_byte();
        Line {
            base_ns: (ns * WIRE_OVERHEAD as f64).ceil() as u64,
            per_mib_ns: (ns * 1_048_576.0).ceil() as u64,
        }
    }

    /// Largest cost of a frame over its exact time, as costs are whole nanoseconds: that of the
    /// shortest frame. The base is rounded up, the part of the bytes by less than 1 ns, and their
    /// time per MiB by less than 1 ns too.
    fn rounding(&self) -> f64 {
        let ns = self.ns_per_byte();
        let base = self.line().base_ns as f64 - ns * WIRE_OVERHEAD as f64;
        let more = base + 1.0 + self.largest_frame as f64 / 1_048_576.0;
        1.0 + more / (ns * (SHORTEST_FRAME + WIRE_OVERHEAD) as f64)
    }

    /// Reservation of device time that covers frames of any size within these bytes on the wire.
    #[must_use]
    pub fn reservation(&self, rate: BytesPerSec, burst: Bytes, deadline: Nanos) -> Reservation {
        let ns = self.ns_per_byte() * self.rounding();
        let whole = |v: f64| v.ceil() as u64;
        Reservation { rate: whole(rate.0 * ns), burst: whole(burst.0 as f64 * ns), deadline }
    }

    /// Parameters for bounds. Frames sent to catch up may wait in the interface.
    #[must_use]
    pub fn device(stall: Nanos) -> bound::Device {
        let latency = Nanos(stall.0.saturating_add(CATCH_UP.0));
        let deallocations = Deallocations::default();
        bound::Device { parallel: 1, window: LINK_WINDOW, latency, stretch: 1.0, deallocations }
    }

    /// Demand of one port: its reservations, and its load beyond them. `piece` is the time of the
    /// network's largest frame, in ns.
    pub fn demand(
        piece: f64,
        port: usize,
        weight: u32,
        reservations: [Option<Reservation>; 2],
    ) -> impl Iterator<Item = Flow> {
        let free = Flow { vm: port, rate: 0.0, burst: 0.0, piece, outstanding: None, deadline: None, weight };
        let reserved = reservations.into_iter().flatten().map(move |r| Flow {
            rate: r.rate as f64 / 1e9,
            burst: r.burst as f64,
            deadline: Some(r.deadline),
            piece: piece.min(r.burst as f64),
            ..free
        });
        std::iter::once(free).chain(reserved)
    }
}

/// Frames in transmission on a link.
#[derive(Clone, Debug)]
pub struct VirtualLink {
    /// Completion time of the last frame.
    free_at: Nanos,
    catch_up: Nanos,
    /// Frames with their completion times, in this order.
    frames: VecDeque<(Nanos, Piece)>,
}

impl VirtualLink {
    /// An idle link. `window` is the largest number of frames at once.
    #[must_use]
    pub fn new(window: u32, catch_up: Nanos) -> Self {
        Self { free_at: Nanos(0), catch_up, frames: VecDeque::with_capacity(window as usize + 1) }
    }

    /// Transmits a frame that is submitted at `now`; returns its completion time.
    pub fn submit(&mut self, now: Nanos, piece: Piece) -> Nanos {
        let begin = self.free_at.max(Nanos(now.0.saturating_sub(self.catch_up.0)));
        self.free_at = Nanos(begin.0.saturating_add(piece.cost));
        self.frames.push_back((self.free_at, piece));
        self.free_at
    }

    /// The next frame that is complete at `now`, and its completion time.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<(Nanos, Piece)> {
        let &(at, _) = self.frames.front()?;
        if at <= now { self.frames.pop_front() } else { None }
    }

    /// Completion time of the next frame; `None` for an idle link.
    #[must_use]
    pub fn next_completion(&self) -> Option<Nanos> {
        self.frames.front().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::id::VmId;
    use crate::{Op, Priority};

    fn frame(cost: u64) -> Piece {
        Piece {
            vm: VmId(0),
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

    /// On fast links a nanosecond is a large part of a short frame.
    #[test]
    fn costs_cover_the_wire_and_reservations_cover_the_costs() {
        for gbit in [0.01, 1.0, 10.0, 40.0, 100.0] {
            let link = Link { rate: BytesPerSec(gbit * 125e6), stall: LINK_STALL, largest_frame: 9_238 };
            for len in SHORTEST_FRAME..=link.largest_frame {
                let (wire, cost) = (len + WIRE_OVERHEAD, link.line().time_of(len));
                assert!(cost as f64 >= wire as f64 * 1e9 / link.rate.0, "{len} at {gbit}: {cost}");
                let of = link.reservation(BytesPerSec(1e3 * wire as f64), Bytes(10 * wire), Nanos(1));
                assert!(of.rate >= 1_000 * cost && of.burst >= 10 * cost, "{len} at {gbit}: {of:?} {cost}");
            }
        }
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
                // With a window of one, the next frame is submitted when the last one is complete.
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
