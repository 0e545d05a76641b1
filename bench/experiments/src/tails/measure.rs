//! Long runs cut into pieces.

use std::path::Path;
use std::time::Duration;

use super::{LongRun, Setup, TailsData, TaskTails, setups};
use anyhow::{Context, ensure};
use clap::Args;
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_learn::load::spec;
use rtvirtio_learn::stage::{RunPlan, Stage, Treatment};
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;

use crate::report::write;
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_testbed::LabHost;
use rtvirtio_workflow::{Progress, generated};

/// Shortest piece; shorter ones have too few requests.
const LEAST_PIECE: Nanos = Nanos(100_000_000);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct TailsOptions {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards.
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Length of each of the four runs: 100 requests a second show their p99.99 in five minutes.
    #[arg(long = "for", value_name = "TIME", default_value = "6min")]
    pub length: Nanos,
    /// Length of a piece: with 10000 requests and more it needs no estimate.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub piece: Nanos,
}

/// Measures all set-ups. The result is written to `path` after each run.
///
/// # Errors
/// A piece out of range, a device that cannot be made, and cancellation.
pub fn measure(
    options: &TailsOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    ensure!(
        (LEAST_PIECE..=options.length).contains(&options.piece),
        "--piece {}: from {LEAST_PIECE} to --for {}",
        options.piece,
        options.length
    );
    let _lock = labs.dirs.lock_vms()?;
    let bed = TestBed::make(&options.device, MAX_VMS, LabKind::Process, labs, progress)?;
    let measured = measure_on(options, &bed, path, progress);
    bed.remove()?;
    measured
}

fn measure_on(
    options: &TailsOptions,
    bed: &TestBed<'_>,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut data = TailsData {
        schema: TailsData::SCHEMA.to_owned(),
        host: bed.facts(),
        command: format!(
            "rtvirtio-bench tails {} --for {} --piece {}",
            options.device, options.length, options.piece
        ),
        generated: String::new(),
        seconds: options.length.as_secs_f64(),
        piece_ns: options.piece,
        runs: Vec::new(),
    };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let stage = bed.stage()?;
    let all = setups();
    let mut bar = progress.bar("set-ups", all.len() as u64);
    for (done, setup) in all.iter().enumerate() {
        bar.set_message(setup.name);
        data.runs.push(long_run(setup, &stage, bed, options, progress)?);
        data.generated = generated();
        write(path, &data)?;
        bar.set(done as u64 + 1);
    }
    Ok(())
}

fn long_run(
    setup: &Setup,
    stage: &Stage<'_>,
    bed: &TestBed<'_>,
    options: &TailsOptions,
    progress: &dyn Progress,
) -> anyhow::Result<LongRun> {
    let spec = spec(&setup.vms, bed.device.spec.clone(), LabKind::Process);
    let length = Duration::from_nanos(options.length.0);
    let plan = RunPlan { length, seed: 1, cancel: progress.cancel_flag() };
    let run = stage.run(&spec, &Treatment::knobs(setup.knobs.config()), plan)?;
    let (mut tasks, mut left_out) = (Vec::new(), 0);
    for task in &run.tasks {
        let Some(rate) = task.result.declared_rate else { continue };
        // The series lacks requests that were never sent; the histogram has them.
        let all_sent = task.latencies.n() == task.series.len() as u64;
        let cut = || TaskTails::cut(rate, &task.series, options.piece);
        match all_sent.then(cut).flatten() {
            Some(tails) => tasks.push(tails),
            None => left_out += 1,
        }
    }
    if left_out > 0 {
        progress.warn(&format!(
            "{}: p99.99 of {left_out} tasks is not known even of the whole run (too few requests, or some never made): they are left out",
            setup.name
        ));
    }
    Ok(LongRun { setup: setup.name.to_owned(), noise: run.noise.unwrap_or_default(), tasks, left_out })
}
