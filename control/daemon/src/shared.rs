//! State that the loop of the service shares with its other threads: the API, the observer, the
//! publisher and those that wake it.

use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rtvirtio_units::Nanos;
use rtvirtio_workflow::Dirs;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, oneshot, watch};

use crate::arrivals::{self, ArrivalAnswer, ArrivalError, ArrivingVm};
use crate::config::Config;
use crate::history::{Event, History};
use crate::linux::RunningVm;
use crate::lock::lock;
use crate::observe::{Observation, UncoveredObservation};
use crate::snapshot::Snapshot;

/// Capacity of a client's event queue; a slower client loses events.
const BEHIND: usize = 256;

/// Message that wakes the loop.
pub enum Command {
    /// Something may have changed.
    Wake,
    /// A VM or its manager reported an event that may concern settings, or contracts too.
    Reported {
        /// Whether contracts of libvirt's domains are to be read.
        contracts: bool,
    },
    /// Compare every setting now.
    Compare,
    /// Accept the contract that a VM waits for; answers whether it waits for one.
    Accept(String, oneshot::Sender<bool>),
    /// Accept the plan that waits, or refuse it; answers whether one does.
    AnswerPlan(bool, oneshot::Sender<bool>),
    /// Admit a VM that is about to arrive, and reserve for it.
    Arrive(ArrivalRequest),
    /// End the reservations of a VM, given by its name or UUID; answers whether there was one.
    GiveArrivalBack(String, oneshot::Sender<bool>),
}

/// Request to admit a VM that is about to arrive.
pub struct ArrivalRequest {
    pub(crate) vm: ArrivingVm,
    /// Time of the reservation.
    pub(crate) hold: Nanos,
    /// Place among the requests that the loop has not answered, whose number is limited.
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) answer: oneshot::Sender<Result<ArrivalAnswer, ArrivalError>>,
}

/// State that the loop shares with the API. No lock is held while anything waits for a client.
pub struct Shared {
    snapshot: watch::Sender<Arc<Snapshot>>,
    pub(crate) observation: watch::Sender<Arc<Observation>>,
    /// I/O on which no setting in force acts.
    pub(crate) uncovered: Arc<Mutex<UncoveredObservation>>,
    /// Time of the loop's last scan of the host.
    looked: Mutex<Option<Instant>>,
    pub(crate) running: Mutex<Vec<Arc<RunningVm>>>,
    pub(crate) events: broadcast::Sender<Event>,
    pub(crate) history: Mutex<History>,
    commands: Mutex<Sender<Command>>,
    /// Sources whose events are not received, each with the reason.
    pub(crate) unheard: Mutex<Vec<String>>,
    /// Counters of the loop, for `/metrics`.
    pub counters: Counters,
    /// Places for requests of arriving VMs.
    pub(crate) arriving: Arc<Semaphore>,
    config: RwLock<Config>,
    dirs: Dirs,
}

/// Counters of the loop.
#[derive(Debug, Default)]
pub struct Counters {
    /// Passes of the loop.
    pub passes: AtomicU64,
    /// Time that they took, in microseconds.
    pub pass_us: AtomicU64,
    /// Settings that were written.
    pub changes: AtomicU64,
    /// Events of kind `Failed`.
    pub failures: AtomicU64,
    /// Passes that an event asked for.
    pub wakes: AtomicU64,
    /// Events that VMs and their managers reported.
    pub reports: AtomicU64,
    /// Comparisons of settings that these events asked for.
    pub report_compares: AtomicU64,
    /// Daemons and monitors whose events are received now.
    pub reporters: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        snapshot: Snapshot,
        history: History,
        commands: Sender<Command>,
        config: Config,
        dirs: Dirs,
    ) -> Self {
        Self {
            snapshot: watch::Sender::new(Arc::new(snapshot)),
            observation: watch::Sender::default(),
            uncovered: Arc::default(),
            looked: Mutex::default(),
            running: Mutex::default(),
            events: broadcast::Sender::new(BEHIND),
            history: Mutex::new(history),
            commands: Mutex::new(commands),
            unheard: Mutex::default(),
            counters: Counters::default(),
            arriving: Arc::new(Semaphore::new(arrivals::MOST_ARRIVALS)),
            config: RwLock::new(config),
            dirs,
        }
    }

    /// State with the age of the scan that it is of; VMs seen too long ago are reported as unknown.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.aged(&Arc::clone(&self.snapshot.borrow()))
    }

    /// Current state, and each new one. A slow reader sees the latest only.
    #[must_use]
    pub fn snapshots(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.subscribe()
    }

    /// Last observation, with its age.
    #[must_use]
    pub fn observation(&self) -> Arc<Observation> {
        Arc::new(self.aged_observation(&Arc::clone(&self.observation.borrow())))
    }

    /// Last observation, and each new one.
    #[must_use]
    pub fn observations(&self) -> watch::Receiver<Arc<Observation>> {
        self.observation.subscribe()
    }

    /// Events from now on. A slow reader loses some, and gets their number.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Events that have happened.
    #[must_use]
    pub fn history(&self, after: u64, most: usize) -> Vec<Event> {
        lock(&self.history).after(after, most)
    }

    /// Wakes the loop; false when it has ended.
    pub fn send(&self, command: Command) -> bool {
        lock(&self.commands).send(command).is_ok()
    }

    /// State and run directories.
    #[must_use]
    pub fn dirs(&self) -> &Dirs {
        &self.dirs
    }

    /// Copy of the configuration.
    #[must_use]
    pub fn config(&self) -> Config {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Publishes a state; returns whether it differs from the last one.
    pub(crate) fn publish(&self, snapshot: Snapshot) -> bool {
        self.snapshot.send_if_modified(|now| {
            let changed = **now != snapshot;
            if changed {
                *now = Arc::new(snapshot);
            }
            changed
        })
    }

    /// Copy of a state with the age of the last scan.
    #[must_use]
    pub(crate) fn aged(&self, state: &Snapshot) -> Arc<Snapshot> {
        let (age, config) = (lock(&self.looked).map(|at| at.elapsed()), self.config());
        let mut state = state.clone().aged(age, config.stale_after());
        let oldest = self.observation.borrow().oldest(Instant::now());
        if let Some(age) = oldest.filter(|age| *age > config.unobserved_after()) {
            let why = "what is shown of load and targets is old";
            state.problems.push(format!("the VMs have not been observed for {} s: {why}", age.as_secs()));
        }
        Arc::new(state)
    }

    /// Records that the loop has just scanned the host.
    pub(crate) fn looked_now(&self) {
        *lock(&self.looked) = Some(Instant::now());
    }

    /// Copy of an observation with the age of each sample.
    #[must_use]
    pub(crate) fn aged_observation(&self, seen: &Observation) -> Observation {
        let (now, config) = (Instant::now(), self.config());
        let every = Duration::from_nanos(config.observe.0);
        let uncovered = lock(&self.uncovered).clone().aged(now, every);
        Observation { uncovered, ..seen.clone().aged(now, config.unobserved_after()) }
    }
}
