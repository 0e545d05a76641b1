//! A model of one device on one host, learned from measured runs.
//!
//! A quantile regression forest reads the features of a task and names the measured tasks that are most alike; their tails give the median
//! and a high quantile, their losses the share of the rate that is kept. The upper bound is the high quantile plus a score
//! calibrated on the trees that did not see a run (conformalised quantile regression: Romano, Patterson and Candes, NeurIPS 2019;
//! out of bag: Johansson and others, Machine Learning 97, 2014). How it is fitted, and what coverage was seen: `docs/model.md`.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::Arc;

use rtvirtio_spec::{Arrival, Pattern, Spec, Task, Vm};
use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::ensemble::{self, Ensemble};
use rtvirtio_stats::forest::{Forest, ForestError, Scratch};
use rtvirtio_units::{Nanos, Percentile, Ratio};
use serde::{Deserialize, Serialize};

use super::features::{MEANINGS, NAMES, WIDTH, features, paper_features};
use super::flowing::FlowingModel;
use super::guests::{self, GuestModel};
use crate::analytical::Coefficients;
use crate::device::{MIN_SLACK, declared_shares, service};
use crate::load::is_guest;
use crate::types::{Config, Elevator, Forecast, ModelKind, Profile, Upper, UpperBasis, VmConfig};
use crate::{ModelError, TailModel};

/// Version of the model file's form, and of the slice model whose errors it has learned.
pub const HOST_MODEL_SCHEMA: &str = "rtvirtio.model.v8";

/// Largest model file in bytes. One learned from 2500 tasks has about 4 MiB.
pub const MAX_MODEL_BYTES: usize = 64 << 20;

/// Largest logarithm of a latency in s, of a ratio of two or of a score that a file may hold; e^30 s are 300 000 years, and still a number.
const LN_MOST: f64 = 30.0;

/// How much wider a bound is outside of what was measured. Not proven; it is said wherever the bound is shown.
const EXTRAPOLATED: f64 = 2.0;

/// A learned model of one device on one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostModel {
    /// Always [`HOST_MODEL_SCHEMA`].
    pub schema: String,
    /// The device and host as measured before the runs. Forecasts rest on this profile, not on a later one: where the
    /// formulas err was learned with its numbers.
    pub profile: Profile,
    /// Names of the features in order.
    pub features: Vec<String>,
    /// Length of the runs that it was learned from, s: what is predicted is the tail of such a run.
    pub seconds: f64,
    /// Runs that it was learned from.
    pub points: usize,
    /// Tasks in them.
    pub rows: usize,
    /// When it was fitted.
    pub generated: String,
    /// ln(latency in s) of the measured tasks, each with the share of its declared rate that was lost.
    pub forest: Forest,
    /// Level of the forest's quantile that the bound starts from, 0 to 1.
    pub high: f64,
    /// Calibrated score `ln(latency) - high quantile`: of all runs, or of those in which BFQ idles where [`HostModel::flowing`] speaks of the others.
    pub bound: Quantile,
    /// What runs in which BFQ does not idle say by themselves; `None` when there were too few, or when one forest for all is sharper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flowing: Option<FlowingModel>,
    /// What must be added to the bound to hold, at its confidence, for tails as measured: tails are learned without the host's own stalls,
    /// because no setting of ours changes them. `None` where the runs could not tell them apart; the tails then hold them.
    pub host_stalls: Option<Nanos>,
    /// The RT-VirtIO paper's network on its own features, in s; `None` when not fitted.
    pub paper: Option<Ensemble>,
    /// The coefficients of the paper's equations as fitted on these runs; `None` when too few were under BFQ.
    pub analytical: Option<Coefficients>,
    /// What runs in QEMU guests taught; `None` when all runs were of process VMs: what is said of guests is then what is said of processes, doubled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guests: Option<GuestModel>,
}

/// Why a model file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// Not JSON of the known form.
    #[error("not a model of form {HOST_MODEL_SCHEMA}: {0}; make it again with `rtvirtio profile --sweep`")]
    Form(String),
    /// Right form, wrong content.
    #[error("the model is damaged: {0}; make it again with `rtvirtio profile --sweep`")]
    Damaged(String),
    /// Fitted elsewhere.
    #[error("the model is of {theirs}, this is {ours}; make one here with `rtvirtio profile --sweep`")]
    Elsewhere {
        /// Where it was fitted.
        theirs: String,
        /// Where it should be used.
        ours: String,
    },
}

