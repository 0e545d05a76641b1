//! Splits requests into pieces.

use crate::bucket::Charge;
use crate::cost::Cost;
use crate::queue::Head;
use crate::request::Direction;

/// A piece that may go, with its charge to the caps.
#[derive(Clone, Copy)]
pub struct Candidate {
    pub head: Head,
    pub len: u64,
    pub charge: Charge,
}

/// Splits requests into pieces of at most one quantum and prices them.
#[derive(Debug)]
pub struct Splitter {
    pub cost: Cost,
    /// Largest piece of a transfer, in bytes.
    pub quantum: u64,
}

impl Splitter {
    /// The next piece of a request, of `quantum` bytes at most.
    pub fn split(&self, head: Head, quantum: u64) -> Candidate {
        let len = head.remaining.min(quantum);
        // A deallocation is charged when it completes: its time is not known earlier.
        let time = if head.op.deallocates() { 1 } else { self.cost.time_of(head.op, len) };
        let charge = Charge::for_piece(head.op, len, head.submitted == 0, time);
        Candidate { head, len, charge }
    }

    /// The most that one piece of a direction takes from a cap.
    pub fn max_charge(&self, direction: Direction, quantum: u64) -> Charge {
        Charge { requests: 1, bytes: quantum, time: self.cost.max_cost(direction, quantum) }
    }

    /// The most that one piece of a transfer costs, in ns.
    pub fn max_piece_ns(&self) -> u64 {
        self.cost.max_transfer(self.quantum)
    }
}
