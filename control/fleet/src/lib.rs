//! Many hosts and their contracts: what fits where, what the loss of a host does, what to buy.
//!
//! [`load`] reads a fleet file with the hosts' profiles and the contracts' specs, [`assess`]
//! answers from them alone: nothing is measured, no host is asked. Placement is the cluster
//! engine's; what [`Cluster`] does here shows what an engine that knows admission could do.

mod assess;
mod buckets;
mod cluster;
mod demand;
mod engine_names;
mod file;
mod host;
mod kubernetes;
mod load;
mod openstack;
mod proxmox;

pub use assess::{Assessment, Buy, ContractRow, FLEET_SCHEMA, FitsOn, HostRow, Loss, MATRIX_HOSTS, assess};
pub use cluster::{Cluster, Search};
pub use file::{ContractsEntry, FleetError, FleetFile, HostEntry, LinkEntry, Share};
pub use kubernetes::{Kubernetes, Operation};
pub use load::{Fleet, FleetContract, FleetHost, load, load_named};
pub use openstack::{Inventory, OpenStack, resources};
pub use proxmox::{HaNode, HaRule, NoRule, Proxmox, ProxmoxError, ProxmoxVersion, Without};
pub use rtvirtio_capacity::Permille;