/// Regimes in which tails behave differently. The bound is judged in each, and calibrated in two classes of them (`docs/model.md` says why).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// BFQ idles and all tasks have a rate.
    Idling,
    /// BFQ idles, and a neighbour has none.
    IdlingBeside,
    /// Requests wait for requests.
    Flowing,
    /// The same beside a neighbour without a rate.
    FlowingBeside,
}

impl Regime {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Idling, Self::IdlingBeside, Self::Flowing, Self::FlowingBeside];

    /// The regime of a configuration.
    #[must_use]
    pub fn of(spec: &Spec, config: &Config) -> Self {
        let idles =
            config.elevator == Elevator::Bfq && (config.bfq.slice_idle.0 > 0 || config.bfq.strict_guarantees);
        let beside = spec.tasks().any(|(_, t)| t.rate.is_none());
        match (idles, beside) {
            (true, false) => Self::Idling,
            (true, true) => Self::IdlingBeside,
            (false, false) => Self::Flowing,
            (false, true) => Self::FlowingBeside,
        }
    }

    /// Its number.
    #[must_use]
    pub fn category(self) -> usize {
        self as usize
    }

    /// Whether requests wait for requests and for nobody's idling.
    #[must_use]
    pub fn flows(self) -> bool {
        matches!(self, Self::Flowing | Self::FlowingBeside)
    }

    /// For tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idling => "BFQ idling",
            Self::IdlingBeside => "BFQ idling, neighbour",
            Self::Flowing => "not idling",
            Self::FlowingBeside => "not idling, neighbour",
        }
    }
}

impl HostModel {
    /// Reads and checks a model file's text.
    ///
    /// # Errors
    /// [`ModelFileError`] for another form, for more than [`MAX_MODEL_BYTES`] and for numbers that cannot be.
    pub fn from_json(text: &str) -> Result<Self, ModelFileError> {
        if text.len() > MAX_MODEL_BYTES {
            return Err(ModelFileError::Form(format!("it is larger than {} MiB", MAX_MODEL_BYTES >> 20)));
        }
        let model: Self = serde_json::from_str(text).map_err(|e| ModelFileError::Form(e.to_string()))?;
        model.check()?;
        Ok(model)
    }

    /// Checks what was read.
    ///
    /// # Errors
    /// [`ModelFileError`] with what is wrong.
    pub fn check(&self) -> Result<(), ModelFileError> {
        let damaged = |what: String| Err(ModelFileError::Damaged(what));
        if self.schema != HOST_MODEL_SCHEMA {
            return Err(ModelFileError::Form(format!("it has form {}", self.schema)));
        }
        if self.features != NAMES {
            return damaged("it has other features than this rtvirtio".to_owned());
        }
        // From a millisecond to 30 years.
        if !(1e-3..=1e9).contains(&self.seconds) {
            return damaged("its runs have no length".to_owned());
        }
        self.profile.check().map_err(ModelFileError::Damaged)?;
        check_forest(&self.forest, self.high, 0.0..=1.0).map_err(ModelFileError::Damaged)?;
        if let Some(paper) = &self.paper {
            paper.check().map_err(|e| ModelFileError::Damaged(e.to_string()))?;
        }
        if let Some(flowing) = &self.flowing {
            flowing.check(self.bound.miss).map_err(ModelFileError::Damaged)?;
        }
        if let Some(guests) = &self.guests {
            guests.check().map_err(ModelFileError::Damaged)?;
        }
        check_bound(&self.bound).map_err(ModelFileError::Damaged)
    }

    /// Refuses to speak of another device or host.
    ///
    /// # Errors
    /// [`ModelFileError::Elsewhere`].
    pub fn fits(&self, profile: &Profile) -> Result<(), ModelFileError> {
        let both = self.profile.identity.is_some() && profile.identity.is_some();
        let of = |p: &Profile| {
            let drive = p.identity.as_ref().filter(|_| both).map_or(String::new(), |id| format!(" ({id})"));
            format!("{}{drive} on Linux {} with {} CPUs", p.device, p.kernel, p.cpus)
        };
        let (ours, theirs) = (of(profile), of(&self.profile));
        if ours == theirs { Ok(()) } else { Err(ModelFileError::Elsewhere { theirs, ours }) }
    }

