//! Tuning: the next setting to try, given the measurements of earlier trials. Pure: the caller
//! applies and measures.
//!
//! The models predict the score of each candidate. Measurements show the error of the prediction,
//! which nearby settings are likely to share: a Gaussian process over the settings with the model's
//! prediction as its mean (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
//! eqs. 2.25 and 2.26). The next trial is the one whose score could well be the smallest (lower
//! confidence bound; Cox and John, 1992). Settings that met all targets once are tried again before
//! they are accepted, because of many noisy trials the best one is partly lucky.

mod process;

use rtvirtio_model::{Config, Elevator, ModelError, ModelKind, Profile};
use rtvirtio_spec::Spec;
use rtvirtio_units::Ratio;

use crate::evaluate::{Evaluator, Outcome, Problem};
use crate::types::RATE_KEPT;
use crate::{PlanError, PlanOptions, search};
use process::Process;

/// Most candidates: enough for every kind of setting, few enough to be judged in a moment.
const CANDIDATES: usize = 400;

/// Candidates of each kind that are kept.
const PER_KIND: usize = 40;

/// Deviations below its mean that a candidate is judged by: 0 never explores, 2 mostly does.
const OPTIMISM: f64 = 0.7;

/// Score of a task that loses all its rate; a partial loss lies between 1 and this in proportion.
const NO_RATE: f64 = 10.0;

/// Measured result of a task in a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialResult {
    /// Latency at the target's percentile, ns.
    pub latency_ns: f64,
    /// Share of the declared rate that was kept; 1 without a rate.
    pub kept: f64,
}

/// A configuration with its measured score.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// Configuration as it was applied.
    pub config: Config,
    /// Largest ratio of measured latency to target; above 1 some target was missed.
    pub score: f64,
}

/// Conditions that end the tuning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TuneGoal {
    /// Largest score of a good trial: 0.9 leaves a tenth for bad luck.
    pub score: f64,
    /// Number of good trials of the same setting that are required.
    pub repeats: usize,
    /// Most trials in all.
    pub trials: usize,
}

impl Default for TuneGoal {
    fn default() -> Self {
        Self { score: 0.9, repeats: 2, trials: 15 }
    }
}

/// State of a tuning run.
pub struct Tuner {
    /// Targets in the order of [`Spec::goals`], ns; `None` for a VM that is given up.
    targets: Vec<Option<f64>>,
    given_up: Vec<usize>,
    overloaded: bool,
    goal: TuneGoal,
    candidates: Vec<Candidate>,
    process: Process,
    trials: Vec<Trial>,
}

struct Candidate {
    config: Config,
    /// Logarithm of the predicted score.
    prior: f64,
    place: Vec<f64>,
}

