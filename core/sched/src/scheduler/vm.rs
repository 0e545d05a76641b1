//! One VM of a scheduler: its requests, limits and reservations, and which of its pieces may go.

use rtvirtio_units::Nanos;

use super::VmCounters;
use crate::bucket::{Bucket, Charge, Regulator, Reservation};
use crate::config::VmConfig;
use crate::cost::Cost;
use crate::deallocation::QUIET;
use crate::meter::Meter;
use crate::priority::{Class, PriorityRule};
use crate::queue::{Head, Mask, Queue, TRANSFERS, of_direction};
use crate::request::{Direction, Op};

#[derive(Debug)]
pub(super) struct Flow {
    pub(super) bucket: Bucket,
    pub(super) deadline: Nanos,
    /// Until then something of its own kept the requests behind from going: a cap, or a request beyond the reservation. They do not go as if they had come before that, or all that
    /// collected would go at once, before everybody's.
    pub(super) not_before: Nanos,
}

impl Flow {
    pub(super) fn new(r: &Reservation) -> Self {
        Self { bucket: Bucket::new(r.rate, r.burst), deadline: r.deadline, not_before: Nanos(0) }
    }
}

#[derive(Debug)]
pub(super) struct Vm {
    pub(super) queue: Queue,
    pub(super) rule: PriorityRule,
    pub(super) weight: u32,
    pub(super) caps: [Regulator; 2],
    /// Real-time and best-effort requests.
    pub(super) flows: [Option<Flow>; 2],
    /// Largest pieces of requests that go by these.
    pub(super) quanta: [u64; 2],
    pub(super) meters: [Meter; 2],
    pub(super) outstanding: [u32; 2],
    pub(super) counters: VmCounters,
    /// A flush of it is at the device.
    pub(super) flushing: bool,
    /// When its last transfer came or ended.
    pub(super) last_transfer: Nanos,
}

/// How the next request of a VM is chosen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Priority,
    Age,
}

/// A piece that may go.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) head: Head,
    pub(super) len: u64,
    pub(super) charge: Charge,
}

/// How requests are cut and what pieces cost.
#[derive(Debug)]
pub(super) struct Cutter {
    pub(super) cost: Cost,
    pub(super) quantum: u64,
}

impl Cutter {
    pub(super) fn cut(&self, head: Head, quantum: u64) -> Candidate {
        let len = head.rest.min(quantum);
        // What a deallocation takes is charged when it is back.
        let time = if head.op.deallocates() { 1 } else { self.cost.of(head.op, len) };
        let charge = Charge::of(head.op, len, head.given == 0, time);
        Candidate { head, len, charge }
    }

    pub(super) fn most(&self, direction: Direction, quantum: u64) -> Charge {
        Charge { requests: 1, bytes: quantum, time: self.cost.most(direction, quantum) }
    }

    /// The most that one piece of a transfer costs, in ns.
    pub(super) fn most_time(&self) -> u64 {
        self.cost.dearest(self.quantum)
    }
}

/// The reservation that requests of a class go by.
pub(super) fn flow_of(flows: &mut [Option<Flow>; 2], class: Class) -> Option<&mut Flow> {
    match class {
        Class::RealTime => flows[0].as_mut(),
        Class::BestEffort => flows[1].as_mut(),
        Class::Idle => None,
    }
}

impl Vm {
    pub(super) fn new(config: &VmConfig, cutter: &Cutter) -> Self {
        let largest = config.urgent_quantum.unwrap_or(0).max(cutter.quantum);
        let cap = |d: Direction| Regulator::new(&config.caps[d.index()], cutter.most(d, largest));
        Self {
            queue: Queue::new(config.depth),
            rule: config.priority,
            weight: config.weight,
            caps: [cap(Direction::Read), cap(Direction::Write)],
            flows: [config.urgent.as_ref().map(Flow::new), config.normal.as_ref().map(Flow::new)],
            quanta: [largest, cutter.quantum],
            meters: [Meter::new(config.promised[0]), Meter::new(config.promised[1])],
            outstanding: [0; 2],
            counters: VmCounters::default(),
            flushing: false,
            last_transfer: Nanos(0),
        }
    }

    /// Whether it has a reservation: then its own discards keep their pace before its requests too.
    pub(super) fn is_promised(&self) -> bool {
        self.flows.iter().any(Option::is_some)
    }

    /// From when on it does not use the device; the end of time while it has transfers outstanding.
    pub(super) fn quiet_at(&self) -> Nanos {
        if self.queue.transfers_held() > 0 {
            return Nanos(u64::MAX);
        }
        // A VM that never asked for anything is quiet from the beginning.
        if self.last_transfer == Nanos(0) { Nanos(0) } else { Nanos(self.last_transfer.0 + QUIET.0) }
    }

    /// The next piece of a set of lists that its caps let go; `wake` becomes no later than the moment at which one that is held may go.
    pub(super) fn pick(
        &mut self,
        mask: Mask,
        (order, quantum): (Order, u64),
        now: Nanos,
        cutter: &Cutter,
        wake: &mut Nanos,
    ) -> Option<Candidate> {
        let mut best: Option<Candidate> = None;
        for direction in Direction::ALL {
            let mask = mask & of_direction(direction);
            let head = match order {
                Order::Priority => self.queue.head(mask),
                Order::Age => self.queue.oldest(mask),
            };
            let Some(head) = head else { continue };
            let cap = &mut self.caps[direction.index()];
            // A limit on bytes has room for one quantum at least, and counts zeroes as written.
            let whole = head.op != Op::WriteZeroes || !cap.counts_bytes();
            let candidate = cutter.cut(head, if whole { quantum } else { quantum.min(cutter.quantum) });
            let ready = cap.ready_at(now, &candidate.charge);
            if ready > now {
                cap.hold();
                *wake = (*wake).min(ready);
                let flow = flow_of(&mut self.flows, head.priority.class);
                if let (Some(flow), true) = (flow, mask & TRANSFERS != 0) {
                    flow.not_before = flow.not_before.max(now);
                }
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

    /// Whether something less important has waited for too long.
    pub(super) fn has_aged(&self, now: Nanos, aging: Nanos) -> bool {
        (self.queue.filled() & TRANSFERS).count_ones() > 1
            && self.queue.oldest(TRANSFERS).is_some_and(|h| now.0.saturating_sub(h.arrival.0) > aging.0)
    }
}