    /// What tells it from another model: FNV-1a (Fowler, Noll, Vo) over what was learned, in hexadecimal digits. When it was fitted does not count.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let timeless = Self { generated: String::new(), ..self.clone() };
        let bytes = serde_json::to_vec(&timeless).unwrap_or_default();
        let hash = bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
        format!("{hash:016x}")
    }

    /// Confidence of the bound.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        1.0 - self.bound.miss
    }

    /// What runs of processes say of one row.
    fn estimate(
        &self,
        row: &[f64; WIDTH],
        regime: Regime,
        scratch: &mut Scratch,
    ) -> Result<Estimate, ModelError> {
        match self.flowing_in(regime) {
            Some(flowing) => flowing.estimate(row, scratch),
            None => estimate(&self.forest, self.high, row, scratch),
        }
        .map_err(|e| self.unusable(&e))
    }

    /// How far the trees that speak of a regime are apart on one row.
    ///
    /// # Errors
    /// [`ForestError::BadInput`].
    pub fn spread(&self, row: &[f64; WIDTH], regime: Regime) -> Result<f64, ForestError> {
        self.flowing_in(regime).map_or(&self.forest, |f| &f.forest).spread(row)
    }

    /// The part that speaks of a regime by itself.
    fn flowing_in(&self, regime: Regime) -> Option<&FlowingModel> {
        self.flowing.as_ref().filter(|_| regime.flows())
    }

    fn unusable(&self, e: &dyn std::fmt::Display) -> ModelError {
        ModelError::BadProfile {
            device: self.profile.device.clone(),
            what: format!("its learned model fails: {e}"),
        }
    }

    /// The bound of a row.
    fn upper(
        &self,
        row: &[f64; WIDTH],
        of: &Load,
        estimate: &Estimate,
        unlike: Option<&'static str>,
    ) -> Upper {
        let flowing = self.flowing_in(of.regime);
        let (forest, bound, host) = flowing
            .map_or((&self.forest, &self.bound, self.host_stalls), |f| (&f.forest, &f.bound, f.host_stalls));
        let outside = outside(forest, row, unlike);
        let widen = if outside.is_empty() { 1.0 } else { EXTRAPOLATED };
        let upper = estimate.upper(bound.score, of.stall) * widen;
        let basis = match &self.flowing {
            _ if !outside.is_empty() => UpperBasis::Extrapolated,
            Some(_) => UpperBasis::Regime,
            None => UpperBasis::Pooled,
        };
        Upper {
            latency_ns: Nanos::from_secs_f64(upper),
            confidence: Ratio(self.confidence()),
            basis,
            host_ns: host.unwrap_or(Nanos(0)),
            outside,
            run_s: self.seconds,
        }
    }

    /// What runs in guests say of a task in one. Outside of what guests were measured with, the worse of that and of what process VMs say, which ran more VMs and
    /// more load; the bound of guests is widened there, as that of processes is.
    fn in_guest(
        &self,
        guests: &GuestModel,
        row: &[f64; WIDTH],
        of: &Load,
        unlike: Option<&'static str>,
        scratch: &mut Scratch,
    ) -> Result<(Estimate, Upper), ModelError> {
        let mut estimate = guests.estimate(row, scratch).map_err(|e| self.unusable(&e))?;
        let mut upper = Upper {
            latency_ns: Nanos::from_secs_f64(guests.upper(&estimate, of.stall)),
            confidence: Ratio(guests.confidence()),
            basis: UpperBasis::Guests,
            host_ns: Nanos(0),
            outside: outside(&guests.forest, row, unlike),
            run_s: self.seconds,
        };
        if !upper.outside.is_empty() {
            let process = self.estimate(row, of.regime, scratch)?;
            let of_process = self.upper(row, of, &process, unlike);
            let widened = Nanos((upper.latency_ns.0 as f64 * EXTRAPOLATED) as u64);
            // Bounds of guests hold the host's own stalls.
            let as_measured = Nanos(of_process.latency_ns.0.saturating_add(of_process.host_ns.0));
            upper.latency_ns = widened.max(as_measured);
            upper.basis = UpperBasis::Extrapolated;
            estimate.middle = estimate.middle.max(process.middle);
            estimate.lost = estimate.lost.max(process.lost);
        }
        Ok((estimate, upper))
    }
}

/// Checks a forest and the level of its high quantile, as read from a file; the error says what is damaged. Shares of lost rates lie in `lost`.
pub(super) fn check_forest(forest: &Forest, high: f64, lost: RangeInclusive<f64>) -> Result<(), String> {
    if !(high > 0.5 && high < 1.0) {
        return Err("its high quantile is none".to_owned());
    }
    forest.check().map_err(|e| e.to_string())?;
    if forest.ranges.len() != WIDTH {
        return Err(format!("{} features instead of {WIDTH}", forest.ranges.len()));
    }
    if forest.targets.iter().any(|ln| ln.abs() > LN_MOST) {
        return Err("a latency that cannot be".to_owned());
    }
    if forest.companions.iter().any(|share| !lost.contains(share)) {
        return Err("a loss of rate that cannot be".to_owned());
    }
    Ok(())
}

