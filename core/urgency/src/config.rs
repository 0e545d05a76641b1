//! Limits on the scheduling of a VM's vCPUs.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Priorities, budgets and times of the vCPUs of one VM. Priorities are real-time priorities of the
/// host; 0 means an ordinary thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Highest priority: the paper's p_max.
    pub ceiling: u32,
    /// Priority while nothing urgent runs, below the ceiling.
    pub floor: u32,
    /// Priority by the VM's contract, used while the guest reports nothing.
    pub contract: u32,
    /// CPU time in each `period` above the floor for urgent tasks, and for a vCPU that reports that
    /// it is blocked.
    pub task_budget: Nanos,
    /// CPU time in each `period` above the floor for interrupts and critical sections.
    pub critical_budget: Nanos,
    /// Charge of each promotion against `task_budget`, but for those for critical sections: about
    /// the cost to the neighbours of a change of the CPU to the vCPU and back. A guest that changes
    /// its report all the time pays for it.
    pub promotion_cost: Nanos,
    /// Interval at which both budgets are refilled, counted from the start.
    pub period: Nanos,
    /// Least time from a change of a vCPU's priority to a demotion.
    pub dwell: Nanos,
    /// Time without a new beat or report after which a guest counts as not reporting.
    pub silence: Nanos,
    /// Time by which the vCPU is raised before an announced timer.
    pub lead: Nanos,
    /// Time for which the vCPU stays raised after the timer, or after the completion of an urgent
    /// request or an interrupt by KVM, where nothing urgent is reported.
    pub hold: Nanos,
    /// CPU time within which an urgent task answers an interrupt by KVM; later the interrupt counts
    /// as one for other work.
    pub answer: Nanos,
}

impl Config {
    /// A configuration with default budgets and times. The budgets are those of ChromeOS for the
    /// same purpose (3 ms for a critical section, 500 ms for a task), here in each second.
    #[must_use]
    pub const fn new(ceiling: u32, floor: u32, contract: u32) -> Self {
        Self {
            ceiling,
            floor,
            contract,
            task_budget: Nanos::from_millis(500),
            critical_budget: Nanos::from_millis(3),
            promotion_cost: Nanos::from_micros(20),
            period: Nanos::from_millis(1000),
            dwell: Nanos::from_micros(25),
            silence: Nanos::from_millis(1000),
            lead: Nanos::from_micros(50),
            hold: Nanos::from_micros(1000),
            answer: Nanos::from_micros(200),
        }
    }
}
