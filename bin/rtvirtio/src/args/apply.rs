//! `apply`, `revert`, `verify`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_console::{MarginArg, ModelArg};
use rtvirtio_units::Nanos;

/// `apply`.
#[derive(Args, Debug)]
pub struct ApplyArgs {
    /// A plan file; or a spec, planned first; or an I/O domain's file (`plan --domain`), which
    /// starts it
    #[arg(value_name = "SPEC|PLAN")]
    pub source: PathBuf,
    /// The spec, when it is not where it was when the plan was made
    #[arg(long, value_name = "SPEC")]
    pub spec: Option<PathBuf>,
    /// Print every write as `path: old -> new` and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Only the CPU contracts and priorities of a spec; needs no profile of the device
    #[arg(long, conflicts_with_all = ["spec", "compromise", "profile", "margin"])]
    pub cpu_only: bool,
    /// Only the limits of a spec's `traffic`; needs no profile of the device
    #[arg(long, conflicts_with_all = ["spec", "compromise", "profile", "margin", "cpu_only"])]
    pub traffic_only: bool,
    /// The CPU profile of a VM with a demand, instead of the one saved under its name; once for
    /// each VM
    #[arg(long = "cpu-profile", value_name = "VM=FILE")]
    pub cpu_profiles: Vec<String>,
    /// Apply a compromise although some target is predicted to be missed
    #[arg(long)]
    pub compromise: bool,
    /// Apply a plan although its spec or the measurement of its device has changed since
    #[arg(long, conflicts_with_all = ["cpu_only", "traffic_only"])]
    pub force: bool,
    /// A profile file instead of the one saved for the device
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Model for the prediction
    #[arg(long, value_parser = ModelArg::parser(), default_value = "auto")]
    pub model: ModelArg,
    /// Targets against the neighbours' rate.
    #[command(flatten)]
    pub margin: MarginArg,
}

/// `revert`.
#[derive(Args, Debug)]
pub struct RevertArgs {
    /// Also put back settings that were changed since
    #[arg(long)]
    pub force: bool,
    /// Leave settings that were changed since as they are, for good
    #[arg(long, conflicts_with = "force")]
    pub keep: bool,
    /// Stop the I/O domain also while guests are attached: their requests wait until an I/O domain
    /// runs again
    #[arg(long)]
    pub stop_domain: bool,
}

/// `verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// The spec file
    pub spec: PathBuf,
    /// Duration of the measurement
    #[arg(long = "for", value_name = "TIME", default_value = "60s")]
    pub length: Nanos,
    /// Write the result file here as well
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Let tasks write although the device is real: the data that they overwrite is LOST
    #[arg(long)]
    pub destroy_data: bool,
    /// Load a small object into fio inside guests with an `agent` (LD_PRELOAD), with which fio's
    /// pauses between requests end on time
    #[arg(long)]
    pub fio_preload: bool,
    /// Run the flows of a network too: as UDP from this interface of the host, or of a network
    /// namespace, to the guests, which answer. Once for each network
    #[arg(long = "network-peer", value_name = "[NETWORK=][NAMESPACE/]INTERFACE")]
    pub network_peers: Vec<String>,
    /// Echo server for the flows of a VM, or for one flow: a UDP echo (RFC 862) in the guest
    /// [port: 7] [default: `rtvirtio-guest echo`, started through its agent]
    #[arg(long = "network-echo", value_name = "VM[/FLOW]=ADDRESS[:PORT]", requires = "network_peers")]
    pub network_echoes: Vec<String>,
    /// Run the flows alone, no task of a disk
    #[arg(long, requires = "network_peers", conflicts_with_all = ["html", "destroy_data", "fio_preload"])]
    pub network_only: bool,
}
