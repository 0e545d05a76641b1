//! Requests as the scheduler sees them.

use rtvirtio_units::Nanos;

use crate::priority::Priority;

/// What a request asks of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Data from the device.
    Read,
    /// Data onto the device.
    Write,
    /// Everything that was completed before is on stable storage.
    Flush,
    /// A range is no longer needed.
    Discard,
    /// A range reads as zeroes.
    WriteZeroes,
}

/// The two directions that are regulated and measured apart (the paper's two queues per VM and device).
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
    /// Whose budget it uses.
    #[must_use]
    pub const fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::Read,
            Self::Write | Self::Flush | Self::Discard | Self::WriteZeroes => Direction::Write,
        }
    }

    /// Whether it changes the allocation of a range instead of moving data: its device time depends on the file
    /// system and the device, not on its length.
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
    /// The caller's name for it, given back when it is finished.
    pub tag: u64,
    /// What it asks.
    pub op: Op,
    /// Its length in bytes; 0 for a flush.
    pub len: u64,
    /// Its place among the requests of its own VM.
    pub priority: Priority,
    /// When it came, on the caller's monotonic clock.
    pub arrival: Nanos,
}

/// A part of a request, to be given to the device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Whose it is.
    pub vm: usize,
    /// Where the scheduler keeps its request; [`crate::Scheduler::complete`] wants it back.
    pub slot: u32,
    /// The request's tag.
    pub tag: u64,
    /// What is asked.
    pub op: Op,
    /// Where it begins, in bytes from the request's beginning.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The request's priority.
    pub priority: Priority,
    /// Device time that it is expected to take, in ns.
    pub cost: u64,
    /// It went by its reservation's deadline, not as one of those who share what is left.
    pub reserved: bool,
}
