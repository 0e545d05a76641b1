//! `rtvirtio-bench cyclictest`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::cyclictest::{CyclictestOptions, Setup};
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench cyclictest`.
#[derive(Args, Debug)]
pub struct BenchCyclictestArgs {
    /// Length of each run, in whole seconds
    #[arg(long = "for", value_name = "TIME", default_value = "60s")]
    pub length: Nanos,
    /// Runs of each set-up, interleaved
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Append the runs to the existing result, which must be of the same host and contract
    #[arg(long, conflicts_with = "report_only")]
    pub add: bool,
    /// Set-ups to measure, such as guest,aio-lowered [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub setups: Vec<Setup>,
    /// Also with Debian's PREEMPT_RT kernel in the guest
    #[arg(long)]
    pub preempt_rt: bool,
    /// Budget of the VM in each period, for the set-ups with priorities
    #[arg(long, value_name = "TIME", default_value = "1800us")]
    pub budget: Nanos,
    /// The period
    #[arg(long, value_name = "TIME", default_value = "2ms")]
    pub period: Nanos,
    /// Directory for the guest's disk, a file of 256 MiB: a file system on a disk, not in memory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk_dir: PathBuf,
    /// Keep idle CPUs from sleeping, as on a real-time host
    #[arg(long)]
    pub awake: bool,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchCyclictestArgs {
    pub fn options(&self) -> CyclictestOptions {
        CyclictestOptions {
            length: self.length,
            repeat: self.repeat,
            add: self.add,
            setups: self.setups.clone(),
            preempt_rt: self.preempt_rt,
            budget: self.budget,
            period: self.period,
            disk_dir: self.disk_dir.clone(),
            awake: self.awake,
        }
    }
}
