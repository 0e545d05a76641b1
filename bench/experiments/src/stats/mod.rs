//! Statistics used by the experiments alone; those of the product are in `rtvirtio_stats`.

pub mod rank;