/// Checks a calibrated score, as read from a file.
pub(super) fn check_bound(bound: &Quantile) -> Result<(), String> {
    if bound.score.abs() > LN_MOST {
        return Err("a score that cannot be".to_owned());
    }
    bound.check().map_err(|e| e.to_string())
}

/// What of a row lies outside of a forest's training rows, in words.
fn outside(forest: &Forest, row: &[f64; WIDTH], unlike: Option<&'static str>) -> Vec<String> {
    let features = forest.outside(row).into_iter().filter_map(|i| MEANINGS.get(i).copied());
    features.chain(unlike).map(str::to_owned).collect()
}

/// What a forest says: logarithms of the median and of the high quantile, mean share of the rate that is lost.
pub(super) struct Estimate {
    middle: f64,
    high: f64,
    lost: f64,
}

impl Estimate {
    /// The same where a latency of `e^ln` s and a loss of `lost` are what it is measured against.
    pub(super) fn beyond(self, ln: f64, lost: f64) -> Self {
        Self { middle: self.middle + ln, high: self.high + ln, lost: self.lost + lost }
    }

    /// Upper bound, s: never below the expected tail, also where the calibrated score is negative, and the `stall` that any run may meet and most do not.
    pub(super) fn upper(&self, score: f64, stall: Nanos) -> f64 {
        (self.high + score).exp().max(self.middle.exp() + stall.as_secs_f64())
    }
}

/// What the bounds under one spec and configuration share.
struct Load {
    regime: Regime,
    /// How long the drive may stand still because something writes.
    stall: Nanos,
}

/// How long a request may be held up because the drive stands still while it arrives, or stood still before and works off what has come since: no longer than
/// the busy period that the stall begins, `stall / (1 - load)`, whatever the order of service, as long as the device does not idle (fluid limit of
/// the busy period: Kleinrock, Queueing Systems I, 1975, chapter 5).
fn held_up(profile: &Profile, spec: &Spec, config: &Config) -> Result<Nanos, ModelError> {
    let load: f64 = declared_shares(profile, spec, config)?.iter().sum();
    let stall = service(profile)?.write_stall.as_secs_f64();
    Ok(Nanos::from_secs_f64(stall / (1.0 - load).max(MIN_SLACK)))
}

/// Whether anything under a spec writes.
#[must_use]
pub fn writes(spec: &Spec) -> bool {
    spec.tasks().any(|(_, task)| task.op.write_share() > 0.0)
}

/// What a forest says of one row.
pub(super) fn estimate(
    forest: &Forest,
    high: f64,
    row: &[f64; WIDTH],
    scratch: &mut Scratch,
) -> Result<Estimate, ForestError> {
    let mut quantiles = [0.0; 2];
    let lost = forest.predict_with(row, &[0.5, high], scratch, &mut quantiles)?;
    Ok(Estimate { middle: quantiles[0], high: quantiles[1], lost })
}

/// [`TailModel`] of a [`HostModel`]: the expected tail with its upper bound, or the paper's network.
#[derive(Clone, Debug)]
pub struct Learned {
    model: Arc<HostModel>,
    kind: ModelKind,
}

impl Learned {
    /// Ours: the expected tail and its bound.
    #[must_use]
    pub fn bound(model: Arc<HostModel>) -> Self {
        Self { model, kind: ModelKind::Bound }
    }

    /// The network of the RT-VirtIO paper: its features, its shape, its loss.
    #[must_use]
    pub fn paper(model: Arc<HostModel>) -> Self {
        Self { model, kind: ModelKind::Mlp }
    }

    fn forecast_paper(&self, spec: &Spec, config: &Config) -> Result<Vec<Forecast>, ModelError> {
        if config.elevator != Elevator::Bfq {
            return Err(ModelError::NotCovered {
                model: "paper's network",
                what: "a host elevator other than bfq".to_owned(),
                remedy: "choose bfq or use the bound model",
            });
        }
        let paper = self.model.paper.as_ref().ok_or(ModelError::NoNetwork)?;
        let slice = crate::Slice.forecast(&self.model.profile, spec, config)?;
        let rows = paper_features(spec, config);
        let mut scratch = ensemble::Scratch::default();
        rows.iter()
            .zip(slice)
            .map(|(row, slice)| {
                let s = paper.predict_with(row, &mut scratch).map_err(|e| self.model.unusable(&e))?;
                // It knows nothing of rates: our model's view of them is no part of the paper's planner.
                Ok(rescaled(slice, Nanos::from_secs_f64(s.max(1e-6)), Some(1.0), None))
            })
            .collect()
    }
}

