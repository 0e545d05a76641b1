//! Commands of the control threads to an engine.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rtvirtio_domain_config::{Mac, Poll};
use rtvirtio_sched::{
    Config, ConfigError, Contract, DeallocationStatus, MembershipError, VmCounters, VmId, Waits,
};
use rtvirtio_stats::LatencyReader;

use super::prepared::{DetachedDisk, PreparedDisk, RefusedDisk};
use super::queue_id::QueueId;
use super::thread::{EngineGone, Quit};
use super::trace::{TraceCommand, TraceEvent, TraceReply, TraceWriter};
use super::vm::{Faults, PromiseCounters};
use super::vring::{StartError, VringBase, VringStart};

/// Reasons for which a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReconfigureError {
    /// A window larger than the table of pieces.
    #[error("a window of {most} needs a restart: there is room for {room}")]
    Window {
        /// The window, in pieces.
        most: u32,
        /// The largest window of this engine.
        room: usize,
    },
    /// An invalid scheduler configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The scheduler refuses a VM that was checked: a defect.
    #[error("{0}")]
    Refused(String),
    /// The engine has ended.
    #[error(transparent)]
    Gone(#[from] EngineGone),
}

/// Reasons for which a port is not announced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnnounceError {
    /// A disk, or a port that is gone.
    #[error("it is no network port")]
    NoPort,
    /// An address of another port.
    #[error("{mac} is not its address, which is {own}")]
    OtherAddress {
        /// Address as the front end says it.
        mac: Mac,
        /// Address of the port.
        own: Mac,
    },
    /// The rules of the port's frames.
    #[error("the port may not send this frame")]
    NotAllowed,
    /// The port's frames wait already.
    #[error("all buffers of its frames are in use")]
    NoBuffer,
}

/// A command about the queues of a VM, the same for disks and network ports.
#[derive(Debug)]
pub enum QueueCommand {
    /// Starts to serve a queue.
    Start {
        vm: VmId,
        queue: QueueId,
        /// Rings and descriptors of the queue.
        start: Box<VringStart>,
        /// Number of requests that were fetched elsewhere and get no answer, or the reason of a
        /// refusal.
        reply: SyncSender<Result<u16, StartError>>,
    },
    /// Completes what was fetched from a queue, then stops serving it.
    Stop {
        vm: VmId,
        queue: QueueId,
        /// Whether the front end asked for it; otherwise the queue starts again at once.
        for_good: bool,
        /// Next index in the available ring.
        reply: SyncSender<VringBase>,
    },
    /// Replaces the call descriptor of a queue.
    Call {
        vm: VmId,
        queue: QueueId,
        /// New descriptor, as in [`VringStart::call`].
        call: Option<File>,
        /// Sent when done. A QEMU has one command under way at a time, which bounds the engine's
        /// time for commands.
        reply: SyncSender<()>,
    },
    /// Sends a frame by which switches learn where a network port is.
    Announce {
        vm: VmId,
        /// Address as the front end says it.
        mac: Mac,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), AnnounceError>>,
    },
    /// Answered when every write to the VM's memory before this is made, and logged if writes are.
    Barrier {
        vm: VmId,
        /// Sent by the thread that makes them.
        reply: SyncSender<()>,
    },
    /// The VM disconnected: cancels its backlog, and completes nothing more.
    Disconnect {
        vm: VmId,
        /// Sent when no request of the VM is in flight. `None` leaves a thread waiting that waits
        /// for that already.
        reply: Option<SyncSender<()>>,
    },
}

impl Quit for Command {
    fn quit() -> Self {
        Self::Quit
    }
}

impl TraceCommand for Command {
    type Event = TraceEvent;
    const EMPTY: TraceEvent = TraceEvent::EMPTY;

    fn start_trace(writer: Box<TraceWriter>, reply: TraceReply<TraceEvent>) -> Self {
        Self::StartTrace { writer, reply }
    }

    fn stop_trace(reply: TraceReply<TraceEvent>) -> Self {
        Self::StopTrace { reply }
    }
}

impl From<QueueCommand> for Command {
    fn from(command: QueueCommand) -> Self {
        Self::Queue(command)
    }
}

