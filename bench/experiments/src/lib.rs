//! The experiments: their measurements, data, claims and pages.
//!
//! One folder or file for each experiment. Shared parts: `rtvirtio_harness` makes the device and
//! its VMs, [`backend`] and [`guest`] run the I/O domain and a QEMU guest on it, [`interleave`]
//! orders the measurements; [`report`] holds the results of an experiment, and [`page`] draws them.
//! Sweeps, datasets and models that are learned from them are `rtvirtio_learn`'s.

pub mod accuracy;
pub mod ageing;
pub mod backend;
pub mod before_after;
pub mod blame;
mod busy;
pub mod cases;
mod child;
pub mod claims;
pub mod contention;
pub mod cores;
pub mod cpu_predict;
pub mod cyclictest;
pub mod daemon;
pub mod demo_busy;
pub mod directory;
pub mod experiment;
pub mod fleet;
pub mod fleet_cluster;
pub mod guest;
pub mod host;
pub mod interleave;
pub mod iod;
pub mod iod_added;
pub mod iod_attach;
pub mod iod_crash;
pub mod iod_migrate;
pub mod iod_startup;
pub mod isolation;
pub mod net;
pub mod page;
pub mod paravirt;
pub mod planning;
pub mod profile_time;
pub mod regulation;
pub mod report;
pub mod reservation;
pub mod responsiveness;
pub mod run_basis;
pub mod saved;
pub mod stats;
pub mod sweep;
pub mod tails;
