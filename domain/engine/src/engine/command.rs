//! What control threads ask of an engine.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use rtvirtio_sched::{Config, Contract, DeallocationStatus, LatencyHistogram, VmCounters};
use rtvirtio_units::Nanos;
use vm_memory::GuestAddress;

use super::trace::TraceWriter;
use crate::inflight::Inflight;
use crate::memory::GuestMem;

/// A queue to be served.
#[derive(Debug)]
pub struct VringStart {
    /// The guest's memory.
    pub mem: Arc<GuestMem>,
    /// Number of descriptors.
    pub size: u16,
    /// Descriptor table.
    pub desc: GuestAddress,
    /// Available ring.
    pub avail: GuestAddress,
    /// Used ring.
    pub used: GuestAddress,
    /// Where to go on in the available ring.
    pub base: u16,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Writes are on stable storage before they are answered, for guests that do not flush.
    pub write_through: bool,
    /// Says that there is something; `None` for a guest that wants to be polled, which is not served.
    pub kick: File,
    /// Tells the guest that something is done.
    pub call: Option<File>,
    /// Memory that remembers what is in flight.
    pub inflight: Option<Inflight>,
}

/// Where a queue stopped: the base to go on with.
pub type VringBase = u16;

/// One thing to do.
#[derive(Debug)]
pub enum Command {
    /// Serve a queue.
    Start {
        /// Whose.
        vm: usize,
        /// Which.
        index: u16,
        /// How.
        start: Box<VringStart>,
        /// Why not.
        reply: SyncSender<Result<(), String>>,
    },
    /// Completion what was taken from a queue, and serve it no more.
    Stop {
        /// Whose.
        vm: usize,
        /// Which.
        index: u16,
        /// Where it stopped.
        reply: SyncSender<VringBase>,
    },
    /// Tell the guest by another descriptor.
    Call {
        /// Whose.
        vm: usize,
        /// Which queue.
        index: u16,
        /// As in [`VringStart::call`].
        call: Option<File>,
        /// Done. A QEMU has one command under way at a time, so that the engine's time for commands is bounded.
        reply: SyncSender<()>,
    },
    /// The VM is gone: drop all that waits and answer nothing more.
    Disconnect {
        /// Whose.
        vm: usize,
        /// Said when nothing of it is left.
        reply: SyncSender<()>,
    },
    /// Another policy, window and aging, and other caps, weights, reservations and rules of these VMs. All of it or nothing, between two pieces.
    Reconfigure {
        /// The device's new configuration; cost, quantum, depths and the number of VMs are as before.
        config: Box<Config>,
        /// VMs whose part is new: their buckets begin full.
        vms: Vec<usize>,
        /// How long the thread looks for more before it sleeps.
        poll: Nanos,
        /// Why not.
        reply: SyncSender<Result<(), String>>,
    },
    /// How is everybody?
    Status {
        /// All of it.
        reply: SyncSender<EngineStatus>,
    },
    /// Write down each request that is answered; see [`super::TraceReader`], which sends this.
    StartTrace {
        /// Where.
        writer: Box<TraceWriter>,
        /// `None` when it begins; the writer, when somebody else's runs.
        reply: SyncSender<Option<Box<TraceWriter>>>,
    },
    /// Write nothing down any more.
    StopTrace {
        /// What was written to, for the engine's thread shall not be the one that frees it.
        reply: SyncSender<Option<Box<TraceWriter>>>,
    },
    /// End.
    Quit,
}

/// How an engine is.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// One for each VM.
    pub vms: Vec<VmStatus>,
    /// Pieces that the device may hold now.
    pub window: u32,
    /// How much later than the exact moment pieces went that a regulator had held.
    pub regulator_lateness: LatencyHistogram,
    /// What discards and zeroing took.
    pub deallocations: DeallocationStatus,
}

/// How a VM is served.
#[derive(Clone, Debug)]
pub struct VmStatus {
    /// The disk's name.
    pub name: String,
    /// Queues that are served now.
    pub queues: u16,
    /// RequestTable that wait or run.
    pub outstanding: usize,
    /// Since the start.
    pub counters: VmCounters,
    /// Reads and writes.
    pub contracts: [Contract; 2],
    /// From the moment at which the request was taken from its queue to the answer; reads and writes.
    pub latencies: [LatencyHistogram; 2],
    /// Chains that were no requests.
    pub malformed: u64,
    /// RequestTable that the device refused.
    pub errors: u64,
    /// Queues that were given up because the guest broke them.
    pub broken_queues: u64,
}

/// The engine is gone.
#[derive(Debug, thiserror::Error)]
#[error("the engine has ended")]
pub struct EngineGone;

/// Reaches an engine from any thread.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    sender: SyncSender<Command>,
    doorbell: Arc<OwnedFd>,
}

impl EngineHandle {
    pub(super) fn new(sender: SyncSender<Command>, doorbell: Arc<OwnedFd>) -> Self {
        Self { sender, doorbell }
    }

    /// Sends a command, waiting while the engine has too many.
    ///
    /// # Errors
    /// The engine is gone.
    pub fn send(&self, command: Command) -> Result<(), EngineGone> {
        self.sender.send(command).map_err(|_| EngineGone)?;
        rustix::io::write(&self.doorbell, &1u64.to_ne_bytes()).map_err(|_| EngineGone)?;
        Ok(())
    }

    /// Sends a command and waits for its answer.
    ///
    /// # Errors
    /// The engine is gone.
    pub fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, EngineGone> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| EngineGone)
    }
}
