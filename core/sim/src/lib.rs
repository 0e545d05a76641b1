//! Discrete-event simulation of the I/O domain: the scheduler itself ([`rtvirtio_sched::Scheduler`]), a declared device ([`rtvirtio_twin::ServiceModel`]) and declared
//! arrivals, under virtual time. A day of traffic takes minutes, and a seed gives the same run again.
//!
//! What it leaves out: the host's CPUs. A request reaches the scheduler at the moment at which it is due, and its answer reaches the guest at the moment at which the device
//! has it. Those delays are the latency T of [`rtvirtio_sched::bound::Device`].

mod arrival;
mod sim;
mod stats;

pub use arrival::{Arrival, Load};
pub use sim::{NoObserver, Observer, Sim, SimError};
pub use stats::{LoadResult, SimResult};
