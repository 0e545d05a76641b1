//! Steps that keep the plan of contracts and observations in force.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_planner::replan::{Basis, Input, Observations, Policy, Proposal, Replan, Request, Timing};

use super::snapshot::{PlanSnapshot, proposal_words};
use super::unplanned::{UnplannedDevice, plan_warnings, planned_part};
use crate::config::{Config, Mode};
use crate::desired::Desired;
use crate::history::EventKind;
use crate::host::{Millis, Outcome};
use crate::memory::Memory;
use crate::observed::{MadePlan, Observed, PredictionSnapshot, Presence, ScopeState};
use crate::reconcile::{PLAN, drift, step};
use crate::step::{Action, Step};

/// Keeps the plan in force that contracts and observations ask for.
#[derive(Debug)]
pub(crate) struct PlanKeeper {
    wanted: bool,
    replan: Replan,
    /// Settings and predictions of the current proposal.
    made: Option<MadePlan>,
    /// Predictions of the plan that was put in force last. A plan without a setting has no journal
    /// that would record them.
    predictions: Vec<PredictionSnapshot>,
    /// Basis of the plan found in force at the last pass.
    found: Option<Basis>,
}

impl PlanKeeper {
    pub fn new(config: &Config) -> Self {
        let timing = config.plan.as_ref().map_or_else(Timing::default, |plan| plan.timing());
        let wanted = config.plan.is_some();
        Self { wanted, replan: Replan::new(timing), made: None, predictions: Vec::new(), found: None }
    }

    /// Takes the plan in force and observations; returns the plan that is to be made.
    pub fn update(
        &mut self,
        now: Millis,
        desired: &Desired,
        observed: &Observed,
        sight: Option<&Observations>,
    ) -> Option<Request> {
        let found = observed.plan.as_ref().and_then(|plan| plan.basis.clone());
        if found != self.found {
            self.found.clone_from(&found);
            self.replan.found(found, now.0);
        }
        self.replan.lack(now.0, observed.unmeasured.clone());
        if let Some((number, made)) = &observed.made {
            let outline = made.as_ref().map(|made| made.outline.clone()).map_err(Clone::clone);
            self.replan.planned(now.0, *number, outline);
            let is_asked_for = self.replan.proposal().is_some_and(|p| p.request.number == *number);
            if let (Ok(made), true) = (made, is_asked_for) {
                self.made = Some(made.clone());
            }
        }
        if let Some(sight) = sight {
            self.replan.see(now.0, &planned_part(sight, &self.replan.unplanned(), desired));
        }
        let plant = desired.plant.as_ref().filter(|_| self.wanted);
        // A contract file with a mistake hides its contracts: nothing is replanned.
        if desired.hides_contracts() || is_unclear(observed) {
            return None;
        }
        let known = |vm: &str| plant.is_some_and(|p| p.host.vms().iter().any(|of| of.name == vm));
        let running: BTreeSet<String> = observed
            .vms
            .iter()
            .filter(|(name, vm)| matches!(vm.presence, Presence::Running(_)) && known(name))
            .map(|(name, _)| name.clone())
            .collect();
        self.replan.next(now.0, plant.map(|p| p.id.as_str()), &running)
    }

    /// Steps that keep the plan in force, and the one that puts a new plan in force.
    pub fn steps(
        &self,
        desired: &Desired,
        observed: &Observed,
        config: &Config,
        memory: &Memory,
        now: Millis,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        let policy = config.policy();
        let is_wanted = policy.is_some() && (desired.plant.is_some() || desired.hides_contracts());
        if let Some(plan) = &observed.plan {
            let force = config.puts_back_over(&plan.drift);
            let put_back = |why: &str| step(PLAN, Action::PutBack { force }, why);
            match &plan.state {
                ScopeState::Unusable(_) => return Vec::new(),
                ScopeState::Cut => steps.push(put_back("it was interrupted")),
                ScopeState::Rebooted => steps.push(put_back("the host was restarted since")),
                ScopeState::Whole if !is_wanted => steps.push(put_back("no plan is to be held any more")),
                ScopeState::Whole => {}
            }
            if steps.is_empty() {
                for (name, vm) in &observed.vms {
                    if vm.lacks_held && matches!(vm.presence, Presence::Running(_)) {
                        steps.push(step(name, Action::RenewHeld, "the VM was restarted, and a plan is held"));
                    }
                }
                steps.extend(drift(PLAN, &plan.drift, config, memory, now));
            }
        }
        let is_accepted = |proposal: &Proposal| memory.is_accepted(PLAN, &proposal.name());
        let proposal = policy.and_then(|policy| self.replan.to_apply(now.0, policy, is_accepted));
        // Drift of other settings is settled first. A VM that cannot be given its settings again,
        // as where its device is gone, holds up no plan without it.
        let has_failed = |step: &Step| step.action == Action::RenewHeld && memory.waits(step, now);
        if let Some(proposal) = proposal.filter(|_| steps.iter().all(has_failed)) {
            steps.push(step(PLAN, Action::SetPlan, proposal.request.reason.clone()));
        }
        steps.retain(|step| step.action == Action::SetPlan || !memory.waits(step, now));
        if config.mode == Mode::Observe { Vec::new() } else { steps }
    }

