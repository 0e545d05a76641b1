//! Targets against the neighbours' rate.

use clap::Args;
use rtvirtio_units::Ratio;

/// What a search weighs targets against.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarginArg {
    /// Hold VMs without targets down until predictions are this far below the targets, %; more is not worth it. Less
    /// leaves these VMs more. The slice model always keeps 20; without the option it is 75, 25 for upper bounds, and 50
    /// for VMs whose own targets are given up
    #[arg(id = "margin", long = "margin", value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=99))]
    percent: Option<u8>,
}

impl MarginArg {
    /// As the planner takes it.
    pub fn enough(self) -> Option<Ratio> {
        self.percent.map(|percent| Ratio(f64::from(percent) / 100.0))
    }

    /// The option as it was given.
    pub fn option(self) -> Option<String> {
        self.percent.map(|percent| format!("--margin {percent}"))
    }
}
