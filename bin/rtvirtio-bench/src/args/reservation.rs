//! `rtvirtio-bench reservation`, and its child process.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
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
    pub action: KillActionName,
    /// Order of the guest's threads
    #[arg(value_enum)]
    pub order: KillOrderName,
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
        let action = match self.action {
            KillActionName::Apply => KillAction::Apply,
            KillActionName::Revert => KillAction::Revert,
        };
        let order = match self.order {
            KillOrderName::Contract => KillOrder::Contract,
            KillOrderName::Rt => KillOrder::Rt,
        };
        KillAt { action, order, at: self.at, vm: &self.vm, pid: self.pid, state: &self.state }
    }
}

/// The killed action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillActionName {
    /// `apply`
    Apply,
    /// `revert`
    Revert,
}

/// Order of the threads of the guest whose contract is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillOrderName {
    /// A contract
    Contract,
    /// The paper's priorities
    Rt,
}
