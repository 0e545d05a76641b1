//! `rtvirtio-bench cores`.

use clap::Args;
use rtvirtio_experiments::cores::CoresOptions;

use super::BenchResult;

/// `rtvirtio-bench cores`.
#[derive(Args, Debug)]
pub struct BenchCoresArgs {
    /// Random hosts
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub hosts: u32,
    /// Repetitions of each time
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Seed of hosts and VMs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchCoresArgs {
    pub fn options(&self) -> CoresOptions {
        CoresOptions { hosts: self.hosts as usize, repeat: usize::from(self.repeat), seed: self.seed }
    }
}
