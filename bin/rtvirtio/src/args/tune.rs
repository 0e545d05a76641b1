//! `tune`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_console::{MarginArg, ModelArg};
use rtvirtio_units::Nanos;

/// `tune`.
#[derive(Args, Debug)]
pub struct TuneArgs {
    /// The spec file
    pub spec: PathBuf,
    /// Time for everything
    #[arg(long, value_name = "TIME", default_value = "10min")]
    pub budget: Nanos,
    /// Length of each trial
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Most trials
    #[arg(long, default_value_t = 15)]
    pub trials: usize,
    /// Save the settings as a plan
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Put the settings back at the end, also when all targets are met
    #[arg(long)]
    pub put_back: bool,
    /// If the device cannot carry all declared rates, tune for as many VMs as it can, the most
    /// urgent first, and limit the others
    #[arg(long)]
    pub compromise: bool,
    /// A profile file instead of the one saved for the device
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Model that chooses the first trial
    #[arg(long, value_parser = ModelArg::parser(), default_value = "auto")]
    pub model: ModelArg,
    /// Targets against the neighbours' rate.
    #[command(flatten)]
    pub margin: MarginArg,
    /// Let tasks write although the device is real: the data that they overwrite is LOST
    #[arg(long)]
    pub destroy_data: bool,
    /// Load a small object into fio inside guests with an `agent` (LD_PRELOAD), with which fio's
    /// pauses between requests end on time
    #[arg(long)]
    pub fio_preload: bool,
}
