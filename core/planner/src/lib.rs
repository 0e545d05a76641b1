//! Plans and the search for them: pure, deterministic, no I/O.
//!
//! [`plan`] looks for knob settings under which every target is predicted to be met with a safety
//! margin. When there are none it serves the VMs in order of urgency and reports those it gives up,
//! the targets that conflict, and targets that would fit. [`neighbours::neighbours`] chooses limits
//! of the VMs without a target instead, with a bound for those that have one.

mod convert;
mod cpu_room;
mod cpu_wait;
mod error;
mod evaluate;
mod explain;
mod infeasible;
mod io_cost;
mod io_latency;
pub mod neighbours;
mod options;
mod placement;
mod plan;
pub mod replan;
mod scheme;
mod search;
pub mod strategy;
mod throttled;
pub mod tune;
mod types;

pub use convert::{check_actable, config_of, settings_of};
pub use cpu_room::CpuRoom;
pub use cpu_wait::{CpuWait, CpuWaits, RunDelay, add_cpu_waits, contracts, debt};
pub use error::PlanError;
pub use io_cost::io_cost_plan;
pub use io_latency::io_latency_plan;
pub use options::{PlanOptions, Space};
pub use placement::{CgroupNode, Placement, Placements};
pub use plan::{Quality, add_cpu_room, add_cpu_unknown, mark_not_predicted, outlook, plan, quality};
pub use rtvirtio_units::Enforcement;
pub use scheme::{scheme_name, scheme_of};
pub use throttled::{Throttled, throttled};
pub use types::*;

#[cfg(test)]
pub(crate) mod tests;
