//! Search for the next piece. The search changes nothing in the scheduler; its side results are in
//! [`Findings`], which [`Scheduler::next`] applies.

use rtvirtio_units::Nanos;

use super::vm::{Order, Query, Vm};
use super::{Next, Scheduler};
use crate::config::Policy;
use crate::drr::Round;
use crate::id::VmId;
use crate::priority::Class;
use crate::queue::{DEALLOCATIONS, FLUSHES, Head, Mask, TRANSFERS, class_mask};
use crate::request::Direction;
use crate::split::Candidate;

/// A piece for the device, and the rule under which it goes.
pub(super) struct Choice {
    pub(super) vm: VmId,
    pub(super) candidate: Candidate,
    pub(super) grant: Grant,
}

/// Rule under which a piece goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Grant {
    /// A flush: outside of the window and of the policy.
    Flush,
    /// A discard or zeroing piece: outside of the window, paced on its own.
    Deallocation,
    /// The earliest deadline of all reservations; eligible from this time on.
    Reservation { index: usize, eligible_at: Nanos },
    /// A share of the unreserved device time.
    Share,
}

/// Result of a search.
pub(super) enum Decision {
    Submit(Choice),
    /// No piece may go now, with the reason.
    Hold(Next),
}

/// A queue head that a cap delays.
#[derive(Debug)]
pub(super) struct Capped {
    pub(super) vm: VmId,
    pub(super) direction: Direction,
    /// Class of a transfer; `None` otherwise.
    pub(super) class: Option<Class>,
}

/// Side results of a search. One buffer serves all searches, so that none allocates.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) capped: Vec<Capped>,
    /// Time at which the next search for a deallocation is due.
    pub(super) deallocation_recheck_at: Option<Nanos>,
    pub(super) round: Round,
    /// Whether the search reached the round robin.
    pub(super) has_round: bool,
}

impl Findings {
    pub(super) fn with_capacity(vms: usize) -> Self {
        // One flush, one deallocation, two classes and one share of each VM, each list in two
        // directions at most; round robin visits one VM twice.
        Self { capped: Vec::with_capacity(8 * vms + 2), round: Round::with_capacity(vms), ..Self::default() }
    }

    /// Room for the search among `vms` VMs.
    pub(super) fn reserve(&mut self, vms: usize) {
        self.capped.reserve((8 * vms + 2).saturating_sub(self.capped.len()));
        self.round.reserve(vms);
    }

    fn clear(&mut self) {
        self.capped.clear();
        self.deallocation_recheck_at = None;
        self.has_round = false;
    }
}

fn capped(vm: VmId, direction: Direction, mask: Mask, class: Class) -> Capped {
    Capped { vm, direction, class: (mask & TRANSFERS != 0).then_some(class) }
}

impl Scheduler {
    /// Searches the next piece for the device.
    pub(super) fn pick(&self, now: Nanos, findings: &mut Findings) -> Decision {
        findings.clear();
        if self.backlog == 0 {
            return Decision::Hold(Next::Idle);
        }
        let mut wake = Nanos(u64::MAX);
        if let Some(choice) = self.pick_flush(now, &mut wake, findings) {
            return Decision::Submit(choice);
        }
        if let Some(choice) = self.pick_deallocation(now, &mut wake, findings) {
            return Decision::Submit(choice);
        }
        if self.backlog == self.flush_backlog + self.deallocation_backlog {
            return hold_until(wake);
        }
        if self.inflight >= self.window.limit() {
            return Decision::Hold(Next::Full);
        }
        // A capped flush keeps its wake-up, also where no reservation becomes eligible by then.
        let flush_wake = wake;
        if self.policy == Policy::Edf {
            if let Some(choice) = self.pick_earliest_deadline(now, &mut wake, findings) {
                return Decision::Submit(choice);
            }
            if self.shared_inflight >= self.window.shared_limit() {
                return hold_until(wake);
            }
            // Requests beyond a reservation may share the rest; only caps delay them then.
            wake = flush_wake;
        }
        let choice = if self.policy == Policy::Fifo {
            self.pick_oldest(now, &mut wake, findings)
        } else {
            self.pick_by_turn(now, &mut wake, findings)
        };
        choice.map_or_else(|| hold_until(wake), Decision::Submit)
    }

    /// A flush of a VM that has none at the device. It moves no data and occupies no slot of the
    /// window, so neither turn nor deadline applies.
    fn pick_flush(&self, now: Nanos, wake: &mut Nanos, findings: &mut Findings) -> Option<Choice> {
        if self.flush_backlog == 0 {
            return None;
        }
        let query = Query { mask: FLUSHES, order: Order::Age, quantum: self.splitter.quantum, now };
        let pending = |vm: &Vm| !vm.flush_inflight && vm.queue.nonempty() & FLUSHES != 0;
        self.vms.iter_enumerated().filter(|(_, vm)| pending(vm)).find_map(|(i, vm)| {
            let note = |d, h: &Head| {
                findings.capped.push(capped(i, d, FLUSHES, h.priority.class));
            };
            let candidate = vm.candidate(&query, &self.splitter, wake, note)?;
            Some(Choice { vm: i, candidate, grant: Grant::Flush })
        })
    }

