//! The Linux host that the service runs on.

mod admitted;
mod arriving;
mod domains;
mod fit;
mod found;
mod lookup;
mod numbers;
mod once;
mod perform;
mod plan;
mod prepared;
mod running;
mod status;
mod tasks;
mod tracked;
mod warnings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Machine, NoGuests};
use rtvirtio_kernel::{HostError, Root};
use rtvirtio_planner::replan::{Observations, Policy, Request};
use rtvirtio_spec::{HostHandle, Reach, Vm};
use rtvirtio_workflow::contracts::{AdmittedInTurn, InForce};
use rtvirtio_workflow::{Dirs, Quiet, renew, scope_files, scopes, started};

use crate::arrivals::{Arrivals, BootTime};
use crate::config::{Config, Mode};
use crate::desired::Desired;
use crate::host::{Host, Millis, Outcome, ScanDepth};
use crate::observe::Observation;
use crate::observed::{Admission, Drift, Observed, ObservedVm, lost_words};
use crate::reconcile::{APPLIED, PLAN};
use crate::step::{Action, Step};
use admitted::{admission, lacks_cpus};
use domains::ContractSources;
use found::{FoundVm, tids};
use lookup::Lookups;
use plan::PlanPart;
use prepared::Renewals;
use status::{drift, lost, state_of};
use tasks::Listed;
use tracked::{SPLIT_EVERY, Tracked};

pub(crate) use arriving::EndedArrival;
pub use fit::{Fit, fit};
pub use lookup::Waker;
pub use once::look_once;
pub use running::RunningVm;

/// Maximum age of the admission, which depends on what the kernel grants.
const ADMISSION_AGE: Duration = Duration::from_secs(60);
/// Maximum age while a VM lacks CPUs: programs other than the service give them up unseen.
const AGE_WITHOUT_CPUS: Duration = Duration::from_secs(5);
/// Interval of lookups of a VM that does not run, unless a new process shows sooner that it may
/// have been started.
const LOOKUP_EVERY: Duration = Duration::from_secs(1);
/// Interval of lookups in libvirt, each of which starts a program.
const DOMAIN_LOOKUP_EVERY: Duration = Duration::from_secs(15);

/// Files and directories of the service.
#[derive(Clone, Debug)]
pub struct Places {
    /// Directories of journals and sockets.
    pub dirs: Dirs,
    pub contracts: PathBuf,
    /// Spec files besides the directory.
    pub specs: Vec<PathBuf>,
}

/// The Linux host that the service runs on.
pub struct LinuxHost {
    root: Root,
    places: Places,
    contracts: ContractSources,
    begin: Instant,
    tracked: BTreeMap<String, Tracked>,
    lookups: Lookups,
    /// Settings of the applied plan.
    renewals: Renewals<renew::Renewal>,
    admission: Option<(Instant, AdmittedInTurn)>,
    /// Contracts of VMs that are about to arrive.
    arrivals: Arrivals,
    /// Messages for clients about what could not be read.
    problems: Vec<String>,
    /// Processes at the last listing, and those of them that are kernel threads of a VM.
    pids: BTreeSet<u32>,
    kernel_threads: BTreeSet<u32>,
    /// Last listing of processes and threads.
    listed: Option<Listed>,
    applied: Applied,
    plan: PlanPart,
    /// Whether contracts have changed since the last sample.
    contracts_changed: bool,
    /// Whether the last comparison could list the VMs for which something is in force.
    scopes_are_known: bool,
    /// Whether the cgroups above those of VMs may have more budget than the contracts in force
    /// need: the kernel has refused to lower it, or an earlier process has not lowered it.
    has_spare_room: bool,
    /// Whether the service only observes, so that threads are not taken in.
    only_observes: bool,
    /// Whether BFQ may be loaded, where it is a module.
    may_load: bool,
}

