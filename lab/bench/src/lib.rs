//! The experiments: what is measured, under which settings, and what comes out, as data.
//!
//! - [`load`]: loads and knobs in the form that a dataset holds.
//! - [`dataset`]: measured runs in a file that can be gone on with.
//! - [`stage`]: one setting after the other, applied to a lab, measured, put back.
//! - [`servers`]: budget servers, for the scheme that mimics RT-Xen.

pub mod accuracy;
pub mod calibrate;
pub mod cases;
pub mod chooser;
pub mod claims;
pub mod contention;
pub mod crash;
pub mod cyclictest;
pub mod dataset;
pub mod design;
pub mod guests;
pub mod iod;
pub mod iod_sim;
pub mod iod_window;
pub mod load;
pub mod misses;
pub mod neighbours;
pub mod networks;
pub mod passes;
pub mod planning;
pub mod promises;
pub mod rates;
pub mod repeat;
pub mod reservation;
pub mod run;
pub mod saved;
pub mod schemes;
pub mod servers;
pub mod sizes;
pub mod stage;
pub mod startup;
pub mod stats;
pub mod tails;
pub mod train;
