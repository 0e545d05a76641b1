//! Plan, apply, measure, correct, until the targets are met or the budget ends.

use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_measure::verdict::samples_needed;
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, Verdict};
use rtvirtio_model::{Config, Profile};
use rtvirtio_planner::tune::{TrialResult, TuneGoal, Tuner};
use rtvirtio_planner::{Infeasible, Knob, Placements, Plan, check_actable, settings_of};
use rtvirtio_spec::{Target, Vm};
use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::apply::{PlanWith, apply_plan, revert_all};
use crate::dirs::Dirs;
use crate::error::{Result, bail, ensure, one_line};
use crate::model_choice::ModelChoice;
use crate::plan::{load_profile, outlook};
use crate::plan_file::HostPlan;
use crate::progress::Progress;
use crate::run::measure;
use crate::site::Site;
use crate::verified::ActiveSettings;

/// Name of the scheme in results.
const SCHEME: &str = "tuned";
/// Time that applying, starting fio and putting back take next to a trial's measurement.
const OVERHEAD: Duration = Duration::from_secs(4);
/// Share of the budget for the trials; the remainder is for the proof.
const TRIALS_SHARE: f64 = 0.7;
/// Late requests that a proof has room for.
const LATE: u64 = 1;
/// Start of the warning that the settings were not in force during all of the last run.
const NOT_PROVED: &str = "the last run proves nothing of the settings";
/// Longest proof, s: a task with a request an hour shall not ask for years.
const LONGEST_PROOF: f64 = 86_400.0;

/// Result of tuning a site.
#[derive(Serialize)]
pub struct Outcome {
    /// Trials in the order in which they ran.
    pub trials: Vec<TrialLine>,
    /// The best settings found; `feasible` where they met all targets in the trials and the proof
    /// missed none. Which of them it has proven is in `result`.
    pub plan: HostPlan,
    /// The last, longer run under them.
    pub result: ResultFile,
    /// VMs whose targets do not count, because the device cannot carry all declared rates.
    pub given_up: Vec<String>,
    /// Whether they stay in force.
    pub in_force: bool,
}

/// Score and settings of one trial.
#[derive(Serialize)]
pub struct TrialLine {
    /// The largest of measured over target; above 1 a target was missed or a rate lost.
    pub score: f64,
    /// The settings, as differences from those found.
    pub settings: Vec<String>,
}

/// Options of tuning a spec.
pub struct TuneOptions<'a> {
    /// The spec's file, for the plan that is found.
    pub spec_file: &'a Path,
    /// Time limit of all trials and the proof.
    pub budget: Nanos,
    /// Length of each trial.
    pub length: Nanos,
    /// Largest number of trials.
    pub trials: usize,
    /// Put the settings back at the end, also when all targets are met.
    pub put_back: bool,
    /// Whether to give VMs up for the others where the device cannot carry all declared rates.
    pub compromise: bool,
    /// Profile, model and margin of the first trials.
    pub with: PlanWith<'a>,
    /// A setting's short name, for progress and the list of trials.
    pub knob_name: &'a dyn Fn(&Knob) -> String,
}

/// Whether trials were made, and their result.
pub enum Tuned {
    /// The device cannot carry all declared rates, and no compromise is wanted: no trial was made.
    TooMuch {
        /// VMs that a compromise would give up; empty where it would still try to serve all.
        given_up: Vec<String>,
    },
    /// Trials were made, with this result.
    Done(Box<Outcome>),
}

