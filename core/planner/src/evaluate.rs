//! Judging a configuration: forecasts against targets, and which of two configurations is better.

use std::cmp::Ordering;
use std::collections::hash_map::Entry;

use rtvirtio_model::{
    Bfq, Config, Elevator, Forecast, ModelError, ModelKind, Profile, SliceSearch, TailModel, model,
};
use rtvirtio_spec::Spec;
use rtvirtio_units::Nanos;
use rustc_hash::FxHashMap;

use crate::types::RATE_KEPT;
use crate::{Placements, PlanOptions};

/// Margins are compared in steps of this much of the target, so that a sliver of margin does not
/// outweigh a change.
const MARGIN_STEP: f64 = 0.005;

/// Planning problem: the spec's tasks with the targets that count in this search.
#[derive(Clone)]
pub(crate) struct Problem<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) options: &'a PlanOptions,
    /// Targets in ns, in the order of [`Spec::goals`]; so are all lists with this index.
    pub(crate) targets: Vec<Option<f64>>,
    /// VM of each goal.
    pub(crate) vm_of: Vec<usize>,
    /// VMs by urgency: tightest target first, then spec order; those without targets last.
    pub(crate) urgency: Vec<usize>,
    /// VMs that may be capped: no target declared, a task without a rate, and a cgroup where a
    /// limit acts.
    pub(crate) cappable: Vec<usize>,
    /// VMs with rates that may be capped below their rates, because the device cannot carry all:
    /// none of their targets counts.
    pub(crate) given_up: Vec<usize>,
    /// Whether a longer search for the last bit of margin is wanted: not where the only question is
    /// whether the targets can be met.
    pub(crate) thorough: bool,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(spec: &'a Spec, options: &'a PlanOptions) -> Self {
        let cappable = (0..spec.vms.len())
            .filter(|&i| options.placements.limits_act(i))
            .filter(|&i| spec.vms[i].tightest_target().is_none())
            .filter(|&i| spec.vms[i].tasks.iter().any(|t| t.rate.is_none()))
            .collect();
        let targets = spec.goals().map(|(_, _, t)| t.map(|t| t.latency.0 as f64)).collect();
        let goals = |i: usize| spec.vms[i].tasks.iter().flat_map(rtvirtio_spec::Task::goals).map(move |_| i);
        let vm_of = (0..spec.vms.len()).flat_map(goals).collect();
        Self {
            spec,
            options,
            targets: Vec::new(),
            vm_of,
            urgency: Vec::new(),
            cappable,
            given_up: Vec::new(),
            thorough: true,
        }
        .with_targets(targets)
    }

    /// The problem with other targets and the urgency that follows from them; the cappable VMs stay
    /// as declared.
    pub(crate) fn with_targets(&self, targets: Vec<Option<f64>>) -> Self {
        let mut new = Self { targets, ..self.clone() };
        let tightest = new.tightest();
        new.urgency = (0..self.spec.vms.len()).collect();
        let of = |i: usize| tightest[i].unwrap_or(f64::INFINITY);
        new.urgency.sort_by(|&a, &b| of(a).total_cmp(&of(b)).then(a.cmp(&b)));
        new
    }

    /// The problem with these VMs given up.
    pub(crate) fn without(&self, given_up: Vec<usize>) -> Self {
        let mut targets = self.targets.clone();
        for (target, vm) in targets.iter_mut().zip(&self.vm_of) {
            if given_up.contains(vm) {
                *target = None;
            }
        }
        Self { given_up, ..self.with_targets(targets) }
    }

    /// VMs that may be capped: the cappable ones and those given up.
    pub(crate) fn held(&self) -> impl Iterator<Item = usize> {
        let may = |i: &&usize| !self.cappable.contains(i) && self.options.placements.limits_act(**i);
        let more = self.given_up.iter().filter(may);
        self.cappable.iter().chain(more).copied()
    }

    /// Tightest target of each VM, in ns.
    pub(crate) fn tightest(&self) -> Vec<Option<f64>> {
        let mut out: Vec<Option<f64>> = vec![None; self.spec.vms.len()];
        for (target, &vm) in self.targets.iter().zip(&self.vm_of) {
            if let Some(t) = *target {
                out[vm] = Some(out[vm].map_or(t, |o| o.min(t)));
            }
        }
        out
    }

    /// Largest prediction at which a target counts as met.
    pub(crate) fn limit(&self, target: f64) -> f64 {
        target * (1.0 - self.options.safety.0)
    }

    /// Whether a target is met with the safety margin and the rate kept.
    pub(crate) fn met(&self, target: f64, latency: f64, kept: f64) -> bool {
        latency <= self.limit(target) && kept >= RATE_KEPT
    }

    /// Relative margin: remaining share of the target; negative when the rate is not kept.
    pub(crate) fn margin(target: f64, latency: f64, kept: f64) -> f64 {
        let tail = 1.0 - latency / target;
        if kept >= RATE_KEPT { tail } else { tail.min(kept / RATE_KEPT - 1.0) }
    }

    pub(crate) fn outcome(&self, config: Config, judged: &Judged) -> Outcome {
        let mut missed_of = vec![0u32; self.spec.vms.len()];
        let mut margin = f64::INFINITY;
        for (i, target) in self.targets.iter().enumerate() {
            let Some(target) = *target else { continue };
            let (latency, kept) = (judged.latency[i], judged.kept[i]);
            if !self.met(target, latency, kept) {
                missed_of[self.vm_of[i]] += 1;
            }
            margin = margin.min(Self::margin(target, latency, kept));
        }
        Outcome {
            missed: missed_of.iter().sum(),
            missed_by_urgency: self.urgency.iter().map(|&i| missed_of[i]).collect(),
            margin: if margin.is_finite() { margin } else { 0.0 },
            enough: self.options.enough(),
            changes: changes(&self.options.start, &config),
            given_up: Vec::new(),
            left: self.held().map(|i| config.vms[i].cap.map_or(f64::INFINITY, |c| c.0)).sum(),
            config,
        }
    }
}

