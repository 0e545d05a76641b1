//! `rtvirtio-bench fleet-cluster`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::fleet_cluster::ClusterVms;

use super::BenchResult;

/// `rtvirtio-bench fleet-cluster`.
#[derive(Args, Debug)]
pub struct BenchFleetClusterArgs {
    /// Repetitions, each with a new cluster
    #[arg(long, default_value_t = 5)]
    pub repeat: usize,
    /// Resource agent of the VMs: processes of ocf:heartbeat:anything, or domains of each node's
    /// libvirt by ocf:heartbeat:VirtualDomain or, with the contract before the guest,
    /// ocf:rtvirtio:VirtualDomain
    #[arg(long, value_enum, default_value_t = ClusterVms::Process)]
    pub vms: ClusterVms,
    /// VMs as processes, in a cluster that switches a lost node off before its VMs start elsewhere
    #[arg(long, conflicts_with = "vms")]
    pub fencing: bool,
    /// Instead the scenario of a disk that becomes slow on one node: an emulated drive for each
    /// node, with reads on it
    #[arg(long, conflicts_with_all = ["vms", "fencing"])]
    pub slow: bool,
    /// `rtvirtio-pacemaker`, instead of the one next to this program
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchFleetClusterArgs {
    pub fn cluster_vms(&self) -> ClusterVms {
        if self.fencing { ClusterVms::Fenced } else { self.vms }
    }
}
