//! Carrying out steps: journaled, VM by VM.

use std::time::Instant;

use rtvirtio_apply::{Amended, ApplyError, Fate, KnownJournal, Line, OnConflict, Reverted};
use rtvirtio_cpu::Backend;
use rtvirtio_kernel::ProcessId;
use rtvirtio_workflow::Error;
use rtvirtio_workflow::contracts::{AdmittedInTurn, InForce, writes_of_one};
use rtvirtio_workflow::managed_vm::ManagedVm;
use rtvirtio_workflow::pieces::{PIECE, leave_for_later};
use rtvirtio_workflow::renew::Renewal;
use rtvirtio_workflow::scope_files::VmInForce;
use rtvirtio_workflow::scopes::{NewContract, Scopes};
use rtvirtio_workflow::started::StartedVm;

use super::{LinuxHost, Quiet, SPLIT_EVERY, Tracked};
use crate::desired::Desired;
use crate::history::now;
use crate::host::{Outcome, SettingChange};
use crate::observed::ScopeState;
use crate::reconcile::{APPLIED, PLAN};
use crate::step::{Action, Step};

/// Reason why a step ended early.
enum Stop {
    Busy,
    NotYet,
    Failed(String),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error.cause::<ApplyError>() {
            Some(ApplyError::Locked { .. }) => Self::Busy,
            _ => Self::Failed(format!("{error:#}")),
        }
    }
}

const SPARE_ROOM: &str = "the groups above those of VMs keep more than they need";

type Done = (Vec<SettingChange>, Vec<String>);

pub(super) fn perform(host: &mut LinuxHost, step: &Step, desired: &Desired) -> Outcome {
    let result = match &step.action {
        Action::Apply => apply(host, step, desired),
        Action::SetPlan => looked_up(host.plan.set()).map(|set| (changes(set.changed), set.notes)),
        Action::RenewHeld => {
            let start = start_of(host, &step.vm);
            looked_up(host.plan.renew(&step.vm, start, desired)).map(amended)
        }
        Action::PutBack { force } if step.vm == PLAN => put_plan_back(host, *force),
        Action::PutBack { force } => put_back(host, &step.vm, *force),
        Action::TakeIn | Action::Split => take_in(host, &step.vm, false),
        Action::Relevel => take_in(host, &step.vm, true),
        Action::Renew => looked_up(renew(host, &step.vm)).map(amended),
        Action::Restore { paths } => {
            let restored = || {
                let scopes = Scopes::lock(&host.places.dirs)?;
                let done = match step.vm.as_str() {
                    APPLIED => scopes.restore_applied(paths)?,
                    PLAN => host.plan.restore(&scopes, paths)?,
                    vm => scopes.restore(vm, paths)?,
                };
                Ok(amended(done))
            };
            restored()
        }
        Action::Release { paths } => {
            let released = || {
                let scopes = Scopes::lock(&host.places.dirs)?;
                let left = match step.vm.as_str() {
                    APPLIED => scopes.release_applied(paths)?,
                    PLAN => host.plan.release(&scopes, paths)?,
                    vm => scopes.release(vm, paths)?,
                };
                let notes = left.into_iter().map(|knob| format!("{knob} is no longer kept"));
                Ok((Vec::new(), notes.collect()))
            };
            released()
        }
    };
    match result {
        Ok((changes, notes)) => Outcome::Done { changes, notes },
        Err(Stop::Busy) => Outcome::Busy,
        Err(Stop::NotYet) => Outcome::NotYet,
        Err(Stop::Failed(why)) => Outcome::Failed(why),
    }
}

/// The result of a step that a lookup comes before; none while that is under way, and where what it
/// found has changed since.
fn looked_up<T>(result: Result<Option<T>, Error>) -> Result<T, Stop> {
    result?.ok_or(Stop::NotYet)
}

/// Processes of a VM that was found.
fn start_of(host: &LinuxHost, vm: &str) -> Vec<ProcessId> {
    let found = host.tracked.get(vm).and_then(|tracked| tracked.found.as_ref());
    found.map_or_else(Vec::new, |found| found.lasting.clone())
}

/// Gives a VM that was started again the weights and limits of the applied plan.
fn renew(host: &mut LinuxHost, vm: &str) -> Result<Option<Amended>, Error> {
    let (start, dirs) = (start_of(host, vm), &host.places.dirs);
    let begin = || {
        let (vm, dirs) = (vm.to_owned(), dirs.clone());
        move || Renewal::find(&vm, &dirs, &Quiet::default())
    };
    if !host.renewals.is_ready(vm, start, begin)? {
        return Ok(None);
    }
    let scopes = Scopes::lock(dirs)?;
    let Some(renewal) = host.renewals.take(vm) else { return Ok(None) };
    scopes.renew(&renewal?)
}

