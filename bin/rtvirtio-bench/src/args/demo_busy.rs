//! `rtvirtio-bench demo-busy`.

use clap::Args;
use rtvirtio_console::Global;
use rtvirtio_experiments::demo_busy::DemoBusyOptions;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// Most CPUs that the load asks for.
const MOST_LOAD: f64 = 1024.0;

/// `rtvirtio-bench demo-busy`.
#[derive(Args, Debug)]
pub struct BenchDemoBusyArgs {
    /// Demos in all; those that the file has are kept
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
    /// CPUs that other programs ask for, of one demo after the other; repeated from the first
    #[arg(long, value_name = "CPUS,...", default_value = "4,0.5", value_delimiter = ',')]
    pub load: Vec<f64>,
    /// Length of each of a demo's two measurements
    #[arg(long = "for", value_name = "TIME", default_value = "40s")]
    pub length: Nanos,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchDemoBusyArgs {
    /// For the experiment.
    pub fn options(&self, global: &Global) -> std::io::Result<DemoBusyOptions> {
        Ok(DemoBusyOptions {
            lab: std::env::current_exe()?.with_file_name("rtvirtio-lab"),
            runs: usize::from(self.runs),
            loads: self.load.iter().map(|load| load.clamp(0.0, MOST_LOAD)).collect(),
            length: self.length,
            global: super::directories(global),
        })
    }
}
