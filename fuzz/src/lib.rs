//! What each target does with its bytes. The ordinary test-suite plays the committed corpus through the same functions (`crates/iodomain/tests/corpus.rs`).

pub mod chain;
pub mod config;
pub mod engine;
pub mod messages;
pub mod qemu;
pub mod rings;
