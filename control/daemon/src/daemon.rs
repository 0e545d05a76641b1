//! The control loop: observe, decide, act, and repeat until there is nothing to do.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_kernel::sched::Attr;
use rtvirtio_planner::replan::Proposal;

use crate::config::{Config, DriftPolicy, Mode};
use crate::desired::Desired;
use crate::history::EventKind;
use crate::host::{Host, Millis, Outcome, SettingChange};
use crate::memory::Memory;
use crate::observed::{Drift, LOOKED_FOR, Observed, Presence};
use crate::plan::PlanKeeper;
use crate::reconcile::{APPLIED, PLAN};
use crate::snapshot::Snapshot;
use crate::step::{Action, Step};
use pass::Pass;

mod pass;

/// Event of a pass, before the history gives it a number and a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassEvent {
    /// Kind that the history records.
    pub kind: EventKind,
    /// The VM that it concerns.
    pub vm: Option<String>,
    /// In words, with the reason.
    pub text: String,
    /// Settings that were changed.
    pub changes: Vec<SettingChange>,
}

/// A condition that lasts: key, kind, VM, text.
type State = (String, EventKind, Option<String>, String);

/// The control loop of one host.
pub struct Daemon<H> {
    host: H,
    config: Config,
    desired: Desired,
    observed: Observed,
    memory: Memory,
    compared: Option<Millis>,
    /// Whether the last pass saw or did anything new.
    is_new: bool,
    /// Whether the last look found nothing to do, and none was asked for since.
    is_settled: bool,
    /// Whether the last pass left the host alone.
    rested: bool,
    /// Start of the last pass that looked at the host.
    looked: Millis,
    /// Looks at the host so far.
    looks: u64,
    under_way: Option<Pass>,
    /// Whether the last pass has left steps to the next.
    has_more: bool,
    plan: PlanKeeper,
    /// Last text reported for each condition, by key; an unchanged one is not reported again.
    said: BTreeMap<String, String>,
}

impl<H: Host> Daemon<H> {
    /// A loop that has not looked yet.
    #[must_use]
    pub fn new(host: H, config: Config, memory: Memory) -> Self {
        let plan = PlanKeeper::new(&config);
        Self {
            host,
            config,
            plan,
            desired: Desired::default(),
            observed: Observed::default(),
            memory,
            compared: None,
            is_new: true,
            is_settled: false,
            rested: false,
            looked: Millis(0),
            looks: 0,
            under_way: None,
            has_more: false,
            said: BTreeMap::new(),
        }
    }

    /// Exclusive access to the host.
    pub fn host(&mut self) -> &mut H {
        &mut self.host
    }

    /// The host, to be read.
    #[must_use]
    pub fn host_ref(&self) -> &H {
        &self.host
    }

    /// Ends the loop and returns its host.
    #[must_use]
    pub fn into_host(self) -> H {
        self.host
    }

    /// The contracts as last read.
    #[must_use]
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// The host as last seen.
    #[must_use]
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// Failures, restores and acceptances that the loop remembers.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Accepts the contract that a VM waits for; false when it waits for none.
    pub fn accept(&mut self, vm: &str) -> bool {
        let waiting = self.snapshot().vms.iter().any(|v| v.name == vm && v.waits_for.is_some());
        if let (true, Some(contract)) = (waiting, self.desired.contract_of(vm)) {
            self.memory.accept(vm, &contract.id);
        }
        waiting
    }

    /// Accepts the plan that waits; false when none does.
    pub fn accept_plan(&mut self) -> bool {
        let name = self.plan.waiting(&self.config, &self.memory).map(Proposal::name);
        if let Some(name) = &name {
            self.memory.accept(PLAN, name);
        }
        name.is_some()
    }

    /// Refuses the plan that was made; false when there is none.
    pub fn refuse_plan(&mut self) -> bool {
        self.plan.refuse()
    }

    /// The next pass compares every setting.
    pub fn compare_next(&mut self) {
        self.compared = None;
    }

    /// The next pass looks, even where nothing seems to have changed.
    pub fn look_next(&mut self) {
        self.is_settled = false;
    }

