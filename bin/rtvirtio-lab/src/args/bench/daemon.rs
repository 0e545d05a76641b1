//! The command line of `bench daemon`.

use std::time::Duration;

use clap::Args;
use rtvirtio_bench::daemon::DaemonOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `bench daemon`.
#[derive(Args, Debug)]
pub struct BenchDaemonArgs {
    /// Threads that come
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub threads: usize,
    /// Restarts of a VM
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub restarts: usize,
    /// Times that the service is killed
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub kills: usize,
    /// Length of each of the three windows at rest
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub idle: Nanos,
    /// Days of each of the three simulated months
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub days: u64,
    /// Seed of moments and months
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDaemonArgs {
    /// For the experiment: the service is the program in this one's directory.
    pub fn options(&self) -> anyhow::Result<DaemonOptions> {
        Ok(DaemonOptions {
            program: std::env::current_exe()?.with_file_name("rtvirtiod"),
            threads: self.threads,
            restarts: self.restarts,
            kills: self.kills,
            idle: Duration::from_nanos(self.idle.0),
            days: self.days,
            seed: self.seed,
        })
    }
}
