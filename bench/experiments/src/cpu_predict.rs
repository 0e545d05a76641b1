//! Predictions with and without the CPU's term, against runs under CPU load.
//!
//! A QEMU guest reads from a twin at a rate, with a target and under a load of other programs on
//! the CPUs, all drawn from the seed. Each is predicted as `predict` does, then run as `verify`
//! does; no prediction is learned from these runs. A prediction counts where it says *holds*.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use rtvirtio_blame::CauseKind;
use rtvirtio_harness::BENCH_DIR;
use rtvirtio_measure::{HostFacts, Verdict};
use rtvirtio_model::{ModelKind, Profile};
use rtvirtio_planner::{Placements, TaskOutlook};
use rtvirtio_spec::HostSpec;
use rtvirtio_stats::Random;
use rtvirtio_testbed::{AccelChoice, LabHost};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::model_choice::ModelChoice;
use rtvirtio_workflow::plan::outlook;
use rtvirtio_workflow::profile::{Access, of_site};
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Progress, cpu_room, generated, run};
use serde::{Deserialize, Serialize};

use crate::before_after::RemoveOnDrop;
use crate::busy::Busy;
use crate::claims::Claim;
use crate::experiment::{Experiment, from_one};
use crate::page::Section;
use crate::page::claims::text as claims_text;
use crate::page::xy::table;
use crate::report::{ExperimentReport, read, write};
use crate::saved::Saved as _;

/// Time of the device's profile.
const PROFILE_TIME: Duration = Duration::from_secs(24);
/// Time for CPU load to settle, and for a run's requests to leave the device.
const SETTLE: Duration = Duration::from_millis(500);
/// Bounds of rates, 1/s, and of targets, ms: logarithms are uniform between them.
const RATES: [f64; 2] = [100.0, 2_000.0];
const TARGETS: [f64; 2] = [3.0, 200.0];
/// Most CPUs that other programs use.
const MOST_LOAD: f64 = 2.0;
/// Least share of targets said to hold that do.
const HELD: f64 = 0.99;

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct CpuPredictOptions {
    /// Emulated device.
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Runs in all; those that the file has are kept.
    #[arg(long, value_name = "N", default_value_t = 80, value_parser = from_one())]
    pub runs: usize,
    /// Length of each run.
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Seed of rates, targets and loads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// A run with its predictions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuPredictRun {
    /// CPUs that other programs ask for.
    pub load: f64,
    /// Declared rate, 1/s.
    pub rate: f64,
    /// Prediction, with the target and the CPU's term.
    pub predicted: TaskOutlook,
    /// Verdict of the run; `None` where it has none.
    pub verdict: Option<Verdict>,
    /// 99th percentile, as measured.
    pub p99_ns: Nanos,
    /// Causes of a missed target that were seen, the first one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<CauseKind>,
    /// Reason of a run without a result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl CpuPredictRun {
    /// Whether the prediction says *holds*, with the CPU's term or without it.
    fn holds(&self, with_cpu: bool) -> bool {
        let without =
            || TaskOutlook { cpu: None, cpu_wait: None, cpu_unknown: None, ..self.predicted.clone() };
        if with_cpu { self.predicted.holds() } else { without().holds() }
    }
}

/// Runs and their conditions, as saved in [`Experiment::FILE`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuPredictData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last run, and version of the program.
    pub generated: String,
    /// Profile that all predictions rest on.
    pub profile: Profile,
    /// Runs in the order of the seed.
    pub runs: Vec<CpuPredictRun>,
}

/// Load, rate and target in ms of each run.
fn draw(runs: usize, seed: u64) -> Vec<(f64, f64, f64)> {
    let mut random = Random::new(seed);
    let log = |unit: f64, [from, to]: [f64; 2]| from * (to / from).powf(unit);
    let one = |_| {
        let load = random.unit() * MOST_LOAD;
        (load, log(random.unit(), RATES).round(), log(random.unit(), TARGETS))
    };
    (0..runs).map(one).collect()
}

fn spec_text(device: &str, rate: f64, target_ms: f64) -> anyhow::Result<String> {
    let twin = device.strip_prefix("twin:").context("the device of this experiment is a twin: twin:NAME")?;
    let target_us = (target_ms * 1e3) as u64;
    Ok(format!(
        "[device]\ntwin = {twin:?}\nsize = \"512MiB\"\n[[vm]]\nname = \"reader\"\nlab = \"qemu\"\n\
         [[vm.task]]\nname = \"paced\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"{rate}/s\"\n\
         target = {{ percentile = \"p99\", latency = \"{target_us}us\" }}\n"
    ))
}

