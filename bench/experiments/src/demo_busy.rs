//! The demo while other programs use the CPUs: is a target missed that was said to hold, and is the
//! cause of each miss named?

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_blame::CauseKind;
use rtvirtio_measure::{HostFacts, ResultFile, Verdict};
use rtvirtio_planner::Plan;
use rtvirtio_units::{Nanos, Percentile};
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::busy::Busy;
use crate::child::{self, Ended};
use crate::claims::Claim;
use crate::experiment::Experiment;
use crate::page::Section;
use crate::page::claims::text as claims_text;
use crate::page::xy::table;
use crate::report::{ExperimentReport, read, write};
use crate::saved::Saved as _;

/// Longest time of a demo; one that takes longer is ended.
const LIMIT: Duration = Duration::from_secs(900);
/// Longest time that a demo may take, s.
const PROMISED: f64 = 180.0;
/// Least share of missed targets whose cause is named.
const NAMED: f64 = 0.95;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct DemoBusyOptions {
    /// The program `rtvirtio-lab`.
    pub lab: PathBuf,
    /// Runs in all, with those that the file has.
    pub runs: usize,
    /// CPUs that other programs ask for, of one demo after the other; repeated from the first.
    pub loads: Vec<f64>,
    /// Length of each of a demo's two measurements.
    pub length: Nanos,
    /// Options of every command, such as its directories.
    pub global: Vec<String>,
}

/// A demo under load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DemoBusyRun {
    /// CPUs that other programs asked for.
    pub load: f64,
    /// Wall-clock time, s.
    pub seconds: f64,
    /// Number of targets that the demo said would hold.
    pub promised: usize,
    /// Number of these that were missed.
    pub broken: usize,
    /// Exit code of a demo with a result.
    pub exit: Option<i32>,
    /// Verdicts under the plan, with their numbers.
    pub verdicts: BTreeMap<String, usize>,
    /// First cause of each missed target (`VM/TASK PERCENTILE`) under the plan; `None` where none
    /// was seen.
    pub missed: BTreeMap<String, Option<CauseKind>>,
    /// Reason of a demo without a result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Runs and their conditions, as saved in [`Experiment::FILE`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DemoBusyData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement; `None` before the first result.
    pub host: Option<HostFacts>,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last run, and version of the program.
    pub generated: String,
    /// In the order measured.
    pub runs: Vec<DemoBusyRun>,
}

/// Runs what a file lacks; it is written after each demo.
///
/// # Errors
/// A file of another command, a demo that does not start, and cancellation.
pub fn measure(options: &DemoBusyOptions, path: &Path, progress: &dyn Progress) -> anyhow::Result<()> {
    let loads: Vec<String> = options.loads.iter().map(f64::to_string).collect();
    let command = format!(
        "rtvirtio-bench demo-busy --runs {} --load {} --for {}",
        options.runs,
        loads.join(","),
        options.length
    );
    let mut data = if path.try_exists()? {
        read::<DemoBusyData>(path)?
    } else {
        let schema = DemoBusyData::SCHEMA.to_owned();
        let (generated, runs) = (String::new(), Vec::new());
        DemoBusyData { schema, host: None, command: command.clone(), generated, runs }
    };
    ensure!(data.command == command, "{} is of another command: choose another --out", path.display());
    let loads = options.loads.iter().copied().cycle();
    for (number, load) in loads.enumerate().take(options.runs).skip(data.runs.len()) {
        progress.check_cancelled()?;
        let out = tempfile::tempdir().context("cannot make a directory for the demo")?;
        let busy = Busy::start(load)?;
        let begin = Instant::now();
        let (run, host) = demo(options, out.path(), progress)?;
        let run = DemoBusyRun { load, seconds: begin.elapsed().as_secs_f64(), ..run };
        drop(busy);
        progress.step(&format!("{} of {}, {}", number + 1, options.runs, line(&run)));
        data.host = host.or(data.host);
        data.runs.push(run);
        data.generated = generated();
        write(path, &data)?;
    }
    Ok(())
}

