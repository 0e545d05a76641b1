//! Statistics for tails: what few samples can say, and bounds that hold on data never seen.
//!
//! Everything here is pure and deterministic: no I/O, no clock; randomness comes from a seed.

pub mod bootstrap;
pub mod conformal;
pub mod design;
pub mod ensemble;
pub mod forest;
pub mod minimize;
pub mod mlp;
pub mod pot;
mod rng;

pub use rng::Random;
