//! The event loop.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rtvirtio_sched::{
    CompletedRequest, Config, ConfigError, Idx, IndexVec, Next, Op, Piece, Request, Scheduler, SubmitError,
    VmId,
};
use rtvirtio_stats::Latencies;
use rtvirtio_twin::{Access, ServiceModel, TwinProfile};
use rtvirtio_units::{Nanos, Percentile};

use crate::arrival::{Load, Source};
use crate::stats::{LoadResult, SimResult};

/// Failures of a simulation.
#[derive(Debug)]
#[non_exhaustive]
pub enum SimError {
    /// The scheduler refuses its configuration.
    Config(ConfigError),
    /// A load names a VM that the configuration lacks.
    NoVm {
        load: String,
        /// Index of a VM that is not configured.
        vm: usize,
    },
    /// The scheduler lost a piece: a defect.
    Scheduler(SubmitError),
}

impl std::fmt::Display for SimError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config(e) => e.fmt(f),
            Self::NoVm { load, vm } => write!(f, "load \"{load}\" is of VM {vm}, which is not configured"),
            Self::Scheduler(e) => write!(f, "the scheduler lost a piece: {e}"),
        }
    }
}

impl std::error::Error for SimError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(e) => Some(e),
            Self::Scheduler(e) => Some(e),
            Self::NoVm { .. } => None,
        }
    }
}

/// Observes a simulation; for tests and traces.
pub trait Observer {
    /// A request was submitted to the scheduler.
    fn on_submit(&mut self, _now: Nanos, _vm: VmId, _request: &Request) {}
    /// A piece went to the device.
    fn on_dispatch(&mut self, _now: Nanos, _piece: &Piece) {}
    /// The device completed a piece.
    fn on_piece_complete(&mut self, _now: Nanos, _piece: &Piece) {}
    /// The last piece of a request completed.
    fn on_complete(&mut self, _now: Nanos, _finished: &CompletedRequest) {}
    /// The scheduler submitted nothing, for this reason.
    fn on_idle(&mut self, _now: Nanos, _next: &Next, _scheduler: &Scheduler) {}
}

/// Default observer, which records nothing.
#[derive(Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request of this load is submitted.
    Arrival(u32),
    /// The piece in this slot completes.
    Completion(u32),
    /// The scheduler asked for this wake-up.
    Wakeup,
}

#[derive(Clone, Copy, Debug)]
struct PendingRequest {
    load: u32,
    due: Nanos,
    offset: u64,
}

/// Longest latency that the histograms tell apart: one day.
const LONGEST_LATENCY: Nanos = Nanos(86_400_000_000_000);

/// Latencies of a load.
#[derive(Debug)]
struct LoadStats {
    hist: Latencies,
    /// Completions after the deadline.
    late: u64,
}

impl LoadStats {
    fn new() -> Self {
        Self { hist: Latencies::with_range(LONGEST_LATENCY, 3), late: 0 }
    }

    fn record(&mut self, latency: Nanos, deadline: Option<Nanos>) {
        self.hist.record(latency, 1);
        self.late += u64::from(deadline.is_some_and(|d| latency > d));
    }
}

/// A scheduler, a device and any number of loads under virtual time.
pub struct Sim<O = NoObserver> {
    scheduler: Scheduler,
    device: ServiceModel,
    size: u64,
    sources: Vec<Source>,
    stats: Vec<LoadStats>,
    /// Requests beyond their VM's depth, in order of arrival.
    blocked: IndexVec<VmId, VecDeque<(u32, Nanos)>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    pending: Vec<PendingRequest>,
    free_pending: Vec<u32>,
    pieces: Vec<Option<Piece>>,
    free_pieces: Vec<u32>,
    /// The next scheduled wake-up.
    wake: Nanos,
    now: Nanos,
    requests: u64,
    observer: O,
}

impl Sim {
    /// A simulation without an observer.
    pub fn new(
        config: &Config,
        device: TwinProfile,
        size: u64,
        loads: &[Load],
        seed: u64,
    ) -> Result<Self, SimError> {
        Self::with_observer(config, device, size, loads, seed, NoObserver)
    }
}

impl<O: Observer> Sim<O> {
    /// A simulation with an observer.
    pub fn with_observer(
        config: &Config,
        device: TwinProfile,
        size: u64,
        loads: &[Load],
        seed: u64,
        observer: O,
    ) -> Result<Self, SimError> {
        let scheduler = Scheduler::new(config).map_err(SimError::Config)?;
        if let Some(load) = loads.iter().find(|l| l.vm >= config.vms.len()) {
            return Err(SimError::NoVm { load: load.name.clone(), vm: load.vm });
        }
        let source = |(i, load): (usize, &Load)| Source::new(load.clone(), seed.wrapping_add(1 + i as u64));
        let mut sim = Self {
            scheduler,
            device: ServiceModel::new(device, size, seed),
            size,
            sources: loads.iter().enumerate().map(source).collect(),
            stats: loads.iter().map(|_| LoadStats::new()).collect(),
            blocked: config.vms.iter().map(|_| VecDeque::new()).collect(),
            events: BinaryHeap::new(),
            sequence: 0,
            pending: Vec::new(),
            free_pending: Vec::new(),
            pieces: Vec::new(),
            free_pieces: Vec::new(),
            wake: Nanos(u64::MAX),
            now: Nanos(0),
            requests: 0,
            observer,
        };
        for load in 0..sim.sources.len() {
            if let Some(at) = sim.sources[load].next_arrival() {
                sim.schedule(at, Event::Arrival(load as u32));
            }
            for _ in 0..sim.sources[load].outstanding() {
                sim.schedule(Nanos(0), Event::Arrival(load as u32));
            }
        }
        Ok(sim)
    }