/// Runs a demo, and tells the host that it found.
fn demo(
    options: &DemoBusyOptions,
    out: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<(DemoBusyRun, Option<HostFacts>)> {
    let words = ["demo", "--json", "--for", &options.length.to_string(), "--out", &out.display().to_string()];
    let args: Vec<String> = words.map(str::to_owned).into_iter().chain(options.global.clone()).collect();
    let ended = child::run(&options.lab, &args, ("demo", LIMIT), progress)?;
    progress.check_cancelled()?;
    let failed = |why: String| (DemoBusyRun { failed: Some(why), ..DemoBusyRun::default() }, None);
    Ok(match ended {
        Ended::Failed(why) => failed(why),
        Ended::Result(text, code) => match results(&text, &out.join("plan.json")) {
            Ok((file, plan)) => {
                let run = DemoBusyRun { exit: Some(code), ..judged(&file, &plan) };
                (run, Some(file.host))
            }
            Err(e) => failed(format!("its result is not readable: {e:#}")),
        },
    })
}

fn results(text: &str, plan: &Path) -> anyhow::Result<(ResultFile, Plan)> {
    let file = serde_json::from_str(text)?;
    let text = std::fs::read(plan).with_context(|| format!("cannot read {}", plan.display()))?;
    Ok((file, serde_json::from_slice(&text).with_context(|| plan.display().to_string())?))
}

/// Verdicts of the last run, the first cause of each missed target, and what the plan said.
fn judged(file: &ResultFile, plan: &Plan) -> DemoBusyRun {
    let promised: BTreeSet<String> = plan
        .tasks
        .iter()
        .filter(|task| task.holds())
        .map(|task| name(&task.vm, &task.task, task.percentile))
        .collect();
    let mut run = DemoBusyRun { promised: promised.len(), ..DemoBusyRun::default() };
    for task in file.runs.last().map(|run| run.tasks.as_slice()).unwrap_or_default() {
        let Some(verdict) = task.verdict else { continue };
        *run.verdicts.entry(format!("{verdict:?}").to_lowercase()).or_default() += 1;
        if verdict == Verdict::Missed {
            let name = name(&task.vm, &task.task, task.percentile);
            run.broken += usize::from(promised.contains(&name));
            let first = task.causes.as_ref().and_then(|causes| causes.first());
            run.missed.insert(name, first.map(|cause| cause.kind));
        }
    }
    run
}

fn name(vm: &str, task: &str, percentile: Percentile) -> String {
    format!("{vm}/{task} {percentile}")
}

fn line(run: &DemoBusyRun) -> String {
    if let Some(why) = &run.failed {
        return format!("no result after {:.0} s: {why}", run.seconds);
    }
    let verdicts = run.verdicts.iter().map(|(verdict, n)| format!("{n} {verdict}"));
    let word = |kind: &Option<CauseKind>| kind.map_or_else(|| "not seen".to_owned(), |of| format!("{of:?}"));
    let causes = run.missed.iter().map(|(task, kind)| format!("{task}: {}", word(kind)));
    let said = format!("{} said to hold, {} of them missed", run.promised, run.broken);
    let all = verdicts.chain(causes).chain([said]).collect::<Vec<_>>();
    format!("load {}, {:.0} s: {}", run.load, run.seconds, all.join(", "))
}

/// Claims of the runs.
#[must_use]
pub fn claims(data: &DemoBusyData) -> Vec<Claim> {
    let all = &data.runs;
    let promised: usize = all.iter().map(|run| run.promised).sum();
    let broken: usize = all.iter().map(|run| run.broken).sum();
    let ended = all.iter().filter(|run| run.failed.is_none()).count();
    let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
    let missed: Vec<_> = all.iter().flat_map(|run| run.missed.values()).collect();
    let named = missed.iter().filter(|kind| **kind == &Some(CauseKind::CpuOthers)).count();
    let unseen = missed.iter().filter(|kind| kind.is_none()).count();
    let longest = all.iter().map(|run| run.seconds).fold(0.0, f64::max);
    let kept = Claim::new(
        "demo.busy.kept",
        "targets that a demo on busy CPUs said would hold, and that were not missed",
        share(promised - broken, promised),
        "share",
        promised,
    )
    .at_least(1.0);
    let mut claims: Vec<Claim> = (promised > 0).then_some(kept).into_iter().collect();
    claims.extend([
        Claim::new("demo.busy.ended", "demos with a result", share(ended, all.len()), "share", all.len())
            .at_least(1.0),
        Claim::new("demo.busy.seconds", "longest of these demos", longest, "s", all.len()).at_most(PROMISED),
    ]);
    if !missed.is_empty() {
        let of_missed =
            |id: &str, what: &str, n| Claim::new(id, what, share(n, missed.len()), "share", missed.len());
        claims.extend([
            of_missed(
                "demo.busy.named",
                "missed targets whose first cause is that others use the CPUs",
                named,
            )
            .at_least(NAMED),
            of_missed("demo.busy.unseen", "missed targets whose cause was not seen", unseen),
        ]);
    }
    claims
}

impl Experiment for DemoBusyData {
    const FORM: &str = "rtvirtio-demo-busy/1";
    const FILE: &str = "demo-busy.json";
    const TITLE: &str = "rtvirtio: the demo on busy CPUs";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let host = self.host.clone().context("no demo has a result")?;
        let lead = format!("{}: {} demos; {}.", host.device, self.runs.len(), self.command);
        let claims = claims(self);
        let row = |run: &DemoBusyRun| {
            vec![run.exit.map_or_else(|| "-".to_owned(), |code| code.to_string()), line(run)]
        };
        let section = Section {
            title: "Demos".to_owned(),
            text: vec!["Verdicts and first causes are those of the run under the plan.".to_owned()],
            plots: Vec::new(),
            tables: vec![table("demos", &["exit code", "result"], self.runs.iter().map(row).collect())],
        };
        let text = claims_text(&claims);
        let of = ExperimentReport::of_data(self, host, claims, lead, vec![section])?;
        Ok(ExperimentReport { text, ..of })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(promised: usize, broken: usize, missed: &[Option<CauseKind>]) -> DemoBusyRun {
        let missed = missed.iter().enumerate().map(|(n, kind)| (format!("a/t{n} p99"), *kind)).collect();
        DemoBusyRun { seconds: 100.0, exit: Some(0), promised, broken, missed, ..DemoBusyRun::default() }
    }

    fn values(runs: Vec<DemoBusyRun>) -> Vec<(String, f64, usize)> {
        let schema = DemoBusyData::SCHEMA.to_owned();
        let (command, generated) = (String::new(), String::new());
        let data = DemoBusyData { schema, host: None, command, generated, runs };
        claims(&data).into_iter().map(|claim| (claim.id, claim.value, claim.n)).collect()
    }

    #[test]
    fn only_what_was_said_to_hold_can_be_broken() {
        let failed = DemoBusyRun { failed: Some("x".to_owned()), ..run(0, 0, &[]) };
        let of = |id: &str, value, n| (id.to_owned(), value, n);
        let found = values(vec![run(3, 0, &[]), run(1, 1, &[]), failed, run(0, 0, &[])]);
        let expected = [
            of("demo.busy.kept", 0.75, 4),
            of("demo.busy.ended", 0.75, 4),
            of("demo.busy.seconds", 100.0, 4),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn every_missed_target_counts_once() {
        let (cpu, flood) = (Some(CauseKind::CpuOthers), Some(CauseKind::Neighbour));
        let found = values(vec![run(0, 0, &[cpu, None]), run(0, 0, &[flood, cpu])]);
        assert_eq!((found[2].1, found[2].2, found[3].1), (0.5, 4, 0.25), "{found:?}");
        assert!(found.iter().all(|claim| claim.0 != "demo.busy.kept"), "nothing was promised");
    }
}
