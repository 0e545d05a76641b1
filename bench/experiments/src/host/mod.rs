//! Measurement of one host: as many experiments as fit into a time, one after the other, in one
//! bundle without any property by which the host could be recognised.

mod bundle;
mod facts;
mod part;
mod report;
mod run;
mod scrub;

pub use bundle::{Bundle, FILE, Outcome, PartResult};
pub use facts::MachineFacts;
pub use part::{Choice, PARTS, Part, Size, choose};
pub use report::report;
pub use run::{HostOptions, PlannedPart, Work, measure, prepare};
