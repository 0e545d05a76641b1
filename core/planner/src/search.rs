//! The searches, and their common parts.

mod bound;
mod climb;
#[cfg(test)]
mod gain_tests;
mod slice;
mod triage;
mod weights;

use rtvirtio_model::{Bfq, Config, Elevator, ModelError, ModelKind, weights_act};
use rtvirtio_units::{Iops, blk_throttle};

pub(crate) use bound::{SAFETY, diverse};
pub(crate) use climb::climb;
pub(crate) use triage::{ENOUGH as ENOUGH_GIVEN_UP, asked, released};

use crate::PlanError;
use crate::convert::guest_reachable;
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Margin, as a share of the target, that a setting must gain to stay.
const WORTH: f64 = 0.005;

/// With our models a setting must also make the worst prediction shorter by this share: they aim to
/// be within a factor of three, so less is no visible gain.
const WITHIN_ERROR: f64 = 0.1;

/// Share of a declared rate that may be lost for fewer settings.
const RATE_LOST: f64 = 0.001;

/// Least cap that is set, requests per second: a VM that may do less is as good as stopped, and
/// before Linux 6.11 blk-throttle lets through less than limits below this.
const LEAST_CAP: f64 = 10.0;

/// The best configuration found, without settings that gain nothing.
pub(crate) fn search(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>) -> Result<Outcome, PlanError> {
    let start = started(problem, evaluator)?;
    let found = if problem.targets.iter().all(Option::is_none) {
        start
    } else {
        let found = match problem.options.model {
            ModelKind::Slice => {
                let by_slice = |evaluator: &mut Evaluator<'_>| {
                    slice::search(problem, evaluator, start)
                        .map(|best| tidy(problem, evaluator, best, WITHIN_ERROR))
                };
                return triage::search(problem, evaluator, by_slice).ok_or_else(|| nothing(evaluator));
            }
            ModelKind::Bound => bound::search(problem, evaluator, start),
        };
        let found = found.map(|best| tidy(problem, evaluator, best, WITHIN_ERROR));
        match found {
            // Where the only question is whether bounds can meet the targets, this is the answer.
            Some(best)
                if best.missed > 0 && problem.options.model == ModelKind::Bound && problem.thorough =>
            {
                bound::expected(problem, evaluator).or(Some(best))
            }
            found => found,
        }
    };
    found.ok_or_else(|| nothing(evaluator))
}

/// The configuration in force, judged; `None` where the model does not cover it, which is no error;
/// an invalid one is.
pub(crate) fn started(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
) -> Result<Option<Outcome>, PlanError> {
    let start = evaluator.outcome(problem, problem.options.start.clone());
    match (start, evaluator.refusal()) {
        (None, Some(e @ (ModelError::BadConfig(_) | ModelError::BadProfile { .. }))) => {
            Err(PlanError::Model(e.clone()))
        }
        (start, _) => Ok(start),
    }
}

/// Error when no configuration was found.
pub(crate) fn nothing(evaluator: &Evaluator<'_>) -> PlanError {
    match evaluator.refusal() {
        Some(e) => PlanError::Model(e.clone()),
        None => PlanError::BadOptions("the space holds no configuration that the model covers".to_owned()),
    }
}

/// VMs up to which a step of a local search tries every VM, not only the ones of [`Pressed`].
const ALL_NEIGHBOURS: usize = 8;

/// The VMs that a step of a local search changes where there are many.
struct Pressed {
    /// The VM with the least margin.
    worst: Option<usize>,
    /// The VM with the most margin.
    easiest: Option<usize>,
    /// The most urgent VM that misses a target.
    missing: Option<usize>,
}

