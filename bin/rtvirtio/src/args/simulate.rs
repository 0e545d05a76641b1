//! `simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_units::Nanos;

/// `simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// The spec file
    pub spec: PathBuf,
    /// Virtual time
    #[arg(long = "for", value_name = "TIME", default_value = "600s")]
    pub length: Nanos,
    /// Scheduling policy; several are compared
    #[arg(long = "policy", value_enum, default_values_t = [PolicyName::Edf])]
    pub policies: Vec<PolicyName>,
    /// The worst traffic that the plan allows for, instead of what is declared: guests that stand
    /// still and then ask at once, neighbours with the largest requests
    #[arg(long)]
    pub worst: bool,
    /// Seed of phases and service times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// A profile file, instead of what the spec's twin declares or the one saved for the device
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

/// Policies of the I/O domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// First come, first served: what a backend does that does not schedule
    Fifo,
    /// A piece of each VM in turn
    RoundRobin,
    /// Device time by weight
    Drr,
    /// By deadline within reservations, remaining requests by weight: as planned
    Edf,
}
