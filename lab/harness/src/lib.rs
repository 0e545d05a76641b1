//! The set-up of one measurement: [`test_bed`] makes a device and its VMs and removes them,
//! [`cores`] pins threads, [`huge_pages`] adds pages temporarily, and [`watched`] runs a service
//! that observes.

pub mod cores;
pub mod huge_pages;
pub mod test_bed;
pub mod watched;

/// Run directory of experiments, below the program's.
pub const BENCH_DIR: &str = "bench";
