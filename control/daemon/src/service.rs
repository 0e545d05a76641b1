//! The loop in a thread of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rtvirtio_kernel::detached::Detached;
use rtvirtio_workflow::write_state;

use crate::api::{self, Listeners};
use crate::config::Config;
use crate::contract_files;
use crate::contract_scan::READ_TIMEOUT;
use crate::daemon::Daemon;
use crate::error::DaemonError;
use crate::history::{self, Event, EventKind, History, HistoryFile};
use crate::linux::{LinuxHost, Places};
use crate::lock::lock;
use crate::memory::Memory;
use crate::observe::AgeingObservation;
use crate::placement::Placement;
use crate::run_dir::take_lock;
use crate::shared::{Command, Shared};
use placement_source::PlacementSource;

mod accepted;
mod ageing;
mod arriving;
mod observing;
mod pass;
mod placement_source;
pub(crate) mod state_lock;
mod woken;

/// Interval after which an apparently unchanged state is compared with the published one.
const SHOWN_AGAIN: Duration = Duration::from_secs(1);
/// Interval after which running VMs are listed again.
const LISTED_AGAIN: Duration = Duration::from_secs(10);
/// Events, in the state directory.
pub const HISTORY_FILE: &str = "history.jsonl";
/// Parameters of a service.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Directories and spec files.
    pub places: Places,
    /// Settings of the configuration file.
    pub config: Config,
    /// Sockets and addresses of the API.
    pub listeners: Listeners,
}

impl ServiceOptions {
    /// Text of the start event: mode, contracts and sockets.
    fn start_text(&self) -> String {
        let http = self.listeners.tcp.map_or_else(String::new, |address| format!(", http://{address}"));
        let dir = self.places.contracts.clone();
        let list = move || contract_files::all(&dir).map_err(|e| e.to_string());
        let found = Detached::call("contracts", list).ok().and_then(|of| of.wait(READ_TIMEOUT)?.ok());
        let files = match found {
            Some(Ok(files)) => format!("{} files", files.len()),
            Some(Err(why)) => format!("not readable: {why}"),
            None => "it does not answer".to_owned(),
        };
        format!(
            "service started: mode {}, contracts in {} ({files}), socket {}{http}",
            crate::word(&self.config.mode),
            self.places.contracts.display(),
            self.listeners.socket.display()
        )
    }
}

/// A service that runs.
pub struct Service {
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    daemon: Daemon<LinuxHost>,
    options: ServiceOptions,
    /// Time of the observation that the loop has last taken, RFC 3339.
    seen: String,
    /// Devices against their profiles in that observation.
    aged: BTreeMap<String, AgeingObservation>,
    /// Whether a command came since the state was published.
    was_asked: bool,
    /// Time at which the state was published last.
    published: Option<Instant>,
    /// Time at which running VMs were last listed for the observer.
    listed: Option<Instant>,
    /// File of the history, which the loop alone writes.
    history: Mutex<HistoryFile>,
    /// Reason why it is not known which contracts were accepted, until one is accepted again.
    unread: Option<String>,
    /// The publisher, or why there is none; `None` where nothing is to be published.
    placement: Option<Result<Placement, String>>,
    /// Dropping these ends observer and event thread; without events scans find everything.
    _observer: [Sender<()>; 2],
    _events: Option<Sender<()>>,
    locks: [File; 2],
    _api: api::Running,
}

/// Message of a pass of the loop to its program.
pub enum ServiceEvent<'a> {
    /// New entry of the history.
    Event(&'a Event),
    /// A step of the pass has ended: the loop is alive.
    Alive,
}

