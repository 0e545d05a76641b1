//! One VM of a scheduler: its requests, caps and reservations, and its next eligible piece.

use rtvirtio_units::Nanos;

use super::VmCounters;
use crate::bucket::{Bucket, Regulator, Reservation};
use crate::config::VmConfig;
use crate::deallocation::IDLE_AFTER;
use crate::meter::Meter;
use crate::priority::{Class, PriorityRule};
use crate::queue::{Head, Mask, Queue, TRANSFERS, direction_mask};
use crate::request::{Direction, Op};
use crate::split::{Candidate, Splitter};

/// A reservation with the state of its bucket.
#[derive(Debug)]
pub(super) struct ReservationState {
    pub(super) bucket: Bucket,
    pub(super) deadline: Nanos,
    /// Earliest time at which reads and writes become eligible. Until then a cap of theirs, or a
    /// request beyond the reservation, of the same VM delayed them; without this, the accumulated
    /// backlog would overtake all other VMs at once.
    pub(super) not_before: [Nanos; 2],
}

impl ReservationState {
    pub(super) fn new(r: &Reservation) -> Self {
        Self { bucket: Bucket::new(r.rate, r.burst), deadline: r.deadline, not_before: [Nanos(0); 2] }
    }
}

#[derive(Debug)]
pub(super) struct Vm {
    pub(super) queue: Queue,
    pub(super) rule: PriorityRule,
    pub(super) weight: u32,
    pub(super) caps: [Regulator; 2],
    /// Reservations of real-time and of best-effort requests.
    pub(super) reservations: [Option<ReservationState>; 2],
    /// Largest pieces under these reservations, in bytes.
    pub(super) quanta: [u64; 2],
    pub(super) meters: [Meter; 2],
    pub(super) outstanding: [u32; 2],
    pub(super) counters: VmCounters,
    /// Whether a flush of this VM is at the device.
    pub(super) flush_inflight: bool,
    /// Time at which the last transfer arrived or completed.
    pub(super) last_transfer_at: Nanos,
    /// Whether the place has no VM.
    pub(super) is_vacant: bool,
}

/// Order among the requests of a VM.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Priority,
    Age,
}

/// Selection of a piece from a VM's queue.
#[derive(Clone, Copy)]
pub(super) struct Query {
    /// Lists that are searched.
    pub(super) mask: Mask,
    pub(super) order: Order,
    /// Largest piece to take, in bytes.
    pub(super) quantum: u64,
    pub(super) now: Nanos,
}

/// The reservation that covers requests of a class.
pub(super) fn reservation_for(
    reservations: &mut [Option<ReservationState>; 2],
    class: Class,
) -> Option<&mut ReservationState> {
    match class {
        Class::RealTime => reservations[0].as_mut(),
        Class::BestEffort => reservations[1].as_mut(),
        Class::Idle => None,
    }
}

impl Vm {
    pub(super) fn new(config: &VmConfig, splitter: &Splitter) -> Self {
        let largest = config.urgent_quantum.unwrap_or(0).max(splitter.quantum);
        let piece = config.largest.map_or(largest, |request| request.min(largest));
        let cap = |d: Direction| Regulator::new(&config.caps[d.index()], splitter.max_charge(d, piece));
        let state = |r: &Option<Reservation>| r.as_ref().map(ReservationState::new);
        Self {
            queue: Queue::new(config.depth),
            rule: config.priority,
            weight: config.weight,
            caps: [cap(Direction::Read), cap(Direction::Write)],
            reservations: [state(&config.urgent), state(&config.normal)],
            quanta: [largest, splitter.quantum],
            meters: [Meter::default(), Meter::default()],
            outstanding: [0; 2],
            counters: VmCounters::default(),
            flush_inflight: false,
            last_transfer_at: Nanos(0),
            is_vacant: false,
        }
    }

    /// A place without a VM: no requests, and a weight that is never the lightest.
    pub(super) fn vacant(splitter: &Splitter) -> Self {
        let none = VmConfig { depth: 0, weight: u32::MAX, ..VmConfig::default() };
        Self { is_vacant: true, ..Self::new(&none, splitter) }
    }

    /// Whether the VM has a reservation. Its own discards are then paced like those of other VMs.
    pub(super) fn has_reservation(&self) -> bool {
        self.reservations.iter().any(Option::is_some)
    }

    /// Time from which the VM does not use the device; no end while transfers are outstanding.
    pub(super) fn idle_from(&self) -> Nanos {
        if self.queue.transfers_outstanding() > 0 {
            return Nanos(u64::MAX);
        }
        // A VM without any transfer so far is idle from the beginning.
        if self.last_transfer_at == Nanos(0) {
            Nanos(0)
        } else {
            Nanos(self.last_transfer_at.0 + IDLE_AFTER.0)
        }
    }

    /// The next piece that the VM's caps admit. For each head that a cap delays, `capped` is
    /// called, and `wake` becomes no later than the time at which that head may go.
    pub(super) fn candidate(
        &self,
        query: &Query,
        splitter: &Splitter,
        wake: &mut Nanos,
        mut capped: impl FnMut(Direction, &Head),
    ) -> Option<Candidate> {
        let Query { mask, order, quantum, now } = *query;
        let mut best: Option<Candidate> = None;
        for direction in Direction::ALL {
            let mask = mask & direction_mask(direction);
            let head = match order {
                Order::Priority => self.queue.head(mask),
                Order::Age => self.queue.oldest(mask),
            };
            let Some(head) = head else { continue };
            let cap = &self.caps[direction.index()];
            // A cap on bytes has a burst of one quantum at least, and counts zeroes as written.
            let whole = head.op != Op::WriteZeroes || !cap.limits_bytes();
            let len = if whole { quantum } else { quantum.min(splitter.quantum) };
            let candidate = splitter.split(head, len);
            let ready = cap.ready_at(now, &candidate.charge);
            if ready > now {
                *wake = (*wake).min(ready);
                capped(direction, &head);
                continue;
            }
            let key = |h: &Head| match order {
                Order::Priority => (Some(h.priority), h.sequence),
                Order::Age => (None, h.sequence),
            };
            if best.as_ref().is_none_or(|b| key(&head) < key(&b.head)) {
                best = Some(candidate);
            }
        }
        best
    }

    /// Whether a less important request has waited longer than `aging`.
    pub(super) fn has_aged(&self, now: Nanos, aging: Nanos) -> bool {
        (self.queue.nonempty() & TRANSFERS).count_ones() > 1
            && self.queue.oldest(TRANSFERS).is_some_and(|h| now.0.saturating_sub(h.arrival.0) > aging.0)
    }
}
