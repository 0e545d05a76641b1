//! Attach and detach of disks while an engine runs. All memory is allocated before, and freed
//! after, by the control thread: guests of other disks wait for the engine's thread.

use std::fmt;
use std::io;

use rtvirtio_domain_config::DiskId;
use rtvirtio_sched::{Config, Idx, MembershipError, PreparedVm, Scheduler, VmId};

use super::Disk;
use super::table::PieceSlot;
use super::vm::Vm;

/// A disk that an engine can serve at once.
pub struct PreparedDisk {
    pub(super) vm: Vm,
    pub(super) scheduler: PreparedVm,
    /// For a new place: a flush of each VM may be in flight in addition to the window.
    pub(super) piece: Option<PieceSlot>,
    /// Largest piece of its requests, in bytes.
    pub(super) largest: u64,
}

/// Room of an engine that was fixed at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of places, vacant ones included.
    pub places: usize,
    /// Largest piece, in bytes.
    pub largest: u64,
}

/// Reasons for which a disk cannot be added to a running engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The scheduler refuses the VM.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// No memory for requests and pieces.
    #[error("no memory for its requests: {0}")]
    Memory(#[source] io::Error),
    /// A new place without a slot for its flush: a defect.
    #[error("a new place needs a slot for a flush")]
    Slot,
    /// Larger pieces than those of the start.
    #[error("`urgent_quantum` of {largest} bytes needs a restart: there is room for pieces of {room}")]
    Piece {
        /// Largest piece of the disk, in bytes.
        largest: u64,
        /// Largest piece of this engine.
        room: u64,
    },
}

impl PreparedDisk {
    /// Allocates what a disk needs. `disk_id` is its index in the file, whose scheduler is `sched`;
    /// `place` is its place in the engine.
    pub fn new(
        disk: Disk,
        sched: &Config,
        disk_id: DiskId,
        place: VmId,
        capacity: Capacity,
    ) -> Result<Self, AttachError> {
        let vm = disk_id.vm();
        let scheduler = Scheduler::prepare(sched, vm)?;
        let config = sched.vms.get(disk_id.0).ok_or(MembershipError::Vacant(vm))?;
        let largest = sched.max_piece(config);
        let room = capacity.largest;
        if largest > room {
            return Err(AttachError::Piece { largest, room });
        }
        let piece = if place.index() < capacity.places { None } else { Some(PieceSlot::new(room)) };
        let piece = piece.transpose().map_err(AttachError::Memory)?;
        Ok(Self { vm: Vm::new(disk, config.depth), scheduler, piece, largest })
    }
}

impl fmt::Debug for PreparedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedDisk").field("largest", &self.largest).finish_non_exhaustive()
    }
}

/// A disk that an engine refuses.
#[derive(Debug)]
pub struct RefusedDisk {
    /// Reason of the refusal.
    pub error: AttachError,
    pub(super) _disk: Option<Box<PreparedDisk>>,
}

/// Memory of a removed disk: its files close when this is dropped.
pub struct DetachedDisk {
    pub(super) _vm: Vm,
    pub(super) _scheduler: PreparedVm,
}

impl fmt::Debug for DetachedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedDisk").finish_non_exhaustive()
    }
}
