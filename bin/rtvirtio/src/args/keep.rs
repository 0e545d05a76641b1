//! The command line of `keep`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_units::Nanos;

/// `keep`.
#[derive(Args, Debug)]
pub struct KeepArgs {
    /// The spec whose contracts are in force
    pub spec: PathBuf,
    /// Interval between scans for new threads
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    pub every: Nanos,
    /// Interval between splits of a budget over the threads, where the mechanism knows only single
    /// threads (SCHED_DEADLINE)
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub split_every: Nanos,
}
