//! `rtvirtio-bench sweep`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::sweep::SweepOptions;
use rtvirtio_units::Nanos;

/// `rtvirtio-bench sweep`.
#[derive(Args, Debug)]
pub struct BenchSweepArgs {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards; one dataset each
    #[arg(value_name = "twin:NAME", required = true)]
    pub devices: Vec<String>,
    /// Conditions per device
    #[arg(long, default_value_t = 100)]
    pub points: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Additional conditions of the RT-VirtIO paper's Table II, for its coefficients and its
    /// network
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub paper: usize,
    /// Number of conditions run two times more, to show how far runs of one condition differ
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub again: usize,
    /// Run the first N of them that three emulated guests can carry in QEMU guests, into a file of
    /// their own
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["again", "paper"])]
    pub qemu: usize,
    /// Seed of the design
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// A profile of the device, instead of measuring it
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Directory of the dataset
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
}

impl BenchSweepArgs {
    pub fn options(&self) -> SweepOptions {
        SweepOptions {
            devices: self.devices.clone(),
            points: self.points,
            length: self.length,
            paper: self.paper,
            again: self.again,
            qemu: self.qemu,
            seed: self.seed,
            profile: self.profile.clone(),
            out: self.out.clone(),
        }
    }
}
