//! Commands of the control threads to a network's engine.

use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{Config, ConfigError, Contract, VmCounters};
use rtvirtio_stats::Latencies;
use rtvirtio_units::Nanos;

use crate::engine::thread::Quit;
use crate::engine::{EngineHandle, PromiseCounters, QueueCommand};

/// A command.
#[derive(Debug)]
pub enum NetCommand {
    /// A command about the queues of a port.
    Queue(QueueCommand),
    /// Replaces policy, and caps, weights and reservations of these ports, all or nothing.
    Reconfigure {
        /// Toward the link.
        tx: Box<Config>,
        /// Toward the VMs.
        rx: Box<Config>,
        /// Ports whose part has changed: their buckets start full.
        ports: Vec<usize>,
        /// How long the thread sleeps beyond the moment at which a frame to each port is admitted.
        coalesce: Vec<Nanos>,
        /// Why the command is refused.
        reply: SyncSender<Result<(), ConfigError>>,
    },
    /// Snapshot of the network.
    Status {
        /// The snapshot.
        reply: SyncSender<NetStatus>,
    },
    /// Snapshot of a port.
    PortStatus {
        /// Index of the port.
        port: usize,
        /// The snapshot; `None` for an unknown port.
        reply: SyncSender<Option<Box<PortStatus>>>,
    },
    /// Ends the thread.
    Quit,
}

impl Quit for NetCommand {
    fn quit() -> Self {
        Self::Quit
    }
}

impl From<QueueCommand> for NetCommand {
    fn from(command: QueueCommand) -> Self {
        Self::Queue(command)
    }
}

/// Sends commands to a network's engine.
pub type NetHandle = EngineHandle<NetCommand>;

/// Snapshot of a network.
#[derive(Clone, Debug)]
pub struct NetStatus {
    /// Number of ports.
    pub ports: usize,
    /// Delay of regulated frames to the link beyond their exact moment.
    pub regulator_lateness: Latencies,
}

/// Frames that were not passed on, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// From the VM: another source address or VLAN.
    pub spoofed: u64,
    /// From the VM: no valid chain, header or frame, or too long.
    pub malformed: u64,
    /// From the VM: the uplink refused it.
    pub refused: u64,
    /// To the VM: beyond its limit on broadcasts.
    pub broadcast: u64,
    /// To the VM: for another VLAN or address.
    pub filtered: u64,
    /// To the VM: it had no buffers, or its queue was full.
    pub no_buffer: u64,
    /// To the VM: a large segment that it cannot take.
    pub segmented: u64,
}

/// One direction of a port.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Frames passed on.
    pub frames: u64,
    /// Their bytes, without FCS.
    pub bytes: u64,
    /// From the VM: from fetch to hand-over. To the VM: from the read to its memory.
    pub latencies: Latencies,
    /// Measured service: alpha and Delta.
    pub contract: Contract,
}

/// Snapshot of a port.
#[derive(Clone, Debug)]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// Queues that are served.
    pub queues: u16,
    /// Frames from the VM.
    pub tx: Flow,
    /// Frames to the VM.
    pub rx: Flow,
    /// Counters of the scheduler toward the link.
    pub tx_counters: VmCounters,
    /// Counters of the scheduler toward the VM.
    pub rx_counters: VmCounters,
    /// Frames under a reservation: urgent ones, then the others.
    pub promises: [PromiseCounters; 2],
    /// Frames that were not passed on.
    pub drops: Drops,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken_queues: u64,
}
