//! The functions of the fuzz targets. The test suites replay the committed corpus through them
//! (`tests/corpus.rs` of each crate).

pub mod agent;
pub mod answers;
pub mod bucket;
pub mod chain;
pub mod config;
pub mod engine;
pub mod fio;
pub mod fleet;
pub mod inflight;
pub mod journal;
pub mod json;
pub mod kernel;
pub mod learned;
pub mod libvirt;
pub mod messages;
pub mod net;
pub mod peer;
pub mod placement;
pub mod profile;
pub mod qemu;
pub mod qmp;
pub mod rings;
pub mod scheduler;
pub mod spec;
pub mod urgency;
