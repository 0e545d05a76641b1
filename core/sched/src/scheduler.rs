//! The scheduler of one device.

mod vm;

use rtvirtio_units::Nanos;

use self::vm::{Candidate, Cutter, Order, Vm, flow_of};
use crate::config::{Config, ConfigError, Policy, VmConfig};
use crate::deallocation::{DeallocationStatus, Lane};
use crate::fair::Turns;
use crate::meter::Contract;
use crate::priority::{Class, PriorityRule};
use crate::queue::{DEALLOCATIONS, FLUSHES, TRANSFERS, of_class};
use crate::request::{Direction, Op, Piece, Request};
use crate::window::Window;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Give this to the device, then ask again.
    Piece(Piece),
    /// Something waits, and nothing may go before this moment, unless a piece comes back or a request arrives.
    Wait(Nanos),
    /// The device holds as much as it may, of a VM or of all: ask again when a piece is back.
    Full,
    /// Nothing waits.
    Idle,
}

/// A request all of whose pieces are back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Whose it was.
    pub vm: usize,
    /// As it was submitted.
    pub request: Request,
}

/// Why a request or a piece is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There is no such VM.
    #[error("no VM {0}")]
    NoVm(usize),
    /// The VM has as many requests outstanding as it may.
    #[error("VM {0} has as many requests outstanding as it may")]
    Full(usize),
    /// No piece of that kind is at the device.
    #[error("VM {0}: this piece is not at the device")]
    NotRunning(usize),
}

/// Counts of one VM since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmCounters {
    /// Requests finished, reads and writes.
    pub finished: [u64; 2],
    /// Bytes that came back, reads and writes.
    pub bytes: [u64; 2],
    /// Pieces that had to wait for a cap, reads and writes.
    pub hits: [u64; 2],
    /// Pieces that went by their deadline.
    pub reserved: u64,
    /// Pieces that went as a share of what was left.
    pub shared: u64,
}

fn turns(policy: Policy, weights: &[u32], cutter: &Cutter) -> Turns {
    match policy {
        Policy::RoundRobin => Turns::by_piece(weights.len()),
        _ => Turns::by_weight(weights, cutter.most_time()),
    }
}

/// Orders the requests of all VMs that share one device.
///
/// Every call takes constant time but for the number of VMs that have something to ask. Times given must not run backwards; where they do, nothing is granted earlier for it.
#[derive(Debug)]
pub struct Scheduler {
    policy: Policy,
    cutter: Cutter,
    aging: Nanos,
    window: Window,
    turns: Turns,
    /// Discards and zeroing.
    lane: Lane,
    vms: Vec<Vm>,
    /// Requests of which something is still to give.
    waiting: usize,
    /// Flushes of these.
    flushes: usize,
    /// Discards and zeroing of these.
    deallocations: usize,
    in_flight: u32,
    shared_in_flight: u32,
}