impl Tuner {
    /// Candidates from the space of `options`, judged by its model. Where the device cannot carry
    /// all declared rates, the plan by formulas decides which VMs are given up, and is the first
    /// candidate: those that it caps or, where weights alone decide, those that miss a target in
    /// it. The targets of the others count.
    pub fn new(
        spec: &Spec,
        profile: &Profile,
        options: &PlanOptions,
        goal: TuneGoal,
    ) -> Result<Self, PlanError> {
        options.check()?;
        // The whole space by the formulas, which cost little; then the model of `options`.
        let by_slice = PlanOptions { model: ModelKind::Slice, learned: None, ..options.clone() };
        let problem = Problem::new(spec, &by_slice);
        let mut slice = Evaluator::new(profile, spec, &by_slice)?;
        let planned = PlanOptions {
            safety: if options.model == ModelKind::Slice { options.safety } else { search::SAFETY },
            ..by_slice.clone()
        };
        let found = search::search(&Problem::new(spec, &planned), &mut slice)?;
        let overloaded = found.missed > 0 && search::asked(&problem, &slice) > 1.0;
        let given_up = if overloaded && found.given_up.is_empty() {
            left_out(&problem, &found)
        } else {
            found.given_up.clone()
        };
        let problem = problem.without(given_up);
        let given_up: Vec<usize> =
            problem.given_up.iter().copied().filter(|&i| spec.vms[i].tightest_target().is_some()).collect();
        // More margin than [`search::ENOUGH_GIVEN_UP`] is not better.
        let enough = by_slice.enough().min(search::ENOUGH_GIVEN_UP);
        let least = if given_up.is_empty() { 1e-6 } else { 1.0 - enough };
        let held = PlanOptions { enough: Some(Ratio(enough)), ..by_slice.clone() };
        let problem = if given_up.is_empty() { problem } else { Problem { options: &held, ..problem } };
        let targets = problem.targets.clone();
        // A new budget for the candidates, however much the plan used.
        let mut slice = Evaluator::new(profile, spec, &by_slice)?;
        let mut configs = search::diverse(&problem, &mut slice, PER_KIND, CANDIDATES);
        // Where VMs are given up the plan was searched on a finer grid than the candidates: limits
        // between their steps, weights one by one.
        if !given_up.is_empty() {
            configs.retain(|c| *c != found.config);
            configs.insert(0, found.config);
        }
        let evaluator = Evaluator::new(profile, spec, options)?;
        let mut candidates = Vec::new();
        let mut refused: Option<ModelError> = None;
        for config in configs {
            match evaluator.forecast(&config) {
                Ok(forecasts) => {
                    let seen: Vec<TrialResult> = forecasts
                        .iter()
                        .map(|f| TrialResult { latency_ns: f.latency_ns.0 as f64, kept: f.rate_kept })
                        .collect();
                    let prior = score(&targets, &seen).max(least).ln();
                    let place = place(&config);
                    candidates.push(Candidate { config, prior, place });
                }
                Err(e) => refused = Some(e),
            }
        }
        match (candidates.is_empty(), refused) {
            (true, Some(e)) => Err(e.into()),
            (true, None) => Err(PlanError::BadOptions("there is nothing to try".to_owned())),
            _ => Ok(Self {
                targets,
                given_up,
                overloaded,
                goal,
                candidates,
                process: Process::default(),
                trials: Vec::new(),
            }),
        }
    }

    /// Whether the VMs with targets declare more than the device can do, so that no setting can
    /// meet all their targets.
    #[must_use]
    pub fn is_overloaded(&self) -> bool {
        self.overloaded
    }

    /// Indices of VMs whose targets do not count, because the device cannot carry all declared
    /// rates.
    #[must_use]
    pub fn given_up(&self) -> &[usize] {
        &self.given_up
    }

    /// Next configuration to try; `None` when the goal is reached, or the trials or the candidates
    /// are used up.
    #[must_use]
    pub fn next(&self) -> Option<Config> {
        if self.trials.len() >= self.goal.trials || self.reached() {
            return None;
        }
        // Lower limits score better than the plan, but starve the VMs that are given up for
        // nothing: the plan is tried before them.
        if self.trials.is_empty() && !self.given_up.is_empty() {
            return self.candidates.first().map(|c| c.config.clone());
        }
        // A setting that was good is tried again first.
        if let Some(best) = self.promising().filter(|b| b.0 <= self.goal.score) {
            return Some(best.1.clone());
        }
        let worth = |c: &Candidate| {
            let (mean, deviation) = self.process.at(&c.place);
            c.prior + mean - OPTIMISM * deviation
        };
        // A setting with one bad trial cannot reach the required number of good ones, however good
        // it is on average.
        let open = self.candidates.iter().filter(|c| self.worst(&c.config) <= self.goal.score);
        let next = open.min_by(|a, b| worth(a).total_cmp(&worth(b)))?;
        Some(next.config.clone())
    }

    /// Records the measured results of a trial of `config`, in the order of [`Spec::goals`].
    pub fn observe(&mut self, config: &Config, seen: &[TrialResult]) {
        let score = score(&self.targets, seen);
        let place = place(config);
        self.process.add(place, score.max(1e-6).ln() - self.prior(config));
        self.trials.push(Trial { config: config.clone(), score });
    }

    /// Whether some setting had the required number of good trials.
    #[must_use]
    pub fn reached(&self) -> bool {
        self.promising().is_some_and(|(score, config)| {
            let n = self.trials.iter().filter(|t| t.config == *config).count();
            score <= self.goal.score && n >= self.goal.repeats
        })
    }

