//! The command line of `top`.

use clap::{Args, ValueEnum};
use rtvirtio_daemon::trouble::LineOrder;
use rtvirtio_units::Nanos;

/// `top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Print once and end, as without a terminal
    #[arg(long)]
    pub once: bool,
    /// Interval of updates; not with `--once`, and `--json` prints once
    #[arg(short = 'd', long, value_name = "TIME", default_value = "2s", conflicts_with = "once")]
    pub delay: Nanos,
    /// First order of the lines; the key `s` changes it
    #[arg(long, value_enum, default_value_t = SortBy::Trouble)]
    pub sort: SortBy,
}

/// Order of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// Missed targets first
    Trouble,
    /// By the name of the VM
    Vm,
    /// The largest p99 first
    P99,
}

impl SortBy {
    /// Order of the service's lines that has this name.
    #[must_use]
    pub fn order(self) -> LineOrder {
        match self {
            Self::Trouble => LineOrder::Trouble,
            Self::Vm => LineOrder::Vm,
            Self::P99 => LineOrder::P99,
        }
    }
}
