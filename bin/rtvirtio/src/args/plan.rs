//! `predict` and `plan`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_console::{MarginArg, ModelArg};

/// Common options of `predict` and `plan`.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    /// The spec file
    pub spec: PathBuf,
    /// A profile file instead of the one saved for the device
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Which model predicts
    #[arg(long, value_enum, default_value_t = ModelArg::Auto)]
    pub model: ModelArg,
    /// Start from the kernel's default settings instead of those found on this host
    #[arg(long)]
    pub defaults: bool,
}

/// `predict`.
#[derive(Args, Debug)]
pub struct PredictArgs {
    /// Spec, profile and model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// Spec, profile and model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Save the plan
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Plan the I/O domain instead of the kernel's settings: reservations with bounds. The saved
    /// plan is its configuration file
    #[arg(long, conflicts_with = "margin")]
    pub domain: bool,
    /// Print HTB classes for the flows of a network instead, as a shell script for the interface
    /// behind its bridge: for hosts without the I/O domain. It keeps rates, not deadlines
    #[arg(long, value_name = "[NETWORK=]INTERFACE", conflicts_with_all = ["margin", "domain"])]
    pub tc: Option<String>,
    /// A VM's disk image or device on the host, for --domain; once for each VM
    #[arg(long = "disk", value_name = "VM=PATH", requires = "domain")]
    pub disks: Vec<String>,
    /// The group, by name or number, whose members may connect to the sockets of disks and ports,
    /// for --domain: that of a QEMU that is not root's, as under libvirt
    #[arg(long, value_name = "GROUP", requires = "domain")]
    pub socket_group: Option<String>,
    /// The CPU profile of a VM with a demand, instead of the one saved under its name; once for
    /// each VM
    #[arg(long = "cpu-profile", value_name = "VM=FILE")]
    pub cpu_profiles: Vec<String>,
    /// Targets against the neighbours' rate.
    #[command(flatten)]
    pub margin: MarginArg,
}