    /// Lets virtual time pass until `end`.
    pub fn run(&mut self, end: Nanos) -> Result<(), SimError> {
        while let Some(Reverse((at, _, _))) = self.events.peek() {
            if *at > end.0 {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            self.now = Nanos(at);
            self.handle(event)?;
            // All events of one moment are handled before the scheduler is asked, as when a real
            // queue is drained.
            let more = self.events.peek().is_some_and(|Reverse((next, _, _))| *next == at);
            if !more {
                self.dispatch();
            }
        }
        self.now = self.now.max(end);
        Ok(())
    }

    /// Results up to the present virtual time.
    #[must_use]
    pub fn result(&self) -> SimResult {
        let seconds = self.now.as_secs_f64();
        let loads = self.sources.iter().zip(&self.stats).map(|(source, l)| LoadResult {
            name: source.load.name.clone(),
            vm: source.load.vm,
            n: l.hist.n(),
            rate: if seconds > 0.0 { l.hist.n() as f64 / seconds } else { 0.0 },
            p50: l.hist.at(Percentile(50.0)),
            p99: l.hist.at(Percentile(99.0)),
            p9999: l.hist.tail(),
            max: l.hist.max(),
            late: l.late,
        });
        SimResult {
            requests: self.requests,
            loads: loads.collect(),
            vms: self.blocked.indices().map(|vm| self.scheduler.counters(vm)).collect(),
        }
    }

    /// The observer, with what it recorded.
    pub fn into_observer(self) -> O {
        self.observer
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at.0, self.sequence, event)));
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        match event {
            Event::Arrival(load) => {
                let source = &mut self.sources[load as usize];
                if source.next_arrival().is_some() {
                    source.advance();
                    if let Some(at) = source.next_arrival() {
                        self.schedule(at, Event::Arrival(load));
                    }
                }
                let due = self.sources[load as usize].due(self.now);
                self.submit_due(load, due);
            }
            Event::Completion(slot) => self.complete_piece(slot)?,
            Event::Wakeup => {
                if self.wake <= self.now {
                    self.wake = Nanos(u64::MAX);
                }
            }
        }
        Ok(())
    }

    /// Submits a request that was due at `due`.
    fn submit_due(&mut self, load: u32, due: Nanos) {
        let source = &mut self.sources[load as usize];
        let vm = VmId::from_usize(source.load.vm);
        let (op, offset) = source.next_request(self.size);
        let slot = self.free_pending.pop().unwrap_or(self.pending.len() as u32);
        let pending = PendingRequest { load, due, offset };
        let request = Request {
            tag: slot.into(),
            op,
            len: source.load.len,
            priority: source.load.priority,
            arrival: self.now,
        };
        if self.scheduler.submit(vm, request).is_err() {
            self.free_pending.push(slot);
            if slot as usize == self.pending.len() {
                self.pending.push(pending);
            }
            self.blocked[vm].push_back((load, due));
            return;
        }
        match self.pending.get_mut(slot as usize) {
            Some(entry) => *entry = pending,
            None => self.pending.push(pending),
        }
        self.observer.on_submit(self.now, vm, &request);
    }

    fn complete_piece(&mut self, slot: u32) -> Result<(), SimError> {
        let Some(piece) = self.pieces[slot as usize].take() else { return Ok(()) };
        self.free_pieces.push(slot);
        self.observer.on_piece_complete(self.now, &piece);
        let Some(done) = self.scheduler.complete(self.now, &piece).map_err(SimError::Scheduler)? else {
            return Ok(());
        };
        self.observer.on_complete(self.now, &done);
        self.requests += 1;
        let tag = done.request.tag as u32;
        let pending = self.pending[tag as usize];
        self.free_pending.push(tag);
        let source = &self.sources[pending.load as usize];
        self.stats[pending.load as usize].record(Nanos(self.now.0 - pending.due.0), source.load.deadline);
        if let Some(at) = source.resubmit_at(self.now) {
            self.schedule(at, Event::Arrival(pending.load));
        }
        if let Some((load, due)) = self.blocked[done.vm].pop_front() {
            self.submit_due(load, due);
        }
        Ok(())
    }

    /// Submits all pieces that may go now.
    fn dispatch(&mut self) {
        loop {
            let next = self.scheduler.next(self.now);
            match next {
                Next::Piece(piece) => {
                    self.observer.on_dispatch(self.now, &piece);
                    let offset = self.pending[piece.tag as usize].offset + piece.offset;
                    let access = match piece.op {
                        Op::Read => Access::Read,
                        Op::Flush => Access::Flush,
                        Op::Write | Op::WriteZeroes | Op::Discard => Access::Write,
                    };
                    let done = self.device.complete_at(self.now.0, access, offset, piece.len);
                    let slot = self.free_pieces.pop().unwrap_or(self.pieces.len() as u32);
                    match self.pieces.get_mut(slot as usize) {
                        Some(entry) => *entry = Some(piece),
                        None => self.pieces.push(Some(piece)),
                    }
                    self.schedule(Nanos(done), Event::Completion(slot));
                }
                Next::Wait(at) => {
                    self.observer.on_idle(self.now, &next, &self.scheduler);
                    if at < self.wake {
                        self.wake = at;
                        self.schedule(at, Event::Wakeup);
                    }
                    return;
                }
                Next::Full | Next::Idle => {
                    self.observer.on_idle(self.now, &next, &self.scheduler);
                    return;
                }
            }
        }
    }
}
