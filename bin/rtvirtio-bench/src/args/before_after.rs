//! `rtvirtio-bench before-after`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::before_after::BeforeAfterOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench before-after`.
#[derive(Args, Debug)]
pub struct BenchBeforeAfterArgs {
    /// A spec with lab VMs on a twin instead of the one of the README's tour
    pub spec: Option<PathBuf>,
    /// Rounds
    #[arg(long, default_value_t = 10)]
    pub repeat: usize,
    /// Length of each verification
    #[arg(long = "for", value_name = "TIME", default_value = "25s")]
    pub length: Nanos,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchBeforeAfterArgs {
    pub fn options(&self) -> BeforeAfterOptions {
        BeforeAfterOptions {
            spec: self.spec.clone(),
            repeat: self.repeat,
            length: self.length,
            profile: Nanos::from_millis(36_000),
        }
    }
}
