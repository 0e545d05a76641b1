//! Commands of the control threads to an engine.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use rtvirtio_domain_config::Poll;
use rtvirtio_sched::{Config, ConfigError, Contract, DeallocationStatus, MembershipError, VmCounters, Waits};
use rtvirtio_stats::Latencies;
use rtvirtio_units::Nanos;
use vm_memory::GuestAddress;

use super::prepared::{DetachedDisk, PreparedDisk, RefusedDisk};
use super::thread::Quit;
use super::trace::{TraceCommand, TraceEvent, TraceReply, TraceWriter};
use crate::blk::Refused;
use crate::inflight::Inflight;
use crate::memory::GuestMem;

/// A queue to serve.
#[derive(Debug)]
pub struct VringStart {
    /// Guest memory that holds the rings.
    pub mem: Arc<GuestMem>,
    /// Descriptors of the queue.
    pub size: u16,
    /// Address of the descriptor table.
    pub desc: GuestAddress,
    /// Address of the available ring.
    pub avail: GuestAddress,
    /// Address of the used ring.
    pub used: GuestAddress,
    /// Next index in the available ring.
    pub base: u16,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Feature bits that the guest accepted.
    pub features: u64,
    /// The guest's notification of new requests. Guests that are polled, without a kick descriptor,
    /// are not served.
    pub kick: File,
    /// The notification of completions; `None` for a guest that polls.
    pub call: Option<File>,
    /// Shared memory that tracks requests in flight.
    pub inflight: Option<Inflight>,
}

/// The index in the available ring at which a queue stopped.
pub type VringBase = u16;

/// Reasons for which a queue is not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The disk has no such queue.
    #[error("there is no queue {0}")]
    NoQueue(u16),
    /// The queue is served already.
    #[error("queue {0} runs already")]
    Running(u16),
    /// An invalid number of descriptors.
    #[error("queue of {size} descriptors: {source}")]
    Size {
        /// Number of descriptors.
        size: u16,
        /// Error of the virtqueue.
        source: virtio_queue::Error,
    },
    /// A misaligned or unreadable ring address.
    #[error("ring addresses: {0}")]
    Address(#[source] virtio_queue::Error),
    /// A ring outside of guest memory.
    #[error("the rings do not lie in the guest's memory")]
    OutsideMemory,
}

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

/// A command about the queues of a VM, the same for disks and network ports.
#[derive(Debug)]
pub enum QueueCommand {
    /// Starts to serve a queue.
    Start {
        /// Index of the VM.
        vm: usize,
        /// Index of the queue.
        index: u16,
        /// Rings and descriptors of the queue.
        start: Box<VringStart>,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), StartError>>,
    },
    /// Completes what was fetched from a queue, then stops serving it.
    Stop {
        /// Index of the VM.
        vm: usize,
        /// Index of the queue.
        index: u16,
        /// Next index in the available ring.
        reply: SyncSender<VringBase>,
    },
    /// Replaces the call descriptor of a queue.
    Call {
        /// Index of the VM.
        vm: usize,
        /// Index of the queue.
        index: u16,
        /// New descriptor, as in [`VringStart::call`].
        call: Option<File>,
        /// Sent when done. A QEMU has one command under way at a time, which bounds the engine's
        /// time for commands.
        reply: SyncSender<()>,
    },
    /// The VM disconnected: cancels its backlog, and completes nothing more.
    Disconnect {
        /// Index of the VM.
        vm: usize,
        /// Sent when no request of the VM is in flight.
        reply: SyncSender<()>,
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
        vms: Vec<usize>,
        /// Polling before the thread sleeps.
        poll: Poll,
        /// Result, with the reason of a refusal.
        reply: SyncSender<Result<(), ReconfigureError>>,
    },
    /// Adds a VM in a vacant place, or behind the last one, between two pieces.
    Attach {
        /// Index of the place.
        vm: usize,
        /// The new disk, with all memory allocated.
        disk: Box<PreparedDisk>,
        /// Result, with the reason of a refusal and the disk.
        reply: SyncSender<Result<(), Box<RefusedDisk>>>,
    },
    /// Removes a VM of which nothing is in flight, after [`QueueCommand::Disconnect`].
    Detach {
        /// Index of the VM.
        vm: usize,
        /// Memory and files of the VM, so that the engine's thread frees nothing.
        reply: SyncSender<Result<Box<DetachedDisk>, MembershipError>>,
    },
    /// Snapshot of what the device's VMs share. The VMs' snapshots are commands of their own: each
    /// copies two histograms, and guests wait meanwhile.
    Status {
        /// Receives the snapshot.
        reply: SyncSender<EngineStatus>,
    },
    /// Snapshot of a VM's counters.
    VmStatus {
        /// Index of the VM.
        vm: usize,
        /// Receives the snapshot; `None` for a vacant place.
        reply: SyncSender<Option<Box<VmStatus>>>,
    },
    /// The VM in a place.
    Member {
        /// Index of the place.
        vm: usize,
        /// [`super::TraceEvent::member`] of the VM and its disk's name; `None` for a vacant place.
        reply: SyncSender<Option<(u32, String)>>,
    },
    /// Signals an eventfd before a VM's guest is notified of a completed real-time request; `None`
    /// for no more.
    SignalUrgent {
        /// Index of the VM.
        vm: usize,
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
    pub regulator_lateness: Latencies,
    /// Measured discards and zeroing.
    pub deallocations: DeallocationStatus,
}

