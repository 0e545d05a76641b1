//! The RT-VirtIO paper's models and search, for comparison with ours.
//!
//! - [`coefficients`]: the paper's equations, which are `rtvirtio_model::Analytical`, fitted to
//!   measured runs by [`minimize`].
//! - [`mlp`], [`ensemble`], [`network`]: the paper's network.
//! - [`search`]: its search for settings with either.
//!
//! [`PaperModels`] are the fitted models of one device, which the file of a learned model may hold.

pub mod coefficients;
pub mod ensemble;
pub mod minimize;
pub mod mlp;
mod models;
pub mod network;
pub mod search;

pub use models::PaperModels;