    /// Whether the last pass left the host alone, because nothing could have changed.
    #[must_use]
    pub fn rested(&self) -> bool {
        self.rested
    }

    /// Whether the last pass saw or did anything new.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The state for clients.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let of_plan = self.plan.snapshot(&self.desired, &self.observed, &self.config, &self.memory);
        let mut snapshot =
            Snapshot::build(&self.desired, &self.observed, &self.config, &self.memory).with_plan(of_plan);
        if self.memory.waits_for_lock(self.host.now()) {
            let why = "another rtvirtio, such as `profile` or `apply`, holds the lock of the state directory";
            snapshot
                .problems
                .push(format!("settings are delayed: {why}; until it ends nothing is set or restored"));
        }
        snapshot
    }

    /// Factors of service times that the plan in force allows for, by device.
    #[must_use]
    pub fn planned_slowness(&self) -> BTreeMap<String, f64> {
        self.plan.slowness(&self.observed)
    }

    /// Passes observations to the plan keeper, and requests a plan where it wants one.
    fn look_at_plan(&mut self, now: Millis) {
        let sight = self.host.sight(&self.desired);
        let request = self.plan.update(now, &self.desired, &self.observed, sight.as_ref());
        if let Some(request) = request {
            self.host.make_plan(&request, &self.desired);
        }
    }

    /// Carries out one step; returns whether something may have changed.
    fn perform(&mut self, step: &Step, out: &mut Vec<PassEvent>) -> bool {
        let outcome = self.host.perform(step, &self.desired);
        let failed_before = self.memory.failure(&step.vm).map(str::to_owned);
        let now = self.host.now();
        self.memory.note(step, &outcome, now);
        self.plan.note(step, &outcome, now);
        let vm = Some(step.vm.clone());
        match outcome {
            Outcome::Busy | Outcome::NotYet => false,
            Outcome::Done { changes, notes } => {
                let is_event = match step.action {
                    Action::TakeIn | Action::SetPlan => !changes.is_empty(),
                    // Splits come every two seconds, and would fill the history. An event is only a
                    // thread that is new, or that another program took out of its reservation.
                    Action::Split => changes.iter().any(|of| !was_split(of)),
                    _ => true,
                };
                if is_event {
                    let text = format!("{}: {}", action_text(&step.action), step.reason);
                    out.push(PassEvent { kind: EventKind::Changed, vm: vm.clone(), text, changes });
                }
                out.extend(notes.into_iter().map(|text| PassEvent {
                    kind: EventKind::Note,
                    vm: vm.clone(),
                    text,
                    changes: Vec::new(),
                }));
                true
            }
            Outcome::Failed(why) => {
                // The same failure again is no event.
                if failed_before.as_ref() != Some(&why) {
                    let text = format!("{} failed: {why}", action_text(&step.action));
                    out.push(PassEvent { kind: EventKind::Failed, vm, text, changes: Vec::new() });
                }
                false
            }
        }
    }

    /// Reports new faults, and forgets the failures of VMs whose contracts have changed.
    fn changed(&mut self, desired: &Desired, out: &mut Vec<PassEvent>) {
        for fault in &desired.faults {
            if !self.desired.faults.contains(fault) {
                let text = format!("{} is not used: {}", fault.origin, fault.why);
                out.push(PassEvent { kind: EventKind::Fault, vm: None, text, changes: Vec::new() });
            }
        }
        for contract in &desired.contracts {
            let vm = &contract.vm.name;
            if self.desired.contract_of(vm).is_none_or(|old| old.id != contract.id) {
                self.memory.forget(vm);
            }
        }
    }

    /// Forgets the failures of what is gone: no step would try these again.
    fn forget_gone(&mut self, now: Millis) {
        let (desired, observed, has_plans) = (&self.desired, &self.observed, self.config.plan.is_some());
        let is_known = |of: &str| match of {
            APPLIED => !observed.applied_drift.is_empty(),
            PLAN => has_plans || observed.plan.is_some(),
            vm => desired.contract_of(vm).is_some() || observed.vms.contains_key(vm),
        };
        self.memory.prune(is_known, now);
    }

    /// A setting that another program has changed and that is left so, as a condition.
    fn left(&self, name: &str, drift: &Drift, now: Millis) -> Option<State> {
        let policy = self.config.drift_policy(drift);
        let contested = policy == DriftPolicy::Restore && self.memory.is_contested(name, &drift.path, now);
        let why = match policy {
            DriftPolicy::Restore if contested => "another program sets it repeatedly, so it is not restored",
            DriftPolicy::Report => "it is left as it is",
            DriftPolicy::Restore | DriftPolicy::Yield => return None,
        };
        let text = format!("{} was changed from {} to {}: {why}", drift.knob, drift.wanted, drift.found);
        Some((format!("drift {name} {}", drift.path), EventKind::Drift, Some(name.to_owned()), text))
    }

    /// Reports conditions that are new or have another text.
    fn notice(&mut self, now: Millis, out: &mut Vec<PassEvent>) {
        let mut states: Vec<State> = Vec::new();
        for (name, vm) in &self.observed.vms {
            let (kind, text) = match &vm.presence {
                Presence::Running(_) => (EventKind::Appeared, "it runs".to_owned()),
                Presence::Off(why) => (EventKind::Gone, why.clone()),
                Presence::Unknown(why) if why == LOOKED_FOR => continue,
                Presence::Unknown(why) => (EventKind::Note, why.clone()),
            };
            states.push((format!("presence {name}"), kind, Some(name.clone()), text));
            let drift = vm.scope.iter().flat_map(|s| &s.drift);
            states.extend(drift.filter_map(|drift| self.left(name, drift, now)));
        }
        states.extend(self.observed.applied_drift.iter().filter_map(|drift| self.left(APPLIED, drift, now)));
        let of_plan = self.observed.plan.iter().flat_map(|plan| &plan.drift);
        states.extend(of_plan.filter_map(|drift| self.left(PLAN, drift, now)));
        let plan = self.plan.states(&self.desired, &self.observed, &self.config, &self.memory);
        states.extend(plan.map(|(key, kind, text)| (key, kind, None, text)));
        for (vm, why) in &self.observed.admission.refused {
            states.push((format!("refused {vm}"), EventKind::Refused, Some(vm.clone()), why.clone()));
        }
        let in_force = |vm: &String| self.observed.vms.get(vm)?.scope.as_ref();
        for (vm, why) in &self.observed.admission.kept {
            if let Some(scope) = in_force(vm) {
                let is_changed = self.desired.contract_of(vm).is_some_and(|of| of.id != scope.contract);
                let text = crate::snapshot::kept_words(is_changed, why);
                states.push((format!("refused {vm}"), EventKind::Refused, Some(vm.clone()), text));
            }
        }
        let asks = self.config.mode == Mode::Ask;
        let waiting = if asks { self.snapshot().vms } else { Vec::new() };
        for vm in waiting.iter().filter(|vm| vm.waits_for.is_some()) {
            let text = format!("its contract waits: `rtvirtio contract accept {}`", vm.name);
            states.push((format!("waiting {}", vm.name), EventKind::Waiting, Some(vm.name.clone()), text));
        }
        let keys: BTreeSet<&String> = states.iter().map(|s| &s.0).collect();
        self.said.retain(|key, _| keys.contains(key));
        for (key, kind, vm, text) in states {
            if self.said.get(&key) != Some(&text) {
                out.push(PassEvent { kind, vm, text: text.clone(), changes: Vec::new() });
                self.said.insert(key, text);
            }
        }
    }
}

/// Whether a change is of a thread's share of a budget that had one before.
fn was_split(change: &SettingChange) -> bool {
    let old = change.old.as_deref().and_then(|old| old.parse::<Attr>().ok());
    old.is_some_and(|old| old.reservation.is_some())
}

fn action_text(action: &Action) -> &'static str {
    match action {
        Action::Apply => "put in force",
        Action::PutBack { .. } => "put back",
        Action::TakeIn => "taken in",
        Action::Split => "budget split anew",
        Action::SetPlan => "plan put in force",
        Action::Renew | Action::RenewHeld => "weights and limits given again",
        Action::Relevel => "priorities moved",
        Action::Restore { .. } => "set again",
        Action::Release { .. } => "left to another program",
    }
}

#[cfg(test)]
mod tests;
