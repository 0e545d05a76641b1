//! Requests, and the pieces into which they are split.

use rtvirtio_units::Nanos;

use crate::id::VmId;
use crate::priority::Priority;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Transfer from the device to the VM.
    Read,
    /// Transfer from the VM to the device.
    Write,
    /// Makes all completed writes stable.
    Flush,
    /// Deallocates a range of blocks.
    Discard,
    /// Makes a range read as zeroes.
    WriteZeroes,
}

/// The two directions that are regulated and measured separately (the paper's two queues per VM and
/// device).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Transfers from the device to the VM.
    Read,
    /// Transfers from the VM to the device; also flushes, discards and zeroes.
    Write,
}

impl Direction {
    /// Both directions, in the order of [`Direction::index`].
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Array index: 0 for reads, 1 for writes.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
        }
    }
}

impl Op {
    /// Direction whose caps the operation uses.
    #[must_use]
    pub const fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::Read,
            Self::Write | Self::Flush | Self::Discard | Self::WriteZeroes => Direction::Write,
        }
    }

    /// Whether the operation changes the allocation of a range instead of moving data: its device
    /// time depends on the file system and the device, not on its length.
    #[must_use]
    pub const fn deallocates(self) -> bool {
        matches!(self, Self::Discard | Self::WriteZeroes)
    }

    /// Whether bytes move between VM and device.
    #[must_use]
    pub const fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// A request of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The caller's identifier, returned at completion.
    pub tag: u64,
    /// Operation, which decides the list and the cost.
    pub op: Op,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// Priority among the requests of the VM.
    pub priority: Priority,
    /// Time at which it was fetched, on the caller's monotonic clock.
    pub arrival: Nanos,
}

/// A part of a request that is submitted to the device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the VM.
    pub vm: VmId,
    /// Slot of the request, for [`crate::Scheduler::complete`].
    pub slot: u32,
    /// Tag of the request.
    pub tag: u64,
    /// Operation of the request.
    pub op: Op,
    /// Offset in bytes from the start of the request.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Priority of the request.
    pub priority: Priority,
    /// Expected device time, in ns.
    pub cost: u64,
    /// Whether it is submitted under a reservation, not as a share of the rest.
    pub reserved: bool,
    /// Time from which on its reservation covers it: its arrival, or later where the VM exceeds the
    /// reservation. 0 without a reservation.
    pub eligible_at: Nanos,
    /// Deadline of its reservation; the end of time without one.
    pub due: Nanos,
}
