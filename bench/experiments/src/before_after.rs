//! The measurement of the tutorial, repeated: default settings, a plan, default settings, ... Does
//! the spec miss without a plan each time, and is it met with one?

use crate::experiment::Experiment;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::{HostFacts, Run, Verdict};
use rtvirtio_report::tally;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::apply::{PlanWith, apply_plan, plan_now, revert_all};
use rtvirtio_workflow::model_choice::ModelName;
use rtvirtio_workflow::profile::{Access, of_site};
use rtvirtio_workflow::run::measure as measure_site;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Dirs, Progress, generated, write_file};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::page::xy::table;
use crate::page::{Section, claims as claim_rows};
use crate::report::{ExperimentReport, write};
use crate::saved::Saved as _;
use rtvirtio_harness::BENCH_DIR;

/// The example that is measured when no spec is given.
pub const EXAMPLE: &str = "examples/heavy-process.toml";
const EXAMPLE_TEXT: &str = include_str!("../../../examples/heavy-process.toml");

/// Length of the device's measurement.
const PROFILE_TIME: Duration = Duration::from_secs(36);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct BeforeAfterOptions {
    /// A spec with lab VMs on a twin instead of the one of the README's tour.
    pub spec: Option<PathBuf>,
    /// Rounds.
    #[arg(long, default_value_t = 10)]
    pub repeat: usize,
    /// Length of each verification.
    #[arg(long = "for", value_name = "TIME", default_value = "25s")]
    pub length: Nanos,
}

impl BeforeAfterOptions {
    fn name(&self) -> String {
        self.spec.as_ref().map_or_else(|| EXAMPLE.to_owned(), |path| path.display().to_string())
    }
}

/// Summary of one verification.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Targets shown to be missed.
    pub missed: usize,
    /// Targets shown to hold.
    pub met: usize,
    /// Targets shown neither way.
    pub unproven: usize,
    /// VMs none of whose targets is shown to hold.
    pub vms_without_met: usize,
    /// Largest p99 of any task.
    pub p99_ns: Nanos,
    /// Largest p99.99 of any task; the maximum where a task has fewer than 10 000 requests.
    pub p9999_ns: Nanos,
    /// Least share of a declared rate that was kept.
    pub rate_kept: f64,
}

impl Outcome {
    /// Summary of a run's verdicts, tails and rates.
    #[must_use]
    pub fn from_run(run: &Run) -> Self {
        let counts = tally(run);
        let mut vms: Vec<(&str, bool)> = Vec::new();
        for t in run.tasks.iter().filter(|t| t.verdict.is_some()) {
            let met = t.verdict == Some(Verdict::Met);
            match vms.iter_mut().find(|(vm, _)| *vm == t.vm) {
                Some((_, any)) => *any |= met,
                None => vms.push((&t.vm, met)),
            }
        }
        let kept = |t: &rtvirtio_measure::TaskResult| t.declared_rate.map(|d| t.achieved_rate.0 / d.0);
        Self {
            missed: counts.missed,
            met: counts.met,
            unproven: counts.unproven,
            vms_without_met: vms.iter().filter(|(_, met)| !met).count(),
            p99_ns: run.tasks.iter().map(|t| t.p99_ns).max().unwrap_or_default(),
            p9999_ns: run.tasks.iter().map(|t| t.p9999_ns).max().unwrap_or_default(),
            rate_kept: run.tasks.iter().filter_map(kept).fold(1.0, f64::min),
        }
    }
}

/// Verifications before and after a plan is applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// Under the kernel's default settings.
    pub before: Outcome,
    /// Under the settings of the plan.
    pub after: Outcome,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BeforeAfterData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last round, and version of the program.
    pub generated: String,
    /// Length of each verification, s.
    pub seconds: f64,
    /// Rounds in the order measured.
    pub rounds: Vec<Round>,
}