/// Settings that `rtvirtio apply` has put in force.
#[derive(Default)]
struct Applied {
    /// The VMs that it acts on.
    vms: Vec<String>,
    /// VMs of these that have ended since.
    ended: Vec<String>,
    /// VMs of the plan's spec that have ended and may be found again; empty without that spec.
    reach: Vec<Vm>,
    /// Settings that another program has changed.
    drift: Vec<Drift>,
}

impl LinuxHost {
    /// `waker` is called from other threads when a lookup, a plan or libvirt has a new result.
    #[must_use]
    pub fn new(places: Places, config: &Config, waker: Waker) -> Self {
        let root = Root::default();
        let only_observes = config.mode == Mode::Observe;
        // An earlier process may have raised these budgets and ended before the contract.
        let has_spare_room = !only_observes && scope_files::has_shared(&places.dirs).unwrap_or(true);
        Self {
            arrivals: Arrivals::load(&places.dirs.state, &BootTime::read(&root)),
            contracts: ContractSources::new(&places, config, &waker),
            plan: PlanPart::new(places.dirs.clone(), Arc::clone(&waker), config.plan.is_some()),
            may_load: config.policy().is_some_and(|policy| policy != Policy::Observe),
            only_observes,
            root,
            renewals: Renewals::new(places.dirs.clone(), Arc::clone(&waker)),
            lookups: Lookups::new(places.dirs.clone(), waker),
            places,
            begin: Instant::now(),
            tracked: BTreeMap::new(),
            admission: None,
            problems: Vec::new(),
            pids: BTreeSet::new(),
            kernel_threads: BTreeSet::new(),
            listed: None,
            applied: Applied::default(),
            contracts_changed: true,
            scopes_are_known: false,
            has_spare_room,
        }
    }

    /// Takes an observation of the VMs, for the plan.
    pub fn saw(&mut self, seen: Arc<Observation>) {
        self.plan.saw(seen);
    }

    /// Saves nothing from here on, as for a single look.
    pub fn read_only(&mut self) {
        self.lookups.read_only();
    }

    /// Queries libvirt for contracts with the next pass.
    pub fn ask_for_contracts(&mut self) {
        self.contracts.ask_now();
    }

    /// Messages about what could not be read since the last comparison.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Latest time of the next look, because a thread's role is not known yet. One that is due
    /// already waits for the next scan: it could not be taken in a moment ago.
    #[must_use]
    pub fn look_by(&self, now: Instant) -> Option<Instant> {
        self.tracked.values().filter_map(Tracked::role_due).filter(|at| *at > now).min()
    }

    fn problem(&mut self, text: String) {
        if !self.problems.contains(&text) {
            self.problems.push(text);
        }
    }

    /// Updates whether a VM runs and whether its threads changed, which are listed if `lists`;
    /// starts a lookup where it was not found.
    fn look_at(&mut self, name: &str, vm: Option<&Vm>, lists: bool, now: Instant) {
        let tracked = self.tracked.entry(name.to_owned()).or_default();
        let in_force = tracked.saved.as_ref().map_or(&[][..], |saved| &saved.processes);
        for result in self.lookups.take(name, in_force) {
            match result {
                Ok((handle, processes)) => {
                    // Its CPUs are counted from now on.
                    let counts = vm.is_some_and(|vm| vm.cpu.cores.is_some()) && tracked.found.is_none();
                    self.admission.take_if(|_| counts);
                    let found = FoundVm::new(&self.root, handle, processes);
                    let is_same = |f: &FoundVm| f.handle == found.handle && f.tids == found.tids;
                    tracked.threads_changed |= !tracked.found.as_ref().is_some_and(is_same);
                    tracked.found = Some(found);
                    tracked.lack = None;
                }
                Err(lack) => {
                    // A monitor that is busy for a moment does not end a running VM.
                    if tracked.found.is_none() {
                        tracked.lack = Some(lack);
                    }
                }
            }
        }
        let is_due = tracked.role_due().is_some_and(|at| now >= at);
        if let Some(found) = &mut tracked.found {
            let tids = lists.then(|| tids(&self.root, &found.processes));
            if found.runs() {
                let new = tids.filter(|tids| *tids != found.tids);
                let changed = new.is_some();
                if let Some(tids) = new {
                    found.tids = tids;
                    tracked.threads_changed = true;
                    tracked.role_looks = 0;
                }
                if let Some(vm) = vm.filter(|_| changed || is_due) {
                    self.lookups.start(vm);
                }
            } else {
                tracked.forget();
            }
        }
        let Some(vm) = vm else { return };
        if tracked.found.is_none() && tracked.next_lookup.is_none_or(|at| now >= at) {
            let is_domain = matches!(&vm.reach, Reach::Existing { host: HostHandle::Domain(_), .. });
            let every = if is_domain { DOMAIN_LOOKUP_EVERY } else { LOOKUP_EVERY };
            tracked.next_lookup = Some(now + every);
            self.lookups.start(vm);
        }
    }

