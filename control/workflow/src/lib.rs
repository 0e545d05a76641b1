//! From a spec to the host and back, one direction, each step testable alone:
//!
//! `named::load_host -> Devices::find -> plan -> resolve -> apply`.
//!
//! No function here touches a terminal: progress goes to a [`Progress`], errors are an [`Error`]
//! with a [`Kind`] that a caller can act on. The command line and a daemon call the same functions.

pub mod acting;
pub mod apply;
pub mod bfq;
mod block_sizes;
pub mod contracts;
pub mod controls;
pub mod core_faults;
pub mod covered;
pub mod cpu_room;
pub mod data_guard;
pub mod device_ageing;
pub mod device_windows;
pub mod devices;
mod dirs;
pub mod discover;
pub mod domain;
pub mod elevator;
mod error;
mod fair_server;
mod files;
pub mod find;
#[cfg(test)]
mod fixtures;
pub mod group_limits;
pub mod guest_point;
pub mod guests;
pub mod holders;
mod host;
mod identity;
pub mod in_force;
pub mod interrupts;
pub mod inventory;
pub mod keep;
pub mod knob_class;
pub mod leftovers;
mod managed;
pub mod managed_vm;
mod memory;
mod missed;
pub mod model_choice;
pub mod named;
pub mod neighbours;
pub mod networks;
pub mod pieces;
pub mod plan;
pub mod plan_file;
pub mod profile;
pub mod profile_cpu;
mod progress;
mod reached;
pub mod regulator;
pub mod renew;
pub mod run;
pub mod scope_files;
pub mod scoped_contracts;
pub mod scopes;
pub mod service_plan;
pub mod site;
pub mod start_up;
pub mod started;
pub mod starts;
mod stop_on_cancel;
pub mod systemd_units;
pub mod traffic;
pub mod tune;
pub mod uncovered;
mod unreached;
pub mod verified;
pub mod vm_counters;
pub mod vmms;

pub use dirs::{Dirs, is_there, profile_key, write_state};
pub use error::{Context, Error, Kind, Result, one_line};
pub use files::{check_writable, generated, write_file};
pub use host::{cpus, kernel_release};
pub use progress::{Bar, Progress, Quiet};
