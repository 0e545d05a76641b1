//! The engine: one thread for each device, which serves the queues of all its VMs.
//!
//! The engine waits in one place, io_uring: for kicks of guests, completions, commands, and the
//! next moment at which a regulator admits a piece. All memory that depends on guests' requests is
//! allocated before the first guest connects, so a guest can exhaust its own share only.

mod blocks;
pub(crate) mod buffers;
mod command;
mod data;
pub(crate) mod kick;
pub(crate) mod poll;
mod prepared;
pub(crate) mod queue_host;
pub(crate) mod queue_id;
mod room;
mod run;
pub(crate) mod slot;
mod table;
pub(crate) mod thread;
mod trace;
mod trace_reader;
pub(crate) mod urgency_eventfd;
pub(crate) mod uring;
mod vm;
pub(crate) mod vring;

use std::io;

use rtvirtio_domain_config::Poll;
use rtvirtio_domain_resources::backing::Backing;
use rtvirtio_sched::{Config, ConfigError, Scheduler};
use rtvirtio_units::Bytes;

use self::thread::EngineThread;
use crate::confine::{Confine, Role};
pub use command::{AnnounceError, Command, EngineStatus, QueueCommand, ReconfigureError, VmStatus};
pub use kick::Kick;
pub use prepared::{AttachError, Capacity, DetachedDisk, PreparedDisk, RefusedDisk};
pub use queue_id::QueueId;
pub(crate) use run::{now, prepare_thread};
pub use thread::EngineGone;
pub use trace::{TraceCommand, TraceEvent, TraceReply, TraceWriter};
pub use trace_reader::{TraceError, TraceReader};
pub use vm::{Faults, PromiseCounters, RefusedRequests};
pub use vring::{StartError, VringBase, VringStart};

/// Sends commands to an engine, from any thread.
pub type EngineHandle<C = Command> = thread::EngineHandle<C>;

/// A VM's disk on this engine.
#[derive(Debug)]
pub struct Disk {
    /// Name in threads, logs and counters.
    pub name: String,
    /// File or device of the disk.
    pub backing: Backing,
    /// Serial number that the guest reads.
    pub serial: String,
    /// Queues offered to the guest.
    pub queues: u16,
    /// Whether writes that find no room wait for it.
    pub waits_for_room: bool,
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
    /// Polling before the thread sleeps.
    pub poll: Poll,
    /// Places for registered buffers, of guests' memory that is pinned; 0 where none is.
    pub buffers: u32,
    /// Passes the guest's I/O class on to the host's I/O scheduler.
    pub pass_priority: bool,
    /// Privileges that its thread drops before it serves guests.
    pub confine: Confine,
}

/// Causes for which an engine does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An invalid scheduler configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The number of disks is not the scheduler's number of VMs.
    #[error("{disks} disks for a scheduler of {vms} VMs")]
    Disks {
        /// Number of disks that were given.
        disks: usize,
        /// VMs of the scheduler's configuration.
        vms: usize,
    },
    /// io_uring, an eventfd or a thread.
    #[error("{what}: {source}")]
    Io {
        /// Operation that failed, for the message.
        what: &'static str,
        source: io::Error,
    },
}

/// Whether this kernel can pin guests' memory for engines (Linux 6.13).
#[must_use]
pub fn can_pin() -> bool {
    buffers::pinner(Bytes(0), 0).is_ok()
}

/// A running engine; it ends when this is dropped.
#[derive(Debug)]
pub struct Engine(EngineThread<Command>);

impl Engine {
    /// Starts the thread. Disks are in the order of the scheduler's VMs.
    pub fn start(config: EngineConfig, sched: &Config, disks: Vec<Disk>) -> Result<Self, EngineError> {
        if disks.len() != sched.vms.len() {
            return Err(EngineError::Disks { disks: disks.len(), vms: sched.vms.len() });
        }
        let mut scheduler = Scheduler::new(sched)?;
        scheduler.watch_waiting();
        let (name, sched) = (format!("iod-{}", config.name), sched.clone());
        let confine = config.confine.clone();
        let role = Role::Engine { passes_priority: config.pass_priority };
        let make = move |commands, doorbell| {
            run::EventLoop::new(config, scheduler, &sched, disks, commands, doorbell)
        };
        Ok(Self(EngineThread::start(&name, confine, role, make)?))
    }

    /// Whether the kernel refuses every io_uring operation that the engine does not use.
    #[must_use]
    pub fn is_restricted(&self) -> bool {
        self.0.is_restricted()
    }

    /// A handle for control threads.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.0.handle()
    }
}
