//! Requests and pieces as the scheduler sees them.

use rtvirtio_units::Nanos;

use crate::priority::Priority;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the device to the VM.
    Read,
    /// From the VM to the device.
    Write,
    /// All completed writes become stable.
    Flush,
    /// A range is deallocated.
    Discard,
    /// A range reads as zeroes.
    WriteZeroes,
}

/// The two directions that are regulated and measured apart (the paper's two queues per VM and
/// device).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the device to the VM.
    Read,
    /// From the VM to the device; also flushes, discards and zeroes.
    Write,
}

impl Direction {
    /// Both, in the order of [`Direction::index`].
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// 0 for reads, 1 for writes.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
        }
    }
}

impl Op {
    /// The direction whose caps it uses.
    #[must_use]
    pub const fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::Read,
            Self::Write | Self::Flush | Self::Discard | Self::WriteZeroes => Direction::Write,
        }
    }

    /// Whether it changes the allocation of a range instead of moving data: its device time depends
    /// on the file system and the device, not on its length.
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
    /// The operation.
    pub op: Op,
    /// Its length in bytes; 0 for a flush.
    pub len: u64,
    /// Its priority among the requests of its VM.
    pub priority: Priority,
    /// When it was fetched, on the caller's monotonic clock.
    pub arrival: Nanos,
}

/// A part of a request that is submitted to the device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the VM.
    pub vm: usize,
    /// The slot of its request, for [`crate::Scheduler::complete`].
    pub slot: u32,
    /// The request's tag.
    pub tag: u64,
    /// The operation.
    pub op: Op,
    /// Offset in bytes from the start of the request.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The request's priority.
    pub priority: Priority,
    /// Expected device time, in ns.
    pub cost: u64,
    /// Submitted under a reservation, not as a share of the rest.
    pub reserved: bool,
    /// From when on its reservation covers it: its arrival, or later where the VM asks for more
    /// than it reserved. 0 without a reservation.
    pub eligible_at: Nanos,
    /// The moment by which its reservation promises its completion; the end of time without one.
    pub due: Nanos,
}