/// A command to the engine of a device.
#[derive(Debug)]
pub enum Command {
    /// A command about the queues of a VM.
    Queue(QueueCommand),
    /// Replaces policy, window and aging, and caps, weights, reservations and rules of these VMs.
    /// All or nothing, between two pieces.
    Reconfigure {
        /// The device's configuration; cost, quantum, depths and the number of VMs are as at the
        /// start.
        config: Box<Config>,
        /// VMs whose part has changed: their buckets start full.
        vms: Vec<VmId>,
        /// Polling before the thread sleeps.
        poll: Poll,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), ReconfigureError>>,
    },
    /// Adds a VM in a vacant place, or behind the last one, between two pieces.
    Attach {
        vm: VmId,
        /// The new disk, with all memory allocated.
        disk: Box<PreparedDisk>,
        /// Result, with the reason of a refusal and the disk.
        reply: SyncSender<Result<(), Box<RefusedDisk>>>,
    },
    /// Removes a VM of which nothing is in flight, after [`QueueCommand::Disconnect`].
    Detach {
        vm: VmId,
        /// Memory and files of the VM, so that the engine's thread frees nothing.
        reply: SyncSender<Result<Box<DetachedDisk>, MembershipError>>,
    },
    /// Gives a VM's disk a new, larger size.
    Grow {
        vm: VmId,
        /// The size, in bytes.
        size: u64,
        /// Sent when requests up to this size are accepted.
        reply: SyncSender<()>,
    },
    /// Snapshot of what the device's VMs share. The VMs' snapshots are commands of their own:
    /// guests wait for one at a time. Histograms are shared, not copied.
    Status {
        /// Receives the snapshot of the device.
        reply: SyncSender<EngineStatus>,
    },
    /// Snapshot of a VM's counters.
    VmStatus {
        vm: VmId,
        /// Receives the snapshot; `None` for a vacant place.
        reply: SyncSender<Option<Box<VmStatus>>>,
    },
    /// The VM in a place.
    Member {
        vm: VmId,
        /// [`super::TraceEvent::member`] of the VM and its disk's name; `None` for a vacant place.
        reply: SyncSender<Option<(u32, String)>>,
    },
    /// Signals an eventfd before a VM's guest is notified of a completed real-time request; `None`
    /// for no more.
    SignalUrgent {
        vm: VmId,
        /// Descriptor to signal, which came over the control socket.
        eventfd: Option<Arc<OwnedFd>>,
        /// The previous eventfd, so that the engine's thread does not close it.
        reply: SyncSender<Option<Arc<OwnedFd>>>,
    },
    /// Starts a trace of completed requests; [`super::TraceReader`] sends this.
    StartTrace {
        /// Ring to which events are written.
        writer: Box<TraceWriter>,
        /// `None` when the trace starts; the writer, when another trace runs.
        reply: SyncSender<Option<Box<TraceWriter>>>,
    },
    /// Ends the running trace.
    StopTrace {
        /// The writer, so that the engine's thread does not free it.
        reply: SyncSender<Option<Box<TraceWriter>>>,
    },
    /// Ends the engine's thread.
    Quit,
}

/// Snapshot of an engine.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// Number of places, vacant ones included.
    pub places: usize,
    /// The current window, in pieces.
    pub window: u32,
    /// Delay of regulated pieces beyond their exact moment.
    pub regulator_lateness: LatencyReader,
    /// Measured discards and zeroing.
    pub deallocations: DeallocationStatus,
}

/// Snapshot of a VM.
#[derive(Clone, Debug)]
pub struct VmStatus {
    pub name: String,
    /// Queues that are served.
    pub queues: u16,
    /// Requests that are fetched and not completed.
    pub outstanding: usize,
    /// Counters since the start.
    pub counters: VmCounters,
    /// Measured service, reads and writes.
    pub contracts: [Contract; 2],
    /// Latency from the fetch of a request to its completion; reads and writes.
    pub latencies: [LatencyReader; 2],
    /// Requests under a reservation: real-time ones, then the others.
    pub promises: [PromiseCounters; 2],
    /// Signals of completed real-time requests; `None` while none is asked for.
    pub urgent_signals: Option<u64>,
    /// Causes of waiting in the scheduler; `None` where that is not told apart.
    pub waits: Option<Waits>,
    /// Requests that were not carried out.
    pub faults: Faults,
    /// Requests that wait for room on the host's file system.
    pub waiting_for_room: u64,
    /// Requests that had to wait for it, since the start.
    pub waited_for_room: u64,
}