impl LinuxHost {
    /// Lowers the budgets of the cgroups above those of VMs to what the contracts in force need. A
    /// refusal is retried with the next comparison, and is a problem that clients see.
    pub(super) fn take_spare_room(&mut self) {
        let (true, Some((_, admission))) = (self.has_spare_room, &self.admission) else { return };
        // No contract that may need the room is left out.
        let is_counted = |t: &Tracked| t.scope.is_none() || t.saved.is_some();
        if !(self.scopes_are_known && self.tracked.values().all(is_counted)) {
            let unread = |t: &Tracked| {
                let state = t.scope.as_ref().map(|scope| &scope.state);
                !is_counted(t) && matches!(state, Some(ScopeState::Unusable(_)))
            };
            if let Some((vm, _)) = self.tracked.iter().find(|(_, t)| unread(t)) {
                let why = format!("{SPARE_ROOM}: not before the journal of {vm} can be read, or is removed");
                self.problem(why);
            }
            return;
        }
        let taken = || -> Result<(), Error> {
            let scopes = Scopes::lock(&self.places.dirs)?;
            scopes.make_room(&admission.admitted.probe, &self.contracts_in_force())
        };
        match taken().map_err(Stop::from) {
            Ok(()) => self.has_spare_room = false,
            // Another rtvirtio holds the lock.
            Err(Stop::Busy | Stop::NotYet) => {}
            Err(Stop::Failed(why)) => self.problem(format!("{SPARE_ROOM}: {why}")),
        }
    }
}

impl LinuxHost {
    /// Other VMs for which something is in force; `None` where not all of them are known.
    fn in_force_beside(&self, vm: &str) -> Option<Vec<StartedVm>> {
        let others =
            self.tracked.iter().filter(|(name, t)| *name != vm && (t.scope.is_some() || t.saved.is_some()));
        let of = |(name, t): (&String, &Tracked)| {
            let processes = t.saved.as_ref().map_or_else(Vec::new, |saved| saved.processes.clone());
            StartedVm { vm: name.clone(), processes }
        };
        self.scopes_are_known.then(|| others.map(of).collect())
    }
}

/// The CPU contracts in force for all VMs but one, each with the processes of its VM.
fn others(host: &LinuxHost, vm: &str) -> Vec<(InForce, Vec<u32>)> {
    host.in_force_with_processes(|name| name != vm)
}

fn in_force_of(others: Vec<(InForce, Vec<u32>)>) -> Vec<InForce> {
    others.into_iter().map(|(of, _)| of).collect()
}

fn apply(host: &mut LinuxHost, step: &Step, desired: &Desired) -> Result<Done, Stop> {
    let failed = |why: &str| Stop::Failed(why.to_owned());
    let contract = desired.contract_of(&step.vm).ok_or_else(|| failed("its contract is gone"))?;
    let tracked = host.tracked.get(&step.vm).ok_or_else(|| failed("it is not known"))?;
    let found = tracked.found.as_ref().ok_or_else(|| failed("it does not run"))?;
    // A put-back in this round has reset the admission.
    let (_, admission) = host.admission.as_ref().ok_or(Stop::NotYet)?;
    let probe = &admission.admitted.probe;
    // For these VMs the admitted contract is the one in force, not this one.
    if admission.kept.iter().any(|(vm, _)| *vm == step.vm) {
        return Err(failed("it is not admitted"));
    }
    let mut admitted = admission.admitted.contracts.iter();
    let one = admitted.find(|c| c.vm == step.vm).ok_or_else(|| failed("it is not admitted"))?;
    let scopes = Scopes::lock(&host.places.dirs)?;
    let others = others(host, &step.vm);
    let (mut held, threads) =
        writes_of_one(probe, one.clone(), &found.handle, &host.kernel_threads, &others)?;
    let in_force = InForce::from_settings(&held);
    // A budget that is split over threads is split over all of them.
    let is_split = in_force.backend == Backend::Deadline;
    let piece = if is_split { usize::MAX } else { PIECE };
    let later = leave_for_later(&mut held.settings.writes, &threads, piece);
    // Right after its CPUs became a partition a thread that sleeps is refused a reservation: they
    // are given later, as to new threads, and again where one was refused.
    if is_split && in_force.partition.is_some() {
        held.settings.writes.clear();
    }
    let new = NewContract {
        in_force: VmInForce {
            vm: step.vm.clone(),
            contract: contract.id.clone(),
            processes: found.processes.clone(),
            cpu: Some(in_force.clone()),
            reason: step.reason.clone(),
            since: now(),
        },
        writes: std::mem::take(&mut held.settings.writes),
        beside: host.in_force_beside(&step.vm),
    };
    let others = in_force_of(others);
    let mut all = others.clone();
    all.push(in_force.clone());
    scopes.make_room(probe, &all)?;
    let applied = match scopes.apply(&new) {
        Ok(applied) => applied,
        Err(e) => {
            // Until a comparison lowers it, the spare budget counts against new contracts.
            host.has_spare_room |= scopes.make_room(probe, &others).is_err();
            return Err(e.into());
        }
    };
    let mut lines = applied.knobs;
    lines.retain(|line| line.old.as_ref() != Some(&line.new));
    let mut notes = held.settings.notes.clone();
    notes.extend(
        held.settings.outside.iter().map(|(tid, why)| format!("thread {tid} is outside of it: {why}")),
    );
    let handle = found.handle.clone();
    let kept = match is_split {
        true => ManagedVm::start(in_force, handle, &host.root, SPLIT_EVERY),
        false => ManagedVm::of_threads(in_force, handle, &threads, &later, SPLIT_EVERY).in_pieces(PIECE),
    };
    if let Some(tracked) = host.tracked.get_mut(&step.vm) {
        (tracked.kept, tracked.saved) = (Some(kept), Some(new.in_force));
        (tracked.threads_changed, tracked.taken_in) = (is_split, Some(Instant::now()));
        tracked.role_looks = 0;
    }
    Ok((changes(lines), notes))
}

