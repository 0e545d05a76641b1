//! Tail-latency models: the paper's analytical model and the slice model.

mod types;

pub use types::*;