impl Pressed {
    /// `None` where the model does not cover the configuration or the budget is spent.
    fn new(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, at: &Outcome) -> Option<Self> {
        let judged = evaluator.judge(&at.config)?;
        let n = problem.spec.vms.len();
        let mut margins = vec![f64::INFINITY; n];
        for (i, target) in problem.targets.iter().enumerate() {
            if let Some(target) = *target {
                let vm = problem.vm_of[i];
                margins[vm] = margins[vm].min(Problem::margin(target, judged.latency[i], judged.kept[i]));
            }
        }
        let by = |a: &usize, b: &usize| margins[*a].total_cmp(&margins[*b]);
        Some(Self {
            worst: (0..n).min_by(by),
            easiest: (0..n).max_by(by),
            missing: at.missing(problem).next(),
        })
    }
}

/// The nearest level above a value.
fn above<T: Copy + Ord>(levels: &[T], value: T) -> Option<T> {
    levels.iter().copied().filter(|l| *l > value).min()
}

/// The nearest level below a value.
fn below<T: Copy + Ord>(levels: &[T], value: T) -> Option<T> {
    levels.iter().copied().filter(|l| *l < value).max()
}

/// The next cap from this rate on that the kernel holds exactly ([`blk_throttle::let_through`]), at
/// least [`LEAST_CAP`].
fn whole_cap(rate: f64) -> Iops {
    let below = blk_throttle::let_through(rate.ceil().max(LEAST_CAP));
    Iops(if below < rate { below + blk_throttle::STEP } else { below })
}

/// The next such cap down from this rate.
fn whole_cap_below(rate: f64) -> Iops {
    Iops(blk_throttle::let_through(rate).max(LEAST_CAP))
}

/// Whether weights may be set.
pub(crate) fn weights_allowed(problem: &Problem<'_>) -> bool {
    problem.options.placements.any_weights_compare() && !problem.options.space.weights.is_empty()
}

/// BFQ tunables that are in force before the plan writes any: those of the start, or the kernel's
/// defaults when BFQ is newly selected.
pub(crate) fn initial_bfq(start: &Config) -> Bfq {
    if start.elevator == Elevator::Bfq { start.bfq } else { Bfq::default() }
}

/// Removes settings that cannot act in `config` and adds required ones: weights need idling BFQ,
/// and where they differ weight raising must be off or it overrides them.
pub(crate) fn settle(problem: &Problem<'_>, mut config: Config) -> Config {
    let start = &problem.options.start;
    let acts = weights_act(problem.spec, &config);
    if config.elevator != Elevator::Bfq {
        config.bfq = start.bfq;
    }
    if !acts || !weights_allowed(problem) {
        for (vm, old) in config.vms.iter_mut().zip(&start.vms) {
            vm.weight = old.weight;
        }
        return config;
    }
    for (i, (vm, old)) in config.vms.iter_mut().zip(&start.vms).enumerate() {
        if !problem.options.placements.weights_compare(i) {
            vm.weight = old.weight;
        }
    }
    if weights_differ(&config) && problem.options.space.low_latency {
        config.bfq.low_latency = false;
    }
    config
}

/// Whether weights differ between VMs.
fn weights_differ(config: &Config) -> bool {
    config.vms.windows(2).any(|w| w[0].weight != w[1].weight)
}

/// VMs whose weights may be set.
fn weighed(problem: &Problem<'_>) -> Vec<usize> {
    (0..problem.spec.vms.len()).filter(|&vm| problem.options.placements.weights_compare(vm)).collect()
}

/// Evaluates a configuration and keeps it when it is better.
pub(crate) fn consider(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    best: &mut Option<Outcome>,
    config: Config,
) -> bool {
    let Some(outcome) = evaluator.outcome(problem, settle(problem, config)) else { return false };
    let better = best.as_ref().is_none_or(|b| outcome.better_than(b));
    if better {
        *best = Some(outcome);
    }
    better
}

