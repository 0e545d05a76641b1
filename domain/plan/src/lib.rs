//! From a spec to the I/O domain: how much device time each VM must have reserved so that its
//! targets hold in the worst case ([`plan`]), the configuration file that says so
//! ([`DomainPlan::text`]), and the same scheduler under virtual time to see what happens
//! ([`Simulation`]).
//!
//! Pure: a spec and what is known of the device go in, decisions come out.

mod device;
mod plan;
mod simulate;
mod text;

pub use device::{DeviceError, DeviceModel};
pub use plan::{DomainPlan, Options, TaskPromise, VmPlan, plan};
pub use simulate::{Simulation, TaskOutcome, Traffic};
pub use text::DiskPlace;
