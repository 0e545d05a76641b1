//! `rtvirtio tune`: plan, apply, measure, correct, until the targets are met or the budget ends.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_measure::verdict::samples_needed;
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, Verdict};
use rtvirtio_model::{Config, Profile};
use rtvirtio_planner::tune::{Seen, TuneGoal, Tuner};
use rtvirtio_planner::{CgroupMode, Infeasible, PLAN_SCHEMA, Plan, check_actable, settings_of};
use rtvirtio_report::{knob_name, text};
use rtvirtio_spec::Task;
use serde::Serialize;

use super::apply::apply_plan;
use super::plan::{INFEASIBLE, load_profile, outlook};
use super::revert::revert_all;
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
/// Late requests that a proof has room for.
const LATE: u64 = 1;
/// Longest proof, s: a task with a request an hour shall not ask for years.
const LONGEST_PROOF: f64 = 86_400.0;

/// What `tune --json` prints.
#[derive(Serialize)]
struct Outcome {
    /// Trials in order.
    trials: Vec<TrialLine>,
    /// The best settings found; `feasible` where the trials and the proof show that they meet all targets.
    plan: Plan,
    /// The last, longer run under them.
    result: ResultFile,
    /// VMs whose targets do not count, because the device cannot carry all declared rates.
    given_up: Vec<String>,
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
    site.load_bfq();
    site.guard_data(args.destroy_data)?;
    let profile = load_profile(&site.spec, args.profile.as_deref(), global)?;
    let choice = ModelChoice::find(args.model, &site.spec, &profile, global, ui)?;
    let found = site.config()?;
    let mut options = site.plan_options(found.clone(), &choice)?;
    options.enough = args.margin.enough();
    let affordable = (budget.as_secs_f64() * TRIALS_SHARE / (length + OVERHEAD).as_secs_f64()) as usize;
    anyhow::ensure!(
        affordable >= 2,
        "a budget of {} is too short for two trials of {}: give more with --budget",
        args.budget,
        args.length
    );
    let goal = TuneGoal { trials: affordable.min(args.trials), ..TuneGoal::default() };
    let mut tuner = Tuner::new(&site.spec, &profile, &options, goal)?;
    let given_up: Vec<String> = tuner.given_up().iter().map(|&i| site.spec.vms[i].name.clone()).collect();
    if tuner.is_overloaded() || !given_up.is_empty() {
        let names = if given_up.is_empty() { "nobody".to_owned() } else { given_up.join(", ") };
        if !args.compromise {
            ui.warn(&format!(
                "not tuned: the device cannot carry all declared rates. Lower them, move a VM away, or tune with --compromise ({names} given up for the others)"
            ));
            return Ok(ExitCode::from(INFEASIBLE));
        }
        ui.step(&given_up_for_the_others(&names));
    }
    let end = start + budget;
    let rates = site.spec.tasks().map(|(_, t)| t.rate.map(|r| r.0)).collect();
    let reserve = budget.mul_f64(1.0 - TRIALS_SHARE);
    let mut tuning = Tuning {
        rates,
        reserve,
        given_up,
        args,
        site: &site,
        found,
        choice,
        profile,
        length,
        end,
        lines: Vec::new(),
        global,
        ui,
    };
    let (plan, proof) = loop {
        tuning.trials(&mut tuner, options.mode)?;
        let (best, plan, proof) = tuning.prove(&tuner)?;
        if missed(&proof, &tuning.given_up) == 0 {
            break (plan, proof);
        }
        // A longer run says more than the trials before it: tuning goes on from there while there is time for a trial and another proof. What only the
        // host's own stalls made miss, which trials do not count, is proved again.
        tuner.observe(&best, &seen(&proof));
        let by_host = tuner.trials().last().is_some_and(|t| t.score <= 1.0);
        tuning.reserve = tuning.proof_length();
        if tuning.left() < length + OVERHEAD + tuning.reserve || !by_host && tuner.next().is_none() {
            break (plan, proof);
        }
        revert_all(global)?;
        let what =
            if by_host { "a longer run misses by the host's own stalls" } else { "a longer run misses" };
        tuning.note(what, &tuner, &plan);
    };
    let Tuning { lines: trials, given_up, .. } = tuning;
    let outcome = Outcome { trials, plan, result: file(&site, proof), given_up, in_force: true };
    finish(args, &site, outcome, global, ui)
}

/// A tuning under way.
struct Tuning<'a> {
    args: &'a TuneArgs,
    site: &'a Site,
    found: Config,
    choice: ModelChoice,
    profile: Profile,
    length: Duration,
    end: Instant,
    /// Time that trials leave for the proof.
    reserve: Duration,
    /// VMs whose targets do not count.
    given_up: Vec<String>,
    /// Requests per second of each task, as declared, or as the last trial had it.
    rates: Vec<Option<f64>>,
    lines: Vec<TrialLine>,
    global: &'a Global,
    ui: &'a Ui,
}