/// A configuration and its result for a problem.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) config: Config,
    /// Number of targets missed.
    pub(crate) missed: u32,
    /// Targets missed per VM, most urgent VM first.
    pub(crate) missed_by_urgency: Vec<u32>,
    /// Smallest margin relative to its target.
    pub(crate) margin: f64,
    /// Margin beyond which more does not count.
    pub(crate) enough: f64,
    /// Knobs that differ from the start.
    pub(crate) changes: usize,
    /// VMs that are capped although they declare rates, because the device cannot carry all.
    pub(crate) given_up: Vec<usize>,
    /// Sum of the caps of the VMs that may be capped, requests per second; infinite where one is
    /// not.
    pub(crate) left: f64,
}

impl Outcome {
    /// Number of targets missed.
    #[must_use]
    pub fn missed(&self) -> u32 {
        self.missed
    }

    /// The greatest is best: fewer misses of the most urgent VM first, then of the next; then more
    /// margin, in steps, up to [`Outcome::enough`]; then fewer changes; then looser caps; then
    /// margin to the last bit.
    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        let step = |m: f64| (m.clamp(-1e6, self.enough) / MARGIN_STEP).floor() as i64;
        other
            .missed_by_urgency
            .cmp(&self.missed_by_urgency)
            .then_with(|| step(self.margin).cmp(&step(other.margin)))
            .then_with(|| other.changes.cmp(&self.changes))
            .then_with(|| self.left.total_cmp(&other.left))
            .then_with(|| self.margin.total_cmp(&other.margin))
    }

    /// VMs that miss targets, most urgent first.
    pub(crate) fn missing(&self, problem: &Problem<'_>) -> impl DoubleEndedIterator<Item = usize> {
        let by_urgency = problem.urgency.iter().zip(&self.missed_by_urgency);
        by_urgency.filter(|(_, missed)| **missed > 0).map(|(&vm, _)| vm)
    }

    /// Whether more margin would not count.
    pub(crate) fn has_enough(&self) -> bool {
        self.margin >= self.enough
    }

    /// Order for hill climbing: as [`Outcome::better_than`], but among equals every bit of margin
    /// counts, because far from feasible no single move meets a target or gains a whole step.
    pub(crate) fn climbs_over(&self, other: &Self) -> bool {
        match other.missed_by_urgency.cmp(&self.missed_by_urgency) {
            Ordering::Equal => self.margin.min(self.enough) > other.margin.min(self.enough) + 1e-6,
            order => order == Ordering::Greater,
        }
    }

    pub(crate) fn better_than(&self, other: &Self) -> bool {
        self.compare(other) == Ordering::Greater
    }
}

