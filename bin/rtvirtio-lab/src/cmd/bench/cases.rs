//! `rtvirtio-lab bench cases`: the paper's 24 cases and ours, all schemes side by side.

mod play;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rtvirtio_bench::cases::{CaseOptions, Tier, cases};
use rtvirtio_bench::dataset::Dataset;
use rtvirtio_bench::design::MAX_VMS;
use rtvirtio_spec::LabKind;

use super::arguments;
use super::bed::{Bed, device_name};
use crate::args::{BenchCasesArgs, TierName};
use play::Play;
pub use report::found;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::{need_root, write_file};
use rtvirtio_workflow::Progress as _;

/// What the names of its data begin with.
pub const PREFIX: &str = "cases-";

/// The scheme that measures as it goes.
pub const TUNED: &str = "tuned";

/// `rtvirtio-lab bench cases`.
pub fn run(args: &BenchCasesArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if let Some(dir) = &args.write {
        return write_specs(dir, ui);
    }
    let path = data_file(args);
    if args.runs.report_only {
        return tell(args, &Dataset::load(&path)?, ui);
    }
    arguments::of_cases(args)?;
    need_root("bench cases")?;
    let _lock = global.dirs().lock_vms()?;
    let bed = Bed::made(&args.runs.device, MAX_VMS + 1, LabKind::Process, global, ui)?;
    let played = Play::begin(args, &bed, &path, ui).and_then(|mut play| play.all());
    bed.remove()?;
    played?;
    tell(args, &Dataset::load(&path)?, ui)
}

fn tell(args: &BenchCasesArgs, data: &Dataset, ui: &Ui) -> anyhow::Result<ExitCode> {
    let title = format!("rtvirtio: cases on {}", data.header.host.device);
    found(&tiers(args), data).about(&data_name(args)).tell(&title, args.runs.html.as_deref(), ui)
}

/// The device, and what sets the loads apart.
fn data_name(args: &BenchCasesArgs) -> String {
    let writes = if args.writes { "-writes" } else { "" };
    format!("{}{writes}", device_name(&args.runs.device))
}

fn data_file(args: &BenchCasesArgs) -> PathBuf {
    args.runs.out.join(format!("{PREFIX}{}.jsonl", data_name(args)))
}

/// The tiers that are asked for.
pub fn tiers(args: &BenchCasesArgs) -> Vec<Tier> {
    let mut tiers: Vec<Tier> = args.tiers.iter().map(|t| Tier::from(*t)).collect();
    if tiers.is_empty() {
        tiers = Tier::ALL.to_vec();
    }
    tiers
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Paper => Self::Paper,
            TierName::Tight => Self::Tight,
            TierName::Strict => Self::Strict,
        }
    }
}

/// The spec files of `examples/cases`.
fn write_specs(dir: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let mut n = 0;
    for tier in Tier::ALL {
        for case in cases(tier, &CaseOptions { writes: 0.0, third_of: None }) {
            write_file(&dir.join(format!("{}.toml", case.name)), case.toml().as_bytes())?;
            n += 1;
        }
    }
    ui.step(&format!("wrote {n} specs in {}", dir.display()));
    Ok(ExitCode::SUCCESS)
}