/// Snapshot of a VM.
#[derive(Clone, Debug)]
pub struct VmStatus {
    /// Name of the disk.
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
    pub latencies: [Latencies; 2],
    /// Requests under a reservation: real-time ones, then the others.
    pub promises: [PromiseCounters; 2],
    /// Signals of completed real-time requests; `None` while none is asked for.
    pub urgent_signals: Option<u64>,
    /// Causes of waiting in the scheduler; `None` where that is not told apart.
    pub waits: Option<Waits>,
    /// Requests that were not carried out.
    pub faults: Faults,
}

/// Requests that were not carried out, each in one counter; those whose header or status is outside
/// of the shared memory are in two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Chains that are no valid requests.
    pub malformed: u64,
    /// Requests that were answered without the device.
    pub refused: RefusedRequests,
    /// Requests that the device failed.
    pub errors: u64,
    /// Result of the kernel for the last of these: a negative error number, or the bytes of a piece
    /// that ended early.
    pub last_error: Option<i32>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken_queues: u64,
}

/// Requests of which every piece was submitted under a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromiseCounters {
    /// Completed requests.
    pub requests: u64,
    /// Requests that took longer than the reservation's deadline.
    pub missed: u64,
    /// Longest time from when the reservation covered a request.
    pub worst: Nanos,
}

impl PromiseCounters {
    pub(crate) fn record(&mut self, took: Nanos, missed: bool) {
        self.requests += 1;
        self.missed += u64::from(missed);
        self.worst = self.worst.max(took);
    }
}

/// Requests that were answered without the device, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedRequests([u64; Refused::ALL.len()]);

impl RefusedRequests {
    pub(crate) fn count(&mut self, why: Refused) {
        self.0[why as usize] += 1;
    }

    /// Number of refused requests for a reason.
    #[must_use]
    pub fn of(&self, why: Refused) -> u64 {
        self.0[why as usize]
    }
}

/// The engine has ended.
#[derive(Debug, thiserror::Error)]
#[error("the engine has ended")]
pub struct EngineGone;

/// Sends commands to an engine, from any thread.
#[derive(Debug)]
pub struct EngineHandle<C = Command> {
    sender: SyncSender<C>,
    doorbell: Arc<OwnedFd>,
}

impl<C> Clone for EngineHandle<C> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), doorbell: Arc::clone(&self.doorbell) }
    }
}

impl<C> EngineHandle<C> {
    pub(crate) fn new(sender: SyncSender<C>, doorbell: Arc<OwnedFd>) -> Self {
        Self { sender, doorbell }
    }

    /// Sends a command; waits while the engine's command queue is full.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn send(&self, command: impl Into<C>) -> Result<(), EngineGone> {
        self.sender.send(command.into()).map_err(|_| EngineGone)?;
        rustix::io::write(&self.doorbell, &1u64.to_ne_bytes()).map_err(|_| EngineGone)?;
        Ok(())
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn ask<T, K: Into<C>>(&self, command: impl FnOnce(SyncSender<T>) -> K) -> Result<T, EngineGone> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| EngineGone)
    }
}
