//! Runs with planted causes, on a lab of one VM with a target and one neighbour.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rtvirtio_harness::BENCH_DIR;
use rtvirtio_kernel::Root;
use rtvirtio_measure::{Run, TaskResult, Verdict};
use rtvirtio_testbed::{AccelChoice, LabHost, vm_cgroup};
use rtvirtio_workflow::leftovers::LAB_FILE;
use rtvirtio_workflow::run::measure_loads;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Dirs, Progress, generated};

use super::paging::{MemoryGroup, SWAP_FILE};
use super::plant::{Kind, PlantedCause, draw};
use super::spec::{VM, rate_of, spec_text, vm_name};
use super::undo::{Target, Undo, has_cpu_groups, plant};
use super::{BlameData, BlameOptions, BlameRun, matrix};
use crate::before_after::RemoveOnDrop;
use crate::report::{read, write};
use crate::saved::Saved as _;

/// Time for requests of a run to leave the device before the next.
const SETTLE: Duration = Duration::from_millis(500);
/// Runs without a result in a row after which the experiment ends.
const FAILURES: usize = 3;

/// Runs all rounds. The result is written to `path` after each run; a measurement of the same seed,
/// VM and host goes on where its file ends.
///
/// # Errors
/// A device that is no twin, a kind that does not fit the VM, a cause that cannot be undone, three
/// runs without a result in a row, and cancellation.
pub fn measure(
    options: &BlameOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let unfit = options.only.iter().find(|kind| !kind.fits(options.vm));
    ensure!(unfit.is_none(), "--only {}: needs --vm qemu", unfit.map_or("", |kind| kind.name()));
    let text = spec_text(&options.device, options.vm)?;
    let spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let _lock = labs.dirs.lock_vms()?;
    let labs = labs.below(BENCH_DIR);
    labs.remove()?;
    // Before the lab, whose guests begin in the group, and gone after it.
    let (kinds, memory) = kinds(options, &labs, progress)?;
    let _guard = RemoveOnDrop(&labs);
    let lab = labs.up(&spec, (BENCH_DIR, &text), AccelChoice::Auto, None, progress)?;
    let site = Site::find(spec, &labs.dirs)?;
    let target = Target { site: &site, lab: &lab, memory: memory.as_ref() };
    let measured = rounds(options, &kinds, &target, path, &labs.dirs, progress);
    labs.remove()?;
    measured
}

fn rounds(
    options: &BlameOptions,
    kinds: &[Kind],
    target: &Target<'_>,
    path: &Path,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut data = begin(options, target);
    let runs = draw(kinds, options.rounds, options.seed);
    let total = runs.len();
    let (before, mut failures) = (path.exists().then(|| read::<BlameData>(path)).transpose()?, 0);
    if let Some(before) = before.filter(|before| goes_on(before, &data, &runs)) {
        progress.step(&format!("{} of {total} runs are in {}", before.runs.len(), path.display()));
        data.runs = before.runs;
    }
    for (done, planted) in runs.into_iter().enumerate().skip(data.runs.len()) {
        progress.check_cancelled()?;
        let run = measure_run(options, planted, target, dirs, progress)?;
        progress.step(&format!("{} of {total}, {}", done + 1, line(&run)));
        failures = if run.failed.is_some() { failures + 1 } else { 0 };
        data.runs.push(run);
        data.matrix = matrix(&data.runs);
        data.generated = generated();
        write(path, &data)?;
        ensure!(failures < FAILURES, "{FAILURES} runs in a row have no result");
        progress.pause(SETTLE)?;
    }
    Ok(())
}

/// Whether runs of an earlier measurement are the first ones of these.
pub(super) fn goes_on(before: &BlameData, now: &BlameData, drawn: &[Vec<PlantedCause>]) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let is_same = |(a, b): (&PlantedCause, &PlantedCause)| {
        a.kind == b.kind && near(a.strength, b.strength) && near(a.form, b.form)
    };
    let are_same = |(run, drawn): (&BlameRun, &Vec<PlantedCause>)| {
        run.planted.len() == drawn.len() && run.planted.iter().zip(drawn).all(is_same)
    };
    let of = |data: &BlameData| (data.host.clone(), data.vm.clone(), data.seed);
    of(before) == of(now)
        && near(before.seconds, now.seconds)
        && before.runs.len() <= drawn.len()
        && before.runs.iter().zip(drawn).all(are_same)
}