/// Tunes a site. The best settings stay in force when the last run under them missed no target.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) for a spec without targets or a budget too short for
/// two trials; everything is put back then, as after every other error.
pub fn tune(site: &Site, options: &TuneOptions<'_>, dirs: &Dirs, progress: &dyn Progress) -> Result<Tuned> {
    let start = Instant::now();
    // Known before anything is in force.
    let spec_file = std::path::absolute(options.spec_file)?;
    let budget = Duration::from_nanos(options.budget.0);
    let length = Duration::from_nanos(options.length.0);
    let profile = load_profile(&site.spec, options.with.profile, dirs)?;
    let choice = ModelChoice::find(options.with.model, &site.spec, &profile, dirs, progress)?;
    let survey = site.survey(progress)?;
    let found_config = survey.config.clone();
    let mut search = site.options(survey, &choice)?;
    search.enough = options.with.enough;
    let affordable = (budget.as_secs_f64() * TRIALS_SHARE / (length + OVERHEAD).as_secs_f64()) as usize;
    ensure!(
        affordable >= 2,
        Argument,
        "a budget of {} is too short for two trials of {}: give more with --budget",
        options.budget,
        options.length
    );
    let goal = TuneGoal { trials: affordable.min(options.trials), ..TuneGoal::default() };
    let mut tuner = Tuner::new(&site.spec, &profile, &search, goal)?;
    let given_up: Vec<String> = tuner.given_up().iter().map(|&i| site.spec.vms[i].name.clone()).collect();
    if tuner.is_overloaded() || !given_up.is_empty() {
        if !options.compromise {
            return Ok(Tuned::TooMuch { given_up });
        }
        let names = if given_up.is_empty() { "no VM".to_owned() } else { given_up.join(", ") };
        progress.step(&given_up_for_the_others(&names));
    }
    let end = start + budget;
    let rates = site.spec.goals().map(|(_, t, _)| t.rate.map(|r| r.0)).collect();
    let reserve = budget.mul_f64(1.0 - TRIALS_SHARE);
    let mut tuning = Tuning {
        placements: search.placements,
        rates,
        reserve,
        given_up,
        options,
        site,
        found_config,
        choice,
        profile,
        length,
        end,
        lines: Vec::new(),
        dirs,
        progress,
    };
    let (plan, proof) = loop {
        tuning.trials(&mut tuner)?;
        let (best, plan, proof) = tuning.prove(&tuner)?;
        if missed(&proof, &tuning.given_up) == 0 {
            break (plan, proof);
        }
        // A longer run is better evidence than the trials before it: tuning continues from it while
        // there is time for a trial and another proof. What only the host's own stalls made miss,
        // which trials do not count, is proved again.
        tuner.observe(&best, &observations(&proof));
        let by_host = tuner.trials().last().is_some_and(|t| t.score <= 1.0);
        tuning.reserve = tuning.proof_length();
        if tuning.time_left() < length + OVERHEAD + tuning.reserve || !by_host && tuner.next().is_none() {
            break (plan, proof);
        }
        revert_all(dirs)?;
        let what =
            if by_host { "a longer run misses by the host's own stalls" } else { "a longer run misses" };
        tuning.note(what, &tuner, &plan);
    };
    let Tuning { lines: trials, given_up, .. } = tuning;
    let mut plan = plan;
    let undone = not_as_proved(&plan, dirs);
    if let Some(why) = &undone {
        progress.warn(&format!("{NOT_PROVED}: {why}"));
    }
    // The trials subtract the host's own stalls; the proof does not.
    let missed = missed(&proof, &given_up);
    note_unmet(&mut plan, undone.as_deref(), missed);
    // Settings that do not reach the goal do not stay in force.
    let in_force = missed == 0 && !options.put_back && undone.is_none();
    if !in_force {
        revert_all(dirs)?;
    }
    let plan = HostPlan::of_one(plan).of_spec_file(&spec_file)?;
    let result = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![proof] };
    Ok(Tuned::Done(Box::new(Outcome { trials, plan, result, given_up, in_force })))
}

impl Outcome {
    /// The last run, without the VMs that are given up.
    #[must_use]
    pub fn counted(&self) -> Run {
        let mut counted = self.result.runs[0].clone();
        counted.tasks.retain(|t| !self.given_up.contains(&t.vm));
        counted
    }

    /// Targets that the last run missed, but for those of VMs that are given up.
    #[must_use]
    pub fn missed(&self) -> usize {
        missed(&self.result.runs[0], &self.given_up)
    }
}

/// A tuning under way.
struct Tuning<'a> {
    options: &'a TuneOptions<'a>,
    site: &'a Site,
    found_config: Config,
    placements: Placements,
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
    dirs: &'a Dirs,
    progress: &'a dyn Progress,
}