    /// Records the outcome of a step.
    pub fn note(&mut self, step: &Step, outcome: &Outcome, now: Millis) {
        if step.action != Action::SetPlan {
            return;
        }
        match outcome {
            Outcome::Busy | Outcome::NotYet => {}
            Outcome::Done { .. } => {
                self.predictions = self.made.as_ref().map(|m| m.predictions.clone()).unwrap_or_default();
                self.replan.applied(now.0);
            }
            Outcome::Failed(why) => self.replan.failed(now.0, why.clone()),
        }
    }

    /// The plan that waits to be accepted.
    pub fn waiting(&self, config: &Config, memory: &Memory) -> Option<&Proposal> {
        let proposal = self.replan.proposal()?;
        let policy = config.policy().filter(|policy| *policy != Policy::Observe)?;
        let is_accepted = memory.is_accepted(PLAN, &proposal.name());
        proposal.waits(policy, is_accepted).map(|_| proposal)
    }

    /// Refuses the plan that was made; false when there is none.
    pub fn refuse(&mut self) -> bool {
        self.replan.refuse()
    }

    /// Lasting conditions, as events: key, kind and text.
    pub fn states(
        &self,
        desired: &Desired,
        observed: &Observed,
        config: &Config,
        memory: &Memory,
    ) -> impl Iterator<Item = (String, EventKind, String)> + use<> {
        let mut states = Vec::new();
        if let (Some(proposal), Some(policy)) = (self.replan.proposal(), config.policy()) {
            let is_accepted = memory.is_accepted(PLAN, &proposal.name());
            if let Some(why) = proposal.waits(policy, is_accepted).filter(|_| proposal.outline.changes > 0) {
                let kind = if policy == Policy::Observe { EventKind::Note } else { EventKind::Waiting };
                let text = proposal_words(proposal, &why);
                states.push(("plan waits".to_owned(), kind, text));
            }
        }
        for warning in plan_warnings(desired, observed) {
            let text = format!("planning: {warning}");
            states.push((format!("plan warning {warning}"), EventKind::Note, text));
        }
        if let Some(why) = self.replan.failure() {
            states.push(("plan fails".to_owned(), EventKind::Failed, format!("no plan: {why}")));
        }
        for device in UnplannedDevice::all(self.replan.unplanned(), desired, observed) {
            states.push((format!("unplanned {}", device.device), EventKind::Failed, device.message()));
        }
        states.into_iter()
    }

    /// Factors of service times that the plan in force allows for, by device.
    pub fn slowness(&self, observed: &Observed) -> BTreeMap<String, f64> {
        let held = observed.plan.as_ref().and_then(|plan| plan.basis.as_ref());
        let input = held.or_else(|| self.replan.basis()).map(|basis| &basis.input);
        let of = |input: &Input| -> BTreeMap<String, f64> {
            input.slow.keys().map(|device| (device.clone(), input.slowness(device))).collect()
        };
        input.map(of).unwrap_or_default()
    }

    /// State for clients; `None` where no plan is in force and none is wanted.
    pub fn snapshot(
        &self,
        desired: &Desired,
        observed: &Observed,
        config: &Config,
        memory: &Memory,
    ) -> Option<PlanSnapshot> {
        let known = (self.made.as_ref(), self.predictions.as_slice());
        PlanSnapshot::new(&self.replan, known, desired, observed, config, memory)
    }
}

/// Whether it is not known yet which VMs run.
fn is_unclear(observed: &Observed) -> bool {
    let looked_for = |vm: &crate::ObservedVm| matches!(&vm.presence, Presence::Unknown(why) if why == crate::observed::LOOKED_FOR);
    observed.vms.values().any(looked_for)
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
