//! The simulation.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rtvirtio_sched::{
    Config, ConfigError, Direction, Finished, Next, Op, Piece, Request, Scheduler, SubmitError,
};
use rtvirtio_twin::{Access, ServiceModel, TwinProfile};
use rtvirtio_units::Nanos;

use crate::arrival::{Load, Source};
use crate::stats::{Latencies, LoadResult, SimResult};

/// Why a simulation cannot go on.
#[derive(Debug)]
#[non_exhaustive]
pub enum SimError {
    /// The scheduler's configuration.
    Config(ConfigError),
    /// A load names a VM that the configuration lacks.
    NoVm {
        /// The load.
        load: String,
        /// The VM that it names.
        vm: usize,
    },
    /// The scheduler lost a piece: a defect of ours.
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

/// Looks on as a simulation goes; for tests and traces.
pub trait Observer {
    /// A request was taken in.
    fn submitted(&mut self, _now: Nanos, _vm: usize, _request: &Request) {}
    /// A piece was given to the device.
    fn given(&mut self, _now: Nanos, _piece: &Piece) {}
    /// A piece is back.
    fn back(&mut self, _now: Nanos, _piece: &Piece) {}
    /// A request is finished.
    fn finished(&mut self, _now: Nanos, _finished: &Finished) {}
    /// The scheduler had nothing to give, and what it said.
    fn rests(&mut self, _now: Nanos, _next: &Next, _scheduler: &Scheduler) {}
}

/// Nobody looks on.
#[derive(Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request of this load is made.
    Made(u32),
    /// The piece in this place is back.
    Back(u32),
    /// The scheduler asked to be asked again.
    Wake,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    load: u32,
    made: Nanos,
    offset: u64,
}

/// One scheduler, one device, any number of loads.
pub struct Sim<O = Unobserved> {
    scheduler: Scheduler,
    device: ServiceModel,
    size: u64,
    sources: Vec<Source>,
    latencies: Vec<Latencies>,
    /// Requests that found their VM full, in order.
    outside: Vec<VecDeque<(u32, Nanos)>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    asked: Vec<Asked>,
    free_asked: Vec<u32>,
    pieces: Vec<Option<Piece>>,
    free_pieces: Vec<u32>,
    /// When the scheduler is asked again anyway.
    wake: Nanos,
    now: Nanos,
    requests: u64,
    observer: O,
}

impl Sim {
    /// A simulation that nobody looks on.
    ///
    /// # Errors
    /// [`SimError::Config`], [`SimError::NoVm`].
    pub fn new(
        config: &Config,
        device: TwinProfile,
        size: u64,
        loads: &[Load],
        seed: u64,
    ) -> Result<Self, SimError> {
        Self::observed(config, device, size, loads, seed, Unobserved)
    }
}

