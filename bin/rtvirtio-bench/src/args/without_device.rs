//! Commands without a device: `rtvirtio-bench plan`, `cores`, `drift` and `report`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::ageing::AgeingOptions;
use rtvirtio_experiments::cores::CoresOptions;

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

/// `rtvirtio-bench drift`.
#[derive(Args, Debug)]
pub struct BenchDriftArgs {
    /// Simulated days
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(30..=730))]
    pub days: u32,
    /// Seed of devices, load and noise
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDriftArgs {
    pub fn options(&self) -> AgeingOptions {
        AgeingOptions { days: self.days, seed: self.seed }
    }
}

/// `rtvirtio-bench report`.
#[derive(Args, Debug)]
pub struct BenchReportArgs {
    /// Directory of the datasets, and of models as DEVICE.model.json
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub data: PathBuf,
    /// Write the claims that have a limit as a page in Markdown here
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write all claims, a line each with tabs between its cells, here
    #[arg(long, value_name = "FILE")]
    pub table: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
