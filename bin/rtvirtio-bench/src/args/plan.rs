//! `rtvirtio-bench plan`.

use std::path::PathBuf;

use clap::Args;

use super::BenchResult;

/// `rtvirtio-bench plan`.
#[derive(Args, Debug)]
pub struct BenchPlanArgs {
    /// Repetitions
    #[arg(long, default_value_t = 20)]
    pub repeat: usize,
    /// Plan with this learned model too
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}