impl Service {
    /// Takes the locks of both directories, and begins to listen. The host is not scanned yet.
    ///
    /// # Errors
    /// [`DaemonError::Runs`] and [`DaemonError::RunsOnState`] while another one runs; when files or
    /// sockets cannot be used.
    pub fn start(options: ServiceOptions) -> Result<Self, DaemonError> {
        let lock = take_lock(&options.places.dirs.run)?;
        let state = &options.places.dirs.state;
        let state_lock = state_lock::take(&options.places.dirs)?;
        let (sender, commands) = channel();
        let wake = Mutex::new(sender.clone());
        let waker = Arc::new(move || {
            let _ = self::lock(&wake).send(Command::Wake);
        });
        let mut memory = Memory::default();
        let unread = match accepted::read(state) {
            Ok(accepted) => {
                memory.set_accepted(accepted);
                None
            }
            Err(why) => Some(why),
        };
        let host = LinuxHost::new(options.places.clone(), &options.config, waker);
        let daemon = Daemon::new(host, options.config.clone(), memory);
        let history = Mutex::new(HistoryFile::new(state.join(HISTORY_FILE)));
        let (config, dirs) = (options.config.clone(), options.places.dirs.clone());
        let mut snapshot = daemon.snapshot().with_contracts(&options.places.contracts);
        snapshot.arrivals = daemon.host_ref().arrivals(&daemon.observed().admission);
        // Before the first scan, an empty list of contracts does not mean that there are none.
        snapshot.problems.push("the host has not been checked yet".to_owned());
        let shared = Arc::new(Shared::new(snapshot, History::default(), sender, config, dirs));
        let api = api::serve(&options.listeners, Arc::clone(&shared))?;
        let _observer = observing::observe(&options, Arc::clone(&shared))?;
        let _events = woken::start(&options, Arc::clone(&shared));
        let (seen, was_asked, published, listed) = (String::new(), false, None, None);
        // A mistake in `[placement]` does not stop the service.
        let placement = options.config.placement.as_ref();
        let placement =
            placement.map(|config| Placement::start(config, PlacementSource(Arc::clone(&shared))));
        Ok(Self {
            shared,
            commands,
            daemon,
            options,
            seen,
            aged: BTreeMap::new(),
            was_asked,
            published,
            listed,
            history,
            unread,
            placement,
            _observer,
            _events,
            locks: [lock, state_lock],
            _api: api,
        })
    }

