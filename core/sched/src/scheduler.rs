//! The scheduler of one device.

mod membership;
mod pick;
mod vm;

use oxc_index::{Idx, IndexVec};
use rtvirtio_units::Nanos;

pub use self::membership::{MembershipError, PreparedVm};
use self::pick::{Choice, Decision, Findings, Grant};
use self::vm::{Vm, reservation_for};
use crate::active::ActiveSet;
use crate::config::{Config, ConfigError, Policy, VmConfig};
use crate::deallocation::{DeallocationPacer, DeallocationStatus};
use crate::drr::DeficitRoundRobin;
use crate::id::VmId;
use crate::meter::Contract;
use crate::priority::PriorityRule;
use crate::request::{Direction, Op, Piece, Request};
use crate::split::Splitter;
use crate::waiting::{WaitMatrix, Waits};
use crate::window::Window;

/// Decision of [`Scheduler::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Submit this to the device, then ask again.
    Piece(Piece),
    /// Requests are queued, and none may go before this time, unless a piece completes or a request
    /// arrives.
    Wait(Nanos),
    /// The device holds as many pieces as it may, of a VM or of all: ask again when a piece
    /// completes.
    Full,
    /// No request is queued.
    Idle,
}

/// A request whose pieces are all complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedRequest {
    /// Index of the VM.
    pub vm: VmId,
    /// The request as submitted.
    pub request: Request,
}

/// Errors of submission and completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The configuration has no such VM.
    #[error("no VM {0}")]
    NoVm(VmId),
    /// All requests of the VM's depth are outstanding.
    #[error("VM {0} has as many requests outstanding as it may")]
    Full(VmId),
    /// The piece is not in flight.
    #[error("VM {0}: this piece is not at the device")]
    NotInflight(VmId),
}

/// Counters of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmCounters {
    /// Requests completed, reads and writes.
    pub completed: [u64; 2],
    /// Bytes completed, reads and writes.
    pub bytes: [u64; 2],
    /// Pieces that waited for a cap, reads and writes.
    pub cap_hits: [u64; 2],
    /// Pieces submitted under a reservation.
    pub reserved: u64,
    /// Pieces submitted as a share of the rest.
    pub shared: u64,
}

fn drr(policy: Policy, weights: &[u32], splitter: &Splitter) -> DeficitRoundRobin {
    match policy {
        Policy::RoundRobin => DeficitRoundRobin::per_piece(weights.len()),
        _ => DeficitRoundRobin::weighted(weights, splitter.max_piece_ns()),
    }
}

/// Orders the requests of all VMs that share one device.
///
/// Each call takes constant time per backlogged VM. Time must not run backwards; where it does, no
/// piece goes earlier for it.
#[derive(Debug)]
pub struct Scheduler {
    policy: Policy,
    splitter: Splitter,
    aging: Nanos,
    window: Window,
    drr: DeficitRoundRobin,
    /// Paces discards and zeroing.
    pacer: DeallocationPacer,
    vms: IndexVec<VmId, Vm>,
    /// VMs with requests that are not completely submitted.
    active: ActiveSet,
    /// Requests that are not completely submitted to the device.
    backlog: usize,
    /// Flushes among the backlog.
    flush_backlog: usize,
    /// Discards and zeroing among the backlog.
    deallocation_backlog: usize,
    inflight: u32,
    shared_inflight: u32,
    /// Buffer of all searches.
    findings: Findings,
    /// Waiting time of each VM by the VM that caused it; `None` where it is not measured.
    waiting: Option<WaitMatrix>,
}

