//! Commands of the control threads to a network's engine.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{Config, ConfigError, Contract, CpuCounters, MembershipError, VmCounters, VmId};
use rtvirtio_stats::LatencyReader;

use super::prepared::{DetachedPort, PreparedPort, VacantPort};
use super::settings::{Drops, PortSettings};
use super::trace::FrameEvent;
use crate::engine::thread::Quit;
use crate::engine::{EngineHandle, PromiseCounters, QueueCommand, TraceCommand, TraceReply, TraceWriter};

/// A command to the engine of a network.
#[derive(Debug)]
pub enum NetCommand {
    /// A command about the queues of a port.
    Queue(QueueCommand),
    /// Replaces policy, and caps, weights and reservations of these ports, all or nothing.
    Reconfigure {
        /// Configuration of the scheduler toward the link.
        tx: Box<Config>,
        /// Configuration of the scheduler toward the VMs.
        rx: Box<Config>,
        /// Places of the ports whose part has changed: their buckets start full.
        ports: Vec<VmId>,
        /// Further settings of each place.
        settings: Vec<PortSettings>,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), ConfigError>>,
    },
    /// Snapshot of the network.
    Status {
        /// Receives the snapshot of the network.
        reply: SyncSender<NetStatus>,
    },
    /// Snapshot of a port.
    PortStatus {
        port: VmId,
        /// Receives the snapshot; `None` for a vacant place.
        reply: SyncSender<Option<Box<PortStatus>>>,
    },
    /// The port in a place.
    Member {
        port: VmId,
        /// [`FrameEvent::member`] of the port and its name; `None` for a vacant place.
        reply: SyncSender<Option<(u32, String)>>,
    },
    /// Signals this eventfd before the guest is notified of urgent frames; `None` for no more.
    SignalUrgent {
        port: VmId,
        /// Descriptor to signal, which came over the control socket.
        eventfd: Option<Arc<OwnedFd>>,
        /// The previous eventfd, so that the network's thread closes nothing.
        reply: SyncSender<Option<Arc<OwnedFd>>>,
    },
    /// Starts a trace of frames; [`crate::engine::TraceReader`] sends this.
    StartTrace {
        /// Ring to which events are written.
        writer: Box<TraceWriter<FrameEvent>>,
        /// `None` when the trace starts; the writer, when another trace runs.
        reply: TraceReply<FrameEvent>,
    },
    /// Ends the running trace.
    StopTrace {
        /// The writer, so that the network's thread does not free it.
        reply: TraceReply<FrameEvent>,
    },
    /// Adds a port in a vacant place, or behind the last one, between two rounds.
    Attach {
        port: VmId,
        /// The new port, with all memory allocated.
        prepared: Box<PreparedPort>,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), MembershipError>>,
    },
    /// Drops the frames of a port without a guest, after [`QueueCommand::Disconnect`].
    Drain {
        port: VmId,
        /// Whether nothing of the port is in flight. The command is sent again until that is so.
        reply: SyncSender<bool>,
    },
    /// Removes a port that is drained.
    Detach {
        port: VmId,
        /// Empty port that takes its place.
        vacant: Box<VacantPort>,
        /// Memory and uplink of the port, so that the network's thread frees nothing.
        reply: SyncSender<Result<Box<DetachedPort>, MembershipError>>,
    },
    /// Ends the network's thread.
    Quit,
}

impl NetCommand {
    /// The port whose VM causes this command; `None` for commands of the I/O domain.
    #[must_use]
    pub fn port(&self) -> Option<VmId> {
        match self {
            Self::Queue(
                QueueCommand::Start { vm, .. }
                | QueueCommand::Stop { vm, .. }
                | QueueCommand::Call { vm, .. }
                | QueueCommand::Announce { vm, .. }
                | QueueCommand::Barrier { vm, .. }
                | QueueCommand::Disconnect { vm, .. },
            ) => Some(*vm),
            _ => None,
        }
    }
}

impl Quit for NetCommand {
    fn quit() -> Self {
        Self::Quit
    }
}

impl TraceCommand for NetCommand {
    type Event = FrameEvent;
    const EMPTY: FrameEvent = FrameEvent::EMPTY;

    fn start_trace(writer: Box<TraceWriter<FrameEvent>>, reply: TraceReply<FrameEvent>) -> Self {
        Self::StartTrace { writer, reply }
    }

    fn stop_trace(reply: TraceReply<FrameEvent>) -> Self {
        Self::StopTrace { reply }
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
    /// Number of places, vacant ones included.
    pub ports: usize,
    /// Delay of regulated frames to the link beyond their exact moment.
    pub regulator_lateness: LatencyReader,
}

/// Counters of one direction of a port.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Frames that were passed on.
    pub frames: u64,
    /// Bytes of these frames, without FCS.
    pub bytes: u64,
    /// From the VM: from fetch to the uplink. To the VM: from the read to its memory.
    pub latencies: LatencyReader,
    /// Measured service: alpha and Delta.
    pub contract: Contract,
}

/// Snapshot of a port.
#[derive(Clone, Debug)]
pub struct PortStatus {
    pub name: String,
    /// Queues that are served.
    pub queues: u16,
    /// Counters of frames from the VM.
    pub tx: Flow,
    /// Counters of frames to the VM.
    pub rx: Flow,
    /// Counters of the scheduler toward the link.
    pub tx_counters: VmCounters,
    /// Counters of the scheduler toward the VM.
    pub rx_counters: VmCounters,
    /// Frames under a reservation: urgent ones, then the others.
    pub promises: [PromiseCounters; 2],
    /// Frames that were not passed on.
    pub drops: Drops,
    /// Times that the port was held for fruitless work: kicks without frames, and refused frames.
    pub backoffs: u64,
    /// Signals before notifications of urgent frames; `None` without an eventfd.
    pub urgent_signals: Option<u64>,
    /// Use of its part of the thread's CPU budget; `None` without a budget.
    pub cpu: Option<CpuCounters>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken_queues: u64,
}
