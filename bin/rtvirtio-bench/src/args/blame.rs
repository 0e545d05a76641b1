//! `rtvirtio-bench blame`.

use clap::{Args, ValueEnum};
use rtvirtio_experiments::blame::{BlameOptions, Kind};
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// Kinds of VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LabVm {
    /// A QEMU guest
    Qemu,
    /// fio in a cgroup
    Process,
}

impl LabVm {
    /// Kind in a spec.
    pub fn kind(self) -> LabKind {
        match self {
            Self::Qemu => LabKind::Qemu,
            Self::Process => LabKind::Process,
        }
    }
}

/// `rtvirtio-bench blame`.
#[derive(Args, Debug)]
pub struct BenchBlameArgs {
    /// Emulated device
    #[arg(value_name = "twin:NAME", default_value = "twin:emmc")]
    pub device: String,
    /// VM whose target is judged, and its neighbour
    #[arg(long, value_name = "KIND", value_enum, default_value_t = LabVm::Qemu)]
    pub vm: LabVm,
    #[arg(long, value_name = "KIND", value_delimiter = ',', help = only_help())]
    pub only: Vec<Kind>,
    /// Rounds: each cause alone, and random pairs, half as many
    #[arg(long = "runs", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: u16,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Seed of order, pairs and strengths
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchBlameArgs {
    pub fn options(&self) -> BlameOptions {
        BlameOptions {
            device: self.device.clone(),
            vm: self.vm.kind(),
            only: self.only.clone(),
            rounds: usize::from(self.rounds),
            length: self.length,
            seed: self.seed,
        }
    }
}

/// Help of `--only`: every kind.
fn only_help() -> String {
    format!("Only these causes: {}", Kind::ALL.map(Kind::name).join(", "))
}