impl Scheduler {
    /// Allocates all memory of the scheduler.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.check()?;
        let splitter = Splitter { cost: config.cost, quantum: config.quantum };
        let weights: Vec<u32> = config.vms.iter().map(|v| v.weight).collect();
        let drr = drr(config.policy, &weights, &splitter);
        let vms = config.vms.iter().map(|v| Vm::new(v, &splitter)).collect();
        let mut active = ActiveSet::default();
        active.reserve(config.vms.len());
        Ok(Self {
            policy: config.policy,
            splitter,
            aging: config.aging,
            window: Window::new(config.window),
            drr,
            pacer: DeallocationPacer::new(
                config.vms.len(),
                (config.discard_least.max(config.quantum), config.discard_quantum),
                config.cost.discard_ns,
                config.discard_share,
            ),
            vms,
            active,
            backlog: 0,
            flush_backlog: 0,
            deallocation_backlog: 0,
            inflight: 0,
            shared_inflight: 0,
            findings: Findings::with_capacity(config.vms.len()),
            waiting: None,
        })
    }

    /// Measures from now on the waiting of each VM by its cause. Costs memory of a fixed size, and
    /// time when a VM begins and ends to wait. Called before the first request.
    pub fn watch_waiting(&mut self) {
        self.waiting = Some(WaitMatrix::new(self.vms.len()));
    }

    /// Changes policy, window and aging, and caps, weights, reservations and rules of the VMs in
    /// `vms`, whose buckets start full. Depths, cost, quantum and outstanding requests stay.
    /// `config` has an entry for each place; those of vacant ones have no effect.
    ///
    /// # Errors
    /// An invalid configuration, or one of other VMs; nothing is changed then.
    pub fn reconfigure(&mut self, config: &Config, vms: &[VmId]) -> Result<(), ConfigError> {
        let count = self.vms.len() as u64;
        let same = |what: &str, value: u64, least: u64| {
            let range = ConfigError::Range { what: what.into(), value, least, most: least };
            if value == least { Ok(()) } else { Err(range) }
        };
        same("number of VMs", config.vms.len() as u64, count)?;
        same("quantum", config.quantum, self.splitter.quantum)?;
        config.check()?;
        if let Some(vm) = vms.iter().find(|vm| **vm >= self.vms.next_idx()) {
            let most = count.saturating_sub(1);
            return Err(ConfigError::Range { what: "VM".into(), value: vm.0.into(), least: 0, most });
        }
        for &vm in vms {
            let old = &mut self.vms[vm];
            if old.is_vacant {
                continue;
            }
            let hits = [old.caps[0].cap_hits(), old.caps[1].cap_hits()];
            let fresh = Vm::new(&VmConfig { depth: 1, ..config.vms[vm.index()].clone() }, &self.splitter);
            let [reads, writes] = fresh.caps;
            old.caps = [reads.with_cap_hits(hits[0]), writes.with_cap_hits(hits[1])];
            (old.rule, old.weight) = (fresh.rule, fresh.weight);
            (old.reservations, old.quanta) = (fresh.reservations, fresh.quanta);
        }
        if config.policy == self.policy {
            self.update_weights();
        } else {
            let weights: Vec<u32> = self.vms.iter().map(|v| v.weight).collect();
            self.policy = config.policy;
            self.drr = drr(config.policy, &weights, &self.splitter);
        }
        self.window.reconfigure(config.window);
        self.pacer.set_share(config.discard_share);
        self.aging = config.aging;
        Ok(())
    }

    /// Interpretation of a VM's priorities; the default for an unknown VM.
    #[must_use]
    pub fn rule(&self, vm: VmId) -> PriorityRule {
        self.vms.get(vm).map_or_else(PriorityRule::default, |v| v.rule)
    }

    /// Queues a request.
    ///
    /// # Errors
    /// An unknown VM, or one whose depth is used up.
    pub fn submit(&mut self, vm: VmId, request: Request) -> Result<(), SubmitError> {
        let v = self.vms.get_mut(vm).ok_or(SubmitError::NoVm(vm))?;
        v.queue.push(request).ok_or(SubmitError::Full(vm))?;
        self.active.set(vm, true);
        if let Some(waiting) = self.waiting.as_mut().filter(|_| v.queue.backlog() == 1) {
            waiting.begin(vm, request.arrival);
        }
        let direction = request.op.direction().index();
        v.outstanding[direction] += 1;
        v.meters[direction].on_submit(request.arrival);
        self.backlog += 1;
        self.flush_backlog += usize::from(request.op == Op::Flush);
        if request.op.deallocates() {
            self.deallocation_backlog += 1;
            if v.queue.deallocation_backlog() == 1 {
                self.pacer.activate(vm);
            }
        } else {
            v.last_transfer_at = v.last_transfer_at.max(request.arrival);
        }
        Ok(())
    }

    /// Decides the next piece for the device. Call again after each piece and as [`Next`] says.
    pub fn next(&mut self, now: Nanos) -> Next {
        let mut findings = std::mem::take(&mut self.findings);
        let decision = self.pick(now, &mut findings);
        self.apply(now, &findings);
        self.findings = findings;
        match decision {
            Decision::Submit(choice) => Next::Piece(self.dispatch(&choice, now)),
            Decision::Hold(next) => next,
        }
    }

    /// Applies the side results of a search.
    fn apply(&mut self, now: Nanos, findings: &Findings) {
        for capped in &findings.capped {
            let v = &mut self.vms[capped.vm];
            v.caps[capped.direction.index()].note_capped();
            let class = capped.class;
            if let Some(r) = class.and_then(|class| reservation_for(&mut v.reservations, class)) {
                let at = &mut r.not_before[capped.direction.index()];
                *at = (*at).max(now);
            }
        }
        if let Some(at) = findings.deallocation_recheck_at {
            self.pacer.recheck_after(at);
        }
        if findings.has_round {
            self.drr.commit(&findings.round);
        }
    }

    /// Removes a VM without queued requests from searches.
    fn update_active(&mut self, vm: VmId, now: Nanos) {
        let is_active = self.vms.get(vm).is_some_and(|v| v.queue.backlog() > 0);
        self.active.set(vm, is_active);
        if !is_active {
            self.drr.on_idle(vm);
            if let Some(waiting) = &mut self.waiting {
                waiting.end(vm, now);
            }
        }
    }

    /// Moves a piece to the device and charges it.
    fn dispatch(&mut self, choice: &Choice, now: Nanos) -> Piece {
        let Choice { vm, candidate: c, grant } = choice;
        let mut promise = (Nanos(0), Nanos(u64::MAX));
        let v = &mut self.vms[*vm];
        let before = (v.queue.backlog(), v.queue.deallocation_backlog());
        v.queue.submit(&c.head, c.len);
        self.backlog -= before.0 - v.queue.backlog();
        self.update_active(*vm, now);
        if let Some(waiting) = &mut self.waiting {
            waiting.on_submit(*vm, now);
        }
        let v = &mut self.vms[*vm];
        self.deallocation_backlog -= before.1 - v.queue.deallocation_backlog();
        v.caps[c.head.op.direction().index()].take(now, &c.charge);
        match *grant {
            // A flush may take as long as the device's whole cache needs: it occupies no slot of
            // the window, so that no other request waits for it, and a VM has one at a time.
            Grant::Flush => {
                v.flush_inflight = true;
                self.flush_backlog -= 1;
            }
            Grant::Deallocation => {
                v.counters.shared += 1;
                self.pacer.submit(*vm, now);
            }
            Grant::Reservation { index, eligible_at } => {
                if let Some(r) = &mut v.reservations[index] {
                    r.bucket.take(eligible_at, c.charge.time);
                    promise = (eligible_at, Nanos(eligible_at.0.saturating_add(r.deadline.0)));
                }
                self.inflight += 1;
                v.counters.reserved += 1;
            }
            Grant::Share => {
                self.inflight += 1;
                self.shared_inflight += 1;
                v.counters.shared += 1;
                if let Some(r) = reservation_for(&mut v.reservations, c.head.priority.class) {
                    r.not_before = [now; 2];
                }
            }
        }
        Piece {
            vm: *vm,
            slot: c.head.slot,
            tag: c.head.tag,
            op: c.head.op,
            offset: c.head.submitted,
            len: c.len,
            priority: c.head.priority,
            cost: c.charge.time,
            reserved: matches!(grant, Grant::Reservation { .. }),
            eligible_at: promise.0,
            due: promise.1,
        }
    }

    /// Ends a request whose piece has failed: the rest of the request is not submitted. Called
    /// before [`Scheduler::complete`] of the piece.
    pub fn cancel_remainder(&mut self, piece: &Piece) {
        let Some(v) = self.vms.get_mut(piece.vm) else { return };
        let before = (v.queue.backlog(), v.queue.deallocation_backlog());
        v.queue.cancel_remainder(piece.slot);
        self.backlog -= before.0 - v.queue.backlog();
        self.deallocation_backlog -= before.1 - v.queue.deallocation_backlog();
        // Time 0 leaves the clock of waits at the last call: the completion follows.
        self.update_active(piece.vm, Nanos(0));
    }

    /// Cancels the queued discards of a VM, and passes each without a piece in flight to
    /// `cancelled`. Others end with that piece.
    pub fn cancel_discards(&mut self, now: Nanos, vm: VmId, mut cancelled: impl FnMut(Request)) {
        let Some(v) = self.vms.get_mut(vm) else { return };
        let before = (v.queue.backlog(), v.queue.deallocation_backlog());
        let (outstanding, meters, counters) = (&mut v.outstanding, &mut v.meters, &mut v.counters);
        v.queue.cancel_discards(|request| {
            let direction = request.op.direction().index();
            outstanding[direction] -= 1;
            counters.completed[direction] += 1;
            meters[direction].on_complete(now, 0, outstanding[direction] > 0);
            cancelled(request);
        });
        self.backlog -= before.0 - v.queue.backlog();
        self.deallocation_backlog -= before.1 - v.queue.deallocation_backlog();
        self.pacer.recheck_now();
        self.update_active(vm, now);
    }

    /// Records the completion of a piece; returns its request when that was the last piece.
    ///
    /// # Errors
    /// A piece that is not in flight.
    pub fn complete(&mut self, now: Nanos, piece: &Piece) -> Result<Option<CompletedRequest>, SubmitError> {
        let v = self.vms.get_mut(piece.vm).ok_or(SubmitError::NoVm(piece.vm))?;
        let done = v.queue.complete(piece.slot).map_err(|()| SubmitError::NotInflight(piece.vm))?;
        if let Some(waiting) = &mut self.waiting {
            waiting.on_complete(piece.vm, now);
        }
        if piece.op == Op::Flush {
            v.flush_inflight = false;
        } else if piece.op.deallocates() {
            let took = self.pacer.complete(now, (piece.vm, v.weight), piece.len);
            // Time beyond the charge is paid before the next piece.
            let beyond = took.0.saturating_sub(piece.cost);
            v.caps[piece.op.direction().index()].overdraw_time(now, beyond);
        } else {
            let transfers = self.backlog - self.flush_backlog - self.deallocation_backlog;
            let busy = self.inflight >= self.window.limit() && transfers > 0;
            self.window.on_completion(now, piece.cost, busy);
            self.inflight = self.inflight.saturating_sub(1);
            if !piece.reserved {
                self.shared_inflight = self.shared_inflight.saturating_sub(1);
            }
        }
        if !piece.op.deallocates() {
            v.last_transfer_at = v.last_transfer_at.max(now);
            if v.queue.transfers_outstanding() == 0 {
                self.pacer.recheck_now();
            }
        }
        let direction = piece.op.direction().index();
        v.outstanding[direction] -= u32::from(done.is_some());
        let bytes = if piece.op.moves_data() { piece.len } else { 0 };
        v.meters[direction].on_complete(now, bytes, v.outstanding[direction] > 0);
        v.counters.bytes[direction] += bytes;
        v.counters.completed[direction] += u64::from(done.is_some());
        Ok(done.map(|request| CompletedRequest { vm: piece.vm, request }))
    }

    /// Cancels the backlog of a VM, and passes each request without a piece in flight to
    /// `cancelled`. Others end with their last piece.
    pub fn cancel_backlog(&mut self, now: Nanos, vm: VmId, mut cancelled: impl FnMut(Request)) {
        let Some(v) = self.vms.get_mut(vm) else { return };
        self.backlog -= v.queue.backlog();
        self.deallocation_backlog -= v.queue.deallocation_backlog();
        self.pacer.recheck_now();
        let (outstanding, meters, flushes) = (&mut v.outstanding, &mut v.meters, &mut self.flush_backlog);
        v.queue.cancel_backlog(|request| {
            *flushes -= usize::from(request.op == Op::Flush);
            let direction = request.op.direction().index();
            outstanding[direction] -= 1;
            if outstanding[direction] == 0 {
                meters[direction].on_complete(now, 0, false);
            }
            cancelled(request);
        });
        self.update_active(vm, now);
    }

    /// Statistics of discards and zeroing.
    #[must_use]
    pub fn deallocation_status(&self) -> DeallocationStatus {
        self.pacer.status()
    }

    /// Pieces in flight, without flushes and deallocations.
    #[must_use]
    pub fn inflight(&self) -> u32 {
        self.inflight
    }

    /// Requests of all VMs that are not completely submitted.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.backlog
    }

    /// Outstanding requests of a VM, queued and in flight.
    #[must_use]
    pub fn outstanding(&self, vm: VmId) -> usize {
        self.vms.get(vm).map_or(0, |v| v.queue.outstanding())
    }

    /// The current window, in pieces.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.window.limit()
    }

    /// Counters of a VM.
    #[must_use]
    pub fn counters(&self, vm: VmId) -> VmCounters {
        self.vms.get(vm).map_or_else(VmCounters::default, |v| VmCounters {
            cap_hits: [v.caps[0].cap_hits(), v.caps[1].cap_hits()],
            ..v.counters
        })
    }

    /// Waiting time of a VM by cause; `None` where it is not measured, or the VM has no own row.
    #[must_use]
    pub fn waits(&self, vm: VmId, now: Nanos) -> Option<Waits> {
        self.waiting.as_ref()?.waits_of(vm, now)
    }

    /// Measured service of a VM in one direction.
    #[must_use]
    pub fn contract(&self, vm: VmId, direction: Direction, now: Nanos) -> Contract {
        self.vms.get(vm).map_or_else(Contract::default, |v| v.meters[direction.index()].contract(now))
    }
}
