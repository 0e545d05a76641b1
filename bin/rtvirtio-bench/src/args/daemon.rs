//! The command line of `rtvirtio-bench daemon`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rtvirtio_experiments::daemon::DaemonOptions;
use rtvirtio_experiments::daemon::day::DayOptions;
use rtvirtio_experiments::daemon::scale::ScaleOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench daemon`.
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
    /// Pairs of windows in which a guest is observed and not
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub pairs: usize,
    /// Length of each of these windows, in whole seconds
    #[arg(long, value_name = "TIME", default_value = "4s")]
    pub window: Nanos,
    /// Measure only the cost of observation, into the result that is there
    #[arg(long, conflicts_with = "report_only")]
    pub only_observation: bool,
    /// Days of each of the three simulated months
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub days: u64,
    /// Seed of moments and months
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDaemonArgs {
    /// Options with the service in this program's directory.
    pub fn options(&self) -> anyhow::Result<DaemonOptions> {
        Ok(DaemonOptions {
            program: std::env::current_exe()?.with_file_name("rtvirtiod"),
            threads: self.threads,
            restarts: self.restarts,
            kills: self.kills,
            idle: Duration::from_nanos(self.idle.0),
            pairs: self.pairs,
            window: Duration::from_secs(self.window.0 / 1_000_000_000),
            days: self.days,
            seed: self.seed,
        })
    }
}

/// `rtvirtio-bench daemon-day`.
#[derive(Args, Debug)]
pub struct BenchDaemonDayArgs {
    /// Length of each window, in whole seconds
    #[arg(long, value_name = "TIME", default_value = "15s")]
    pub window: Nanos,
    /// Windows of each of the day's eight hours
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub windows: usize,
    /// Write the picture into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDaemonDayArgs {
    /// Options with the service in this program's directory.
    pub fn options(&self) -> anyhow::Result<DayOptions> {
        anyhow::ensure!(
            self.window.0 >= 5_000_000_000 && self.windows > 0,
            "a window takes at least 5 s, and an hour has at least one"
        );
        Ok(DayOptions {
            service: std::env::current_exe()?.with_file_name("rtvirtiod"),
            window: Duration::from_secs(self.window.0 / 1_000_000_000),
            windows: self.windows,
        })
    }
}

/// Name of the command that [`SleeperArgs`] are of.
pub const SLEEPER: &str = "sleeper";

/// `rtvirtio-bench daemon-scale`.
#[derive(Args, Debug)]
pub struct BenchDaemonScaleArgs {
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// Service to measure [default: the rtvirtiod next to this program]
    #[arg(long, value_name = "FILE")]
    pub service: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDaemonScaleArgs {
    /// Options with the service in this program's directory, unless another one is given.
    pub fn options(&self) -> anyhow::Result<ScaleOptions> {
        anyhow::ensure!(self.repeat > 0, "--repeat: at least one round");
        let program = std::env::current_exe()?;
        let service = self.service.clone().unwrap_or_else(|| program.with_file_name("rtvirtiod"));
        Ok(ScaleOptions { service, sleeper: (program, SLEEPER.to_owned()), repeat: self.repeat })
    }
}

/// `rtvirtio-bench sleeper`.
#[derive(Args, Debug)]
pub struct SleeperArgs {
    /// Threads
    pub threads: usize,
}