impl Scheduler {
    /// With all the memory that it will ever use.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.check()?;
        let cutter = Cutter { cost: config.cost, quantum: config.quantum };
        let weights: Vec<u32> = config.vms.iter().map(|v| v.weight).collect();
        let turns = turns(config.policy, &weights, &cutter);
        let vms = config.vms.iter().map(|v| Vm::new(v, &cutter)).collect();
        Ok(Self {
            policy: config.policy,
            cutter,
            aging: config.aging,
            window: Window::new(config.window),
            turns,
            lane: Lane::new(
                config.vms.len(),
                (config.discard_least.max(config.quantum), config.discard_quantum),
                config.cost.discard_ns,
                config.discard_share,
            ),
            vms,
            waiting: 0,
            flushes: 0,
            deallocations: 0,
            in_flight: 0,
            shared_in_flight: 0,
        })
    }

    /// Another policy, window and aging; and other caps, weights, reservations and rules for the VMs in `vms`, whose buckets begin full. Depths, cost, quantum and what is outstanding stay.
    ///
    /// # Errors
    /// A configuration that cannot be used, or one of other VMs; nothing is changed then.
    pub fn reconfigure(&mut self, config: &Config, vms: &[usize]) -> Result<(), ConfigError> {
        let count = self.vms.len() as u64;
        let same = |what: &str, value: u64, least: u64| {
            let range = ConfigError::Range { what: what.into(), value, least, most: least };
            if value == least { Ok(()) } else { Err(range) }
        };
        same("number of VMs", config.vms.len() as u64, count)?;
        same("quantum", config.quantum, self.cutter.quantum)?;
        config.check()?;
        if let Some(vm) = vms.iter().find(|vm| **vm >= self.vms.len()) {
            let most = count.saturating_sub(1);
            return Err(ConfigError::Range { what: "VM".into(), value: *vm as u64, least: 0, most });
        }
        for &vm in vms {
            let old = &mut self.vms[vm];
            let hits = [old.caps[0].hits(), old.caps[1].hits()];
            let fresh = Vm::new(&VmConfig { depth: 1, ..config.vms[vm].clone() }, &self.cutter);
            let [reads, writes] = fresh.caps;
            old.caps = [reads.with_hits(hits[0]), writes.with_hits(hits[1])];
            (old.rule, old.weight) = (fresh.rule, fresh.weight);
            (old.flows, old.quanta) = (fresh.flows, fresh.quanta);
        }
        let weights: Vec<u32> = self.vms.iter().map(|v| v.weight).collect();
        if config.policy == self.policy {
            self.turns.set_weights(&weights, self.cutter.most_time());
        } else {
            self.policy = config.policy;
            self.turns = turns(config.policy, &weights, &self.cutter);
        }
        self.window.reconfigure(config.window);
        self.lane.set_share(config.discard_share);
        self.aging = config.aging;
        Ok(())
    }

    /// What a VM's word about priorities counts.
    #[must_use]
    pub fn rule(&self, vm: usize) -> PriorityRule {
        self.vms.get(vm).map_or_else(PriorityRule::default, |v| v.rule)
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// No such VM, or one that has too many outstanding.
    pub fn submit(&mut self, vm: usize, request: Request) -> Result<(), SubmitError> {
        let v = self.vms.get_mut(vm).ok_or(SubmitError::NoVm(vm))?;
        v.queue.push(request).ok_or(SubmitError::Full(vm))?;
        let direction = request.op.direction().index();
        v.outstanding[direction] += 1;
        v.meters[direction].begin(request.arrival);
        self.waiting += 1;
        self.flushes += usize::from(request.op == Op::Flush);
        if request.op.deallocates() {
            self.deallocations += 1;
            if v.queue.deallocations_waiting() == 1 {
                self.lane.begin(vm);
            }
        } else {
            v.last_transfer = v.last_transfer.max(request.arrival);
        }
        Ok(())
    }

    /// What to give the device now.
    pub fn next(&mut self, now: Nanos) -> Next {
        if self.waiting == 0 {
            return Next::Idle;
        }
        let mut wake = Nanos(u64::MAX);
        if let Some((vm, candidate)) = self.flush(now, &mut wake) {
            return Next::Piece(self.give(vm, &candidate, now, false));
        }
        if let Some((vm, candidate)) = self.deallocation(now, &mut wake) {
            self.lane.submit(vm, now);
            return Next::Piece(self.give(vm, &candidate, now, false));
        }
        if self.waiting == self.flushes + self.deallocations {
            return rest_until(wake);
        }
        if self.in_flight >= self.window.limit() {
            return Next::Full;
        }
        // A flush that a cap holds is asked for again at that moment, also where nothing else waits for one.
        let held = wake;
        if self.policy == Policy::Edf {
            if let Some((vm, candidate)) = self.earliest(now, &mut wake) {
                return Next::Piece(self.give(vm, &candidate, now, true));
            }
            if self.shared_in_flight >= self.window.shared_limit() {
                return rest_until(wake);
            }
            // Who has to wait for a reservation may share what is left; only caps hold it then.
            wake = held;
        }
        let chosen = if self.policy == Policy::Fifo {
            self.oldest(now, &mut wake)
        } else {
            self.in_turn(now, &mut wake)
        };
        match chosen {
            Some((vm, candidate)) => Next::Piece(self.give(vm, &candidate, now, false)),
            None => rest_until(wake),
        }
    }

    /// A flush of a VM that has none at the device. Nobody's turn and nobody's deadline: it moves no data, and holds no place.
    fn flush(&mut self, now: Nanos, wake: &mut Nanos) -> Option<(usize, Candidate)> {
        if self.flushes == 0 {
            return None;
        }
        let Self { vms, cutter, .. } = self;
        let waits = |vm: &Vm| !vm.flushing && vm.queue.filled() & FLUSHES != 0;
        vms.iter_mut().enumerate().filter(|(_, vm)| waits(vm)).find_map(|(i, vm)| {
            let how = (Order::Age, cutter.quantum);
            vm.pick(FLUSHES, how, now, cutter, wake).map(|c| (i, c))
        })
    }

    /// The discard or zeroing request whose turn it is, when the device has none and their share
    /// allows it.
    fn deallocation(&mut self, now: Nanos, wake: &mut Nanos) -> Option<(usize, Candidate)> {
        if self.deallocations == 0 || self.lane.is_busy() {
            return None;
        }
        if let Some(until) = self.lane.rests_until(now) {
            *wake = (*wake).min(until);
            return None;
        }
        let Self { vms, cutter, lane, .. } = self;
        let mut next = Nanos(u64::MAX);
        let mut best: Option<(usize, Candidate)> = None;
        for (i, vm) in vms.iter_mut().enumerate() {
            let later = |(b, _): &(usize, Candidate)| lane.used(*b) <= lane.used(i);
            if vm.queue.filled() & DEALLOCATIONS == 0 || best.as_ref().is_some_and(later) {
                continue;
            }
            let how = (Order::Age, lane.piece(i));
            if let Some(c) = vm.pick(DEALLOCATIONS, how, now, cutter, &mut next) {
                best = Some((i, c));
            }
        }
        // The turn is decided first: a VM that need not pause does not overtake one that must.
        if let Some((i, _)) = best {
            let disturbed = |(j, vm): (usize, &Vm)| (j != i || vm.is_promised()).then(|| vm.quiet_at());
            let quiet_at = vms.iter().enumerate().filter_map(disturbed).max().unwrap_or(Nanos(0));
            next = lane.ready_at(quiet_at);
            if next <= now {
                return best;
            }
        }
        lane.rest(next);
        *wake = (*wake).min(next);
        None
    }

    /// The earliest deadline among requests that keep to their reservation.
    fn earliest(&mut self, now: Nanos, wake: &mut Nanos) -> Option<(usize, Candidate)> {
        let mut best: Option<(Nanos, Nanos, usize, usize, Candidate)> = None;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            for (f, class) in [Class::RealTime, Class::BestEffort].into_iter().enumerate() {
                let mask = of_class(class);
                if vm.flows[f].is_none() || vm.queue.filled() & mask == 0 {
                    continue;
                }
                let how = (Order::Priority, vm.quanta[f]);
                let Some(c) = vm.pick(mask, how, now, &self.cutter, wake) else { continue };
                let Some(flow) = &vm.flows[f] else { continue };
                let from = flow.bucket.ready_at(c.head.arrival.max(flow.not_before), c.charge.time);
                if from > now {
                    *wake = (*wake).min(from);
                    continue;
                }
                let deadline = Nanos(from.0.saturating_add(flow.deadline.0));
                if best.as_ref().is_none_or(|b| deadline < b.0) {
                    best = Some((deadline, from, i, f, c));
                }
            }
        }
        let (_, from, vm, f, candidate) = best?;
        if let Some(flow) = &mut self.vms[vm].flows[f] {
            flow.bucket.take(from, candidate.charge.time);
        }
        Some((vm, candidate))
    }

    /// The request that waits longest.
    fn oldest(&mut self, now: Nanos, wake: &mut Nanos) -> Option<(usize, Candidate)> {
        let mut best: Option<(usize, Candidate)> = None;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let how = (Order::Age, self.cutter.quantum);
            let Some(c) = vm.pick(TRANSFERS, how, now, &self.cutter, wake) else { continue };
            if best.as_ref().is_none_or(|(_, b)| c.head.arrival < b.head.arrival) {
                best = Some((i, c));
            }
        }
        best
    }

    /// The VM whose turn it is.
    fn in_turn(&mut self, now: Nanos, wake: &mut Nanos) -> Option<(usize, Candidate)> {
        let Self { turns, vms, cutter, aging, .. } = self;
        let mut found = None;
        let vm = turns.next(|i| {
            let vm = &mut vms[i];
            let order = if vm.has_aged(now, *aging) { Order::Age } else { Order::Priority };
            found = vm.pick(TRANSFERS, (order, cutter.quantum), now, cutter, wake);
            found.map(|c| c.charge.time)
        })?;
        found.map(|c| (vm, c))
    }

    fn give(&mut self, vm: usize, c: &Candidate, now: Nanos, reserved: bool) -> Piece {
        let v = &mut self.vms[vm];
        let before = (v.queue.waiting(), v.queue.deallocations_waiting());
        v.queue.give(&c.head, c.len);
        self.waiting -= before.0 - v.queue.waiting();
        self.deallocations -= before.1 - v.queue.deallocations_waiting();
        v.caps[c.head.op.direction().index()].take(now, &c.charge);
        // A flush may take as long as the device's whole cache: it holds no place in the window, so that nobody waits for it, and a VM has one at a time.
        if c.head.op == Op::Flush {
            v.flushing = true;
            self.flushes -= 1;
        } else if c.head.op.deallocates() {
            v.counters.shared += 1;
        } else {
            self.in_flight += 1;
            self.shared_in_flight += u32::from(!reserved);
            if reserved {
                v.counters.reserved += 1;
            } else {
                v.counters.shared += 1;
                if let Some(flow) = flow_of(&mut v.flows, c.head.priority.class) {
                    flow.not_before = now;
                }
            }
        }
        Piece {
            vm,
            slot: c.head.slot,
            tag: c.head.tag,
            op: c.head.op,
            offset: c.head.given,
            len: c.len,
            priority: c.head.priority,
            cost: c.charge.time,
            reserved,
        }
    }

    /// A piece has failed, and its request with it: what is not given yet of the request goes no
    /// more. Before
    /// [`Scheduler::complete`] of the piece.
    pub fn abandon(&mut self, piece: &Piece) {
        let Some(v) = self.vms.get_mut(piece.vm) else { return };
        let before = (v.queue.waiting(), v.queue.deallocations_waiting());
        v.queue.abandon(piece.slot);
        self.waiting -= before.0 - v.queue.waiting();
        self.deallocations -= before.1 - v.queue.deallocations_waiting();
    }

    /// Drops the discards of a VM that wait, and tells of each request that is thereby gone. One
    /// that runs in part ends with
    /// the piece that is at the device.
    pub fn drop_discards(&mut self, now: Nanos, vm: usize, mut gone: impl FnMut(Request)) {
        let Some(v) = self.vms.get_mut(vm) else { return };
        let before = (v.queue.waiting(), v.queue.deallocations_waiting());
        let (outstanding, meters, counters) = (&mut v.outstanding, &mut v.meters, &mut v.counters);
        v.queue.drop_discards(|request| {
            let direction = request.op.direction().index();
            outstanding[direction] -= 1;
            counters.finished[direction] += 1;
            meters[direction].served(now, 0, outstanding[direction] > 0);
            gone(request);
        });
        self.waiting -= before.0 - v.queue.waiting();
        self.deallocations -= before.1 - v.queue.deallocations_waiting();
        self.lane.look_again();
    }

    /// A piece is back from the device; tells of its request when that was the last of it.
    ///
    /// # Errors
    /// A piece that is not at the device.
    pub fn complete(&mut self, now: Nanos, piece: &Piece) -> Result<Option<Finished>, SubmitError> {
        let v = self.vms.get_mut(piece.vm).ok_or(SubmitError::NoVm(piece.vm))?;
        let done = v.queue.take_back(piece.slot).map_err(|()| SubmitError::NotRunning(piece.vm))?;
        if piece.op == Op::Flush {
            v.flushing = false;
        } else if piece.op.deallocates() {
            let took = self.lane.complete(now, (piece.vm, v.weight), piece.len);
            // What it took beyond what it was charged for is paid before the next one.
            let beyond = took.0.saturating_sub(piece.cost);
            v.caps[piece.op.direction().index()].owe_time(now, beyond);
        } else {
            let transfers = self.waiting - self.flushes - self.deallocations;
            let busy = self.in_flight >= self.window.limit() && transfers > 0;
            self.window.completed(now, piece.cost, busy);
            self.in_flight = self.in_flight.saturating_sub(1);
            if !piece.reserved {
                self.shared_in_flight = self.shared_in_flight.saturating_sub(1);
            }
        }
        if !piece.op.deallocates() {
            v.last_transfer = v.last_transfer.max(now);
            if v.queue.transfers_held() == 0 {
                self.lane.look_again();
            }
        }
        let direction = piece.op.direction().index();
        v.outstanding[direction] -= u32::from(done.is_some());
        let bytes = if piece.op.moves_data() { piece.len } else { 0 };
        v.meters[direction].served(now, bytes, v.outstanding[direction] > 0);
        v.counters.bytes[direction] += bytes;
        v.counters.finished[direction] += u64::from(done.is_some());
        Ok(done.map(|request| Finished { vm: piece.vm, request }))
    }

    /// Drops all that waits of a VM, and tells of each request that is thereby gone. Requests that run in part end with the pieces that are at the device.
    pub fn drop_waiting(&mut self, now: Nanos, vm: usize, mut gone: impl FnMut(Request)) {
        let Some(v) = self.vms.get_mut(vm) else { return };
        self.waiting -= v.queue.waiting();
        self.deallocations -= v.queue.deallocations_waiting();
        self.lane.look_again();
        let (outstanding, meters, flushes) = (&mut v.outstanding, &mut v.meters, &mut self.flushes);
        v.queue.drop_waiting(|request| {
            *flushes -= usize::from(request.op == Op::Flush);
            let direction = request.op.direction().index();
            outstanding[direction] -= 1;
            if outstanding[direction] == 0 {
                meters[direction].served(now, 0, false);
            }
            gone(request);
        });
    }

    /// What discards and zeroing took.
    #[must_use]
    pub fn deallocation_status(&self) -> DeallocationStatus {
        self.lane.status()
    }

    /// Pieces at the device, without flushes and deallocations.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Requests of all VMs of which something is still to give.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Requests of a VM that wait or run.
    #[must_use]
    pub fn outstanding(&self, vm: usize) -> usize {
        self.vms.get(vm).map_or(0, |v| v.queue.held())
    }

    /// Pieces that the device may hold now.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.window.limit()
    }

    /// Counts of a VM.
    #[must_use]
    pub fn counters(&self, vm: usize) -> VmCounters {
        self.vms.get(vm).map_or_else(VmCounters::default, |v| VmCounters {
            hits: [v.caps[0].hits(), v.caps[1].hits()],
            ..v.counters
        })
    }

    /// What a VM really got, for one direction.
    #[must_use]
    pub fn contract(&self, vm: usize, direction: Direction, now: Nanos) -> Contract {
        self.vms.get(vm).map_or_else(Contract::default, |v| v.meters[direction.index()].contract(now))
    }
}

/// Nothing may go before `wake`; where no time helps, a piece must come back first.
fn rest_until(wake: Nanos) -> Next {
    if wake == Nanos(u64::MAX) { Next::Full } else { Next::Wait(wake) }
}
