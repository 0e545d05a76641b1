//! `bench fleet`, `bench fleet-cluster`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_bench::fleet::FleetOptions;

use super::BenchResult;

/// `bench fleet`.
#[derive(Args, Debug)]
pub struct BenchFleetArgs {
    /// Sizes of simulated fleets, in hosts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [100, 1_000, 10_000, 100_000])]
    pub hosts: Vec<usize>,
    /// Single hosts that are filled by sums and by the full admission
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub singles: usize,
    /// Seed of hosts and contracts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchFleetArgs {
    /// For the experiment.
    pub fn options(&self) -> FleetOptions {
        FleetOptions { hosts: self.hosts.clone(), singles: self.singles, seed: self.seed }
    }
}

/// `bench fleet-cluster`.
#[derive(Args, Debug)]
pub struct BenchFleetClusterArgs {
    /// Repetitions, each with a new cluster
    #[arg(long, default_value_t = 5)]
    pub repeat: usize,
    /// `rtvirtio-pacemaker`, instead of the one next to this program
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}
