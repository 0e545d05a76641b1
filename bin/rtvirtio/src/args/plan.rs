//! `predict` and `plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_console::{ExplainingParser, MarginArg, ModelArg};
use rtvirtio_planner::neighbours::check_actuator;
use rtvirtio_traffic::Actuator;

/// Common options of `predict` and `plan`.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    /// The spec file
    pub spec: PathBuf,
    /// A profile file instead of the one saved for the device
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Model for the prediction
    #[arg(long, value_parser = ModelArg::parser(), default_value = "auto")]
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
    /// Save the plan; with --traffic the spec with the chosen limits
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
    /// Choose `traffic` limits for the VMs without a target instead: the largest with which every
    /// target holds in the worst case
    #[arg(long, conflicts_with_all = ["margin", "domain", "tc"])]
    pub traffic: bool,
    /// Divide each device by io.cost instead of BFQ (cgroup v2): its model from the profile, its
    /// latencies from the targets, weights from the declared rates. Nothing is predicted then
    #[arg(long, conflicts_with_all = ["margin", "domain", "tc", "traffic"])]
    pub io_cost: bool,
    /// Give each VM its shortest target as `io.latency` of its cgroup instead (cgroup v2): VMs next
    /// to it are held back while it is missed. Nothing is predicted then
    #[arg(long, conflicts_with_all = ["margin", "domain", "tc", "traffic", "io_cost"])]
    pub io_latency: bool,
    /// A measured curve of victim and neighbour instead of the profile, for --traffic
    #[arg(long, value_name = "FILE", requires = "traffic", conflicts_with = "profile")]
    pub curve: Option<PathBuf>,
    /// Mechanism of the limits, for --traffic. What else `rtvirtio regulator` knows limits networks
    /// or memory, or joins requests before it counts them
    #[arg(
        long,
        value_parser = LimiterName::parser(),
        value_name = "NAME",
        default_value = "io-max",
        requires = "traffic"
    )]
    pub actuator: LimiterName,
    /// A VM must get so many requests per second, with no longer gap between two than this time,
    /// for --traffic; once for each VM
    #[arg(long = "alpha-delta", value_name = "VM=RATE,TIME", requires = "traffic")]
    pub alpha_delta: Vec<String>,
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

/// Regulators that hold the limits of `plan --traffic`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LimiterName {
    /// Caps of the I/O domain
    IoDomain,
    /// cgroup v2 io.max
    IoMax,
    /// cgroup v1 blkio.throttle
    ThrottleV1,
}

impl From<LimiterName> for Actuator {
    fn from(name: LimiterName) -> Self {
        match name {
            LimiterName::IoDomain => Self::IoDomain,
            LimiterName::IoMax => Self::IoMax,
            LimiterName::ThrottleV1 => Self::ThrottleV1,
        }
    }
}

impl LimiterName {
    /// Parser that says why the other regulators are refused, and what takes them.
    fn parser() -> ExplainingParser<Self> {
        ExplainingParser::new(|name| {
            let actuator = Actuator::ALL.into_iter().find(|actuator| actuator.name() == name)?;
            let refused = check_actuator(actuator).err()?;
            Some(format!(
                "{refused}; `rtvirtio regulator SPEC --actuator {name}` prints what it keeps of the `traffic` in a spec"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_is_what_is_taken() {
        for actuator in Actuator::ALL {
            let offered = LimiterName::value_variants().iter().any(|name| Actuator::from(*name) == actuator);
            assert_eq!(check_actuator(actuator).is_ok(), offered, "{actuator}");
        }
    }
}
