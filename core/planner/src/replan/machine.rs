//! Decides when to plan anew and whether a plan is applied: a state machine without a clock.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::effect::{Effect, objection};
use super::hysteresis::{Backoff, Hysteresis, HysteresisTiming};
use super::input::{Input, MOST_CAUTION, load_level, slow_level};
use super::unplanned::{LeftOut, NoPlan, Unplanned, backoff};

/// Quiet time before a plan for new VMs, in ms: VMs that arrive in a row are planned for together.
const ARRIVALS: u64 = 2_000;
/// Key of the caution among keys of loads and devices.
pub const CAUTION: &str = "caution";
/// Least time between two plans for the same contracts, in ms: VMs that end and start all the time
/// must not cause searches all the time.
const BETWEEN: u64 = 5_000;

/// Treatment of a new plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// A plan is shown only.
    Observe,
    /// A plan is shown, and applied when it is accepted.
    Ask,
    /// A plan is applied, unless it would hurt a VM that is as critical as those that gain, or
    /// more: then it waits to be accepted.
    Auto,
}

/// Time constants of replanning, in ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Least time between two changes of plan for observed reasons.
    pub every: u64,
    /// Time for which more load or a slower device must last.
    pub confirm: u64,
    /// Time for which a target must be missed; longer than the windows over which it is judged, so
    /// that they contain nothing from before the present plan.
    pub confirm_miss: u64,
    /// Time for which less load, a faster device or no miss must last.
    pub horizon: u64,
}

impl Default for Timing {
    /// An hour between changes; five and ten minutes, as windows are five minutes long; a week,
    /// because load has daily and weekly cycles.
    fn default() -> Self {
        const MINUTE: u64 = 60_000;
        Self {
            every: 60 * MINUTE,
            confirm: 5 * MINUTE,
            confirm_miss: 10 * MINUTE,
            horizon: 7 * 24 * 60 * MINUTE,
        }
    }
}

/// Observations of one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observations {
    /// Load as a multiple of the declared one, by [`super::load_key`], where it is known.
    pub loads: BTreeMap<String, f64>,
    /// Time of a request as a multiple of the measured one, by the device's path, where it is
    /// known.
    pub slow: BTreeMap<String, f64>,
    /// Whether each judged target (`VM/TASK`) is missed.
    pub missed: BTreeMap<String, bool>,
}

/// Request for a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Sequence number, rising.
    pub number: u64,
    /// Contracts that the plan is for, by their identifier.
    pub contract: String,
    /// Observations that the plan is made from.
    pub input: Input,
    /// State of all ladders, by [`super::load_key`], device or [`CAUTION`].
    pub patience: BTreeMap<String, Backoff>,
    /// Reason of the request, as shown to users.
    pub reason: String,
}

/// Predicted effects of a finished plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Number of settings that the plan changes.
    pub changes: usize,
    /// Predicted effect on each VM.
    pub effects: Vec<Effect>,
    /// Tasks (`VM/TASK`) that are predicted to miss a target.
    pub given_up: BTreeSet<String>,
}

/// A finished plan that is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Request that the plan answers.
    pub request: Request,
    /// Predicted effects of the plan.
    pub outline: Outline,
}

impl Proposal {
    /// Name of the plan: equal for equal contracts and observations, also in a later process.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.request.contract, self.request.input)
    }

    /// Reason why the plan is not applied now; `None` where it may be.
    #[must_use]
    pub fn waits(&self, policy: Policy, accepted: bool) -> Option<String> {
        // A plan without changes needs no consent.
        match policy {
            Policy::Observe => Some("the service only observes".to_owned()),
            _ if accepted || self.outline.changes == 0 => None,
            Policy::Ask => Some("it waits to be accepted".to_owned()),
            Policy::Auto => {
                objection(&self.outline.effects).map(|why| format!("it waits to be accepted: {why}"))
            }
        }
    }
}

/// The plan in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Basis {
    /// Contracts that the plan is for.
    pub contract: String,
    /// Observations that the plan was made from.
    pub input: Input,
    /// Tasks (`VM/TASK`) that are predicted to miss a target.
    pub given_up: BTreeSet<String>,
    /// State of the ladders, as in [`Request::patience`].
    pub patience: BTreeMap<String, Backoff>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Rest,
    /// A plan is being made.
    Asked(Request),
    Proposed(Proposal),
}

