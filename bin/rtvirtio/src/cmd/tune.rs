//! `rtvirtio tune`: plan, apply, measure, correct, until the targets are met or the budget ends.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, Verdict};
use rtvirtio_model::Config;
use rtvirtio_planner::tune::{Seen, TuneGoal, Tuner};
use rtvirtio_planner::{PLAN_SCHEMA, Plan, check_actable, settings_of};
use rtvirtio_report::{knob_name, text};
use serde::Serialize;

use super::apply::{apply_plan, revert_all};
use super::plan::{load_profile, outlook};
use super::verify::{exit_code, measure};
use super::{need_root, show, style, write_file};
use crate::args::{Global, TuneArgs};
use crate::model_choice::ModelChoice;
use crate::site::{self, Site};
use crate::ui::Ui;

/// Name of the scheme in results.
const SCHEME: &str = "tuned";
/// Time that applying, starting fio and putting back take beside a trial's measurement.
const OVERHEAD: Duration = Duration::from_secs(4);
/// Share of the budget that the trials may take; the rest is for the proof.
const TRIALS_SHARE: f64 = 0.7;

/// What `tune --json` prints.
#[derive(Serialize)]
struct Outcome {
    /// Trials in order.
    trials: Vec<TrialLine>,
    /// The best settings found; `feasible` where the trials and the proof show that they meet all targets.
    plan: Plan,
    /// The last, longer run under them.
    result: ResultFile,
    /// Whether they were left in force.
    in_force: bool,
}

/// One trial.
#[derive(Serialize)]
struct TrialLine {
    /// The largest of measured over target; above 1 a target was missed or a rate lost.
    score: f64,
    /// The settings, as differences from those found.
    settings: Vec<String>,
}

/// `rtvirtio tune`.
pub fn run(args: &TuneArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("tune")?;
    let _lock = site::lock(global)?;
    let start = Instant::now();
    let budget = Duration::from_nanos(args.budget.0);
    let length = Duration::from_nanos(args.length.0);
    let spec = site::load_spec(&args.spec)?;
    anyhow::ensure!(
        spec.tasks().any(|(_, t)| t.target.is_some()),
        "{}: no task has a target, so there is nothing to tune for",
        args.spec.display()
    );
    let site = Site::find(spec, global)?;
    site.guard_data(args.destroy_data)?;
    let profile = load_profile(&site.spec, args.profile.as_deref(), global)?;
    let choice = ModelChoice::find(args.model, &site.spec, &profile, global, ui)?;
    let found = site.config()?;
    let options = site.plan_options(found.clone(), &choice)?;
    let affordable = (budget.as_secs_f64() * TRIALS_SHARE / (length + OVERHEAD).as_secs_f64()) as usize;
    anyhow::ensure!(
        affordable >= 2,
        "a budget of {} is too short for two trials of {}: give more with --budget",
        args.budget,
        args.length
    );
    let goal = TuneGoal { trials: affordable.min(args.trials), ..TuneGoal::default() };
    let mut tuner = Tuner::new(&site.spec, &profile, &options, goal)?;
    let mut lines = Vec::new();
    while let Some(config) = tuner.next() {
        let plan = plan_for(&site, &found, &config, &choice, &profile)?;
        check_actable(&site.spec, options.mode, &found, &plan.settings)?;
        apply_plan(&plan, &site, global, ui)?;
        let run = measure(&site, SCHEME, length, &[], global, ui);
        revert_all(global)?;
        let run = run?;
        tuner.observe(&config, &seen(&run));
        let score = tuner.trials().last().map_or(0.0, |t| t.score);
        let settings: Vec<String> =
            plan.settings.iter().map(|s| format!("{}={}", knob_name(&s.knob), s.value)).collect();
        ui.step(&format!(
            "trial {}: worst task at {:.0} % of its target with {}",
            lines.len() + 1,
            100.0 * score,
            if settings.is_empty() { "the settings found".to_owned() } else { settings.join(", ") }
        ));
        lines.push(TrialLine { score, settings });
    }
    let Some((_, best)) = tuner.best() else { anyhow::bail!("no trial was made") };
    let mut plan = plan_for(&site, &found, best, &choice, &profile)?;
    plan.feasible = tuner.reached();
    plan.spec_file = std::path::absolute(&args.spec)?.into_os_string().into_string().ok();
    apply_plan(&plan, &site, global, ui)?;
    let left = budget.saturating_sub(start.elapsed()).max(length);
    let predicted: Vec<_> = plan.tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect();
    let proof = match measure(&site, SCHEME, left, &predicted, global, ui) {
        Ok(run) => run,
        Err(e) => {
            revert_all(global)?;
            return Err(e);
        }
    };
    finish(
        args,
        &site,
        Outcome { trials: lines, plan, result: file(&site, proof), in_force: true },
        global,
        ui,
    )
}

fn finish(
    args: &TuneArgs,
    site: &Site,
    mut outcome: Outcome,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    let run = &outcome.result.runs[0];
    let missed = run.tasks.iter().filter(|t| t.verdict == Some(Verdict::Missed)).count();
    // Settings that do not do what was asked for are not left in force.
    let kept = missed == 0 && !args.put_back;
    if !kept {
        revert_all(global)?;
    }
    let code = exit_code(run);
    // The trials take the host's own stalls off; the proof does not.
    outcome.plan.feasible &= missed == 0;
    outcome.in_force = kept;
    let outcome = &outcome;
    show(ui, outcome, || {
        let mut s = text::results(&outcome.result, &style());
        let _ = writeln!(
            s,
            "\n{} trials; {}",
            outcome.trials.len(),
            match (kept, missed) {
                (true, _) => "the settings are in force: put them back with `rtvirtio revert`".to_owned(),
                (false, 0) => "the settings are put back".to_owned(),
                (false, n) => format!(
                    "{n} targets of {} are still missed, so nothing was left in force",
                    site.spec.tasks().count()
                ),
            }
        );
        s
    })?;
    // Last: a full disk must cost neither the result nor leave settings in force that nobody was told of.
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&outcome.plan)?)?;
    }
    Ok(code)
}

fn file(site: &Site, run: Run) -> ResultFile {
    ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![run] }
}

/// The settings from those found to `config`, with what the model expects of them.
fn plan_for(
    site: &Site,
    found: &Config,
    config: &Config,
    choice: &ModelChoice,
    profile: &rtvirtio_model::Profile,
) -> anyhow::Result<Plan> {
    let mut settings = settings_of(&site.spec, found, config);
    for s in &mut settings {
        s.reason = "found by measuring".to_owned();
    }
    // A configuration that the model does not cover is measured all the same.
    let tasks = outlook(&site.spec, profile, choice, config).unwrap_or_default();
    Ok(Plan {
        schema: PLAN_SCHEMA.to_owned(),
        scheme: SCHEME.to_owned(),
        model: choice.kind,
        settings,
        tasks,
        feasible: true,
        infeasible: None,
        evaluated: 0,
        spec_file: None,
    })
}

fn seen(run: &Run) -> Vec<Seen> {
    run.tasks
        .iter()
        .map(|t| Seen {
            // The next percentile above that is measured: never in the target's favour.
            latency_ns: match t.percentile.0 {
                p if p <= 50.0 => t.p50_ns,
                p if p <= 99.0 => t.p99_ns,
                p if p <= 99.99 => t.p9999_awake_ns.unwrap_or(t.p9999_ns),
                _ => t.max_ns,
            }
            .0 as f64,
            kept: t.declared_rate.map_or(1.0, |r| t.achieved_rate.0 / r.0),
        })
        .collect()
}
