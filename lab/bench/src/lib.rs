//! The experiments: what is measured, under which settings, and what comes out, as data.
//!
//! Runs, datasets and what is learned from them are [`rtvirtio_learn`]'s; [`servers`] are budget
//! servers, for the scheme that mimics RT-Xen.

pub use rtvirtio_learn::{
    accuracy, chooser, condition, dataset, design, load, rates, repeat, run, stage, statistic, train,
};

pub mod calibrate;
pub mod cases;
pub mod claims;
pub mod contention;
pub mod crash;
pub mod cyclictest;
pub mod guests;
pub mod iod;
pub mod iod_sim;
pub mod iod_window;
pub mod misses;
pub mod neighbours;
pub mod networks;
pub mod passes;
pub mod planning;
pub mod promises;
pub mod reservation;
pub mod saved;
pub mod schemes;
pub mod servers;
pub mod sizes;
pub mod startup;
pub mod stats;
pub mod tails;
