//! Plans and the search for them.

mod plan;

pub use plan::*;
