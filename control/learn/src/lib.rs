//! Sweeps of loads and settings on a device, and the model that is learned from them.
//!
//! - [`load`]: loads and knobs in the form that a dataset holds.
//! - [`design`], [`chooser`]: conditions to measure next.
//! - [`rig`], [`process_vms`]: VMs on a device; [`stage`], [`run`]: settings applied, measured, put
//!   back.
//! - [`dataset`], [`runs`]: measured runs in a file that can be continued.
//! - [`sweep`]: a whole sweep in a given time.
//! - [`library`]: merged measurements of many hosts for one kind of device.
//! - [`train`]: from runs to a model.

pub mod chooser;
pub mod condition;
pub mod dataset;
pub mod design;
pub mod library;
pub mod load;
pub mod on_device;
pub mod process_vms;
pub mod rig;
pub mod run;
pub mod runs;
pub mod stage;
pub mod statistic;
pub mod sweep;
#[cfg(any(test, feature = "synthetic"))]
pub mod synthetic;
pub mod train;
