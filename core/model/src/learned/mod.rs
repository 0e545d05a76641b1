//! Models learned from measured runs of this host: the expected tail, and an upper bound that holds.

mod features;
mod flowing;
mod guests;
mod host_model;

pub use features::{LN_SLICE, NAMES, PAPER_WIDTH, SLICE_KEPT, WIDTH, features, paper_features};
pub use flowing::FlowingModel;
pub use guests::GuestModel;
pub use host_model::{
    HOST_MODEL_SCHEMA, HostModel, Learned, MAX_MODEL_BYTES, ModelFileError, Regime, writes,
};