/// Measures all rounds in a lab of its own; the result is written to `path` after each.
///
/// # Errors
/// A spec without lab VMs on a twin, a plan that is not feasible, a setting that is not reverted,
/// and cancellation.
pub fn measure(
    options: &BeforeAfterOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let name = options.name();
    let text = match &options.spec {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?,
        None => EXAMPLE_TEXT.to_owned(),
    };
    let spec = rtvirtio_spec::parse(&name, &text)?;
    ensure!(
        spec.lab_kind().is_some() && matches!(spec.device, rtvirtio_spec::Device::Twin { .. }),
        "{name}: this needs lab VMs on a twin"
    );
    ensure!(spec.tasks().any(|(_, t)| !t.targets.is_empty()), "{name}: no task has a target");
    let _lock = labs.dirs.lock_vms()?;
    let labs = labs.below(BENCH_DIR);
    labs.remove()?;
    let _guard = RemoveOnDrop(&labs);
    labs.up(&spec, (&name, &text), rtvirtio_testbed::AccelChoice::Auto, None, progress)?;
    let site = Site::find(spec, &labs.dirs)?;
    let measured = rounds(options, &site, path, &labs.dirs, progress);
    labs.remove()?;
    measured
}

/// Removes the lab also on a panic.
pub(crate) struct RemoveOnDrop<'a>(pub(crate) &'a LabHost);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        // `measure` has reported the error already.
        let _ = self.0.remove();
    }
}

fn rounds(
    options: &BeforeAfterOptions,
    site: &Site,
    path: &Path,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let length = Duration::from_nanos(options.length.0);
    let profile = of_site(site, Access::Reads, PROFILE_TIME, dirs, progress)?;
    let file = dirs.run.join("profile.json");
    write_file(&file, &rtvirtio_measure::profile::to_json(&profile, &file)?)?;
    let mut data = BeforeAfterData {
        schema: BeforeAfterData::SCHEMA.to_owned(),
        host: site.facts(),
        command: format!(
            "rtvirtio-bench before-after {} --for {} --repeat {}",
            options.name(),
            options.length,
            options.repeat
        ),
        generated: String::new(),
        seconds: options.length.as_secs_f64(),
        rounds: Vec::new(),
    };
    // As distributions set it up: nothing is tuned.
    site.stack.device.set_elevator(&rtvirtio_kernel::Root::default(), "bfq")?;
    for round in 0..options.repeat {
        let run = |scheme: &str| measure_site(site, scheme, length, &[], dirs, progress);
        let before = Outcome::from_run(&run("as-found")?);
        let with = PlanWith { profile: Some(&file), model: ModelName::Slice, enough: None };
        let (plan, _) = plan_now(site, &with, dirs, progress)?;
        if let Some(why) = &plan.infeasible {
            progress.warn(&format!("the plan is a compromise: {}", why.reason));
        }
        apply_plan(&plan, site, dirs, progress)?;
        let after = run(&plan.scheme).map(|run| Outcome::from_run(&run));
        revert_all(dirs)?;
        data.rounds.push(Round { before, after: after? });
        data.generated = generated();
        write(path, &data)?;
        progress.step(&line(round, &data.rounds[round]));
    }
    Ok(())
}

fn line(index: usize, round: &Round) -> String {
    let Round { before: b, after: a } = round;
    format!(
        "round {}: p99 {} -> {}, p99.99 {} -> {}; missed {} -> {}, met {} -> {}, least rate kept {:.1} -> {:.1} %",
        index + 1,
        b.p99_ns,
        a.p99_ns,
        b.p9999_ns,
        a.p9999_ns,
        b.missed,
        a.missed,
        b.met,
        a.met,
        100.0 * b.rate_kept,
        100.0 * a.rate_kept
    )
}