/// The model's prediction for a configuration: independent of the targets, so it is kept for later
/// searches.
pub(crate) struct Judged {
    /// Latency compared with the targets, ns, in the order of [`Spec::goals`].
    pub(crate) latency: Vec<f64>,
    pub(crate) kept: Vec<f64>,
}

impl Judged {
    fn from_tails(tasks: impl Iterator<Item = (Nanos, f64)>) -> Self {
        let (latency, kept) = tasks.map(|(latency, kept)| (latency.0 as f64, kept)).unzip();
        Self { latency, kept }
    }
}

/// The model with its inputs, a cache of its results, and the budget.
pub(crate) struct Evaluator<'a> {
    profile: &'a Profile,
    spec: &'a Spec,
    model: Box<dyn TailModel>,
    /// The slice model prepared for many configurations; `None` with another model.
    slice: Option<SliceSearch<'a>>,
    placements: Placements,
    seen: FxHashMap<Vec<u64>, Option<Judged>>,
    evaluated: u64,
    budget: u64,
    /// The model's last refusal, for when no configuration was covered.
    refusal: Option<ModelError>,
}

impl<'a> Evaluator<'a> {
    pub(crate) fn new(
        profile: &'a Profile,
        spec: &'a Spec,
        options: &PlanOptions,
    ) -> Result<Self, ModelError> {
        let slice = match options.model {
            ModelKind::Slice => Some(SliceSearch::new(profile, spec)?),
            ModelKind::Bound => None,
        };
        let model = model(options.model, options.learned.as_ref())?;
        Ok(Self { slice, ..Self::by(model, profile, spec, options) })
    }

    /// Evaluator with a model from elsewhere.
    pub(crate) fn by(
        model: Box<dyn TailModel>,
        profile: &'a Profile,
        spec: &'a Spec,
        options: &PlanOptions,
    ) -> Self {
        Self {
            profile,
            spec,
            model,
            slice: None,
            placements: options.placements.clone(),
            seen: FxHashMap::default(),
            evaluated: 0,
            budget: options.budget,
            refusal: None,
        }
    }

    pub(crate) fn evaluated(&self) -> u64 {
        self.evaluated
    }

    /// Allows at most `share` of the budget from here on, until [`Self::lift`] with the returned
    /// budget.
    pub(crate) fn limit(&mut self, share: f64) -> u64 {
        let whole = self.budget;
        self.budget = whole.min(self.evaluated + (whole as f64 * share) as u64);
        whole
    }

    /// Ends a [`Self::limit`] by restoring the whole budget.
    pub(crate) fn lift(&mut self, whole: u64) {
        self.budget = whole;
    }

    /// Whether the budget allows no other configuration.
    pub(crate) fn is_spent(&self) -> bool {
        self.evaluated >= self.budget
    }

    pub(crate) fn refusal(&self) -> Option<&ModelError> {
        self.refusal.as_ref()
    }

    pub(crate) fn profile(&self) -> &'a Profile {
        self.profile
    }

    /// Forecasts of one configuration with their terms.
    pub(crate) fn forecast(&self, config: &Config) -> Result<Vec<Forecast>, ModelError> {
        self.model.forecast(self.profile, self.spec, &self.placements.in_effect(config))
    }

    /// Prediction; `None` when the model does not cover `config` or the budget is spent.
    pub(crate) fn judge(&mut self, config: &Config) -> Option<&Judged> {
        let new = match self.seen.entry(fingerprint(config)) {
            Entry::Occupied(known) => return known.into_mut().as_ref(),
            Entry::Vacant(new) => new,
        };
        if self.evaluated >= self.budget {
            return None;
        }
        self.evaluated += 1;
        let config = &self.placements.in_effect(config);
        let said = match &self.slice {
            Some(slice) => slice
                .briefs(config)
                .map(|all| Judged::from_tails(all.iter().map(|b| (b.latency_ns, b.rate_kept)))),
            None => self
                .model
                .forecast(self.profile, self.spec, config)
                .map(|all| Judged::from_tails(all.iter().map(|f| (f.judged(), f.rate_kept)))),
        };
        let judged = match said {
            Ok(judged) => Some(judged),
            Err(e) => {
                self.refusal = Some(e);
                None
            }
        };
        new.insert(judged).as_ref()
    }

    /// Predictions of all configurations so far that the model covers.
    pub(crate) fn judged(&self) -> impl Iterator<Item = &Judged> {
        self.seen.values().flatten()
    }

    /// Whether a configuration that was already evaluated meets all targets of `problem`.
    pub(crate) fn any_meets(&self, problem: &Problem<'_>) -> bool {
        self.judged().any(|j| {
            problem
                .targets
                .iter()
                .enumerate()
                .all(|(i, t)| t.is_none_or(|t| problem.met(t, j.latency[i], j.kept[i])))
        })
    }

    /// The configuration judged for `problem`; `None` as for [`Evaluator::judge`].
    pub(crate) fn outcome(&mut self, problem: &Problem<'_>, config: Config) -> Option<Outcome> {
        self.judge(&config).map(|judged| problem.outcome(config, judged))
    }
}

