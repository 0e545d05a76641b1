//! The engine: one thread for each device, which serves the queues of all its VMs.
//!
//! The engine waits in one place, io_uring: for kicks of guests, completions, commands, and the
//! next moment at which a regulator admits a piece. All memory that depends on guests' requests is
//! allocated before the first guest connects, so a guest can exhaust its own share only.

mod command;
mod data;
pub(crate) mod poll;
mod prepared;
pub(crate) mod queue_host;
mod run;
pub(crate) mod slot;
mod table;
mod trace;
mod trace_reader;
pub(crate) mod uring;
pub(crate) mod vring;

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rtvirtio_domain_config::Poll;
use rtvirtio_sched::{Config, ConfigError, Scheduler};

use crate::backing::Backing;
use crate::confine::{Confine, Role};
pub use command::{
    Command, EngineGone, EngineHandle, EngineStatus, PromiseCounters, QueueCommand, ReconfigureError,
    StartError, VmStatus, VringBase, VringStart,
};
pub use prepared::{AttachError, Capacity, DetachedDisk, PreparedDisk, RefusedDisk};
pub(crate) use run::{now, prepare_thread};
pub use trace::{TraceEvent, TraceWriter};
pub use trace_reader::{TraceError, TraceReader};

/// One VM's disk on this engine.
#[derive(Debug)]
pub struct Disk {
    /// Name in threads, logs and counters.
    pub name: String,
    /// File or device behind it.
    pub backing: Backing,
    /// Serial number that the guest reads.
    pub serial: String,
    /// Queues offered to the guest.
    pub queues: u16,
}

/// Configuration of an engine.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// Name of its thread.
    pub name: String,
    /// CPUs of its thread; any when empty.
    pub cpus: Vec<usize>,
    /// `SCHED_FIFO` priority; an ordinary thread when `None`.
    pub fifo: Option<u8>,
    /// How it waits for work.
    pub poll: Poll,
    /// Passes the guest's I/O class on to the host's I/O scheduler.
    pub pass_priority: bool,
    /// Privileges that its thread drops before it serves guests.
    pub confine: Confine,
}

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An invalid scheduler configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The number of disks is not the scheduler's number of VMs.
    #[error("{disks} disks for a scheduler of {vms} VMs")]
    Disks {
        /// Number of disks.
        disks: usize,
        /// Number of VMs.
        vms: usize,
    },
    /// io_uring, an eventfd or a thread.
    #[error("{what}: {source}")]
    Io {
        /// What failed.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A running engine; it ends when this is dropped.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
    restricted: bool,
}

impl Engine {
    /// Starts the thread. Disks are in the order of the scheduler's VMs.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start(config: EngineConfig, sched: &Config, disks: Vec<Disk>) -> Result<Self, EngineError> {
        if disks.len() != sched.vms.len() {
            return Err(EngineError::Disks { disks: disks.len(), vms: sched.vms.len() });
        }
        let io = |what| move |source| EngineError::Io { what, source };
        let doorbell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )
        .map_err(|e| io("eventfd")(e.into()))?;
        let doorbell = std::sync::Arc::new(doorbell);
        // A few commands for each VM: further ones wait in the control threads.
        let (sender, commands): (SyncSender<Command>, Receiver<Command>) = sync_channel(64);
        let handle = EngineHandle::new(sender, std::sync::Arc::clone(&doorbell));
        let scheduler = Scheduler::new(sched)?;
        let (ready, is_ready) = sync_channel(1);
        let (name, sched) = (format!("iod-{}", config.name), sched.clone());
        // The thread that uses the ring makes it: the kernel then needs no lock for it.
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(move || {
                let _ends = AbortOnPanic;
                let (role, confine) =
                    (Role::Engine { passes_priority: config.pass_priority }, config.confine.clone());
                let made = run::EventLoop::new(config, scheduler, &sched, disks, commands, doorbell);
                let confined = |engine| match confine.apply(role) {
                    Ok(()) => Ok(engine),
                    Err(source) => Err(io("cannot confine the engine's thread")(source)),
                };
                match made.and_then(confined) {
                    Ok(mut engine) => {
                        let _ = ready.send(Ok(engine.is_restricted()));
                        engine.run();
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })
            .map_err(io("cannot start a thread"))?;
        match is_ready.recv() {
            Ok(Ok(restricted)) => Ok(Self { handle, thread: Some(thread), restricted }),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(io("the engine's thread ended at once")(io::Error::other("no reason given"))),
        }
    }

    /// Whether the kernel refuses every io_uring operation that the engine does not use.
    #[must_use]
    pub fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// A handle for control threads.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

/// A panic of the engine ends the process: its guests would wait for ever, and the kernel may still
/// write to memory that is about to be unmapped. QEMU reconnects to the restarted domain.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.handle.send(Command::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
