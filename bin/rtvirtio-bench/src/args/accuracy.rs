//! `rtvirtio-bench accuracy`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::accuracy::AccuracyOptions;
use rtvirtio_experiments::accuracy::judge::FOLDS;

/// `rtvirtio-bench accuracy`.
#[derive(Args, Debug)]
pub struct BenchAccuracyArgs {
    /// Dataset of one device, as `rtvirtio-bench sweep` writes it
    #[arg(value_name = "FILE.jsonl", required = true)]
    pub data: Vec<PathBuf>,
    /// Parts that the runs are split into: each is judged by models fitted on the others
    #[arg(long, default_value_t = FOLDS as u64, value_parser = clap::value_parser!(u64).range(2..=100))]
    pub folds: u64,
    /// Confidence of the upper bound, %: a lower one needs fewer runs (120 for 99, 24 for 95, 12
    /// for 90)
    #[arg(long, value_name = "PERCENT", default_value_t = 99, value_parser = clap::value_parser!(u8).range(60..=99))]
    pub confidence: u8,
    /// Seed of the split
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Judge on these runs in QEMU guests too, as `rtvirtio-bench sweep --qemu` writes them, by
    /// models without and with others of them; the model that is saved learns from all of them
    #[arg(long, value_name = "FILE.jsonl")]
    pub guests: Option<PathBuf>,
    /// Save a model fitted on all runs here
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl BenchAccuracyArgs {
    pub fn options(&self) -> AccuracyOptions<'_> {
        AccuracyOptions {
            folds: self.folds as usize,
            seed: self.seed,
            miss: 1.0 - f64::from(self.confidence) / 100.0,
            guests: self.guests.as_deref(),
            model: self.model.as_deref(),
        }
    }
}
