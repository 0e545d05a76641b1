//! State of the service's plan, as clients see it.

use rtvirtio_planner::replan::{Basis, Change, Effect, Input, Policy, Proposal, Replan};
use serde::{Deserialize, Serialize};

use super::unplanned::{UnplannedDevice, plan_warnings, vms_without_plan};
use crate::config::Config;
use crate::desired::Desired;
use crate::host::SettingChange;
use crate::memory::Memory;
use crate::observed::{DriftSnapshot, MadePlan, Observed, PredictionSnapshot, ScopeState, lost_words};
use crate::reconcile::PLAN;

/// State of the service's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanState {
    /// In force, or nothing has to be set for it.
    InForce,
    /// In force for some devices; others are not planned.
    Partial,
    /// In force, but settings have other values, are gone or cannot be read.
    Drift,
    /// No VM of the contracts runs, or there are no contracts.
    Off,
    /// The planner is computing one.
    Planning,
    /// Made, and waits to be accepted.
    Waiting,
    /// Made; not applied, because the service only observes.
    WouldApply,
    /// Not made or not put in force; tried again.
    Failed,
    /// About to be put in force, or reverted.
    Pending,
}

/// State and predictions of the plan, and the next proposal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSnapshot {
    /// In force, waiting, failed, or another state.
    pub state: PlanState,
    /// Reason for the state, where that is not obvious.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The VMs that the plan in force is for.
    pub vms: Vec<String>,
    /// Observed load, slowness and margin that the plan allows for beyond the declared load, in
    /// words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assumes: Option<String>,
    /// Reason why the plan was put in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Time at which it was put in force, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Tasks (`VM/TASK`) whose target the plan in force is predicted to miss.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_up: Vec<String>,
    /// Prediction of the plan in force for each target.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub predictions: Vec<PredictionSnapshot>,
    /// Settings that another program has changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<DriftSnapshot>,
    /// Settings that were left to another program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub yielded: Vec<String>,
    /// Devices of the contracts that are not planned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unplanned: Vec<UnplannedDevice>,
    /// Warnings of the last planning, such as of an I/O scheduler that the device does not offer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// A plan that was made, and is not in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposal: Option<ProposalSnapshot>,
}

/// A plan that was made, and is not in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProposalSnapshot {
    /// Reason why it was made.
    pub reason: String,
    /// The settings that it would change.
    pub changes: Vec<SettingChange>,
    /// Predicted effect on each VM.
    pub effects: Vec<Effect>,
    /// Tasks (`VM/TASK`) whose target it is predicted to miss.
    pub given_up: Vec<String>,
    /// Reasons why these targets are missed.
    pub reasons: Vec<String>,
}

fn declared(basis: &Basis) -> Input {
    Input::declared(basis.input.vms.clone())
}

/// A proposal as one line.
pub(super) fn proposal_words(proposal: &Proposal, why: &str) -> String {
    let of = |change: Change| {
        let vms = proposal.outline.effects.iter().filter(move |e| e.change == change);
        vms.map(|e| e.vm.as_str()).collect::<Vec<_>>().join(", ")
    };
    let mut text =
        format!("a plan of {} settings: {}; {why}", proposal.outline.changes, proposal.request.reason);
    for change in [Change::Better, Change::Worse, Change::Misses] {
        let vms = of(change);
        if !vms.is_empty() {
            text += &format!("; {}: {vms}", change.word());
        }
    }
    text + ": `rtvirtio contract plan`"
}

impl PlanSnapshot {
    /// `set_last` has the predictions of the plan that was put in force last.
    pub(super) fn new(
        replan: &Replan,
        (made, set_last): (Option<&MadePlan>, &[PredictionSnapshot]),
        desired: &Desired,
        observed: &Observed,
        config: &Config,
        memory: &Memory,
    ) -> Option<Self> {
        let policy = config.policy();
        if policy.is_none() && observed.plan.is_none() {
            return None;
        }
        let scope = observed.plan.as_ref();
        let proposal = replan.proposal().filter(|p| p.outline.changes > 0);
        let waits = proposal.zip(policy).and_then(|(proposal, policy)| {
            proposal.waits(policy, memory.is_accepted(PLAN, &proposal.name()))
        });
        let unplanned = UnplannedDevice::all(replan.unplanned(), desired, observed);
        let basis = scope.and_then(|s| s.basis.as_ref()).or_else(|| replan.basis());
        let (state, why) = match scope.map(|s| &s.state) {
            Some(ScopeState::Unusable(why)) => (PlanState::Failed, Some(why.clone())),
            Some(ScopeState::Cut | ScopeState::Rebooted) => (PlanState::Pending, None),
            _ => match (replan.failure().or_else(|| memory.failure(PLAN)), waits) {
                (Some(why), _) => (PlanState::Failed, Some(why.to_owned())),
                (None, Some(_)) if policy == Some(Policy::Observe) => (PlanState::WouldApply, None),
                (None, Some(why)) => (PlanState::Waiting, Some(why)),
                (None, None) if policy.is_none() || proposal.is_some() => (PlanState::Pending, None),
                (None, None) if scope.is_some_and(|s| !(s.drift.is_empty() && s.lost.is_empty())) => {
                    (PlanState::Drift, scope.and_then(|s| lost_words(&s.lost)))
                }
                (None, None) if basis.is_some() && !unplanned.is_empty() => (PlanState::Partial, None),
                (None, None) if basis.is_some() => (PlanState::InForce, None),
                (None, None) if replan.is_planning() => (PlanState::Planning, None),
                (None, None) => (PlanState::Off, None),
            },
        };
        let made = proposal.zip(made).map(|(proposal, made)| ProposalSnapshot {
            reason: proposal.request.reason.clone(),
            changes: made
                .changes
                .iter()
                .map(|line| SettingChange {
                    knob: line.knob.clone(),
                    path: line.path.clone(),
                    old: line.old.clone(),
                    new: line.new.clone(),
                })
                .collect(),
            effects: proposal.outline.effects.clone(),
            given_up: proposal.outline.given_up.iter().cloned().collect(),
            reasons: made.reasons.clone(),
        });
        let without = vms_without_plan(&unplanned, desired);
        Some(Self {
            state,
            why,
            vms: basis.map(|b| b.input.vms.difference(&without).cloned().collect()).unwrap_or_default(),
            assumes: basis
                .map(|b| b.input.difference(&Input { without: b.input.without.clone(), ..declared(b) }))
                .filter(|words| !words.is_empty()),
            reason: scope.map(|s| s.reason.clone()),
            since: scope.map(|s| s.since.clone()),
            given_up: basis.map(|b| b.given_up.iter().cloned().collect()).unwrap_or_default(),
            predictions: match scope {
                Some(scope) => scope.predictions.clone(),
                // Without a setting it has no journal.
                None if basis.is_some() => set_last.to_vec(),
                None => Vec::new(),
            },
            drift: scope.iter().flat_map(|s| &s.drift).map(DriftSnapshot::from_drift).collect(),
            yielded: scope.map(|s| s.yielded.iter().cloned().collect()).unwrap_or_default(),
            unplanned,
            warnings: plan_warnings(desired, observed).to_vec(),
            proposal: made,
        })
    }

    /// Whether it is in force as it should be.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.state, PlanState::InForce | PlanState::Off) && self.unplanned.is_empty()
    }
}
