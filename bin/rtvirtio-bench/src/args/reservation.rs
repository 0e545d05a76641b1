//! `rtvirtio-bench reservation`, and its child process.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_experiments::reservation::ReservationOptions;
use rtvirtio_experiments::reservation::kills::{KillAction, KillAt, KillOrder};
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench reservation`.
#[derive(Args, Debug)]
pub struct BenchReservationArgs {
    /// Length of each measurement of throughput, made in pieces of 2 s that alternate with those of
    /// all others
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Measurements of throughput at each budget
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Web requests under each condition; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub requests: usize,
    /// Period of the contracts for throughput
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    pub period: Nanos,
    /// While its budget grows, the neighbour computes in a loop without memory accesses instead of
    /// serving clients
    #[arg(long)]
    pub neighbour_computes: bool,
    /// Budgets of one VM alone, in percent of a core, such as 20,50,80 [default: 10 to 90 in tens]
    #[arg(long, value_delimiter = ',', value_name = "PERCENT")]
    pub budgets: Vec<u64>,
    /// vCPUs of the loaded neighbour of the web requests, each of which computes
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub neighbour_vcpus: u16,
    /// Keep idle CPUs from sleeping, as on a real-time host
    #[arg(long)]
    pub awake: bool,
    /// Only kill `apply` and `revert` of a contract at every change, and add the outcome to the
    /// existing result
    #[arg(long, conflicts_with = "report_only")]
    pub kills: bool,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchReservationArgs {
    pub fn options(&self) -> ReservationOptions {
        ReservationOptions {
            length: self.length,
            repeat: self.repeat,
            requests: self.requests,
            period: self.period,
            neighbour_computes: self.neighbour_computes,
            budgets: self.budgets.clone(),
            neighbour_vcpus: self.neighbour_vcpus,
            awake: self.awake,
        }
    }
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
