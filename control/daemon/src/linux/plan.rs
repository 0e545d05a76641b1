//! The plan that the service holds: making it in a thread of its own, reading and setting it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rtvirtio_apply::{Amended, Machine, NoGuests, OnConflict, Reverted};
use rtvirtio_kernel::detached::Detached;
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_planner::replan::{NoPlan, Observations, Request, Unplanned};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::plan_file::HostPlan;
use rtvirtio_workflow::scope_files;
use rtvirtio_workflow::scopes::Scopes;
use rtvirtio_workflow::service_plan::{self, FoundDevices, HeldCandidate, HeldRenewal, Set};
use rtvirtio_workflow::{Dirs, Error};

use super::lookup::Waker;
use super::prepared::{Prepared, Renewals};
use super::warnings::Warnings;
use super::{Quiet, drift, lost, state_of};
use crate::desired::Desired;
use crate::history::now;
use crate::observe::Observation;
use crate::observed::{MadePlan, PlanScope, PredictionSnapshot, ScopeState};
use crate::plan::sight_of;
use crate::reconcile::PLAN;

/// Most plans that are made at once: contracts may change while an earlier one waits for a libvirt
/// or a disk that does not answer.
const MOST_AT_ONCE: usize = 4;

/// The plan, and warnings on the way to it.
type Answer = (Result<HeldCandidate, NoPlan>, Vec<String>);

/// State of the plan between two looks.
pub(super) struct PlanPart {
    dirs: Dirs,
    waker: Waker,
    /// Number of the plan that was asked for last.
    asked: u64,
    /// Reason why it is not made.
    refused: Option<String>,
    /// Threads that make plans, by number.
    making: BTreeMap<u64, Detached<Answer>>,
    /// The plan that was made last, with its number.
    made: Option<(u64, HeldCandidate)>,
    /// Devices found to set a plan, by its number.
    found: Prepared<u64, FoundDevices>,
    /// Settings of the plan in force.
    renewals: Renewals<HeldRenewal>,
    /// Plan in force; `None` without one.
    pub scope: Option<PlanScope>,
    /// VMs of the plan in force that have ended since.
    pub ended: Vec<String>,
    /// Whether `scope` has to be read anew.
    pub stale: bool,
    /// Whether `[plan]` is configured.
    is_wanted: bool,
    /// Devices without a usable profile, as last looked at.
    pub unmeasured: BTreeMap<String, Unplanned>,
    /// Warnings of the last planning.
    pub warnings: Vec<String>,
    seen: Option<Arc<Observation>>,
}

/// Predicted latency of each target of a plan.
fn predictions(plan: &HostPlan) -> Vec<PredictionSnapshot> {
    let tasks = plan.devices.iter().flat_map(|of| &of.plan.tasks);
    let with_target = tasks.filter(|task| task.target_ns.is_some());
    let one = |task: &rtvirtio_planner::TaskOutlook| PredictionSnapshot {
        vm: task.vm.clone(),
        task: task.task.clone(),
        percentile: task.percentile.to_string(),
        latency_ns: task.forecast.latency_ns,
        bound_ns: task.forecast.upper.as_ref().map(|upper| Nanos(upper.latency_ns.0 + upper.host_ns.0)),
    };
    with_target.map(one).collect()
}

impl PlanPart {
    pub fn new(dirs: Dirs, waker: Waker, is_wanted: bool) -> Self {
        let (made, scope, ended, unmeasured) = (None, None, Vec::new(), BTreeMap::new());
        let (stale, seen) = (true, None);
        let found = Prepared::new(dirs.clone(), Arc::clone(&waker));
        let renewals = Renewals::new(dirs.clone(), Arc::clone(&waker));
        Self {
            dirs,
            waker,
            asked: 0,
            refused: None,
            making: BTreeMap::new(),
            made,
            found,
            renewals,
            scope,
            ended,
            stale,
            is_wanted,
            unmeasured,
            warnings: Vec::new(),
            seen,
        }
    }

    /// Looks which devices of the contracts have no usable profile.
    pub fn read_profiles(&mut self, desired: &Desired) {
        let plant = desired.plant.as_ref().filter(|_| self.is_wanted);
        // A file with a mistake hides devices: nothing is planned meanwhile.
        if !desired.hides_contracts() {
            self.unmeasured =
                plant.map(|plant| service_plan::unmeasured(&plant.host, &self.dirs)).unwrap_or_default();
        }
    }

    /// Takes the latest observation of the VMs.
    pub fn saw(&mut self, seen: Arc<Observation>) {
        self.seen = Some(seen);
    }

    /// Whether an observation came, or the plan has to be read, since the last sample.
    pub fn has_news(&self) -> bool {
        self.stale || (self.is_wanted && self.seen.is_some())
    }

    /// Load, slow devices and missed targets of the last observation, once.
    pub fn sight(&mut self, desired: &Desired) -> Option<Observations> {
        let seen = self.seen.take()?;
        Some(sight_of(&seen, desired))
    }

    /// Begins to make a plan: monitors and agents that do not answer delay no contract.
    pub fn make(&mut self, request: &Request, desired: &Desired, may_load: bool) {
        self.asked = request.number;
        self.refused = self.start(request, desired, may_load).err();
    }

