//! The latency target of a task, a flow or a path.

use rtvirtio_units::{Nanos, Percentile};
use serde::Serialize;

/// Latency target: `percentile <= latency`, together with the declared rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Percentile of completion latency, counted from the intended start.
    pub percentile: Percentile,
    /// Upper limit of that percentile.
    pub latency: Nanos,
}
