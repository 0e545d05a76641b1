//! Statistics for tails: estimates from few samples, and bounds that hold on new data.
//!
//! Everything here is pure and deterministic: no I/O, no clock; randomness comes from a seed.

pub mod conformal;
pub mod design;
pub mod forest;
mod frequency;
mod interval;
mod latencies;
pub mod pot;
mod rng;
mod rows;
mod shared_latencies;
mod summary;

pub use frequency::FrequencyTest;
pub use interval::{Interval, normal_quantile};
pub use latencies::{Latencies, MAX_LATENCY};
pub use rng::Random;
pub use rows::{Rows, RowsError, check_finite};
pub use shared_latencies::{LatencyReader, LatencyRecorder};
pub use summary::{Summary, student_t};