/// Cache key of a configuration: equal exactly when the configurations are.
fn fingerprint(config: &Config) -> Vec<u64> {
    let mut key = Vec::with_capacity(6 + 8 * config.vms.len());
    let elevator = |e: Elevator| match e {
        Elevator::None => 0,
        Elevator::MqDeadline => 1,
        Elevator::Kyber => 2,
        Elevator::Bfq => 3,
    };
    let bfq = |key: &mut Vec<u64>, b: &Bfq| {
        let flags = u64::from(b.low_latency) | u64::from(b.strict_guarantees) << 1;
        // No budget is 0: the kernel treats a budget of zero bytes the same way.
        key.extend([b.slice_idle.0, b.timeout_sync.0, b.max_budget.map_or(0, |b| b.0), flags]);
    };
    key.push(elevator(config.elevator));
    bfq(&mut key, &config.bfq);
    for vm in &config.vms {
        key.extend([
            u64::from(vm.weight),
            vm.cap.map_or(u64::MAX, |c| c.0.to_bits()),
            elevator(vm.guest_elevator),
        ]);
        bfq(&mut key, &vm.guest_bfq);
    }
    key
}

/// Changes that leaving BFQ counts for. No other elevator keeps shares between VMs, so a neighbour
/// that exceeds its declared load is then unchecked; and the kernel drops the weights and tunables
/// of an elevator that it leaves. Measured on a disk with a 128 KiB writer at depth 16 that was not
/// declared: 10 to 53 ms with `none`, 2 to 5 ms with BFQ at `slice_idle=0`. So two tunables of BFQ
/// are preferred to another elevator of equal margin.
const LEAVING_BFQ: usize = 3;

/// Number of knobs that differ, as [`crate::settings_of`] counts them but without writing values.
fn changes(start: &Config, config: &Config) -> usize {
    let tunables = |old: (Elevator, &Bfq), new: (Elevator, &Bfq)| {
        if new.0 != Elevator::Bfq {
            return 0;
        }
        let fresh = Bfq::default();
        let (a, b) = (if old.0 == Elevator::Bfq { old.1 } else { &fresh }, new.1);
        usize::from(a.slice_idle != b.slice_idle)
            + usize::from(a.timeout_sync != b.timeout_sync)
            // Raising works by idling, so switching it off belongs to switching idling off: one
            // decision, one change.
            + usize::from(a.low_latency != b.low_latency && (b.low_latency || b.slice_idle.0 > 0))
            + usize::from(a.max_budget != b.max_budget)
            + usize::from(a.strict_guarantees != b.strict_guarantees)
    };
    let leaves_bfq = start.elevator == Elevator::Bfq && config.elevator != Elevator::Bfq;
    let mut n = if leaves_bfq { LEAVING_BFQ } else { usize::from(start.elevator != config.elevator) }
        + tunables((start.elevator, &start.bfq), (config.elevator, &config.bfq));
    for (a, b) in start.vms.iter().zip(&config.vms) {
        n += usize::from(a.weight != b.weight)
            + usize::from(a.cap != b.cap)
            + usize::from(a.guest_elevator != b.guest_elevator)
            + tunables((a.guest_elevator, &a.guest_bfq), (b.guest_elevator, &b.guest_bfq));
    }
    n
}
