//! `rtvirtio-bench profile-time`.

use clap::Args;
use rtvirtio_experiments::profile_time::ProfileTimeOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// Examples in the help of the command.
pub const EXAMPLES: &str = "\
EXAMPLES
  sudo rtvirtio-bench profile-time                  ten rounds on each emulated device, under two hours
  sudo rtvirtio-bench profile-time file:/var/tmp/disk --repeat 3 --out /tmp/own
  rtvirtio-bench profile-time --report-only --json | jq .claims

Exit code 2 when a claim is not met.";

/// `rtvirtio-bench profile-time`.
#[derive(Args, Debug)]
pub struct BenchProfileTimeArgs {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards
    #[arg(
        value_name = "twin:NAME",
        default_values = ["twin:qlc-nvme", "twin:emmc", "twin:microsd", "twin:disk-1.8in"]
    )]
    pub devices: Vec<String>,
    /// Rounds on each device
    #[arg(long, default_value_t = 10)]
    pub repeat: usize,
    /// Length of each of the three runs after both profiles
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchProfileTimeArgs {
    pub fn options(&self) -> ProfileTimeOptions {
        ProfileTimeOptions { devices: self.devices.clone(), repeat: self.repeat, length: self.length }
    }
}
