//! `rtvirtio-bench contention`.

use clap::Args;
use rtvirtio_experiments::contention::ContentionOptions;
use rtvirtio_units::Nanos;

use super::BenchRuns;

/// `rtvirtio-bench contention`.
#[derive(Args, Debug)]
pub struct BenchContentionArgs {
    /// Device, model and results
    #[command(flatten)]
    pub runs: BenchRuns,
    /// Only set-ups whose name contains this, such as fig2
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Repetitions of every set-up
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
}

impl BenchContentionArgs {
    pub fn options(&self) -> ContentionOptions {
        ContentionOptions {
            runs: self.runs.options.clone(),
            only: self.only.clone(),
            repeat: self.repeat,
            length: self.length,
        }
    }
}
