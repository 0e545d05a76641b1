//! `fleet`.

use std::path::PathBuf;

use clap::Args;

/// `fleet`.
#[derive(Args, Debug)]
pub struct FleetArgs {
    /// The fleet file: hosts with their profiles, contracts with their specs
    #[arg(value_name = "FLEET")]
    pub fleet: PathBuf,
    /// Show every host, contract and loss; without it at most 20 of each
    #[arg(long)]
    pub all: bool,
    /// Instead print, as JSON, the inventories of OpenStack's Placement and the extra specs of
    /// flavours
    #[arg(long, conflicts_with = "all")]
    pub openstack: bool,
    /// Instead print, as JSON, the patches of the status of Kubernetes' nodes and the requests of
    /// pods
    #[arg(long, conflicts_with_all = ["all", "openstack"])]
    pub kubernetes: bool,
}
