//! `rtvirtio-bench cases`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_console::MarginArg;
use rtvirtio_experiments::cases::{RunnerOptions, Tier};
use rtvirtio_units::Nanos;

use super::BenchRuns;

/// `rtvirtio-bench cases`.
#[derive(Args, Debug)]
pub struct BenchCasesArgs {
    /// Device, model and results
    #[command(flatten)]
    pub runs: BenchRuns,
    /// Tiers; all when none is named
    #[arg(long = "tier", value_enum)]
    pub tiers: Vec<Tier>,
    /// 30 % of the requests write
    #[arg(long)]
    pub writes: bool,
    /// Scale the rates to a third of what the device can do, for slow devices
    #[arg(long)]
    pub scaled: bool,
    /// Weighting of targets against the neighbours' rate by the planners
    #[command(flatten)]
    pub margin: MarginArg,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Only these schemes, such as default-bfq,bound
    #[arg(long, value_delimiter = ',', value_name = "SCHEMES")]
    pub schemes: Vec<String>,
    /// Repetitions of every case
    #[arg(long, default_value_t = 1)]
    pub repeat: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Repeat a run at most this often while the host itself stalls; the run with the fewest stalls
    /// counts
    #[arg(long, value_name = "N", default_value_t = rtvirtio_learn::runs::TRIES, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub tries: u32,
    /// Measure nothing: write the cases as spec files
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
}

impl BenchCasesArgs {
    pub fn options(&self) -> RunnerOptions {
        RunnerOptions {
            runs: self.runs.options.clone(),
            tiers: if self.tiers.is_empty() { Tier::ALL.to_vec() } else { self.tiers.clone() },
            writes: self.writes,
            scaled: self.scaled,
            enough: self.margin.enough(),
            margin_option: self.margin.option(),
            only: self.only.clone(),
            schemes: self.schemes.clone(),
            repeat: self.repeat,
            length: self.length,
            tries: self.tries,
        }
    }
}
