//! `rtvirtio bench sweep`: the dataset.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_bench::dataset::{DATASET_SCHEMA, Dataset, Header, Point, Recorder};
use rtvirtio_bench::design::{Limits, MAX_VMS, conditions};
use rtvirtio_bench::run::{self, Job, disturbed};
use rtvirtio_bench::stage::Treatment;

use super::bed::{Bed, twin_name};
use crate::args::{BenchSweepArgs, Global};
use crate::cmd::need_root;
use crate::cmd::verify::generated;
use crate::site;
use crate::ui::{Cancelled, Ui};

/// Tries per point when the host is not quiet.
const TRIES: u32 = 2;

/// `rtvirtio bench sweep`.
pub fn run(args: &BenchSweepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("bench sweep")?;
    let _lock = site::lock(global)?;
    for device in &args.devices {
        on_device(args, twin_name(device), global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn on_device(args: &BenchSweepArgs, device: &str, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let bed = Bed::twin(device, MAX_VMS + 1, global, ui)?;
    let path = args.out.join(format!("{device}.jsonl"));
    std::fs::create_dir_all(&args.out)?;
    let profiles = if path.exists() {
        Dataset::load(&path).map(|d| d.header.profiles).unwrap_or_default()
    } else {
        BTreeMap::new()
    };
    let profiles = if profiles.contains_key(device) {
        profiles
    } else {
        BTreeMap::from([(device.to_owned(), bed.profile()?)])
    };
    let header = Header {
        schema: DATASET_SCHEMA.to_owned(),
        host: bed.facts(),
        command: format!("rtvirtio bench sweep twin:{device} --points {} --seed {}", args.points, args.seed),
        generated: generated(),
        profiles,
    };
    let (mut recorder, old) = Recorder::open(&path, &header)?;
    let (elevators, cost) = (bed.elevators()?, bed.cost()?);
    let design =
        conditions(args.points, &Limits { elevators: &elevators, writes: true, cost: &cost }, args.seed);
    let stage = bed.stage()?;
    let mut bar = ui.bar(&format!("{device}: {} points", args.points), args.points as u64);
    let mut noisy = 0;
    for (i, condition) in design.iter().enumerate() {
        bar.set(i as u64);
        let id = format!("{device}/{}/{i}", args.seed);
        if old.iter().any(|p: &Point| p.id == id) {
            continue;
        }
        let job = Job {
            id,
            device,
            spec_device: &bed.spec_device,
            scheme: "sweep",
            treatment: Treatment::knobs(condition.knobs.config()),
            vms: &condition.vms,
            length: Duration::from_nanos(args.length.0),
            seed: args.seed.wrapping_mul(1_000_003).wrapping_add(i as u64),
            tries: TRIES,
        };
        let point = match run::measure(&job, &stage, ui.cancel_flag(), &mut |_| {}) {
            Ok(point) => point,
            Err(e) if e.is_cancelled() => {
                ui.step(&format!("{i} points are in {}; the same command goes on", path.display()));
                return Err(Cancelled.into());
            }
            Err(e) => return Err(e.into()),
        };
        noisy += usize::from(disturbed(&point));
        recorder.add(&point)?;
    }
    drop(bar);
    if noisy > 0 {
        ui.warn(&format!(
            "{noisy} points were measured while the host itself stood still; they are marked by their noise"
        ));
    }
    drop(stage);
    bed.remove()
}
