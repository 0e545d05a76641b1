//! The spec file: devices, VMs, tasks and targets, parsed with line and column.

mod types;

pub use types::*;