/// Kinds that are named, or all that can be planted here, and the group of the VM's memory where it
/// is to be paged.
fn kinds(
    options: &BlameOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<(Vec<Kind>, Option<MemoryGroup>)> {
    let is_named = !options.only.is_empty();
    let mut all = options.only.clone();
    if !is_named {
        all.extend(Kind::ALL.into_iter().filter(|kind| kind.fits(options.vm)));
        if !has_cpu_groups() {
            progress.warn("cpu_others and cpu_quota are left out: they are planted by cgroup v1 only");
            all.retain(|kind| !matches!(kind, Kind::CpuOthers | Kind::CpuQuota));
        }
    }
    if !all.contains(&Kind::Paging) {
        return Ok((all, None));
    }
    let swap = labs.cache_dir.join(SWAP_FILE);
    match MemoryGroup::make(&vm_cgroup(VM), &swap, &labs.dirs.run.join(LAB_FILE)) {
        Ok(group) => Ok((all, Some(group))),
        Err(e) if is_named => Err(e.context("--only paging: it cannot be planted here")),
        Err(e) => {
            progress.warn(&format!("paging is left out: it cannot be planted here: {e:#}"));
            all.retain(|kind| *kind != Kind::Paging);
            Ok((all, None))
        }
    }
}

fn begin(options: &BlameOptions, target: &Target<'_>) -> BlameData {
    let mut host = target.site.facts();
    // A loop device's number changes with each run.
    host.device = format!("{} (emulated)", options.device.replace(':', " "));
    let only: Vec<&str> = options.only.iter().map(|kind| kind.name()).collect();
    let only = if only.is_empty() { String::new() } else { format!(" --only {}", only.join(",")) };
    let vm = vm_name(options.vm);
    BlameData {
        schema: BlameData::SCHEMA.to_owned(),
        host,
        command: format!(
            "rtvirtio-bench blame {} --vm {vm} --seed {} --runs {} --for {}{only}",
            options.device, options.seed, options.rounds, options.length
        ),
        generated: String::new(),
        vm: vm.to_owned(),
        seed: options.seed,
        seconds: options.length.as_secs_f64(),
        runs: Vec::new(),
        matrix: Vec::new(),
    }
}

/// Plants, runs, and undoes. Errors of the run itself are part of the result; those of undoing are
/// not, as the next run would have the cause as well.
fn measure_run(
    options: &BlameOptions,
    planted: Vec<PlantedCause>,
    target: &Target<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> anyhow::Result<BlameRun> {
    begin_elevator_anew(target.site)?;
    let mut loads = target.site.loads(&[])?;
    let rate = rate_of(&target.site.spec)?;
    let settings = planted.iter().map(|one| one.describe(options.vm, rate)).collect();
    let mut undos: Vec<Undo<'_>> = Vec::new();
    for what in &planted {
        let undo = plant(what, target, &mut loads);
        undos.extend(undo.with_context(|| format!("cannot plant {what}"))?);
    }
    let length = Duration::from_nanos(options.length.0);
    let run = measure_loads(target.site, loads, "planted", length, dirs, progress);
    let undone: Vec<anyhow::Result<()>> = undos.into_iter().rev().map(Undo::undo).collect();
    undone.into_iter().collect::<anyhow::Result<()>>()?;
    progress.check_cancelled()?;
    let blank = BlameRun {
        planted,
        settings,
        missed: false,
        n: 0,
        late: 0,
        p99_ns: rtvirtio_units::Nanos(0),
        named: Vec::new(),
        unread: Vec::new(),
        words: String::new(),
        failed: None,
    };
    Ok(match run.map_err(anyhow::Error::from).and_then(|run| victim(&run).cloned()) {
        Ok(result) => of_result(blank, &result),
        Err(e) => BlameRun { failed: Some(format!("{e:#}")), ..blank },
    })
}

/// Switches the device's elevator off and on: BFQ keeps what it learned of a device while that was
/// slow, and serves the next run's flood hardly at all.
fn begin_elevator_anew(site: &Site) -> anyhow::Result<()> {
    let (root, device) = (Root::default(), &site.stack.device);
    let elevator = device.elevators(&root)?.current;
    device.set_elevator(&root, "none")?;
    Ok(device.set_elevator(&root, &elevator)?)
}

fn victim(run: &Run) -> anyhow::Result<&TaskResult> {
    run.tasks.iter().find(|task| task.vm == VM && task.verdict.is_some()).context("the run has no verdict")
}

fn of_result(blank: BlameRun, result: &TaskResult) -> BlameRun {
    let missed = result.verdict == Some(Verdict::Missed);
    let run = BlameRun {
        missed,
        n: result.n,
        late: result.exceedances,
        p99_ns: result.p99_ns,
        unread: result.causes_unread.clone(),
        ..blank
    };
    match (&result.causes, missed) {
        (Some(causes), true) => BlameRun {
            named: causes.iter().map(|cause| cause.kind).collect(),
            words: rtvirtio_blame::describe(causes, &result.causes_unread),
            ..run
        },
        (None, true) => BlameRun { failed: Some("no cause was looked for".to_owned()), ..run },
        (_, false) => run,
    }
}

fn line(run: &BlameRun) -> String {
    let label: Vec<String> =
        run.planted.iter().zip(&run.settings).map(|(one, set)| format!("{one} ({set})")).collect();
    let outcome = match (&run.failed, run.missed) {
        (Some(why), _) => format!("no result: {why}"),
        (None, false) => format!("not missed, p99 {}", run.p99_ns),
        (None, true) => format!("{:?}, p99 {}: {}", run.answer(), run.p99_ns, run.words),
    };
    format!("{}: {outcome}", label.join(" + "))
}