    /// The discard or zeroing piece of the VM with the least virtual time, when none is at the
    /// device and their share of the device's time allows one.
    fn pick_deallocation(&self, now: Nanos, wake: &mut Nanos, findings: &mut Findings) -> Option<Choice> {
        if self.deallocation_backlog == 0 || self.pacer.is_busy() {
            return None;
        }
        if let Some(until) = self.pacer.recheck_pending(now) {
            *wake = (*wake).min(until);
            return None;
        }
        let mut next = Nanos(u64::MAX);
        let mut best: Option<(VmId, Candidate)> = None;
        for (i, vm) in self.vms.iter_enumerated() {
            let later =
                |(b, _): &(VmId, Candidate)| self.pacer.virtual_time(*b) <= self.pacer.virtual_time(i);
            if vm.queue.nonempty() & DEALLOCATIONS == 0 || best.as_ref().is_some_and(later) {
                continue;
            }
            let query =
                Query { mask: DEALLOCATIONS, order: Order::Age, quantum: self.pacer.piece_len(i), now };
            let note = |d, h: &Head| {
                findings.capped.push(capped(i, d, DEALLOCATIONS, h.priority.class));
            };
            if let Some(candidate) = vm.candidate(&query, &self.splitter, &mut next, note) {
                best = Some((i, candidate));
            }
        }
        // The turn is decided first: a VM that need not pause does not overtake one that must.
        if let Some((i, candidate)) = best {
            let others = |(j, vm): (VmId, &Vm)| (j != i || vm.has_reservation()).then(|| vm.idle_from());
            let idle_from = self.vms.iter_enumerated().filter_map(others).max().unwrap_or(Nanos(0));
            next = self.pacer.ready_at(idle_from);
            if next <= now {
                return Some(Choice { vm: i, candidate, grant: Grant::Deallocation });
            }
        }
        findings.deallocation_recheck_at = Some(next);
        *wake = (*wake).min(next);
        None
    }

    /// The earliest deadline among requests within their reservations.
    fn pick_earliest_deadline(
        &self,
        now: Nanos,
        wake: &mut Nanos,
        findings: &mut Findings,
    ) -> Option<Choice> {
        let mut best: Option<(Nanos, Choice)> = None;
        for i in self.active.iter() {
            let vm = &self.vms[i];
            for (index, class) in [Class::RealTime, Class::BestEffort].into_iter().enumerate() {
                let mask = class_mask(class);
                let Some(reservation) = &vm.reservations[index] else { continue };
                if vm.queue.nonempty() & mask == 0 {
                    continue;
                }
                let query = Query { mask, order: Order::Priority, quantum: vm.quanta[index], now };
                let mut not_before = reservation.not_before;
                let note = |d: Direction, h: &Head| {
                    not_before[d.index()] = not_before[d.index()].max(now);
                    findings.capped.push(capped(i, d, mask, h.priority.class));
                };
                let Some(candidate) = vm.candidate(&query, &self.splitter, wake, note) else { continue };
                let arrival = candidate.head.arrival.max(not_before[candidate.head.op.direction().index()]);
                let eligible_at = reservation.bucket.ready_at(arrival, candidate.charge.time);
                if eligible_at > now {
                    *wake = (*wake).min(eligible_at);
                    continue;
                }
                let deadline = Nanos(eligible_at.0.saturating_add(reservation.deadline.0));
                if best.as_ref().is_none_or(|(earliest, _)| deadline < *earliest) {
                    let grant = Grant::Reservation { index, eligible_at };
                    best = Some((deadline, Choice { vm: i, candidate, grant }));
                }
            }
        }
        best.map(|(_, choice)| choice)
    }

    /// The oldest request of all VMs.
    fn pick_oldest(&self, now: Nanos, wake: &mut Nanos, findings: &mut Findings) -> Option<Choice> {
        let query = Query { mask: TRANSFERS, order: Order::Age, quantum: self.splitter.quantum, now };
        let mut best: Option<Choice> = None;
        for i in self.active.iter() {
            let vm = &self.vms[i];
            let note = |d, h: &Head| {
                findings.capped.push(capped(i, d, TRANSFERS, h.priority.class));
            };
            let Some(candidate) = vm.candidate(&query, &self.splitter, wake, note) else { continue };
            let older = |b: &Choice| candidate.head.arrival < b.candidate.head.arrival;
            if best.as_ref().is_none_or(older) {
                best = Some(Choice { vm: i, candidate, grant: Grant::Share });
            }
        }
        best
    }

    /// The next request of the VM whose turn it is.
    fn pick_by_turn(&self, now: Nanos, wake: &mut Nanos, findings: &mut Findings) -> Option<Choice> {
        let Findings { capped: held, round, has_round, .. } = findings;
        *has_round = true;
        let mut candidate = None;
        let vm = self.drr.peek(&self.active, round, |i| {
            let vm = &self.vms[i];
            let order = if vm.has_aged(now, self.aging) { Order::Age } else { Order::Priority };
            let query = Query { mask: TRANSFERS, order, quantum: self.splitter.quantum, now };
            let note = |d, h: &Head| held.push(capped(i, d, TRANSFERS, h.priority.class));
            candidate = vm.candidate(&query, &self.splitter, wake, note);
            candidate.map(|c| c.charge.time)
        })?;
        candidate.map(|candidate| Choice { vm, candidate, grant: Grant::Share })
    }
}

/// Waits until `wake`; where no time helps, until a piece completes.
fn hold_until(wake: Nanos) -> Decision {
    Decision::Hold(if wake == Nanos(u64::MAX) { Next::Full } else { Next::Wait(wake) })
}