/// Removes, one by one, every setting without which the same targets are met with noticeably the
/// same margin. A setting must also make the worst prediction shorter by the share `error`.
pub(crate) fn tidy(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    mut best: Outcome,
    error: f64,
) -> Outcome {
    // The margin is 1 - latency / target.
    let within_error = error * (1.0 - best.margin).max(0.0);
    let floor = best.margin - WORTH.max(within_error);
    let rates = rates_kept(problem, evaluator, &best);
    loop {
        let before = best.changes;
        for config in without_one(problem, &best.config) {
            let Some(outcome) = evaluator.outcome(problem, settle(problem, config)) else { continue };
            let keeps = |(now, before): (&f64, &f64)| *now >= before - RATE_LOST;
            let as_good = outcome.missed_by_urgency == best.missed_by_urgency
                && outcome.margin >= floor
                && rates_kept(problem, evaluator, &outcome).iter().zip(&rates).all(keeps);
            if as_good && outcome.changes < best.changes {
                best = outcome;
                // The list was made for the old configuration: start again.
                break;
            }
        }
        if best.changes >= before {
            return best;
        }
    }
}

/// Share of its rate that each task with a target keeps.
fn rates_kept(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, of: &Outcome) -> Vec<f64> {
    let Some(judged) = evaluator.judge(&of.config) else { return Vec::new() };
    problem.targets.iter().zip(&judged.kept).filter(|(t, _)| t.is_some()).map(|(_, kept)| *kept).collect()
}

/// Changed copies of a configuration; edits without effect are left out.
struct Edits<'a> {
    config: &'a Config,
    changed: Vec<Config>,
}

impl<'a> Edits<'a> {
    fn new(config: &'a Config) -> Self {
        Self { config, changed: Vec::new() }
    }

    fn push(&mut self, edit: &dyn Fn(&mut Config)) {
        let mut c = self.config.clone();
        edit(&mut c);
        if c != *self.config {
            self.changed.push(c);
        }
    }
}

/// Copies of `config` with one knob, or one kind of knob, as at the start. Whole kinds come first:
/// they remove most.
fn without_one(problem: &Problem<'_>, config: &Config) -> Vec<Config> {
    let start = &problem.options.start;
    let mut out = Edits::new(config);
    let mut push = |edit: &dyn Fn(&mut Config)| out.push(edit);
    push(&|c| {
        c.elevator = start.elevator;
        c.bfq = start.bfq;
    });
    push(&|c| c.vms.iter_mut().zip(&start.vms).for_each(|(vm, old)| vm.weight = old.weight));
    push(&|c| c.vms.iter_mut().zip(&start.vms).for_each(|(vm, old)| vm.cap = old.cap));
    push(&|c| {
        c.vms.iter_mut().zip(&start.vms).for_each(|(vm, old)| {
            vm.guest_elevator = old.guest_elevator;
            vm.guest_bfq = old.guest_bfq;
        });
    });
    let initial = initial_bfq(start);
    push(&|c| c.bfq.slice_idle = initial.slice_idle);
    push(&|c| c.bfq.timeout_sync = initial.timeout_sync);
    push(&|c| c.bfq.max_budget = initial.max_budget);
    push(&|c| c.bfq.low_latency = initial.low_latency);
    push(&|c| c.bfq.strict_guarantees = initial.strict_guarantees);
    for (i, old) in start.vms.iter().enumerate() {
        push(&|c| c.vms[i].weight = old.weight);
        push(&|c| c.vms[i].cap = old.cap);
        push(&|c| c.vms[i].guest_elevator = old.guest_elevator);
    }
    out.changed
}

/// VMs whose guest elevator may be set.
fn settable_guests(problem: &Problem<'_>) -> Vec<usize> {
    if !problem.options.space.guests {
        return Vec::new();
    }
    (0..problem.spec.vms.len()).filter(|&i| guest_reachable(&problem.spec.vms[i])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_one_that_the_kernel_holds_and_no_less_than_asked() {
        for (rate, cap) in
            [(0.0, 10.0), (10.0, 10.0), (10.2, 20.0), (78.0, 80.0), (80.0, 80.0), (999.5, 1_000.0)]
        {
            assert_eq!(whole_cap(rate), Iops(cap), "{rate}");
        }
        assert_eq!([12.5, 19.0, 20.0, 4.0].map(|rate| whole_cap_below(rate).0), [10.0, 10.0, 20.0, 10.0]);
    }
}
