//! The set-up of a measurement: [`test_bed`] makes and removes a device and its VMs, [`cores`] pins
//! threads, [`demo_spec`] adapts the demo's spec, [`huge_pages`] adds pages temporarily,
//! [`watched`] runs an observing service.

pub mod cores;
pub mod demo_spec;
pub mod huge_pages;
pub mod test_bed;
pub mod watched;

/// Run directory of experiments, below the program's.
pub const BENCH_DIR: &str = "bench";
