//! Device time of pieces.

use serde::{Deserialize, Serialize};

use crate::request::{Direction, Op};

/// Device time of a transfer: `base + len * per_mib / MiB`, all in ns.
///
/// One line for each direction, fitted to the device. (A cap on requests combined with one on bytes
/// charges a request twice: it either admits large requests too fast or delays small ones too long.
/// Device time has no such error.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Fixed time of a request, in ns.
    pub base_ns: u64,
    /// Time per MiB, in ns.
    pub per_mib_ns: u64,
}

impl Line {
    /// Device time of `len` bytes, in ns, rounded up: bounds count with it. At least 1.
    #[must_use]
    pub fn time_of(&self, len: u64) -> u64 {
        let bytes = (u128::from(len) * u128::from(self.per_mib_ns)).div_ceil(1 << 20);
        self.base_ns.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX)).max(1)
    }
}

/// Device time of every kind of piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Cost of a read.
    pub read: Line,
    /// Cost of a write.
    pub write: Line,
    /// Cost of a flush, in ns.
    pub flush_ns: u64,
    /// Longest time of one piece of a discard or zeroing, in ns: pieces are sized to stay below it.
    pub discard_ns: u64,
}

impl Cost {
    /// All pieces cost the same: for devices that were not measured.
    pub const UNIT: Self = Self {
        read: Line { base_ns: 1_000, per_mib_ns: 0 },
        write: Line { base_ns: 1_000, per_mib_ns: 0 },
        flush_ns: 1_000,
        discard_ns: 1_000_000,
    };

    /// Device time of a piece, in ns; at least 1.
    #[must_use]
    pub fn time_of(&self, op: Op, len: u64) -> u64 {
        match op {
            Op::Read => self.read.time_of(len),
            Op::Write => self.write.time_of(len),
            Op::Flush => self.flush_ns.max(1),
            // Not known at submission: the excess is charged at completion.
            Op::Discard | Op::WriteZeroes => self.discard_ns.max(1),
        }
    }

    /// The largest cost of a piece that holds a place in the window: reads and writes.
    #[must_use]
    pub fn max_transfer(&self, quantum: u64) -> u64 {
        self.read.time_of(quantum).max(self.write.time_of(quantum))
    }

    /// The largest cost of a piece of a direction.
    #[must_use]
    pub fn max_cost(&self, direction: Direction, quantum: u64) -> u64 {
        match direction {
            Direction::Read => self.read.time_of(quantum),
            // Deallocations are charged at completion, and may leave a debt.
            Direction::Write => self.write.time_of(quantum).max(self.flush_ns).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_base_and_slope() {
        let line = Line { base_ns: 60_000, per_mib_ns: 1 << 20 };
        assert_eq!(line.time_of(4096), 64_096);
        assert_eq!(line.time_of(0), 60_000);
        assert_eq!(Line { base_ns: 0, per_mib_ns: 1_000_000 }.time_of(512), 489, "488.3");
        // Neither zero nor an overflow: a policy could loop for ever on a cost of 0.
        assert_eq!(Line { base_ns: 0, per_mib_ns: 0 }.time_of(1), 1);
        assert_eq!(Line { base_ns: u64::MAX, per_mib_ns: u64::MAX }.time_of(u64::MAX), u64::MAX);
    }

    #[test]
    fn the_most_covers_every_kind() {
        let cost = Cost {
            read: Line { base_ns: 10, per_mib_ns: 0 },
            write: Line { base_ns: 20, per_mib_ns: 0 },
            flush_ns: 300,
            discard_ns: 40,
        };
        for op in [Op::Read, Op::Write, Op::Flush] {
            assert!(cost.time_of(op, 65_536) <= cost.max_cost(op.direction(), 65_536));
        }
    }
}
