//! Publishes contracts to Pacemaker; has the resource agent that applies them.
//!
//! Placement stays Pacemaker's. Each node computes by the full admission which contracts it could
//! promise beside those in force ([`survey`]) and publishes it ([`publish`]): its capacity and what
//! each contract takes as utilization, and a veto for each that does not fit, so that a move is
//! refused before the VM is stopped. [`write_constraints`] makes rules of it, and [`agent`] is
//! the resource agent `ocf:rtvirtio:contract`, which applies a contract after its VM has started,
//! verifies it, and restores it.

pub mod agent;
mod cib;
mod crm;
mod error;
mod file;
mod marker;
mod metadata;
mod node;
mod publish;

pub use cib::{Demand, constraints_xml, demands, primitive_xml, without_capacity, write_constraints};
pub use crm::Crm;
pub use error::PacemakerError;
pub use file::{ClusterContract, ClusterFile, load};
pub use metadata::METADATA;
pub use node::{DiskWatch, NodeAnswer, ResourceAnswer, SlowDisks, survey};
pub use publish::{Published, publish, published};
