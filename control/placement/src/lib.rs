//! Publishes a host's free capacity in OpenStack's Placement.
//!
//! [`Wanted`] has a host's resource classes and the contracts in force on it; [`Publisher`] turns
//! them into inventories of `CUSTOM_RTVIRTIO_*` and writes those that differ to the host's resource
//! provider. Nova still decides where VMs run.
//!
//! An inventory's total is always 1000: a demand is a share of the host that it is placed on. Only
//! `reserved` changes: demand of contracts in force beyond what Placement has allocated to their
//! VMs. Inventories of other classes are never written.

mod config;
mod error;
mod http;
mod inventory;
mod keystone;
mod publish;

pub use config::{Auth, KeystoneConfig, PlacementConfig};
pub use error::PlacementError;
pub use inventory::{Allocations, Plan, Taken, Wanted, plan};
pub use publish::{Change, Published, Publisher};