impl Tuning<'_> {
    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Tries settings until the tuner is content, or only the time for a proof is left.
    fn trials(&mut self, tuner: &mut Tuner, mode: CgroupMode) -> anyhow::Result<()> {
        while let Some(config) = tuner.next() {
            let reserve = self.reserve.min(self.proof_length()).max(self.length);
            if !tuner.trials().is_empty() && self.left() < self.length + OVERHEAD + reserve {
                break;
            }
            let plan = self.plan(&config)?;
            check_actable(&self.site.spec, mode, &self.found, &plan.settings)?;
            apply_plan(&plan, self.site, self.global, self.ui)?;
            let run = measure(self.site, SCHEME, self.length, &[], self.global, self.ui);
            revert_all(self.global)?;
            let run = run?;
            tuner.observe(&config, &seen(&run));
            for (rate, task) in self.rates.iter_mut().zip(&run.tasks) {
                *rate = task.declared_rate.or(Some(task.achieved_rate)).map(|r| r.0);
            }
            self.note(&format!("trial {}", self.lines.len() + 1), tuner, &plan);
        }
        Ok(())
    }

    /// The best settings, applied, and a run under them that is long enough for verdicts, or as long as there is time. They stay in force.
    fn prove(&self, tuner: &Tuner) -> anyhow::Result<(Config, Plan, Run)> {
        let Some((_, best)) = tuner.best() else { anyhow::bail!("no trial was made") };
        let mut plan = self.plan(best)?;
        plan.feasible = tuner.reached() && self.given_up.is_empty();
        plan.infeasible = (!self.given_up.is_empty()).then(|| Infeasible {
            sacrificed: self.given_up.clone(),
            conflict: Vec::new(),
            relaxation: Vec::new(),
            reason: given_up_for_the_others(&self.given_up.join(", ")),
        });
        plan.spec_file = std::path::absolute(&self.args.spec)?.into_os_string().into_string().ok();
        apply_plan(&plan, self.site, self.global, self.ui)?;
        let length = self.proof_length().min(self.left()).max(self.length);
        let predicted: Vec<_> = plan.tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect();
        match measure(self.site, SCHEME, length, &predicted, self.global, self.ui) {
            Ok(run) => Ok((best.clone(), plan, run)),
            Err(e) => {
                revert_all(self.global)?;
                Err(e)
            }
        }
    }

    /// A run of this length has requests enough that each target can be judged with one of them late; longer ones prove no more.
    fn proof_length(&self) -> Duration {
        let of = |(task, rate): (&Task, &Option<f64>)| {
            let needed = samples_needed(LATE, task.target?.percentile)? as f64;
            // How fast a task without a rate will be, nobody knows before the first trial.
            Some(rate.map_or(LONGEST_PROOF, |rate| needed / rate.max(1e-3)))
        };
        let tasks =
            self.site.spec.tasks().zip(&self.rates).filter(|((vm, _), _)| !self.given_up.contains(&vm.name));
        let tasks = tasks.map(|((_, task), rate)| (task, rate));
        Duration::from_secs_f64(tasks.filter_map(of).fold(0.0, f64::max).min(LONGEST_PROOF))
    }

    /// Keeps and tells the last trial.
    fn note(&mut self, what: &str, tuner: &Tuner, plan: &Plan) {
        let score = tuner.trials().last().map_or(0.0, |t| t.score);
        let settings: Vec<String> =
            plan.settings.iter().map(|s| format!("{}={}", knob_name(&s.knob), s.value)).collect();
        self.ui.step(&format!(
            "{what}: worst task at {:.0} % of its target with {}",
            100.0 * score,
            if settings.is_empty() { "the settings found".to_owned() } else { settings.join(", ") }
        ));
        self.lines.push(TrialLine { score, settings });
    }

    /// The settings from those found to `config`, with what the model expects of them.
    fn plan(&self, config: &Config) -> anyhow::Result<Plan> {
        let spec = &self.site.spec;
        let mut settings = settings_of(spec, &self.found, config);
        for s in &mut settings {
            s.reason = "found by measuring".to_owned();
        }
        // A configuration that the model does not cover is measured all the same.
        let tasks = outlook(spec, &self.profile, &self.choice, config).unwrap_or_default();
        Ok(Plan {
            schema: PLAN_SCHEMA.to_owned(),
            scheme: SCHEME.to_owned(),
            model: self.choice.kind,
            settings,
            tasks,
            feasible: true,
            infeasible: None,
            evaluated: 0,
            spec_file: None,
        })
    }
}

fn given_up_for_the_others(names: &str) -> String {
    format!("the device cannot carry all declared rates: {names} given up for the others")
}

/// Targets that a run shows as missed, but for those of VMs that are given up.
fn missed(run: &Run, given_up: &[String]) -> usize {
    run.tasks.iter().filter(|t| t.verdict == Some(Verdict::Missed) && !given_up.contains(&t.vm)).count()
}

fn finish(
    args: &TuneArgs,
    site: &Site,
    mut outcome: Outcome,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    let run = &outcome.result.runs[0];
    let missed = missed(run, &outcome.given_up);
    // Settings that do not do what was asked for are not left in force.
    let kept = missed == 0 && !args.put_back;
    if !kept {
        revert_all(global)?;
    }
    let mut counted = run.clone();
    counted.tasks.retain(|t| !outcome.given_up.contains(&t.vm));
    let code = exit_code(&counted);
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
                (true, _) if !outcome.given_up.is_empty() => format!(
                    "the settings are in force, with {} given up: put them back with `rtvirtio revert`",
                    outcome.given_up.join(", ")
                ),
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

fn seen(run: &Run) -> Vec<Seen> {
    run.tasks
        .iter()
        .map(|t| Seen {
            // The next percentile above that is measured: never in the target's favour.
            latency_ns: match t.percentile.0 {
                p if p <= 50.0 => t.p50_ns,
                p if p <= 99.0 => t.p99_ns,
                p if p <= 99.99 => t.p9999_excl_host_stalls_ns.unwrap_or(t.p9999_ns),
                _ => t.max_ns,
            }
            .0 as f64,
            kept: t.declared_rate.map_or(1.0, |r| t.achieved_rate.0 / r.0),
        })
        .collect()
}
