//! Statistics of the experiments alone; what the product computes is in `rtvirtio_stats`.

pub mod bootstrap;
pub mod rank;
pub mod tail_bootstrap;
