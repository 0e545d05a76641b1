//! `rtvirtio-bench cpu-predict`.

use clap::Args;
use rtvirtio_experiments::cpu_predict::CpuPredictOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench cpu-predict`.
#[derive(Args, Debug)]
pub struct BenchCpuPredictArgs {
    /// Emulated device
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Runs in all; those that the file has are kept
    #[arg(long, value_name = "N", default_value_t = 80, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Seed of rates, targets and loads
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchCpuPredictArgs {
    pub fn options(&self) -> CpuPredictOptions {
        CpuPredictOptions {
            device: self.device.clone(),
            runs: usize::from(self.runs),
            length: self.length,
            seed: self.seed,
        }
    }
}