impl Tuning<'_> {
    fn time_left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Tries settings until the tuner ends, or only the time for a proof remains.
    fn trials(&mut self, tuner: &mut Tuner) -> Result<()> {
        while let Some(config) = tuner.next() {
            let reserve = self.reserve.min(self.proof_length()).max(self.length);
            if !tuner.trials().is_empty() && self.time_left() < self.length + OVERHEAD + reserve {
                break;
            }
            let plan = self.plan(&config)?;
            check_actable(&self.site.spec, &self.placements, &self.found_config, &plan.settings)?;
            apply_plan(&plan, self.site, self.dirs, self.progress)?;
            let run = measure(self.site, SCHEME, self.length, &[], self.dirs, self.progress);
            revert_all(self.dirs)?;
            let run = run?;
            tuner.observe(&config, &observations(&run));
            for (rate, task) in self.rates.iter_mut().zip(&run.tasks) {
                *rate = task.declared_rate.or(Some(task.achieved_rate)).map(|r| r.0);
            }
            self.note(&format!("trial {}", self.lines.len() + 1), tuner, &plan);
        }
        Ok(())
    }

    /// The best settings, applied, and a run under them that is long enough for verdicts, or as
    /// long as there is time. They stay in force.
    fn prove(&self, tuner: &Tuner) -> Result<(Config, Plan, Run)> {
        let Some((_, best)) = tuner.best() else { bail!(System, "no trial was made") };
        let mut plan = self.plan(best)?;
        plan.feasible = tuner.reached() && self.given_up.is_empty();
        plan.infeasible = (!self.given_up.is_empty()).then(|| Infeasible {
            sacrificed: self.given_up.clone(),
            conflict: Vec::new(),
            relaxation: Vec::new(),
            reason: given_up_for_the_others(&self.given_up.join(", ")),
        });
        apply_plan(&plan, self.site, self.dirs, self.progress)?;
        let length = self.proof_length().min(self.time_left()).max(self.length);
        let predicted: Vec<_> = plan.tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect();
        match measure(self.site, SCHEME, length, &predicted, self.dirs, self.progress) {
            Ok(run) => Ok((best.clone(), plan, run)),
            Err(e) => {
                revert_all(self.dirs)?;
                Err(e)
            }
        }
    }

    /// A run of this length has requests enough that each target can be judged with one of them
    /// late; longer ones prove no more.
    fn proof_length(&self) -> Duration {
        let of = |(target, rate): (Option<Target>, &Option<f64>)| {
            let needed = samples_needed(LATE, target?.percentile)? as f64;
            // How fast a task without a rate will be is not known before the first trial.
            Some(rate.map_or(LONGEST_PROOF, |rate| needed / rate.max(1e-3)))
        };
        let kept = |vm: &Vm| !self.given_up.contains(&vm.name);
        let goals = self.site.spec.goals().zip(&self.rates).filter(|((vm, ..), _)| kept(vm));
        let goals = goals.map(|((.., target), rate)| (target, rate));
        Duration::from_secs_f64(goals.filter_map(of).fold(0.0, f64::max).min(LONGEST_PROOF))
    }

    /// Records and reports the last trial.
    fn note(&mut self, what: &str, tuner: &Tuner, plan: &Plan) {
        let score = tuner.trials().last().map_or(0.0, |t| t.score);
        let settings: Vec<String> = plan
            .settings
            .iter()
            .map(|s| format!("{}={}", (self.options.knob_name)(&s.knob), s.value))
            .collect();
        self.progress.step(&format!(
            "{what}: worst task at {:.0} % of its target with {}",
            100.0 * score,
            if settings.is_empty() { "the settings found".to_owned() } else { settings.join(", ") }
        ));
        self.lines.push(TrialLine { score, settings });
    }

    /// The settings from those found to `config`, with what the model expects of them.
    fn plan(&self, config: &Config) -> Result<Plan> {
        let spec = &self.site.spec;
        let mut settings = settings_of(spec, &self.found_config, config);
        for s in &mut settings {
            s.reason = "found by measuring".to_owned();
        }
        // A configuration that the model does not cover is measured all the same.
        let tasks = outlook(spec, &self.profile, &self.choice, config, &self.placements).unwrap_or_default();
        Ok(Plan {
            scheme: SCHEME.to_owned(),
            model: self.choice.kind,
            settings,
            tasks,
            feasible: true,
            infeasible: None,
            evaluated: 0,
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

/// Records in a plan that it is not known to meet all targets.
fn note_unmet(plan: &mut Plan, undone: Option<&str>, missed: usize) {
    let Some(reason) = unmet(plan, undone, missed) else { return };
    let (sacrificed, conflict, relaxation) = (Vec::new(), Vec::new(), Vec::new());
    plan.feasible = false;
    plan.infeasible.get_or_insert(Infeasible { sacrificed, conflict, relaxation, reason });
}

/// Reason why a plan is not known to meet all targets, for those who apply it later: `undone` is
/// what another program did to the settings, `missed` the number of targets that the last run
/// missed.
fn unmet(plan: &Plan, undone: Option<&str>, missed: usize) -> Option<String> {
    match (undone, missed) {
        (Some(why), _) => Some(format!("{NOT_PROVED}: {why}")),
        (None, 0) if plan.feasible => None,
        (None, 0) => Some("too few trials of the settings met all targets".to_owned()),
        (None, n) => Some(format!("the last run under the settings missed {n} of the targets")),
    }
}

/// Reason why the settings of a plan are not in force as they were applied, or not known to be:
/// another program may have changed them during the run. `None` where they are.
fn not_as_proved(plan: &Plan, dirs: &Dirs) -> Option<String> {
    if plan.settings.is_empty() {
        return None;
    }
    let under = match ActiveSettings::find(dirs) {
        Ok(under) => under,
        Err(e) => return Some(format!("whether they are in force is not known: {}", one_line(&e))),
    };
    let in_force = under.plan.as_ref().filter(|_| under.held.is_none()).and_then(|of| of.devices.first());
    match in_force {
        Some(of) if of.plan.settings == plan.settings => under.gaps.into_iter().next(),
        _ => Some("another program has put them back".to_owned()),
    }
}

fn observations(run: &Run) -> Vec<TrialResult> {
    run.tasks
        .iter()
        .map(|t| TrialResult {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verified::tests::{applied, by_hand};

    #[test]
    fn a_plan_that_is_not_known_to_meet_its_targets_says_why() {
        let good = by_hand().devices.remove(0).plan;
        assert_eq!(unmet(&good, None, 0), None);
        assert!(unmet(&good, None, 2).unwrap().contains("missed 2"));
        assert!(unmet(&good, Some("changed"), 0).unwrap().ends_with(": changed"));
        let open = Plan { feasible: false, ..good };
        assert!(unmet(&open, None, 0).unwrap().contains("too few trials"));
        let mut missed = by_hand().devices.remove(0).plan;
        note_unmet(&mut missed, None, 1);
        assert!(!missed.feasible && HostPlan::of_one(missed).reasons()[0].contains("missed 1"));
    }

    #[test]
    fn settings_that_another_program_has_changed_since_are_not_proved() {
        let mut plan = by_hand();
        let setting = serde_json::json!({ "knob": "host_elevator", "value": "none", "reason": "r",
            "strength": "hint" });
        plan.devices[0].plan.settings = vec![serde_json::from_value(setting).unwrap()];
        let (_dir, dirs, knob) = applied(&plan);
        let of = &plan.devices[0].plan;
        assert_eq!(not_as_proved(of, &dirs), None);
        std::fs::write(&knob, "3").unwrap();
        assert!(not_as_proved(of, &dirs).unwrap().contains("the knob"));
        std::fs::write(&knob, "2").unwrap();
        revert_all(&dirs).unwrap();
        assert!(not_as_proved(of, &dirs).unwrap().contains("put them back"));
        let nothing = Plan { settings: Vec::new(), ..of.clone() };
        assert_eq!(not_as_proved(&nothing, &dirs), None, "then nothing is in force");
    }
}
