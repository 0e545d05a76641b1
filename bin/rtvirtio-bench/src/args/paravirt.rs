//! `rtvirtio-bench paravirt`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::paravirt::{ParavirtOptions, Piece};
use rtvirtio_units::Nanos;

use super::BenchResult;

/// `rtvirtio-bench paravirt`.
#[derive(Args, Debug)]
pub struct BenchParavirtArgs {
    /// Length of each run, in whole seconds
    #[arg(long = "for", value_name = "TIME", default_value = "20s")]
    pub length: Nanos,
    /// Runs of each set-up, interleaved
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Budget of the VM with the timed task in each period
    #[arg(long, value_name = "TIME", default_value = "1800us")]
    pub budget: Nanos,
    /// The period
    #[arg(long, value_name = "TIME", default_value = "2ms")]
    pub period: Nanos,
    /// CPU time above the floor in each second
    #[arg(long, value_name = "TIME", default_value = "500ms")]
    pub boost: Nanos,
    /// Promotions that are timed in each round
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub promotions: u32,
    /// Real-time priorities without a budget for the VM, as on kernels without
    /// CONFIG_RT_GROUP_SCHED; takes no budget from other programs
    #[arg(long)]
    pub priorities_only: bool,
    /// Keep idle CPUs from sleeping, as on a real-time host
    #[arg(long)]
    pub awake: bool,
    /// Only this part: both, cost, promotions, lies; or what is not run without --only: interrupts
    /// (requests raised by KVM's interrupts or not, under KVM), chain (from a timer by a read in
    /// the I/O domain to the answer, once); may be given several times
    #[arg(long, value_name = "PART", conflicts_with = "report_only")]
    pub only: Vec<Piece>,
    /// Write the latencies of both VMs at once as a picture into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchParavirtArgs {
    pub fn options(&self) -> ParavirtOptions {
        ParavirtOptions {
            length: self.length,
            repeat: self.repeat,
            budget: self.budget,
            period: self.period,
            boost: self.boost,
            promotions: self.promotions,
            priorities_only: self.priorities_only,
            awake: self.awake,
            only: self.only.clone(),
        }
    }
}