    /// Takes threads of VMs that are ending out of their reservations.
    fn release_ending(&mut self) {
        if self.only_observes {
            return;
        }
        let root = &self.root;
        let released = |t: &mut Tracked| t.release_ending(root).err();
        let failed: Vec<HostError> = self.tracked.values_mut().filter_map(released).collect();
        failed.into_iter().for_each(|e| self.problem(format!("a VM that ends keeps its reservations: {e}")));
    }

    /// Looks for threads outside of contracts, where no step takes them in.
    fn look_for_threads(&mut self) {
        let Some((_, admission)) = &self.admission else { return };
        let mut failed = Vec::new();
        for (name, tracked) in &mut self.tracked {
            tracked.take_up(&self.root);
            let looked =
                tracked.look_for_threads(&self.root, &admission.admitted.probe, &self.kernel_threads);
            failed.extend(looked.err().map(|e| format!("threads of {name} cannot be inspected: {e:#}")));
        }
        failed.into_iter().for_each(|why| self.problem(why));
    }

    /// Reads what is in force for a VM.
    fn read_scope(&mut self, name: &str, machine: &Machine<'_>) {
        let status = scopes::status(&self.places.dirs, name, machine);
        let saved = scope_files::in_force(&self.places.dirs, name);
        let Some(tracked) = self.tracked.get_mut(name) else { return };
        (tracked.stale, tracked.read) = (false, Some(Instant::now()));
        if let (true, Ok(Some(status))) = (self.only_observes, &status) {
            tracked.journaled = status::threads(status);
        }
        let former = tracked.saved.take();
        (tracked.scope, tracked.saved) = status::scope(&self.root, status, saved, former);
        if tracked.scope.is_none() {
            tracked.kept = None;
        }
    }

    /// Whether a VM that a plan acts on has ended, or was renewed by another program.
    fn applied_has_changed(&self) -> bool {
        let ended = || started::ended(&self.places.dirs.state).map(|ended| ended.len());
        !self.applied.vms.is_empty() && ended().is_ok_and(|now| now != self.applied.ended.len())
    }

    /// Reads what `rtvirtio apply` has put in force.
    fn read_applied(&mut self) {
        match self.applied_now() {
            Ok((applied, lost)) => {
                self.applied = applied;
                if let Some(why) = lost {
                    self.problem(format!("of what `rtvirtio apply` has set, {why}"));
                }
            }
            Err(e) => self.problem(format!("what `rtvirtio apply` has set is not known: {e:#}")),
        }
    }

