//! Models learned from measured runs of this host: the expected tail, and an upper bound that
//! holds.

mod estimate;
mod features;
mod guests;
mod inference;
mod non_idling;
mod regime;
mod schema;

pub use features::{LN_SLICE, NAMES, SLICE_KEPT, WIDTH, features};
pub use guests::GuestModel;
pub use inference::{Learned, writes};
pub use non_idling::NonIdlingModel;
pub use regime::Regime;
pub use schema::{HOST_MODEL_SCHEMA, HostModel, MAX_MODEL_BYTES, ModelFileError};
