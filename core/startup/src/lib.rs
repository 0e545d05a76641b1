//! Start-ups in guests: how a guest says one, how long it may be favoured, what looks like one.
//!
//! Spyridakis and Raho, "On Application Responsiveness and Storage Latency in Virtualized
//! Environments" (section III): the host sees one mix of a guest's requests and cannot tell that an
//! application is being started, so that it has no reason to favour the guest. The missing link is
//! one line of text on a port of the guest: [`Word`]. What the host does about it is limited by
//! [`Favour`], so that a guest which says it always gains no more than its budget. [`Recogniser`]
//! does without the guest's word, and is wrong at times.

mod favour;
mod recognise;
mod word;

pub use favour::{Favour, FavourCounters, FavourLimits};
pub use recognise::{Recogniser, RecogniserConfig, Sample};
pub use word::{LONGEST_LINE, PORT, Word, WordReader};

/// How long a disk waits for the next request of what starts, in ms (BFQ's `slice_idle`): a program
/// computes between its reads, and 8 ms, BFQ's own time, are often too short for it. The longer,
/// the more the others lose meanwhile.
pub const SLICE_IDLE: u32 = 25;
