//! `rtvirtio-bench tails`.

use clap::Args;
use rtvirtio_experiments::tails::TailsOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench tails`.
#[derive(Args, Debug)]
pub struct BenchTailsArgs {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Length of each of the four runs: 100 requests a second show their p99.99 in five minutes
    #[arg(long = "for", value_name = "TIME", default_value = "6min")]
    pub length: Nanos,
    /// Length of a piece: with 10000 requests and more it needs no estimate
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub piece: Nanos,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchTailsArgs {
    pub fn options(&self) -> TailsOptions {
        TailsOptions { device: self.device.clone(), length: self.length, piece: self.piece }
    }
}
