//! `fleet`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_fleet::ProxmoxVersion;

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
    /// Instead print the commands that tell the HA manager of Proxmox VE, 9 or 8, which nodes each
    /// VM is to run on first; none is run
    #[arg(
        long,
        value_name = "VERSION",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "9",
        conflicts_with_all = ["all", "openstack", "kubernetes"]
    )]
    pub proxmox: Option<ProxmoxName>,
}

/// Value of `--proxmox`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ProxmoxName {
    /// Groups.
    #[value(name = "8")]
    V8,
    /// Node affinity rules.
    #[value(name = "9")]
    V9,
}

impl From<ProxmoxName> for ProxmoxVersion {
    fn from(name: ProxmoxName) -> Self {
        match name {
            ProxmoxName::V8 => Self::V8,
            ProxmoxName::V9 => Self::V9,
        }
    }
}
