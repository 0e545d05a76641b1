//! `rtvirtio-bench host`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rtvirtio_console::Global;
use rtvirtio_experiments::host::HostOptions;
use rtvirtio_units::Nanos;

/// `rtvirtio-bench host`.
#[derive(Args, Debug)]
pub struct BenchHostArgs {
    /// Time for everything; the most worthwhile parts come first, and those that do not fit are
    /// named with their commands
    #[arg(long, value_name = "TIME", default_value = "1h")]
    pub budget: Nanos,
    /// Measure a drive of this host where a part can: a directory on a file system of it, in which
    /// a file is made, and removed at the end
    #[arg(long, value_name = "DIR")]
    pub device: Option<PathBuf>,
    /// Only these parts, such as demo,cases
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Say what would be measured and what it touches, and do nothing
    #[arg(long, conflicts_with = "report_only")]
    pub dry_run: bool,
    /// Also when virtual machines run here, which it slows
    #[arg(long)]
    pub yes: bool,
    /// Directory of the bundle; a stopped run goes on there
    #[arg(long, value_name = "DIR", default_value = "rtvirtio-host")]
    pub out: PathBuf,
    /// Measure nothing: show the bundle in the directory
    #[arg(long)]
    pub report_only: bool,
    /// Write the page here instead of into the directory
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl BenchHostArgs {
    /// For the experiment.
    pub fn options(&self, global: &Global) -> std::io::Result<HostOptions> {
        Ok(HostOptions {
            drive: self.device.clone(),
            budget: Duration::from_nanos(self.budget.0),
            only: self.only.clone(),
            out: self.out.clone(),
            under_vms: self.yes,
            program: std::env::current_exe()?,
            global: super::directories(global),
        })
    }
}
