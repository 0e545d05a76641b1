//! `rtvirtio-bench reservation`, and its child process.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::reservation::ReservationOptions;
use rtvirtio_experiments::reservation::kills::{KillAction, KillAt, KillOrder};

use super::BenchResult;

/// `rtvirtio-bench reservation`.
#[derive(Args, Debug)]
pub struct BenchReservationArgs {
    /// Options of the experiment
    #[command(flatten)]
    pub options: ReservationOptions,
    /// Only kill `apply` and `revert` of a contract at every change, and add the outcome to the
    /// existing result
    #[arg(long, conflicts_with = "report_only")]
    pub kills: bool,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

/// `rtvirtio-bench kill-at`.
#[derive(Args, Debug)]
pub struct BenchKillAtArgs {
    /// The killed action
    #[arg(value_enum)]
    pub action: KillAction,
    /// Order of the guest's threads
    #[arg(value_enum)]
    pub order: KillOrder,
    /// At which point; 0 for not at all
    #[arg(long)]
    pub at: u64,
    /// Name of the guest
    #[arg(long)]
    pub vm: String,
    /// Process id of the killed action
    #[arg(long)]
    pub pid: u32,
    /// Directory of the journal
    #[arg(long)]
    pub state: PathBuf,
}

impl BenchKillAtArgs {
    /// For the child process.
    pub fn options(&self) -> KillAt<'_> {
        let Self { action, order, .. } = *self;
        KillAt { action, order, at: self.at, vm: &self.vm, pid: self.pid, state: &self.state }
    }
}
