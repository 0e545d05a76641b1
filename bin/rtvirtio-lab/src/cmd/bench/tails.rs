//! `rtvirtio-lab bench tails`: long runs cut into pieces, to see whether estimates of a tail from few samples hold.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use rtvirtio_bench::design::MAX_VMS;
use rtvirtio_bench::load::spec;
use rtvirtio_bench::stage::{RunPlan, Stage, Treatment};
use rtvirtio_bench::tails::{LongRun, Setup, TailsData, TaskTails, claims, setups};
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;

use super::arguments;
use super::bed::Bed;
use super::found::{Found, keep, read};
use super::page;
use crate::args::BenchTailsArgs;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;

/// Where the result lies in a directory of results.
pub const FILE: &str = "tails.json";

/// Shorter pieces have a handful of requests.
const LEAST_PIECE: Nanos = Nanos(100_000_000);

/// `rtvirtio-lab bench tails`.
pub fn run(args: &BenchTailsArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        ensure!(
            (LEAST_PIECE..=args.length).contains(&args.piece),
            "--piece {}: from {LEAST_PIECE} to --for {}",
            args.piece,
            args.length
        );
        arguments::device(&args.device)?;
        arguments::result(&args.result)?;
        need_root("bench tails")?;
        let _lock = global.dirs().lock_vms()?;
        let bed = Bed::made(&args.device, MAX_VMS, LabKind::Process, global, ui)?;
        let measured = measure(args, &bed, &path, ui);
        bed.remove()?;
        measured?;
        ui.step(&format!("wrote {}", path.display()));
    }
    found(&path)?.tell("rtvirtio: tails from few samples", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: TailsData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{}: runs of {} s in pieces of {}, process VMs; {}.",
        data.host.device, data.seconds, data.piece_ns, data.command
    )];
    Ok(Found {
        text: page::tails_text(&data) + &page::table(&claims),
        sections: vec![page::tails(&data)],
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}

/// Saves to `path` after each run.
fn measure(args: &BenchTailsArgs, bed: &Bed<'_>, path: &Path, ui: &Ui) -> anyhow::Result<()> {
    let mut data = TailsData {
        schema: TailsData::SCHEMA.to_owned(),
        host: bed.facts(),
        command: format!(
            "rtvirtio-lab bench tails {} --for {} --piece {}",
            args.device, args.length, args.piece
        ),
        generated: String::new(),
        seconds: args.length.as_secs_f64(),
        piece_ns: args.piece,
        runs: Vec::new(),
    };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let stage = bed.stage()?;
    let all = setups();
    let mut bar = ui.bar("set-ups", all.len() as u64);
    for setup in &all {
        bar.say(setup.name);
        data.runs.push(long_run(setup, &stage, bed, args, ui)?);
        data.generated = generated();
        keep(path, &data)?;
        bar.step();
    }
    Ok(())
}

fn long_run(
    setup: &Setup,
    stage: &Stage<'_>,
    bed: &Bed<'_>,
    args: &BenchTailsArgs,
    ui: &Ui,
) -> anyhow::Result<LongRun> {
    let spec = spec(&setup.vms, bed.device.spec.clone(), LabKind::Process);
    let mut plan = RunPlan {
        length: Duration::from_nanos(args.length.0),
        seed: 1,
        cancel: ui.cancel_flag(),
        on_tick: &mut |_| {},
    };
    let seen = stage.run(&spec, &Treatment::knobs(setup.knobs.config()), &mut plan)?;
    let (mut tasks, mut left_out) = (Vec::new(), 0);
    for task in &seen.tasks {
        let Some(rate) = task.result.declared_rate else { continue };
        // Requests that were never made are in the histogram only.
        let all_made = task.latencies.n() == task.series.len() as u64;
        let cut = || TaskTails::cut(rate, &task.series, args.piece);
        match all_made.then(cut).flatten() {
            Some(tails) => tasks.push(tails),
            None => left_out += 1,
        }
    }
    if left_out > 0 {
        ui.warn(&format!(
            "{}: p99.99 of {left_out} tasks is not known even of the whole run (too few requests, or some never made): they are left out",
            setup.name
        ));
    }
    Ok(LongRun { setup: setup.name.to_owned(), noise: seen.noise.unwrap_or_default(), tasks, left_out })
}
