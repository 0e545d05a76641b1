//! Load by fio, latency from the intended start, verdicts, device profile.

mod result;

pub use result::*;