    /// Settings that `rtvirtio apply` has put in force, and those of them that are not known to be.
    fn applied_now(&self) -> rtvirtio_workflow::Result<(Applied, Option<String>)> {
        let state = &self.places.dirs.state;
        let vms = started::applied_vms(state)?;
        let ended: Vec<String> = started::ended(state)?.into_iter().map(|vm| vm.vm).collect();
        // The plan's VMs are looked for only when one has ended.
        let plan = if ended.is_empty() { None } else { renew::plan_in_force(&self.places.dirs)? };
        let reach = plan.map(|(_, host)| host.vms().to_vec()).unwrap_or_default();
        let status = rtvirtio_apply::status(state, &Machine::new(&self.root, &NoGuests))?;
        let whole = status.filter(rtvirtio_apply::Status::is_whole);
        let lost = whole.as_ref().and_then(|status| lost_words(&lost(&self.root, status)));
        let applied = Applied {
            drift: whole.as_ref().map(drift).unwrap_or_default(),
            // The PID of a process that has ended leads to no next start.
            reach: reach
                .into_iter()
                .filter(|vm| ended.contains(&vm.name) && numbers::number(&vm.reach).is_none())
                .collect(),
            vms,
            ended,
        };
        Ok((applied, lost))
    }

    /// The CPU contracts in force.
    fn contracts_in_force(&self) -> Vec<InForce> {
        self.tracked.values().filter_map(|t| t.saved.as_ref()?.cpu.clone()).collect()
    }

    fn refresh_admission(&mut self, desired: &Desired, now: Instant) {
        let is_fresh = |(at, of): &(Instant, AdmittedInTurn)| {
            let age = if lacks_cpus(of, desired) { AGE_WITHOUT_CPUS } else { ADMISSION_AGE };
            now.duration_since(*at) < age
        };
        if self.admission.as_ref().is_some_and(is_fresh) {
            return;
        }
        self.arrivals.find_namesakes(desired);
        match self.admit(desired) {
            Ok(admitted) => self.admission = Some((now, admitted)),
            Err(e) => self.problem(format!("what can be promised is not known: {e:#}")),
        }
    }

    fn admission(&self) -> Admission {
        self.admission.as_ref().map_or_else(Admission::default, |(_, of)| admission(of))
    }
}