    fn start(&mut self, request: &Request, desired: &Desired, may_load: bool) -> Result<(), String> {
        // The plans of earlier requests are of no use any more.
        self.making.retain(|_, thread| thread.wait(Duration::ZERO).is_none());
        if self.making.len() >= MOST_AT_ONCE {
            return Err(format!("{MOST_AT_ONCE} earlier plans are being made still: does libvirt answer?"));
        }
        let plant = desired.plant.as_ref().and_then(|plant| plant.only(&request.input.vms));
        let (number, request, dirs) = (request.number, request.clone(), self.dirs.clone());
        let waker = Arc::clone(&self.waker);
        let thread = Detached::start("plan", move |answers| {
            let warnings = Warnings::default();
            let made = match plant {
                Some(host) => service_plan::make(host, &request, may_load, &dirs, &warnings),
                None => Err(NoPlan::Whole("none of its VMs runs".to_owned())),
            };
            // The service, and with it the receiver, may be gone.
            let _ = answers.send((made, warnings.into_lines()));
            waker();
        });
        self.making.insert(number, thread.map_err(|e| e.to_string())?);
        Ok(())
    }

    /// The answer to the last request, once.
    pub fn made(&mut self) -> Option<(u64, Result<MadePlan, NoPlan>)> {
        let no_plan = |why: String| -> Answer { (Err(NoPlan::Whole(why)), Vec::new()) };
        let (number, mut answer) = (self.asked, self.refused.take().map(no_plan));
        // An earlier request may take longer than a later one.
        self.making.retain(|of, thread| {
            let Some(made) = thread.wait(Duration::ZERO) else { return true };
            if *of == number {
                answer = Some(made.unwrap_or_else(|e| no_plan(e.to_string())));
            }
            false
        });
        let (made, warnings) = answer?;
        self.warnings = warnings;
        Some((
            number,
            made.map(|made| {
                let shown = MadePlan {
                    outline: made.outline.clone(),
                    changes: made.lines.clone(),
                    reasons: made.reasons.clone(),
                    predictions: predictions(made.plan()),
                };
                self.made = Some((number, made));
                shown
            }),
        ))
    }

    /// Reads the plan in force.
    pub fn read(&mut self, root: &Root) {
        self.stale = false;
        let machine = Machine::new(root, &NoGuests);
        let unusable = |why: String| PlanScope {
            basis: None,
            state: ScopeState::Unusable(why),
            drift: Vec::new(),
            lost: Vec::new(),
            yielded: Default::default(),
            reason: String::new(),
            since: String::new(),
            devices: BTreeSet::new(),
            predictions: Vec::new(),
        };
        self.scope = match (service_plan::status(&self.dirs, &machine), service_plan::find(&self.dirs)) {
            (Ok(None), _) => None,
            (Err(e), _) => Some(unusable(format!("{e:#}"))),
            (Ok(Some(status)), Ok(Some(held))) => {
                let state = state_of(&status);
                Some(PlanScope {
                    basis: Some(held.basis()),
                    drift: if state == ScopeState::Whole { drift(&status) } else { Vec::new() },
                    lost: if state == ScopeState::Whole { lost(root, &status) } else { Vec::new() },
                    state,
                    yielded: held.yielded,
                    reason: held.reason,
                    since: held.since,
                    // Unknown counts as none: a device is then not said to be held.
                    devices: service_plan::devices(&self.dirs).unwrap_or_default(),
                    // Unknown counts as none, as for the devices.
                    predictions: service_plan::plan(&self.dirs)
                        .ok()
                        .flatten()
                        .as_ref()
                        .map(predictions)
                        .unwrap_or_default(),
                })
            }
            (Ok(Some(_)), Err(e)) if !scope_files::is_lost(&e) => Some(unusable(format!("{e:#}"))),
            // Without the file next to it a journal can only be put back.
            (Ok(Some(_)), _) => Some(PlanScope { state: ScopeState::Cut, ..unusable(String::new()) }),
        };
        self.read_ended();
    }

    /// Reads which VMs of the plan have ended since.
    pub fn read_ended(&mut self) {
        let is_whole = self.scope.as_ref().is_some_and(|scope| scope.state == ScopeState::Whole);
        // Unknown does not count as ended: the next comparison asks again.
        self.ended = if is_whole { service_plan::ended(&self.dirs).unwrap_or_default() } else { Vec::new() };
    }

    /// Puts the plan in force that was made last; `None` until its devices and VMs are found.
    pub fn set(&mut self) -> Result<Option<Set>, Error> {
        let Some((number, made)) = &self.made else {
            return Err(Error::new(rtvirtio_workflow::Kind::NotInForce, "the plan that was made is gone"));
        };
        let begin = || {
            let (made, dirs) = (made.clone(), self.dirs.clone());
            move || FoundDevices::find(&made, &dirs, &Quiet::default())
        };
        if !self.found.is_ready(PLAN, *number, begin)? {
            return Ok(None);
        }
        let lock = Scopes::lock(&self.dirs)?;
        // A VM that has ended may have started again, in another place.
        let found = self.found.take(PLAN).filter(|found| !found.is_stale());
        let Some(found) = found else { return Ok(None) };
        let warnings = Warnings::default();
        let mut set = service_plan::set(&lock, made, found, &now(), &self.dirs, &warnings)?;
        set.notes.extend(warnings.into_lines());
        Ok(Some(set))
    }

