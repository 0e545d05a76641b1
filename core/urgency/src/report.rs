//! What a guest says about one vCPU.

use rtvirtio_units::Nanos;

use crate::GuestPolicy;

/// What a guest says about one vCPU, checked and in the host's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Policy of what it runs.
    pub policy: GuestPolicy,
    /// Its priority, 0 to 99.
    pub priority: u32,
    /// An interrupt is pending, or its handler runs.
    pub interrupt: bool,
    /// The same for a non-maskable interrupt, which may come within another one.
    pub nmi: bool,
    /// A section runs that must not be cut off: a lock is held that others spin for.
    pub critical: bool,
    /// Nothing runs: it waits for an interrupt.
    pub idle: bool,
    /// When a timer fires next for which something urgent waits, in the host's time.
    pub deadline: Option<Nanos>,
}