fn put_back(host: &mut LinuxHost, vm: &str, force: bool) -> Result<Done, Stop> {
    let scopes = Scopes::lock(&host.places.dirs)?;
    let on_conflict = if force { OnConflict::Force } else { OnConflict::Accept };
    let reverted =
        scopes.put_back(vm, on_conflict)?.unwrap_or(Reverted { done: true, ..Reverted::default() });
    if !reverted.done {
        return Err(Stop::Failed(reverted.summary()));
    }
    let mut notes = reverted.warnings.clone();
    if let Some((_, admission)) = &host.admission {
        if let Err(e) = scopes.make_room(&admission.admitted.probe, &in_force_of(others(host, vm))) {
            host.has_spare_room = true;
            notes.push(format!("{SPARE_ROOM} until a later comparison: {e:#}"));
        }
    }
    let changes = restored(&reverted, &mut notes);
    let had = host.tracked.get_mut(vm).and_then(|tracked| {
        tracked.kept = None;
        tracked.saved.take()?.cpu
    });
    let had_cpus = had.is_some_and(|cpu| cpu.cores.is_some() || cpu.partition.is_some());
    // Its CPUs are free for others, unless its changed contract is applied next.
    let runs = host.tracked.get(vm).is_some_and(|tracked| tracked.found.is_some());
    host.admission.take_if(|(_, of)| had_cpus && !(runs && is_admitted(of, vm)));
    // The contract in force that was admitted instead is gone.
    if host.admission.as_ref().is_some_and(|(_, of)| of.kept.iter().any(|(kept, _)| kept == vm)) {
        host.admission = None;
    }
    Ok((changes, notes))
}

fn is_admitted(admission: &AdmittedInTurn, vm: &str) -> bool {
    admission.admitted.contracts.iter().any(|of| of.vm == vm)
}

fn put_plan_back(host: &LinuxHost, force: bool) -> Result<Done, Stop> {
    let scopes = Scopes::lock(&host.places.dirs)?;
    let on_conflict = if force { OnConflict::Force } else { OnConflict::Accept };
    let Some(reverted) = host.plan.put_back(&scopes, on_conflict)? else { return Ok(Done::default()) };
    if !reverted.done {
        return Err(Stop::Failed(reverted.summary()));
    }
    let mut notes = reverted.warnings.clone();
    Ok((restored(&reverted, &mut notes), notes))
}

/// The settings that were put back; those that were left are noted.
fn restored(reverted: &Reverted, notes: &mut Vec<String>) -> Vec<SettingChange> {
    let mut changes = Vec::new();
    for outcome in &reverted.outcomes {
        match &outcome.fate {
            Fate::Restored { from } => changes.push(SettingChange {
                knob: outcome.knob.clone(),
                path: outcome.path.clone(),
                old: Some(from.clone()),
                new: outcome.old.clone().unwrap_or_default(),
            }),
            Fate::Accepted => notes.push(format!("{} is left as another program has set it", outcome.knob)),
            _ => {}
        }
    }
    changes
}

