//! Discrete-event simulation of the I/O domain: the scheduler itself
//! ([`rtvirtio_sched::Scheduler`]), a declared device ([`rtvirtio_twin::ServiceModel`]) and
//! declared arrivals, under virtual time. A day of traffic takes minutes, and a seed reproduces a
//! run.
//!
//! The host's CPUs are left out: a request reaches the scheduler when it is due, and its completion
//! reaches the guest when the device completes it. The delays in between are the latency T of
//! [`rtvirtio_sched::bound::Device`].

mod arrival;
mod sim;
mod stats;

pub use arrival::{Arrival, Load};
pub use sim::{NoObserver, Observer, Sim, SimError};
pub use stats::{LoadResult, SimResult};