impl<O: Observer> Sim<O> {
    /// A simulation that `observer` looks on.
    ///
    /// # Errors
    /// As [`Sim::new`].
    pub fn observed(
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
            latencies: loads.iter().map(|_| Latencies::new()).collect(),
            outside: config.vms.iter().map(|_| VecDeque::new()).collect(),
            events: BinaryHeap::new(),
            sequence: 0,
            asked: Vec::new(),
            free_asked: Vec::new(),
            pieces: Vec::new(),
            free_pieces: Vec::new(),
            wake: Nanos(u64::MAX),
            now: Nanos(0),
            requests: 0,
            observer,
        };
        for load in 0..sim.sources.len() {
            if let Some(at) = sim.sources[load].next_arrival() {
                sim.schedule(at, Event::Made(load as u32));
            }
            for _ in 0..sim.sources[load].outstanding() {
                sim.schedule(Nanos(0), Event::Made(load as u32));
            }
        }
        Ok(sim)
    }

    /// Lets virtual time pass until `end`.
    ///
    /// # Errors
    /// [`SimError::Scheduler`].
    pub fn run(&mut self, end: Nanos) -> Result<(), SimError> {
        while let Some(Reverse((at, _, _))) = self.events.peek() {
            if *at > end.0 {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            self.now = Nanos(at);
            self.handle(event)?;
            // All that happens at one moment happens before the scheduler is asked, as when a real queue is drained.
            let more = self.events.peek().is_some_and(|Reverse((next, _, _))| *next == at);
            if !more {
                self.dispatch();
            }
        }
        self.now = self.now.max(end);
        Ok(())
    }

    /// What was seen so far.
    #[must_use]
    pub fn result(&self) -> SimResult {
        let seconds = self.now.as_secs_f64();
        let loads = self.sources.iter().zip(&self.latencies).enumerate().map(|(i, (source, l))| LoadResult {
            name: source.load.name.clone(),
            vm: source.load.vm,
            n: l.n(),
            unanswered: self.unanswered(i),
            rate: if seconds > 0.0 { l.n() as f64 / seconds } else { 0.0 },
            p50: l.at(50.0),
            p99: l.at(99.0),
            p9999: l.tail(),
            max: l.max(),
            late: l.late,
        });
        let vms = 0..self.outside.len();
        SimResult {
            time: self.now,
            requests: self.requests,
            loads: loads.collect(),
            vms: vms.clone().map(|vm| self.scheduler.counters(vm)).collect(),
            contracts: vms
                .map(|vm| Direction::ALL.map(|d| self.scheduler.contract(vm, d, self.now)))
                .collect(),
            window: self.scheduler.window(),
        }
    }

    fn unanswered(&self, load: usize) -> u64 {
        let free: std::collections::BTreeSet<u32> = self.free_asked.iter().copied().collect();
        let inside = self
            .asked
            .iter()
            .enumerate()
            .filter(|(i, a)| a.load as usize == load && !free.contains(&(*i as u32)))
            .count();
        let outside = self.outside.iter().flatten().filter(|(l, _)| *l as usize == load).count();
        (inside + outside) as u64
    }

    /// The observer, with what it saw.
    pub fn into_observer(self) -> O {
        self.observer
    }

    fn schedule(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at.0, self.sequence, event)));
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        match event {
            Event::Made(load) => {
                let source = &mut self.sources[load as usize];
                if source.next_arrival().is_some() {
                    source.advance();
                    if let Some(at) = source.next_arrival() {
                        self.schedule(at, Event::Made(load));
                    }
                }
                self.make(load, self.now);
            }
            Event::Back(place) => self.back(place)?,
            Event::Wake => {
                if self.wake <= self.now {
                    self.wake = Nanos(u64::MAX);
                }
            }
        }
        Ok(())
    }

    /// A request of a load that was due at `made`.
    fn make(&mut self, load: u32, made: Nanos) {
        let source = &mut self.sources[load as usize];
        let vm = source.load.vm;
        let (op, offset) = source.ask(self.size);
        let place = self.free_asked.pop().unwrap_or(self.asked.len() as u32);
        let asked = Asked { load, made, offset };
        let request = Request {
            tag: place.into(),
            op,
            len: source.load.len,
            priority: source.load.priority,
            arrival: self.now,
        };
        if self.scheduler.submit(vm, request).is_err() {
            self.free_asked.push(place);
            if place as usize == self.asked.len() {
                self.asked.push(asked);
            }
            self.outside[vm].push_back((load, made));
            return;
        }
        match self.asked.get_mut(place as usize) {
            Some(slot) => *slot = asked,
            None => self.asked.push(asked),
        }
        self.observer.submitted(self.now, vm, &request);
    }

    fn back(&mut self, place: u32) -> Result<(), SimError> {
        let Some(piece) = self.pieces[place as usize].take() else { return Ok(()) };
        self.free_pieces.push(place);
        self.observer.back(self.now, &piece);
        let Some(done) = self.scheduler.complete(self.now, &piece).map_err(SimError::Scheduler)? else {
            return Ok(());
        };
        self.observer.finished(self.now, &done);
        self.requests += 1;
        let tag = done.request.tag as u32;
        let asked = self.asked[tag as usize];
        self.free_asked.push(tag);
        let source = &self.sources[asked.load as usize];
        self.latencies[asked.load as usize].add(self.now.0 - asked.made.0, source.load.deadline);
        if let Some(at) = source.again_at(self.now) {
            self.schedule(at, Event::Made(asked.load));
        }
        if let Some((load, made)) = self.outside[done.vm].pop_front() {
            self.make(load, made);
        }
        Ok(())
    }

    /// Gives the device all that it may have now.
    fn dispatch(&mut self) {
        loop {
            let next = self.scheduler.next(self.now);
            match next {
                Next::Piece(piece) => {
                    self.observer.given(self.now, &piece);
                    let offset = self.asked[piece.tag as usize].offset + piece.offset;
                    let access = match piece.op {
                        Op::Read => Access::Read,
                        Op::Flush => Access::Flush,
                        Op::Write | Op::WriteZeroes | Op::Discard => Access::Write,
                    };
                    let done = self.device.complete_at(self.now.0, access, offset, piece.len);
                    let place = self.free_pieces.pop().unwrap_or(self.pieces.len() as u32);
                    match self.pieces.get_mut(place as usize) {
                        Some(slot) => *slot = Some(piece),
                        None => self.pieces.push(Some(piece)),
                    }
                    self.schedule(Nanos(done), Event::Back(place));
                }
                Next::Wait(at) => {
                    self.observer.rests(self.now, &next, &self.scheduler);
                    if at < self.wake {
                        self.wake = at;
                        self.schedule(at, Event::Wake);
                    }
                    return;
                }
                Next::Full | Next::Idle => {
                    self.observer.rests(self.now, &next, &self.scheduler);
                    return;
                }
            }
        }
    }
}