    pub fn put_back(&self, lock: &Scopes<'_>, on_conflict: OnConflict) -> Result<Option<Reverted>, Error> {
        service_plan::put_back(lock, &self.dirs, on_conflict)
    }

    pub fn restore(&self, lock: &Scopes<'_>, paths: &[String]) -> Result<Amended, Error> {
        service_plan::restore(lock, &self.dirs, paths)
    }

    /// Leaves settings to another program: by name, as their files change with a restart.
    pub fn release(&self, lock: &Scopes<'_>, paths: &[String]) -> Result<Vec<String>, Error> {
        let drift = self.scope.iter().flat_map(|scope| &scope.drift);
        let knobs: Vec<String> = drift.filter(|d| paths.contains(&d.path)).map(|d| d.knob.clone()).collect();
        service_plan::release(lock, &self.dirs, paths, &knobs)
    }

    /// Gives a VM that was started again, as these processes, its settings; `None` until these are
    /// found.
    pub fn renew(
        &mut self,
        vm: &str,
        start: Vec<ProcessId>,
        desired: &Desired,
    ) -> Result<Option<Amended>, Error> {
        let Some(plant) = &desired.plant else {
            return Err(Error::new(rtvirtio_workflow::Kind::NotInForce, "there are no contracts"));
        };
        let begin = || {
            let (vm, host, dirs) = (vm.to_owned(), plant.host.clone(), self.dirs.clone());
            move || HeldRenewal::find(&vm, &host, &dirs, &Quiet::default())
        };
        if !self.renewals.is_ready(vm, start, begin)? {
            return Ok(None);
        }
        let lock = Scopes::lock(&self.dirs)?;
        let Some(renewal) = self.renewals.take(vm) else { return Ok(None) };
        service_plan::renew(&lock, &renewal?, &plant.host, &self.dirs)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use rtvirtio_planner::replan::Input;
    use rtvirtio_testkit::site::wait_for;

    use super::*;

    fn part() -> PlanPart {
        let dirs = Dirs { state: "/state".into(), run: "/run".into() };
        PlanPart::new(dirs, Arc::new(|| {}), true)
    }

    /// Thread that answers when the sender is dropped.
    fn answers(number: u64) -> (Sender<()>, Detached<Answer>) {
        let (release, held) = channel();
        let answer = move || {
            let _ = held.recv();
            (Err(NoPlan::Whole(String::new())), vec![format!("of {number}")])
        };
        (release, Detached::call("test", answer).unwrap())
    }

    /// Answers until no plan is made any more.
    fn all_made(part: &mut PlanPart) -> Vec<(u64, Result<MadePlan, NoPlan>)> {
        let mut made = Vec::new();
        wait_for("the plans", || {
            made.extend(part.made());
            part.making.is_empty()
        });
        made
    }

    #[test]
    fn a_plan_that_comes_after_a_later_one_is_not_taken_for_it() {
        let mut part = part();
        part.asked = 2;
        part.making = [2, 1].map(|number| (number, answers(number).1)).into();
        assert!(matches!(all_made(&mut part).as_slice(), [(2, Err(_))]), "the loop waits for it");
        part.making.insert(1, answers(1).1);
        assert!(all_made(&mut part).is_empty());
        assert_eq!(part.warnings, ["of 2"], "they stay until the next plan");
    }

    #[test]
    fn plans_that_do_not_come_are_limited_in_number() {
        let mut part = part();
        let request = Request {
            number: 1,
            contract: String::new(),
            input: Input::declared(BTreeSet::new()),
            patience: BTreeMap::new(),
            reason: String::new(),
        };
        let (others, making): (Vec<_>, Vec<_>) = [11, 12, 13, 14].map(answers).into_iter().unzip();
        part.making = (11..).zip(making).collect();
        assert_eq!(part.making.len(), MOST_AT_ONCE);
        part.make(&request, &Desired::default(), false);
        let Some((1, Err(NoPlan::Whole(why)))) = part.made() else { panic!("it is made") };
        assert!(why.contains("earlier plans"), "{why}");
        drop(others);
        assert!(all_made(&mut part).is_empty());
        part.make(&request, &Desired::default(), false);
        assert!(matches!(all_made(&mut part).as_slice(), [(1, Err(_))]), "one is made again");
    }

    #[test]
    fn a_plan_whose_thread_panics_is_none() {
        let mut part = part();
        part.asked = 1;
        let panics = Detached::call("test", || -> Answer { panic!("as a planner might") });
        part.making.insert(1, panics.unwrap());
        let made = all_made(&mut part);
        let [(1, Err(NoPlan::Whole(why)))] = made.as_slice() else { panic!("it is waited for") };
        assert!(why.contains("without a result"), "{why}");
    }
}
