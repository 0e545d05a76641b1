//! A guest's report about one vCPU.

use rtvirtio_units::Nanos;

use crate::GuestPolicy;

/// A guest's report about one vCPU, checked and in the host's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Policy of the running task.
    pub policy: GuestPolicy,
    /// Priority of the running task, 0 to 99.
    pub priority: u32,
    /// An interrupt is pending, or its handler runs.
    pub interrupt: bool,
    /// A non-maskable interrupt is pending, or its handler runs, possibly within another one.
    pub nmi: bool,
    /// A critical section runs: a lock is held that others spin for.
    pub critical: bool,
    /// The vCPU is idle and waits for an interrupt.
    pub idle: bool,
    /// Time of the next timer for which an urgent task waits, in the host's time.
    pub deadline: Option<Nanos>,
}
