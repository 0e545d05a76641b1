//! Request schedulers and regulators of the I/O domain: state machines with the clock as an
//! argument, without I/O and without allocation after they are made.
//!
//! The same [`Scheduler`] runs in the I/O domain, against real queues and a real device, and in the
//! simulator, against virtual time. One scheduler orders the requests of all VMs that share one
//! device:
//!
//! ```text
//!  submit ──► per VM: 3 classes x 8 levels x 2 directions ──► caps ──► policy
//!                                      complete ◄── device ◄── window ◄──┘
//! ```
//!
//! - Large requests are split into *pieces* of at most one quantum, so that a 1 MiB write blocks
//!   other requests for no longer than one quantum.
//! - *Caps* ([`Cap`]) are token buckets by RFC 2215's TSPEC (rate, burst, peak) in requests, bytes
//!   and device time; the next moment at which a held piece may go is exact ([`Next::Wait`]).
//! - The *policy* ([`Policy`]) chooses among VMs. Under `edf` a *reservation* ([`Reservation`])
//!   gives requests a deadline as long as they stay within their declared rate and burst; excess
//!   demand shares the rest by weight, so a flood takes only unreserved time.
//! - *Deallocations* (discards, zeroing) go one at a time outside of the window, sized and paced by
//!   measured time.
//! - The *window* bounds the device's queue, so that the scheduler decides the order.
//! - A *CPU budget* ([`CpuBudget`]) limits the thread itself, and a [`Backoff`] what a VM without
//!   useful work costs it.
//! - [`bound`] computes worst-case latencies, and admission refuses reservations that cannot be
//!   kept.

#![deny(missing_docs)]

mod active;
mod backoff;
pub mod bound;
mod bucket;
mod config;
mod cost;
mod cpu_budget;
mod deallocation;
mod drr;
mod id;
mod link;
mod meter;
mod priority;
mod queue;
mod request;
mod scheduler;
mod split;
mod waiting;
mod window;

/// Vectors with an index of their own type.
pub use oxc_index::{Idx, IndexVec};

pub use backoff::{Backoff, LONGEST_BACKOFF};
pub use bucket::{Bucket, Cap, Charge, MAX_BURST, Regulator, Reservation, Tspec};
pub use config::{Config, ConfigError, Policy, VmConfig};
pub use cost::{Cost, Line};
pub use cpu_budget::{CpuBudget, CpuCounters, CpuLimit, CpuLimitError};
pub use deallocation::DeallocationStatus;
pub use id::VmId;
pub use link::{CATCH_UP, LINK_SHARE, LINK_STALL, LINK_WINDOW, Link, VirtualLink};
pub use meter::{Contract, Meter};
pub use priority::{Class, Priority, PriorityRule};
pub use request::{Direction, Op, Piece, Request};
pub use scheduler::{
    CompletedRequest, MembershipError, Next, PreparedVm, Scheduler, SubmitError, VmCounters,
};
pub use waiting::{WATCHED, WaitMatrix, Waits};
pub use window::{Window, WindowConfig};
