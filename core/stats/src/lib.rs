//! Statistics for tails: estimates from few samples, and bounds that hold on new data.
//!
//! Everything here is pure and deterministic: no I/O, no clock; randomness comes from a seed.

pub mod conformal;
pub mod design;
pub mod ensemble;
pub mod forest;
mod interval;
mod latencies;
pub mod mlp;
pub mod pot;
mod rng;
mod summary;

pub use interval::{Interval, normal_quantile};
pub use latencies::{LONGEST, Latencies};
pub use rng::Random;
pub use summary::Summary;