/// Runs what a file lacks; it is written after each run.
///
/// # Errors
/// A device that is no twin, a file of another command, no profile, and cancellation.
pub fn measure(
    options: &CpuPredictOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let command = format!(
        "rtvirtio-bench cpu-predict {} --seed {} --runs {} --for {}",
        options.device, options.seed, options.runs, options.length
    );
    let mut saved = if path.try_exists()? { Some(read::<CpuPredictData>(path)?) } else { None };
    ensure!(
        saved.as_ref().is_none_or(|data| data.command == command),
        "{} is of another command: choose another --out",
        path.display()
    );
    let text = spec_text(&options.device, RATES[0], TARGETS[1])?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let _lock = labs.dirs.lock_vms()?;
    let labs = labs.below(BENCH_DIR);
    labs.remove()?;
    let _guard = RemoveOnDrop(&labs);
    let spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
    labs.up(&spec, (BENCH_DIR, &text), AccelChoice::Auto, None, progress)?;
    let mut data = match saved.take() {
        Some(data) => data,
        None => {
            let site = Site::find(spec, &labs.dirs)?;
            let profile = of_site(&site, Access::Reads, PROFILE_TIME, &labs.dirs, progress)?;
            let mut host = site.facts();
            // A loop device's number changes with each run.
            host.device = format!("{} (emulated)", options.device.replace(':', " "));
            let schema = CpuPredictData::SCHEMA.to_owned();
            CpuPredictData { schema, host, command, generated: generated(), profile, runs: Vec::new() }
        }
    };
    let drawn = draw(options.runs, options.seed);
    for (done, (load, rate, target_ms)) in drawn.into_iter().enumerate().skip(data.runs.len()) {
        progress.check_cancelled()?;
        let text = spec_text(&options.device, rate, target_ms)?;
        let run = measure_run(&text, (load, rate), options.length, &data.profile, &labs, progress)?;
        progress.step(&format!("{} of {}, {}", done + 1, options.runs, line(&run)));
        data.runs.push(run);
        data.generated = generated();
        write(path, &data)?;
    }
    labs.remove()?;
    Ok(())
}

