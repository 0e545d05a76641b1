//! From a spec to the I/O domain: the device time that each VM must have reserved so that its
//! targets hold in the worst case ([`plan()`]), the part of a network's link
//! ([`plan_networks`]), the configuration file ([`DomainPlan::text`]), and a
//! simulation with the same scheduler under virtual time ([`Simulation`]).
//!
//! Pure: a spec and a device model go in, decisions come out.

mod caps;
mod disk_refusal;
mod flow;
mod intended;
mod network;
mod network_refusal;
mod network_simulate;
mod network_tc;
mod network_text;
mod path;
mod plan;
mod promise;
mod simulate;
#[cfg(test)]
mod testing;
mod text;
mod toml_text;

pub use flow::FlowPromise;
pub use network::{NetworkPlan, PortPlan, plan_networks};
pub use network_simulate::{FlowOutcome, NetworkSimulation};
pub use network_tc::tc_script;
pub use path::Guaranteed;
pub use plan::{DomainPlan, VmPlan, plan};
pub use promise::{IntendedBound, PartPromise, PathPromise, TaskPromise};
pub use rtvirtio_capacity::{DeviceError, DeviceModel, LinkReserve, Options};
pub use simulate::{Simulation, TaskOutcome, Traffic};
pub use text::DiskPlace;