impl TailModel for Learned {
    fn kind(&self) -> ModelKind {
        self.kind
    }

    /// From the profile that the model was learned with. Of the one given only the guest's part counts, unless runs in such guests were learned from.
    fn forecast(&self, given: &Profile, spec: &Spec, config: &Config) -> Result<Vec<Forecast>, ModelError> {
        if self.kind == ModelKind::Mlp {
            return self.forecast_paper(spec, config);
        }
        let model = &self.model;
        let guests = model.guests.as_ref().filter(|g| spec.vms.iter().any(is_guest) && g.is_of(given));
        let guest = guests.map_or_else(|| given.guest.clone(), |g| Some(g.guest.clone()));
        let profile = if guest == model.profile.guest {
            Cow::Borrowed(&model.profile)
        } else {
            Cow::Owned(Profile { guest, ..model.profile.clone() })
        };
        let (rows, slice) = features(&profile, spec, config, model.seconds)?;
        let stall = if writes(spec) { held_up(&model.profile, spec, config)? } else { Nanos(0) };
        let of = Load { regime: Regime::of(spec, config), stall };
        let mut scratch = Scratch::default();
        let vms =
            spec.vms.iter().zip(&config.vms).flat_map(|(vm, set)| vm.tasks.iter().map(move |t| (vm, set, t)));
        rows.iter()
            .zip(slice)
            .zip(vms)
            .map(|((row, slice), (vm, set, task))| {
                let in_guest = || guests.and_then(|_| guests::unlike_measured(vm, set, given));
                let unlike = if held_below_its_rates(vm, set) {
                    Some("limit below the declared rates")
                } else {
                    unlike_measured(task).or_else(in_guest)
                };
                let (estimate, upper) = match guests.filter(|_| is_guest(vm)) {
                    Some(guests) => model.in_guest(guests, row, &of, unlike, &mut scratch)?,
                    None => {
                        let estimate = model.estimate(row, of.regime, &mut scratch)?;
                        let upper = model.upper(row, &of, &estimate, unlike);
                        (estimate, upper)
                    }
                };
                let kept = kept(&estimate, &upper, held_below_its_rates(vm, set).then_some(slice.rate_kept));
                let expected = Nanos::from_secs_f64(estimate.middle.exp());
                Ok(rescaled(slice, expected, Some(kept), Some(upper)))
            })
            .collect()
    }
}

/// Share of the declared rate that is kept, 0 to 1: what is expected, or what the bound shows where that is more. A request's latency counts from when it was due, so a task
/// that loses a share of its rate through a run is late by that share of the run at its end: a tail of p99.99 below the bound leaves no room for a larger loss, but in a run that ends
/// within a wait. Outside of what was measured a bound shows nothing. `capped` is what a limit below the VM's rates leaves, which no run was measured with.
fn kept(estimate: &Estimate, upper: &Upper, capped: Option<f64>) -> f64 {
    let latest = upper.latency_ns.as_secs_f64() + upper.host_ns.as_secs_f64();
    let room = if upper.outside.is_empty() { latest / upper.run_s } else { 1.0 };
    (1.0 - estimate.lost.clamp(0.0, 1.0).min(room)).min(capped.unwrap_or(1.0))
}

/// Whether a VM may do less than it declares, as one that a plan gives up: no sweep holds a VM with rates so far down.
fn held_below_its_rates(vm: &Vm, set: &VmConfig) -> bool {
    set.cap.is_some_and(|cap| cap.0 < vm.declared_rate().0)
}

/// What of a task no measured run had, although no feature shows it: sweeps run synchronous random tasks and learn p99.99.
fn unlike_measured(task: &Task) -> Option<&'static str> {
    if crate::percentile_of(task) != Percentile::P9999 {
        Some("percentile")
    } else if task.rate.is_some() && (task.depth != 1 || task.arrival == Arrival::Open) {
        Some("depth")
    } else if task.rate.is_some() && task.pattern == Pattern::Sequential {
        Some("pattern")
    } else {
        None
    }
}

/// A slice forecast with another total: its terms keep their proportions, so that one still sees where the time goes.
fn rescaled(mut f: Forecast, total: Nanos, kept: Option<f64>, upper: Option<Upper>) -> Forecast {
    let factor = total.0 as f64 / (f.latency_ns.0 as f64).max(1.0);
    for term in &mut f.terms {
        term.latency_ns = Nanos((term.latency_ns.0 as f64 * factor) as u64);
    }
    f.latency_ns = total;
    f.rate_kept = kept.unwrap_or(f.rate_kept);
    f.upper = upper;
    f
}