fn measure_run(
    text: &str,
    (load, rate): (f64, f64),
    length: Nanos,
    profile: &Profile,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<CpuPredictRun> {
    let host = HostSpec::parse(BENCH_DIR, text)?;
    let site = Site::find(host.single()?.clone(), &labs.dirs)?;
    let _busy = Busy::start(load)?;
    progress.pause(SETTLE)?;
    let choice = ModelChoice::formula(ModelKind::Slice);
    let mut tasks = outlook(&site.spec, profile, &choice, &site.config()?, &Placements::default())?;
    let cpu = cpu_room::measure(&host, [(&site.spec, profile)].into_iter(), &labs.dirs, progress)?;
    cpu.add_to(&mut tasks, &site.spec);
    let mut predicted = tasks.pop().context("a task")?;
    // Nothing reads them, and the file is two thirds smaller.
    predicted.forecast.terms.clear();
    let length = Duration::from_nanos(length.0);
    let run = run::measure(&site, "cpu-predict", length, &[None], &labs.dirs, progress);
    progress.check_cancelled()?;
    let (verdict, p99_ns, causes) = (None, Nanos(0), Vec::new());
    let blank = CpuPredictRun { load, rate, predicted, verdict, p99_ns, causes, failed: None };
    Ok(match run {
        Ok(run) => match run.tasks.first() {
            Some(of) => {
                let causes = of.causes.iter().flatten().map(|cause| cause.kind).collect();
                CpuPredictRun { verdict: of.verdict, p99_ns: of.p99_ns, causes, ..blank }
            }
            None => CpuPredictRun { failed: Some("the run has no task".to_owned()), ..blank },
        },
        Err(e) => CpuPredictRun { failed: Some(format!("{e:#}")), ..blank },
    })
}

fn line(run: &CpuPredictRun) -> String {
    let word = |holds: bool| if holds { "holds" } else { "not said to hold" };
    format!(
        "load {:.2}, {}/s, target {}: {} without the CPU's term, {} with it; {:?}, p99 {} {:?}{}",
        run.load,
        run.rate,
        run.predicted.target_ns.unwrap_or_default(),
        word(run.holds(false)),
        word(run.holds(true)),
        run.verdict,
        run.p99_ns,
        run.causes,
        run.failed.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
    )
}

/// Targets said to hold that did, and all said to hold, of the runs with a verdict.
fn held(runs: &[CpuPredictRun], with_cpu: bool) -> (usize, usize) {
    let said = runs.iter().filter(|run| is_judged(run) && run.holds(with_cpu));
    let met = said.clone().filter(|run| run.verdict == Some(Verdict::Met)).count();
    (met, said.count())
}

/// Targets said to hold that did, without runs whose first cause is that the host stood still.
fn but_for_host(runs: &[CpuPredictRun]) -> (usize, usize) {
    let is_of_host =
        |run: &&CpuPredictRun| matches!(run.causes.first(), Some(CauseKind::HostStall | CauseKind::CpuSteal));
    let left: Vec<_> = runs.iter().filter(|run| !is_of_host(run)).cloned().collect();
    held(&left, true)
}

/// Whether a run shows if its target was met.
fn is_judged(run: &CpuPredictRun) -> bool {
    matches!(run.verdict, Some(Verdict::Met | Verdict::Missed))
}

fn share((part, all): (usize, usize)) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

/// Claims of the runs.
#[must_use]
pub fn claims(data: &CpuPredictData) -> Vec<Claim> {
    let (with, without) = (held(&data.runs, true), held(&data.runs, false));
    let judged: Vec<_> = data.runs.iter().filter(|run| is_judged(run)).cloned().collect();
    let met = judged.iter().filter(|run| run.verdict == Some(Verdict::Met)).count();
    let claim = |id: &str, what: &str, of: (usize, usize)| Claim::new(id, what, share(of), "share", of.1);
    vec![
        claim(
            "cpu.predict.held",
            "targets said to hold that did, with the CPU's term, under CPU load of 0 to 200 %",
            with,
        )
        .at_least(HELD),
        claim(
            "cpu.predict.held.but_for_host",
            "the same without those missed while the host stood still",
            but_for_host(&data.runs),
        ),
        claim("cpu.predict.held.without", "the same runs without the CPU's term", without),
        claim("cpu.predict.said", "targets met that were said to hold, with the CPU's term", (with.0, met)),
        claim("cpu.predict.judged", "runs whose target was met or missed", (judged.len(), data.runs.len())),
    ]
}

impl Experiment for CpuPredictData {
    const FORM: &str = "rtvirtio-cpu-predict/1";
    const FILE: &str = "cpu-predict.json";
    const TITLE: &str = "rtvirtio: predictions under CPU load";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!("{}: {} runs; {}.", self.host.device, self.runs.len(), self.command);
        let claims = claims(self);
        let word = |holds: bool| if holds { "holds" } else { "-" }.to_owned();
        let row = |run: &CpuPredictRun| {
            vec![
                format!("{:.2}", run.load),
                run.rate.to_string(),
                run.predicted.target_ns.unwrap_or_default().to_string(),
                word(run.holds(false)),
                word(run.holds(true)),
                run.verdict.map_or_else(|| "no result".to_owned(), |of| format!("{of:?}").to_lowercase()),
                run.p99_ns.to_string(),
            ]
        };
        let head = ["CPUs of others", "rate, 1/s", "target", "disk alone", "with CPU", "verdict", "p99"];
        let section = Section {
            title: "Predictions and runs".to_owned(),
            text: vec![
                "Runs without a verdict, or with too few requests for one, are in no share.".to_owned(),
            ],
            plots: Vec::new(),
            tables: vec![table("runs", &head, self.runs.iter().map(row).collect())],
        };
        let text = claims_text(&claims);
        let of = ExperimentReport::of_data(self, self.host.clone(), claims, lead, vec![section])?;
        Ok(ExperimentReport { text, ..of })
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Forecast;
    use rtvirtio_planner::CpuRoom;
    use rtvirtio_units::Percentile;

    use super::*;

    #[test]
    fn draws_are_specs_and_last_with_the_seed() {
        let drawn = draw(60, 1);
        assert_eq!((&drawn[..5], draw(60, 2) == drawn), (&draw(5, 1)[..], false));
        for (load, rate, target) in drawn {
            assert!((0.0..=MOST_LOAD).contains(&load));
            HostSpec::parse("x", &spec_text("twin:emmc", rate, target).unwrap()).unwrap();
        }
        assert!(spec_text("file:/x", 1.0, 1.0).is_err());
    }

    #[test]
    fn only_what_is_said_to_hold_counts() {
        let run = |margin_ns: i64, free: f64, verdict| CpuPredictRun {
            load: 1.0,
            rate: 100.0,
            predicted: TaskOutlook {
                vm: "reader".to_owned(),
                task: "paced".to_owned(),
                percentile: Percentile(99.0),
                target_ns: Some(Nanos(9)),
                forecast: Forecast { latency_ns: Nanos(1), rate_kept: 1.0, terms: Vec::new(), upper: None },
                margin_ns: Some(margin_ns),
                cpu: Some(CpuRoom {
                    cpus: 2,
                    needed: 0.5,
                    free,
                    rate: 100.0,
                    each_ns: Nanos(1),
                    margin: 1.2,
                }),
                cpu_wait: None,
                cpu_unknown: None,
                not_predicted: None,
            },
            verdict,
            p99_ns: Nanos(1),
            causes: Vec::new(),
            failed: None,
        };
        let (met, missed) = (Some(Verdict::Met), Some(Verdict::Missed));
        let unproven = Some(Verdict::Unproven);
        let runs = [
            run(1, 1.0, met),
            run(1, 0.1, missed),
            run(-1, 1.0, missed),
            run(1, 1.0, unproven),
            run(1, 1.0, None),
        ];
        assert_eq!((held(&runs, true), held(&runs, false)), ((1, 1), (1, 2)));
    }
}
