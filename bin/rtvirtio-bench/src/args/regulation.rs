//! `rtvirtio-bench regulation`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use rtvirtio_experiments::regulation::planned::PlannedOptions;
use rtvirtio_experiments::regulation::{Beside, RATES, ROUNDS, RegulationOptions, TOP};
use rtvirtio_traffic::Direction;
use rtvirtio_units::Nanos;

use super::BenchResult;

/// Time of a point.
const DEFAULT: Nanos = Nanos::from_millis(80_000);
const QUICK: Nanos = Nanos::from_millis(500);
/// Longest run of `--only plan`.
const PLANNED: Nanos = Nanos::from_millis(5_000);
const DEVICE: &str = "twin:qlc-nvme";

/// `rtvirtio-bench regulation`.
#[derive(Args, Debug)]
pub struct BenchRegulationArgs {
    /// Points of 0.5 s, one round: about two minutes in all
    #[arg(long, conflicts_with_all = ["length", "repeat"])]
    pub quick: bool,
    /// Longest time of a point, which has ten thousand units where its rate gives them in time
    #[arg(long = "for", value_name = "TIME", default_value = "80s")]
    pub length: Nanos,
    /// The largest rate, in requests or frames per second; each other is half of the one before
    #[arg(long, value_name = "N", default_value_t = TOP)]
    pub top: u64,
    /// Number of rates
    #[arg(long, value_name = "N", default_value_t = RATES)]
    pub rates: u32,
    /// Measurements of a victim at each rate of its neighbour
    #[arg(long, value_name = "N", default_value_t = ROUNDS, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeat: u32,
    /// Only this direction; once for each
    #[arg(long = "flow", value_enum, value_name = "NAME")]
    pub flows: Vec<FlowName>,
    /// Load next to the flow, repeatable; `none` and `memory` without this option
    #[arg(long = "load", value_enum, value_name = "NAME")]
    pub loads: Vec<Beside>,
    /// Measure only the points of these loads and put them to the saved result
    #[arg(long, requires = "loads", conflicts_with_all = ["quick", "report_only"])]
    pub add: bool,
    /// Measure a part of it, into a result of its own
    #[arg(
        long,
        value_enum,
        value_name = "PART",
        conflicts_with_all = ["top", "rates", "flows", "loads", "add", "svg", "curve"]
    )]
    pub only: Option<PartName>,
    /// The emulated device of `--only plan`
    #[arg(long, value_name = "twin:NAME", default_value = DEVICE, requires = "only")]
    pub device: String,
    /// Write the figures as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Write the victim's curve for `rtvirtio plan --traffic --curve`
    #[arg(long, value_name = "FILE")]
    pub curve: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

/// Parts that are measured by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PartName {
    /// A victim next to the limits that `plan --traffic` chooses: about 6 minutes, with `--quick` 2
    Plan,
}

/// Directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FlowName {
    /// Reads of a disk
    Read,
    /// Writes of a disk
    Write,
    /// Frames to a VM
    Rx,
    /// Frames from a VM
    Tx,
}

impl From<FlowName> for Direction {
    fn from(name: FlowName) -> Self {
        match name {
            FlowName::Read => Self::Read,
            FlowName::Write => Self::Write,
            FlowName::Rx => Self::Rx,
            FlowName::Tx => Self::Tx,
        }
    }
}

impl BenchRegulationArgs {
    pub fn options(&self) -> RegulationOptions {
        let flows: Vec<Direction> = self.flows.iter().map(|flow| (*flow).into()).collect();
        let mut words = if self.quick { " --quick".to_owned() } else { String::new() };
        if !self.quick && self.length != DEFAULT {
            words += &format!(" --for {}", self.length);
        }
        for (option, value, default) in [
            ("top", self.top, TOP),
            ("rates", self.rates.into(), u64::from(RATES)),
            ("repeat", self.repeat.into(), u64::from(ROUNDS)),
        ] {
            if value != default {
                words += &format!(" --{option} {value}");
            }
        }
        let mut loads = self.loads.clone();
        loads.sort_unstable();
        loads.dedup();
        for name in self.loads.iter().filter_map(ValueEnum::to_possible_value) {
            words += &format!(" --load {}", name.get_name());
        }
        if self.add {
            words += " --add";
        }
        if loads.is_empty() {
            loads = Beside::USUAL.to_vec();
        }
        words.extend(flows.iter().map(|flow| format!(" --flow {}", flow.name())));
        let longest = if self.quick { QUICK } else { self.length };
        RegulationOptions {
            longest: Duration::from_nanos(longest.0),
            top: self.top,
            rates: self.rates,
            rounds: if self.quick { 1 } else { self.repeat },
            words,
            flows,
            loads,
        }
    }

    /// Options of a run with `--only plan`.
    pub fn planned(&self) -> PlannedOptions {
        let length = if self.quick { QUICK } else { self.length.min(PLANNED) };
        let mut words = if self.quick { " --quick".to_owned() } else { String::new() };
        if !self.quick && length != PLANNED {
            words += &format!(" --for {length}");
        }
        if self.repeat != ROUNDS {
            words += &format!(" --repeat {}", self.repeat);
        }
        if self.device != DEVICE {
            words += &format!(" --device {}", self.device);
        }
        PlannedOptions {
            device: self.device.clone(),
            length: Duration::from_nanos(length.0),
            rounds: if self.quick { 1 } else { self.repeat },
            words,
        }
    }
}
