//! Keeps what a host can promise up to date in OpenStack's Placement.
//!
//! [`Wanted`] says what a host has and which contracts are in force on it, [`Publisher`]
//! makes inventories of the resource classes `CUSTOM_RTVIRTIO_*` of it and writes those that differ
//! to the host's resource provider. Where VMs run stays Nova's decision.
//!
//! An inventory's total is always 1000: a demand is a share of the host that it is placed on. What
//! changes is `reserved`: what contracts in force take beyond what Placement has allocated to their
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
