//! Protocol of the control socket of an I/O domain, for its process and for its clients.
//!
//! A connection has one line of JSON each way: a [`Command`], then its reply or a [`Failure`]; a
//! trace goes on with a line for each event. Both ends may be of different versions:
//!
//! - fields may be added, none is removed or changes its meaning;
//! - names, lists and states are required: a reply without one is an error;
//! - a number that the other end does not have is `None`: unknown, which is not 0;
//! - fields that this end does not know are ignored, but for the facts of passed files.

#![deny(missing_docs)]

mod command;
pub mod handover;
pub mod histograms;
mod reply;
pub mod status;
pub mod trace;

pub use command::{Command, CommandError};
pub use reply::{Changed, Failure, Leaving, Preview, ReplyError, Signalled, Stop, parse_reply};
pub use status::Status;
