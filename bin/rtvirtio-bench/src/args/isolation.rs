//! `rtvirtio-bench isolation`.

use clap::Args;
use rtvirtio_experiments::isolation::{IsolationOptions, Mode};
use rtvirtio_units::Nanos;

use super::BenchResult;
use super::blame::LabVm;

/// `rtvirtio-bench isolation`.
#[derive(Args, Debug)]
pub struct BenchIsolationArgs {
    /// Emulated device, `file:PATH` for a file that is made on a disk of this machine and removed
    /// afterwards, or `/dev/nullbN` of null_blk
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// The four VMs
    #[arg(long, value_name = "KIND", value_enum, default_value_t = LabVm::Process)]
    pub vm: LabVm,
    #[arg(long, value_name = "MODE", value_delimiter = ',', help = only_help())]
    pub only: Vec<Mode>,
    /// Only these questions: 1 overhead, 2 fairness, 3 priority against device use, 4 bursts
    #[arg(
        long = "question",
        value_name = "N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u8).range(1..=4)
    )]
    pub questions: Vec<u8>,
    /// Repetitions of all cases
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: u16,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "4s")]
    pub length: Nanos,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIsolationArgs {
    pub fn options(&self) -> IsolationOptions {
        IsolationOptions {
            device: self.device.clone(),
            vm: self.vm.kind(),
            only: self.only.clone(),
            questions: self.questions.clone(),
            rounds: usize::from(self.rounds),
            length: self.length,
        }
    }
}

/// Help of `--only`: every mode.
fn only_help() -> String {
    format!("Only these modes: {}", Mode::ALL.map(Mode::name).join(", "))
}