impl Host for LinuxHost {
    fn now(&self) -> Millis {
        Millis(u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn desired(&mut self) -> Option<Desired> {
        let desired = self.contracts.changed(Instant::now())?;
        (self.admission, self.contracts_changed) = (None, true);
        let others = self.lookups.keep_only(&desired);
        for (name, tracked) in &mut self.tracked {
            if others.contains(name) {
                (tracked.found, tracked.kept, tracked.lack) = (None, None, None);
            }
            // The contract may reach the VM in another way now.
            if desired.contract_of(name).is_some() {
                tracked.next_lookup = None;
            }
        }
        Some(desired)
    }

    fn rests(&mut self) -> bool {
        self.is_at_rest(Instant::now())
    }

    fn observe(&mut self, desired: &Desired, look: ScanDepth) -> Observed {
        let now = Instant::now();
        // Problems that a comparison found are shown until the next.
        if look == ScanDepth::Compare {
            self.problems.clear();
        }
        let mut names: BTreeSet<String> = desired.contracts.iter().map(|c| c.vm.name.clone()).collect();
        if look == ScanDepth::Compare {
            let vms = scope_files::vms(&self.places.dirs);
            self.scopes_are_known = vms.is_ok();
            match vms {
                Ok(vms) => names.extend(vms),
                Err(e) => self.problem(format!("what is in force is not known: {e:#}")),
            }
        }
        names.extend(self.tracked.iter().filter(|(_, t)| t.scope.is_some()).map(|(name, _)| name.clone()));
        let of_numbers = self.lookups.problem().map(str::to_owned);
        for problem in self.contracts.problems().chain(of_numbers) {
            self.problem(problem);
        }
        if look == ScanDepth::Compare || self.applied_has_changed() {
            self.read_applied();
        }
        if look == ScanDepth::Compare || std::mem::take(&mut self.contracts_changed) {
            self.plan.read_profiles(desired);
        }
        if look == ScanDepth::Compare || self.plan.stale {
            self.plan.read(&self.root);
        } else {
            self.plan.read_ended();
        }
        names.extend(self.applied.reach.iter().map(|vm| vm.name.clone()));
        self.tracked.retain(|name, of| names.contains(name) || !of.ending.is_empty());
        let lists = self.may_have_new_tasks(now) || look == ScanDepth::Compare;
        if lists {
            self.new_processes(look);
        }
        // One for all VMs: a systemd that does not answer is waited for once.
        let root = self.root.clone();
        let machine = Machine::new(&root, &NoGuests);
        for name in &names {
            let of_plan = self.applied.reach.iter().find(|vm| vm.name == *name).cloned();
            self.look_at(name, desired.contract_of(name).map(|c| &c.vm).or(of_plan.as_ref()), lists, now);
            let is_due = |t: &Tracked| t.stale || look == ScanDepth::Compare && t.is_compared(now);
            if self.tracked.get(name).is_some_and(is_due) {
                self.read_scope(name, &machine);
            }
        }
        self.release_ending();
        self.lookups.save();
        self.refresh_admission(desired, now);
        // Lowering budgets may wait for the kernel, so not with each scan.
        if look == ScanDepth::Compare {
            self.take_spare_room();
        }
        let mut observed = Observed {
            vms: BTreeMap::new(),
            admission: self.admission(),
            applied_drift: self.applied.drift.clone(),
            plan: self.plan.scope.clone(),
            made: self.plan.made(),
            plan_warnings: self.plan.warnings.clone(),
            unmeasured: self.plan.unmeasured.clone(),
        };
        if self.only_observes {
            self.look_for_threads();
        }
        for (name, tracked) in &mut self.tracked {
            let vm = tracked.observed(&self.root, now);
            let applied_by_hand = self.applied.vms.contains(name);
            let lacks_plan =
                self.applied.ended.contains(name) && self.applied.reach.iter().any(|vm| vm.name == *name);
            let lacks_held = self.plan.ended.contains(name);
            observed.vms.insert(name.clone(), ObservedVm { applied_by_hand, lacks_plan, lacks_held, ..vm });
        }
        observed
    }

    fn sight(&mut self, desired: &Desired) -> Option<Observations> {
        self.plan.sight(desired)
    }

    fn make_plan(&mut self, request: &Request, desired: &Desired) {
        self.plan.make(request, desired, self.may_load);
    }

    fn perform(&mut self, step: &Step, desired: &Desired) -> Outcome {
        let outcome = perform::perform(self, step, desired);
        // Nothing was written.
        if outcome == Outcome::NotYet {
            return outcome;
        }
        // A failed one may have left a journal: others read what is in force until it is compared.
        self.scopes_are_known &= step.action != Action::Apply || is_done(&outcome);
        // While a VM's threads are taken in piece by piece, its journal is not read for each piece.
        let is_piece = step.action == Action::TakeIn && is_done(&outcome) && self.rest(step).is_some();
        if let Some(tracked) = self.tracked.get_mut(&step.vm).filter(|_| !is_piece) {
            tracked.stale = true;
        }
        // Other scopes are not read anew before the next comparison.
        match &step.action {
            Action::RenewHeld | Action::SetPlan => self.plan.stale = true,
            _ if step.vm == PLAN => self.plan.stale = true,
            Action::Renew => self.applied.ended.retain(|vm| *vm != step.vm || !is_done(&outcome)),
            _ if step.vm == APPLIED && is_done(&outcome) => self.applied.drift.clear(),
            _ => {}
        }
        outcome
    }

    fn rest(&self, step: &Step) -> Option<Step> {
        let takes_in =
            matches!(step.action, Action::Apply | Action::TakeIn | Action::Split | Action::Relevel);
        let kept = self.tracked.get(&step.vm).filter(|_| takes_in)?.kept.as_ref()?;
        let outside = kept.outside().filter(|_| kept.has_next())?;
        let reason = format!("{outside} threads are still outside of it");
        Some(Step { vm: step.vm.clone(), action: Action::TakeIn, reason })
    }
}

fn is_done(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Done { .. })
}
