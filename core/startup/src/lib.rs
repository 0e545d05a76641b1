//! Start-ups in guests: a guest's message, the budget for favouring it, detection by the host.
//!
//! Spyridakis and Raho, "On Application Responsiveness and Storage Latency in Virtualized
//! Environments" (section III): the host sees one mix of a guest's requests and cannot tell that an
//! application is being started, so that it has no reason to favour the guest. The missing link is
//! one line of text on a port of the guest: [`StartMessage`]. The host's reaction is limited by
//! [`Favour`], so that a guest which announces starts all the time gains no more than its budget.
//! [`Recogniser`] works without the guest's messages, and is wrong at times.

mod favour;
mod message;
mod recognise;

pub use favour::{Favour, FavourCounters, FavourLimits};
pub use message::{LONGEST_LINE, PORT, StartMessage, StartMessageReader};
pub use recognise::{Recogniser, RecogniserConfig, Sample};

/// BFQ's `slice_idle` of a disk while a program starts, in ms: it computes between its reads, and
/// BFQ's default of 8 ms is often too short for that. The longer the value, the more throughput
/// other VMs lose meanwhile.
pub const SLICE_IDLE: u32 = 25;