    /// State shared with the API.
    #[must_use]
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Runs until `stop` is set. Settings in force stay in force.
    pub fn run(&mut self, stop: &AtomicBool, tell: &mut dyn FnMut(ServiceEvent<'_>)) {
        let began = self.options.start_text();
        self.event(EventKind::Started, None, began, Vec::new(), tell);
        let scan = Duration::from_nanos(self.options.config.scan.0);
        while !stop.load(Ordering::Relaxed) {
            let begin = Instant::now();
            let seen = Arc::clone(&self.shared.observation.borrow());
            if seen.time != self.seen {
                self.seen.clone_from(&seen.time);
                for text in ageing::events(&self.aged, &seen.host.ageing) {
                    self.event(EventKind::Note, None, text, Vec::new(), tell);
                }
                self.aged.clone_from(&seen.host.ageing);
                self.daemon.host().saw(seen);
            }
            self.pass(stop, tell);
            self.end_arrivals(tell);
            if let Some(Ok(placement)) = &self.placement {
                for (kind, text) in placement.events() {
                    self.event(kind, None, text, Vec::new(), tell);
                }
            }
            // Changes by time alone are published with a later scan, at most once a second.
            let is_due = !self.daemon.rested() && self.published.is_none_or(|at| at.elapsed() >= SHOWN_AGAIN);
            if std::mem::take(&mut self.was_asked) || self.daemon.is_new() || is_due {
                self.publish();
            }
            let took = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.shared.counters.pass_us.fetch_add(took, Ordering::Relaxed);
            self.shared.counters.passes.fetch_add(1, Ordering::Relaxed);
            if self.daemon.has_more() {
                while let Ok(command) = self.commands.try_recv() {
                    self.obey(command);
                }
                continue;
            }
            // The next scan is due one interval after this pass, whatever caused it.
            let (now, next) = (Instant::now(), begin + scan);
            let sooner = self.daemon.host_ref().look_by(now);
            self.wait(sooner.map_or(next, |at| at.min(next)), stop);
        }
    }

    /// Ends the API and the observers. The locks are held until the result is dropped.
    #[must_use]
    pub fn end(self) -> [File; 2] {
        self.locks
    }

    /// Waits until the next pass is due, or a command arrives.
    fn wait(&mut self, until: Instant, stop: &AtomicBool) {
        /// Longest sleep between two checks of `stop`.
        const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(200);
        while !stop.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            match self.commands.recv_timeout(left.min(STOP_CHECK_INTERVAL)) {
                Ok(command) => {
                    self.obey(command);
                    while let Ok(command) = self.commands.try_recv() {
                        self.obey(command);
                    }
                    return;
                }
                Err(RecvTimeoutError::Timeout) if left <= STOP_CHECK_INTERVAL => return,
                Err(RecvTimeoutError::Timeout) => {}
                // Not expected: `shared` holds a sender.
                Err(RecvTimeoutError::Disconnected) => {
                    return std::thread::sleep(left.min(STOP_CHECK_INTERVAL));
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        self.was_asked = true;
        self.daemon.look_next();
        match command {
            Command::Wake => {}
            Command::Reported { contracts } => {
                self.daemon.compare_next();
                if contracts {
                    self.daemon.host().ask_for_contracts();
                }
            }
            Command::Compare => {
                self.daemon.compare_next();
                // The hook of libvirt asks for it when a VM has come.
                if self.daemon.host().has_arrivals() {
                    self.daemon.host().ask_for_contracts();
                }
            }
            Command::Arrive(request) => self.arrive(request),
            Command::GiveArrivalBack(vm, answer) => {
                let ended = self.give_arrival_back(&vm);
                let _ = answer.send(ended);
            }
            Command::Accept(vm, answer) => {
                let accepted = self.daemon.accept(&vm);
                if accepted {
                    self.save_accepted(Some(&vm));
                }
                // The client may be gone.
                let _ = answer.send(accepted);
            }
            Command::AnswerPlan(accepts, answer) => {
                let answered = if accepts { self.daemon.accept_plan() } else { self.daemon.refuse_plan() };
                if answered && accepts {
                    self.save_accepted(None);
                }
                let _ = answer.send(answered);
            }
        }
    }

    fn save_accepted(&mut self, vm: Option<&str>) {
        let all = self.daemon.memory().accepted().clone();
        let saved = serde_json::to_vec(&all).map_err(|e| e.to_string()).and_then(|text| {
            write_state(&self.options.places.dirs.state, accepted::FILE, &text).map_err(|e| format!("{e:#}"))
        });
        if saved.is_ok() {
            self.unread = None;
        }
        if let Err(e) = saved {
            let text = format!("it waits again after a restart of the service: {e}");
            self.event(EventKind::Note, vm, text, Vec::new(), &mut |_| {});
        }
    }

    fn publish(&mut self) {
        let mut snapshot = self.daemon.snapshot().with_contracts(&self.options.places.contracts);
        ageing::take_back(&mut snapshot, &self.aged, &self.daemon.planned_slowness());
        snapshot.problems.extend(self.daemon.host().problems().iter().cloned());
        snapshot.problems.extend(self.shared.observation.borrow().host.ageing_unseen.iter().cloned());
        self.daemon.show_in_domains(&snapshot);
        match &self.placement {
            Some(Ok(placement)) => snapshot.placement = Some(placement.snapshot()),
            Some(Err(why)) => snapshot.problems.push(format!("nothing is published in Placement: {why}")),
            None => {}
        }
        snapshot.problems.extend(self.unread.clone());
        snapshot.arrivals = self.daemon.host_ref().arrivals(&self.daemon.observed().admission);
        snapshot.problems.extend(self.daemon.host_ref().arrivals_problem());
        snapshot.problems.extend(lock(&self.history).problem().map(str::to_owned));
        snapshot.problems.extend(lock(&self.shared.unheard).iter().cloned());
        self.published = Some(Instant::now());
        // A contract may also change in a part that no state shows, such as a declared rate.
        let now_and_then = self.listed.is_none_or(|at| at.elapsed() >= LISTED_AGAIN);
        if self.shared.publish(snapshot) || now_and_then {
            self.listed = self.published;
            *lock(&self.shared.running) = self.daemon.running();
        }
    }

    fn event(
        &self,
        kind: EventKind,
        vm: Option<&str>,
        text: String,
        changes: Vec<crate::SettingChange>,
        tell: &mut dyn FnMut(ServiceEvent<'_>),
    ) {
        let event = history::record(&self.shared.history, &self.history, kind, vm, text, changes);
        tell(ServiceEvent::Event(&event));
        // Fails only without a reader.
        let _ = self.shared.events.send(event);
    }
}