/// Takes new threads in; with `relevel` all threads, at the VM's present priority level.
fn take_in(host: &mut LinuxHost, vm: &str, relevel: bool) -> Result<Done, Stop> {
    let has_cores = |t: &Tracked| t.kept.as_ref().is_some_and(|kept| kept.contract().cores.is_some());
    let others = if host.tracked.get(vm).is_some_and(has_cores) { others(host, vm) } else { Vec::new() };
    let Some((_, admission)) = &host.admission else { return Err(Stop::NotYet) };
    let Some(tracked) = host.tracked.get_mut(vm) else { return Err(Stop::NotYet) };
    let (Some(kept), Some(found)) = (&mut tracked.kept, &tracked.found) else { return Err(Stop::NotYet) };
    let probe = &admission.admitted.probe;
    let mut saved = None;
    if relevel {
        let level = admission.admitted.contracts.iter().find(|c| c.vm == vm).map(|c| c.level);
        let level = level.ok_or_else(|| Stop::Failed("it is not admitted".to_owned()))?;
        kept.set_level(level);
        saved.clone_from(&tracked.saved);
        if let Some(cpu) = saved.as_mut().and_then(|saved| saved.cpu.as_mut()) {
            cpu.level = level;
        }
    }
    tracked.role_looks = if tracked.threads_changed { 0 } else { tracked.role_looks.saturating_add(1) };
    // The next piece of the threads that the last scan found, where no others have come.
    let goes_on = !tracked.threads_changed && kept.has_next();
    tracked.threads_changed = false;
    tracked.taken_in = Some(Instant::now());
    let mut look_up = || Some(found.handle.clone());
    let scanned = match goes_on {
        true => kept.take_next(&host.root, probe, &host.kernel_threads, &mut look_up),
        false => kept.scan(&host.root, probe, &host.kernel_threads, &mut look_up),
    };
    let scanned = scanned.inspect_err(|_| tracked.threads_changed = true);
    let Some(mut new) = scanned? else { return Ok(Done::default()) };
    let scopes = Scopes::lock(&host.places.dirs).inspect_err(|_| tracked.threads_changed = true)?;
    let mut reasons = Vec::new();
    if kept.lacks_cpus(&new) {
        let placed = kept.place_hotplugged(&mut new, &host.root, probe, &others);
        reasons = placed.inspect_err(|_| tracked.threads_changed = true)?;
        if let (Some(of), Some(old)) = (new.changed(kept.contract()), &mut tracked.saved) {
            // Before the write, so that nothing else is placed on these CPUs in any case.
            old.cpu =
                Some(InForce { level: old.cpu.as_ref().map_or(of.level, |cpu| cpu.level), ..of.clone() });
            scopes.save(old).inspect_err(|_| tracked.threads_changed = true)?;
            if let Some(saved) = &mut saved {
                saved.cpu = Some(of.clone());
            }
        }
    }
    reasons.extend(new.stuck.clone());
    let amended_now = scopes.amend(vm, &new.settings.writes, saved.as_ref(), &mut tracked.journal);
    let mut done = amended(amended_now.inspect_err(|_| tracked.threads_changed = true)?);
    done.1.append(&mut reasons);
    kept.written(new);
    if !kept.has_next() {
        // Thousands of settings, not needed until threads come.
        tracked.journal = KnownJournal::default();
    }
    Ok(done)
}

fn changes(lines: Vec<Line>) -> Vec<SettingChange> {
    let change =
        |line: Line| SettingChange { knob: line.knob, path: line.path, old: line.old, new: line.new };
    lines.into_iter().map(change).collect()
}

fn amended(amended: Amended) -> Done {
    let failed = amended.failed.into_iter().map(|(knob, why)| format!("{knob} could not be set: {why}"));
    let left = amended.left.into_iter().map(|(knob, found)| format!("{knob} is left at {found}"));
    let notes = failed.chain(left).chain(amended.warnings).collect();
    (changes(amended.written), notes)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_workflow::Dirs;

    use super::*;
    use crate::config::{Config, Mode};
    use crate::linux::Places;

    #[test]
    fn room_that_an_earlier_process_has_raised_is_lowered_unless_the_service_only_observes() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        let (contracts, specs) = (dir.path().join("contracts.d"), Vec::new());
        let places = Places { dirs, contracts, specs };
        let has_spare_room = |mode: Mode| {
            let config = Config { mode, ..Config::default() };
            LinuxHost::new(places.clone(), &config, Arc::new(|| {})).has_spare_room
        };
        assert!(!has_spare_room(Mode::Auto), "there is none");
        let shared = places.dirs.state.join("contracts/shared");
        std::fs::create_dir_all(&shared).unwrap();
        std::fs::write(shared.join(rtvirtio_apply::JOURNAL_FILE), "{}").unwrap();
        assert!(has_spare_room(Mode::Auto) && has_spare_room(Mode::Ask));
        assert!(!has_spare_room(Mode::Observe));
    }
}