/// Decides when to plan anew.
#[derive(Clone, Debug)]
pub struct Replan {
    timing: Timing,
    contract: Option<String>,
    basis: Option<Basis>,
    loads: BTreeMap<String, Hysteresis>,
    slow: BTreeMap<String, Hysteresis>,
    caution: Hysteresis,
    /// Time of the last change of plan, in ms.
    changed: Option<u64>,
    /// Time of the last request, in ms.
    asked: Option<u64>,
    /// Running VMs, and the time since which they are the same.
    running: (BTreeSet<String>, u64),
    stage: Stage,
    number: u64,
    /// Name of the last proposal that was refused.
    refused: Option<String>,
    failures: u32,
    retry: u64,
    failure: Option<String>,
    left_out: LeftOut,
}

impl Replan {
    /// A machine without a plan in force and without observations.
    #[must_use]
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            contract: None,
            basis: None,
            loads: BTreeMap::new(),
            slow: BTreeMap::new(),
            caution: Hysteresis::at(0, 0),
            changed: None,
            asked: None,
            running: (BTreeSet::new(), 0),
            stage: Stage::Rest,
            number: 0,
            refused: None,
            failures: 0,
            retry: 0,
            failure: None,
            left_out: LeftOut::default(),
        }
    }

    /// Takes over the plan that was found in force, as when a service starts. Its observations
    /// count as needed now.
    pub fn found(&mut self, basis: Option<Basis>, now: u64) {
        if self.basis == basis {
            return;
        }
        if let Some(basis) = &basis {
            let Basis { input, patience, .. } = basis;
            let ladder = |key: &str, level: u8| {
                let ladder = Hysteresis::at(level, now);
                match patience.get(key) {
                    Some(patience) => ladder.with(*patience, now),
                    None => ladder,
                }
            };
            // Also for needs at level 0.
            let all = |levels: &BTreeMap<String, u8>, is_here: fn(&str) -> bool| {
                let keys = levels.keys().chain(patience.keys()).filter(|key| is_here(key));
                keys.map(|key| (key.clone(), ladder(key, at(levels, key)))).collect::<BTreeMap<_, _>>()
            };
            self.loads = all(&input.loads, is_load);
            self.slow = all(&input.slow, |key| !is_load(key) && key != CAUTION);
            self.caution = ladder(CAUTION, input.caution);
            self.contract = Some(basis.contract.clone());
        }
        self.basis = basis;
    }

    /// The plan in force; `None` where there is none.
    #[must_use]
    pub fn basis(&self) -> Option<&Basis> {
        self.basis.as_ref()
    }

    /// The finished plan that is not in force.
    #[must_use]
    pub fn proposal(&self) -> Option<&Proposal> {
        match &self.stage {
            Stage::Proposed(proposal) => Some(proposal),
            Stage::Rest | Stage::Asked(_) => None,
        }
    }

    /// Whether a plan is being made.
    #[must_use]
    pub fn is_planning(&self) -> bool {
        matches!(self.stage, Stage::Asked(_))
    }

    /// Reason why the last plan could not be made or applied.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Sets the devices that cannot be planned at present, by path; they are left out.
    pub fn lack(&mut self, now: u64, devices: BTreeMap<String, Unplanned>) {
        if self.left_out.observe(devices) {
            // The removed devices may have caused the failures.
            (self.failures, self.retry) = (0, now);
        }
    }

    /// Every unplanned device, by path, with the reason: including those that could be planned,
    /// until a plan with them is in force.
    #[must_use]
    pub fn unplanned(&self) -> BTreeMap<String, Unplanned> {
        let mut all = self.left_out.all();
        for device in self.basis.iter().flat_map(|basis| &basis.input.without) {
            let why = || "a plan with it is not in force yet".to_owned();
            all.entry(device.clone()).or_insert_with(|| Unplanned { why: why(), remedy: None });
        }
        all
    }

    /// Records the observations of one moment.
    pub fn see(&mut self, now: u64, sight: &Observations) {
        let Timing { confirm, confirm_miss, horizon, .. } = self.timing;
        let pace = HysteresisTiming { confirm, horizon };
        let ladder = |all: &mut BTreeMap<String, Hysteresis>, key: &String, need| {
            let ladder = all.entry(key.clone()).or_insert_with(|| Hysteresis::at(0, now));
            ladder.see(now, need, pace);
        };
        for (key, ratio) in &sight.loads {
            ladder(&mut self.loads, key, load_level(*ratio));
        }
        for (key, factor) in &sight.slow {
            ladder(&mut self.slow, key, slow_level(*factor));
        }
        let Some(basis) = &self.basis else { return };
        // More load than was planned for, and a slower device, explain a missed target.
        let explained =
            sight.loads.iter().any(|(key, ratio)| load_level(*ratio) > at(&basis.input.loads, key))
                || sight.slow.iter().any(|(key, factor)| slow_level(*factor) > at(&basis.input.slow, key));
        if explained {
            return self.caution.begin_anew();
        }
        let missed = sight.missed.iter().any(|(task, missed)| *missed && !basis.given_up.contains(task));
        if !sight.missed.is_empty() {
            let need = if missed { (basis.input.caution + 1).min(MOST_CAUTION) } else { 0 };
            self.caution.see(now, need, HysteresisTiming { confirm: confirm_miss, horizon });
        }
    }

    /// Requests a plan if one is needed now and none is being made: for these contracts (`None`
    /// where none is to be held) and the running VMs.
    pub fn next(&mut self, now: u64, contract: Option<&str>, running: &BTreeSet<String>) -> Option<Request> {
        if self.contract.as_deref() != contract {
            // Levels relative to the old contracts' loads no longer apply.
            self.contract = contract.map(str::to_owned);
            (self.loads, self.slow) = (BTreeMap::new(), BTreeMap::new());
            self.caution = Hysteresis::at(0, now);
            (self.stage, self.refused) = (Stage::Rest, None);
            (self.failures, self.retry, self.failure) = (0, now, None);
            self.asked = None;
            self.left_out.retry(now);
        }
        let contract = contract?;
        if self.running.0 != *running {
            self.running = (running.clone(), now);
            self.left_out.retry(now);
        }
        let (input, reason) = self.wanted(now, contract)?;
        match &self.stage {
            Stage::Asked(_) => return None,
            Stage::Proposed(of) if of.request.input == input => return None,
            Stage::Proposed(_) | Stage::Rest => self.stage = Stage::Rest,
        }
        let is_refused = self.refused.as_ref() == Some(&format!("{contract}/{input}"));
        // Contracts, arriving VMs and newly measured devices are outside causes: they do not wait.
        let of_basis = self.basis.as_ref().filter(|b| b.contract == contract);
        let is_known = |of: &Input| running.is_subset(&of.vms) && input.without == of.without;
        let is_outside = of_basis.is_none_or(|b| !is_known(&b.input));
        let waits = !is_outside && self.changed.is_some_and(|at| now.saturating_sub(at) < self.timing.every);
        let comes = is_outside && now.saturating_sub(self.running.1) < ARRIVALS;
        let soon = self.asked.is_some_and(|at| now.saturating_sub(at) < BETWEEN);
        if is_refused || waits || comes || soon || running.is_empty() || now < self.retry {
            return None;
        }
        self.number += 1;
        self.asked = Some(now);
        let patience = self.patience();
        let contract = contract.to_owned();
        let request = Request { number: self.number, contract, input, patience, reason };
        self.stage = Stage::Asked(request.clone());
        Some(request)
    }

    fn patience(&self) -> BTreeMap<String, Backoff> {
        let caution = CAUTION.to_owned();
        let all = self.loads.iter().chain(&self.slow).chain([(&caution, &self.caution)]);
        all.filter_map(|(key, ladder)| Some((key.clone(), ladder.patience()?))).collect()
    }

    /// Input for a new plan and its reason; `None` where the plan in force has this input.
    fn wanted(&mut self, now: u64, contract: &str) -> Option<(Input, String)> {
        let levels = |all: &BTreeMap<String, Hysteresis>| {
            let high = all.iter().filter(|(_, ladder)| ladder.level() > 0);
            high.map(|(key, ladder)| (key.clone(), ladder.level())).collect::<BTreeMap<_, _>>()
        };
        let (all, slow, caution) = (levels(&self.loads), levels(&self.slow), self.caution.level());
        let without = self.left_out.at(now);
        let of_vms = |vms: &BTreeSet<String>| Input {
            loads: all.iter().filter(|(key, _)| is_of(key, vms)).map(|(k, v)| (k.clone(), *v)).collect(),
            vms: vms.clone(),
            slow: slow.clone(),
            caution,
            without: without.clone(),
        };
        let input = of_vms(&self.running.0);
        let Some(basis) = self.basis.as_ref().filter(|b| b.contract == contract) else {
            let words = ["contracts are to be held", "the contracts were changed"];
            return Some((input, words[usize::from(self.basis.is_some())].to_owned()));
        };
        // A VM that ended takes its settings along; it stays in the plan as long as nothing else
        // changes, and gets them back with its next start.
        let known = input.vms.is_subset(&basis.input.vms);
        if known && of_vms(&basis.input.vms) == basis.input {
            if matches!(self.stage, Stage::Proposed(_)) {
                self.stage = Stage::Rest;
            }
            self.failure = None;
            return None;
        }
        let reason = input.difference(&basis.input);
        Some((input, reason))
    }

    /// Records the result of a request.
    pub fn planned(&mut self, now: u64, number: u64, made: Result<Outline, NoPlan>) {
        match std::mem::replace(&mut self.stage, Stage::Rest) {
            Stage::Asked(request) if request.number == number => match made {
                Ok(outline) => {
                    self.failure = None;
                    self.left_out.planned(&request.input.without);
                    self.stage = Stage::Proposed(Proposal { request, outline });
                }
                Err(NoPlan::Whole(why)) => self.failed(now, why),
                Err(NoPlan::Devices(devices)) => {
                    // The other devices are planned at once.
                    self.left_out.fail(now, devices);
                    self.asked = None;
                }
            },
            // Result of an earlier request.
            stage => self.stage = stage,
        }
    }

    /// The proposal that is to be applied now.
    #[must_use]
    pub fn to_apply(
        &self,
        now: u64,
        policy: Policy,
        is_accepted: impl Fn(&Proposal) -> bool,
    ) -> Option<&Proposal> {
        let proposal = self.proposal().filter(|_| now >= self.retry)?;
        proposal.waits(policy, is_accepted(proposal)).is_none().then_some(proposal)
    }

    /// Marks the proposal as applied.
    pub fn applied(&mut self, now: u64) {
        let Stage::Proposed(proposal) = std::mem::replace(&mut self.stage, Stage::Rest) else { return };
        if proposal.outline.changes > 0 {
            self.changed = Some(now);
        }
        self.caution.begin_anew();
        (self.failures, self.retry, self.failure) = (0, now, None);
        self.basis = Some(Basis {
            contract: proposal.request.contract,
            input: proposal.request.input,
            given_up: proposal.outline.given_up,
            patience: proposal.request.patience,
        });
    }

    /// Records that the proposal could not be made or applied: another plan is made later, as the
    /// host may have changed.
    pub fn failed(&mut self, now: u64, why: String) {
        self.stage = Stage::Rest;
        self.retry = now.saturating_add(backoff(self.failures));
        self.failures = self.failures.saturating_add(1);
        self.failure = Some(why);
        self.asked = None;
    }

    /// Refuses the proposal, until observations change. Returns whether there was one.
    pub fn refuse(&mut self) -> bool {
        match std::mem::replace(&mut self.stage, Stage::Rest) {
            Stage::Proposed(proposal) => {
                self.refused = Some(proposal.name());
                true
            }
            stage => {
                self.stage = stage;
                false
            }
        }
    }
}

/// Whether a key is a [`super::load_key`]: a device's is its path, without a space at the end.
fn is_load(key: &str) -> bool {
    key.ends_with(" read") || key.ends_with(" write")
}

/// Whether a [`super::load_key`] is of one of these VMs.
fn is_of(key: &str, vms: &BTreeSet<String>) -> bool {
    key.rsplit_once(' ').is_some_and(|(vm, _)| vms.contains(vm))
}

fn at(levels: &BTreeMap<String, u8>, key: &str) -> u8 {
    levels.get(key).copied().unwrap_or(0)
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