    /// All trials in order.
    #[must_use]
    pub fn trials(&self) -> &[Trial] {
        &self.trials
    }

    /// The best setting tried, with its worst score: the one with the required number of good
    /// trials, else the one whose score is expected to be the smallest after all trials. A single
    /// lucky trial counts for as much as its noise allows.
    #[must_use]
    pub fn best(&self) -> Option<(f64, &Config)> {
        if self.reached() {
            return self.promising();
        }
        let expected = |t: &Trial| {
            let (mean, _) = self.process.at(&place(&t.config));
            self.prior(&t.config) + mean
        };
        let best = self.trials.iter().min_by(|a, b| expected(a).total_cmp(&expected(b)))?;
        Some((self.worst(&best.config), &best.config))
    }

    /// The setting with the smallest worst score so far.
    fn promising(&self) -> Option<(f64, &Config)> {
        self.trials.iter().map(|t| (self.worst(&t.config), &t.config)).min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The largest score of a setting over its trials.
    fn worst(&self, config: &Config) -> f64 {
        self.trials.iter().filter(|t| t.config == *config).map(|t| t.score).fold(0.0, f64::max)
    }

    /// Logarithm of the predicted score; 0 for a setting that is no candidate.
    fn prior(&self, config: &Config) -> f64 {
        self.candidates.iter().find(|c| c.config == *config).map_or(0.0, |c| c.prior)
    }
}

/// VMs of which `found` misses targets, although it gives none up; empty if it meets the targets of
/// no VM, for then there is nothing to tune.
fn left_out(problem: &Problem<'_>, found: &Outcome) -> Vec<usize> {
    let mut out: Vec<usize> = found.missing(problem).collect();
    if out.len() == problem.tightest().iter().flatten().count() {
        return Vec::new();
    }
    out.sort_unstable();
    out
}

/// Largest ratio of measured latency to target over all tasks with targets; a lost rate counts as a
/// missed target.
fn score(targets: &[Option<f64>], seen: &[TrialResult]) -> f64 {
    let mut worst = 0.0f64;
    for (target, seen) in targets.iter().zip(seen) {
        let Some(target) = *target else { continue };
        worst = worst.max(seen.latency_ns / target.max(1.0));
        if seen.kept < RATE_KEPT {
            worst = worst.max(1.0 + (NO_RATE - 1.0) * (1.0 - seen.kept));
        }
    }
    worst
}

/// Coordinates of a configuration: settings with very different effects are far apart. One unit is
/// the distance over which the model's error is similar.
fn place(config: &Config) -> Vec<f64> {
    let is = |e: Elevator| if config.elevator == e { 1.5 } else { 0.0 };
    let bfq = config.elevator == Elevator::Bfq;
    let idle = if bfq { config.bfq.slice_idle.as_millis_f64() } else { 0.0 };
    let mut place = vec![
        is(Elevator::None),
        is(Elevator::MqDeadline),
        is(Elevator::Kyber),
        is(Elevator::Bfq),
        if bfq && idle > 0.0 { 2.0 } else { 0.0 },
        idle / 8.0,
        if idle > 0.0 { config.bfq.timeout_sync.as_millis_f64().max(1.0).ln() / 2.0 } else { 0.0 },
        if bfq && config.bfq.low_latency { 0.5 } else { 0.0 },
        if idle > 0.0 {
            config.bfq.max_budget.map_or(0.0, |b| 8.0 / b.as_kib_f64().max(1.0).ln())
        } else {
            0.0
        },
    ];
    let total: f64 = config.vms.iter().map(|v| f64::from(v.weight)).sum();
    for vm in &config.vms {
        place.push(f64::from(vm.weight) / total.max(1.0));
        // No cap counts as one that never binds.
        place.push(vm.cap.map_or(12.0, |c| c.0.max(1.0).ln()) / 2.0);
        place.push(if vm.guest_elevator == Elevator::Bfq { 1.0 } else { 0.0 });
    }
    place
}

#[cfg(test)]
mod tests;