/// Median, least and largest, in ms.
fn spread(data: &BeforeAfterData, of: impl Fn(&Round) -> Nanos) -> (f64, f64, f64) {
    let all: Vec<f64> = data.rounds.iter().map(|r| of(r).as_millis_f64()).collect();
    let ends = all.iter().fold((f64::INFINITY, 0.0f64), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
    (median(all), ends.0, ends.1)
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &BeforeAfterData) -> Vec<Claim> {
    let n = data.rounds.len();
    let share =
        |holds: fn(&Round) -> bool| data.rounds.iter().filter(|r| holds(r)).count() as f64 / n.max(1) as f64;
    let all = |id: &str, what: &str, holds| Claim::new(id, what, share(holds), "share", n).at_least(1.0);
    let ms = |id: &str, what: &str, of: fn(&Round) -> Nanos| {
        let (middle, low, high) = spread(data, of);
        Claim::new(id, format!("{what}, median (from {low:.3} to {high:.3})"), middle, "ms", n)
    };
    vec![
        all(
            "tour.before.missed",
            "rounds of the first tour in which the kernel's default misses a target",
            |r| r.before.missed > 0,
        ),
        all("tour.after.none_missed", "rounds in which no target is missed under the plan", |r| {
            r.after.missed == 0
        }),
        all(
            "tour.after.met",
            "rounds in which each VM has a target that is shown to hold under the plan",
            |r| r.after.vms_without_met == 0,
        ),
        ms("tour.before.p99", "largest p99 of any task, kernel default", |r| r.before.p99_ns),
        ms("tour.after.p99", "the same under the plan", |r| r.after.p99_ns),
        ms("tour.before.p9999", "largest p99.99 of any task, kernel default", |r| r.before.p9999_ns),
        ms("tour.after.p9999", "the same under the plan", |r| r.after.p9999_ns),
    ]
}

impl Experiment for BeforeAfterData {
    const FORM: &str = "rtvirtio-before-after/1";
    const FILE: &str = "before-after.json";
    const TITLE: &str = "rtvirtio: the first tour";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let claims = claims(self);
        let mut text = String::new();
        for (i, round) in self.rounds.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", line(i, round));
        }
        text.push_str(&claim_rows::text(&claims));
        let cells = |(i, r): (usize, &Round)| {
            let both = |of: &dyn Fn(&Outcome) -> String| format!("{} → {}", of(&r.before), of(&r.after));
            vec![
                (i + 1).to_string(),
                both(&|o| o.missed.to_string()),
                both(&|o| o.met.to_string()),
                both(&|o| o.p99_ns.to_string()),
                both(&|o| o.p9999_ns.to_string()),
                both(&|o| format!("{:.1} %", 100.0 * o.rate_kept)),
            ]
        };
        let head = ["round", "missed", "met", "largest p99", "largest p99.99", "least rate kept"];
        let section = Section {
            title: "The first tour, repeated".to_owned(),
            text: vec![format!(
                "Each round is a verification of {} s under the settings found, and one under a plan made from them.",
                self.seconds
            )],
            plots: Vec::new(),
            tables: vec![table(
                "rounds, kernel default → plan",
                &head,
                self.rounds.iter().enumerate().map(cells).collect(),
            )],
        };
        let lead = format!("{}: {} rounds; {}.", self.host.device, self.rounds.len(), self.command);
        Ok(ExperimentReport {
            text,
            ..ExperimentReport::of_data(self, self.host.clone(), claims, lead, vec![section])?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(missed: usize, met: usize, vms_without_met: usize) -> Outcome {
        let ms = Nanos::from_millis(10);
        Outcome { missed, met, unproven: 0, vms_without_met, p99_ns: ms, p9999_ns: ms, rate_kept: 1.0 }
    }

    fn data(rounds: Vec<Round>) -> BeforeAfterData {
        BeforeAfterData {
            schema: BeforeAfterData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 2, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            seconds: 25.0,
            rounds,
        }
    }

    #[test]
    fn one_round_that_differs_is_a_claim_not_met() {
        let good = Round { before: outcome(3, 0, 2), after: outcome(0, 3, 0) };
        let met = |rounds| claims(&data(rounds)).iter().map(|c| c.met).collect::<Vec<_>>();
        assert!(met(vec![good.clone(); 10]).iter().all(|met| *met));
        assert!(!met(Vec::new())[0], "nothing was measured");
        let harmless = Round { before: outcome(0, 3, 0), ..good.clone() };
        assert_eq!(met(vec![good.clone(), harmless])[..3], [false, true, true]);
        let missed = Round { after: outcome(1, 2, 0), ..good.clone() };
        assert_eq!(met(vec![good.clone(), missed])[..3], [true, false, true]);
        let unproven = Round { after: outcome(0, 2, 1), ..good.clone() };
        assert_eq!(met(vec![good.clone(), unproven])[..3], [true, true, false]);
        let whole = data(vec![good]);
        let back: BeforeAfterData = serde_json::from_str(&serde_json::to_string(&whole).unwrap()).unwrap();
        assert_eq!(back, whole);
    }
}
