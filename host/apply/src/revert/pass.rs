//! One pass over the journal: decide for every knob, then put back, then check all once more.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_kernel::sched::Attr;
use rtvirtio_units::io_cost::CostQos;

use super::{OnConflict, State, heirs, inspect, restore};
use crate::journal::{Entry, Journal};
use crate::machine::{Fault, Machine};
use crate::observer::{Observer, Step};
use crate::outcome::Fate;
use crate::target::{Form, Place, Target};

/// Planned fate of each entry, and the current values of those that are to be put back.
pub(super) type Decided = (BTreeMap<usize, Fate>, BTreeMap<usize, String>);

pub(super) struct Pass<'a, 'm> {
    journal: &'a Journal,
    machine: &'a Machine<'m>,
    on_conflict: OnConflict,
    fates: BTreeMap<usize, Fate>,
    /// Knobs to be put back, with their value now.
    todo: BTreeMap<usize, String>,
    /// Knobs that failed once writing had begun: their value now may be any, on our account.
    moved: BTreeSet<usize>,
    /// Entries of our cgroups and groups of resctrl, and of threads' policies: a VM may have
    /// thousands of threads.
    groups: Vec<&'a Entry>,
    policies: BTreeMap<&'a Target, Vec<usize>>,
    /// Entries whose fate is open once writing has begun.
    open: BTreeSet<usize>,
}

impl<'a, 'm> Pass<'a, 'm> {
    pub fn new(journal: &'a Journal, machine: &'a Machine<'m>, on_conflict: OnConflict) -> Self {
        let (fates, todo, moved, open) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let of_form = |is: fn(&Form) -> bool| journal.entries.iter().filter(move |e| is(&e.target.form));
        let groups = of_form(Form::is_group).collect();
        let mut policies: BTreeMap<&Target, Vec<usize>> = BTreeMap::new();
        for entry in of_form(|form| *form == Form::Scheduling).filter(|e| e.changed_by.is_none()) {
            policies.entry(&entry.target).or_default().push(entry.id);
        }
        Self { journal, machine, on_conflict, fates, todo, moved, groups, policies, open }
    }

    /// Reads every knob, before anything is written.
    pub fn decide(mut self) -> Decided {
        self.classify();
        self.classify_side_effects();
        (self.fates, self.todo)
    }

    /// Carries out the decision. Returns the fates, and the knobs that an error has left somewhere
    /// between two values.
    pub fn carry_out(
        &mut self,
        (fates, todo): Decided,
        observer: &mut dyn Observer,
    ) -> (BTreeMap<usize, Fate>, BTreeSet<usize>) {
        (self.fates, self.todo) = (fates, todo);
        for entry in self.journal.entries.iter().filter(|e| e.changed_by.is_some()) {
            let cause = entry.changed_by.and_then(|id| self.fates.get(&id));
            // Its knob is about to change it.
            if matches!(self.fates.get(&entry.id), Some(Fate::Failed { .. }))
                && !cause.is_none_or(Fate::is_open)
            {
                self.moved.insert(entry.id);
            }
        }
        self.put_back(observer);
        for (entry, error) in heirs::release(self.journal, &self.fates, self.machine) {
            self.fail(entry, Fate::Failed { error });
        }
        self.keep_what_stays();
        self.settle(observer);
        (std::mem::take(&mut self.fates), std::mem::take(&mut self.moved))
    }

    /// Decides the fate of every written knob.
    fn classify(&mut self) {
        let mut blocked: BTreeMap<usize, String> = BTreeMap::new();
        let mut kept: BTreeSet<usize> = BTreeSet::new();
        // From the last to the first: a file comes after the write that creates it.
        for entry in self.journal.entries.iter().rev().filter(|e| e.changed_by.is_none()) {
            let id = entry.id;
            let mut state = inspect(entry, self.journal.complete, self.machine);
            if let (State::Foreign(found), OnConflict::Force) = (&state, self.on_conflict) {
                state = State::Ours(found.clone());
            }
            let mut stays = None;
            let fate = match state {
                State::Gone(why) => Fate::Gone { why },
                State::Unreadable(error) => {
                    // A thread may be in any cgroup that was ever a value of ours.
                    stays = entry.new.iter().chain(&entry.also_ours).find_map(|v| self.group_of(entry, v));
                    Fate::Failed { error }
                }
                // irqbalance moves any interrupt at any time.
                State::Foreign(_)
                    if self.on_conflict == OnConflict::Accept || entry.target.is_interrupt() =>
                {
                    Fate::Accepted
                }
                State::Foreign(found) => Fate::Conflict { found },
                State::Old => Fate::Untouched,
                State::Ours(found) => match self.stuck(entry) {
                    _ if blocked.contains_key(&id) => Fate::Blocked { by: blocked[&id].clone() },
                    _ if kept.contains(&id) => Fate::Accepted,
                    Ok(None) => {
                        self.todo.insert(id, found.clone());
                        Fate::Restored { from: found }
                    }
                    // The cgroup stays as long as this thread is in it.
                    stuck => {
                        stays = self.group_of(entry, &found);
                        match (stuck, self.on_conflict) {
                            (Ok(_), OnConflict::Accept) => Fate::Accepted,
                            (Ok(by), _) => Fate::Blocked { by: by.unwrap_or_default() },
                            (Err(error), _) => Fate::Failed { error },
                        }
                    }
                },
            };
            for other in entry.created_by.into_iter().chain(stays) {
                match &fate {
                    f if f.is_open() => {
                        blocked.insert(other, entry.target.to_string());
                    }
                    Fate::Accepted => {
                        kept.insert(other);
                    }
                    _ => {}
                }
            }
            self.fates.insert(id, fate);
        }
        self.leave_movers_alone();
        self.leave_bfq_out();
        self.leave_created();
    }

    /// Leaves files alone that a blocked or accepted knob has created: they stay with it.
    fn leave_created(&mut self) {
        for entry in self.journal.entries.iter().filter(|e| e.old.is_none()) {
            let creator = entry.created_by.and_then(|id| self.fates.get(&id)).cloned();
            let path = entry.created_by.and_then(|id| self.journal.entry(id)).map(|e| e.target.to_string());
            if let (Some(_), Some(creator), Some(by)) = (self.todo.get(&entry.id), creator, path) {
                let fate = match creator {
                    Fate::Accepted => Fate::Accepted,
                    f if f.is_open() => Fate::Blocked { by },
                    _ => continue,
                };
                self.todo.remove(&entry.id);
                self.fates.insert(entry.id, fate);
            }
        }
    }

    /// Leaves a knob alone that moves another one which cannot be read: else that one's value would
    /// not be known as ours the next time.
    fn leave_movers_alone(&mut self) {
        let failed = |e: &&Entry| matches!(self.fates.get(&e.id), Some(Fate::Failed { .. }));
        let unreadable: Vec<&Entry> = self.journal.entries.iter().filter(failed).collect();
        for entry in self.journal.entries.iter().filter(|e| e.may_move()) {
            let Some(moved) = unreadable.iter().find(|e| entry.moves(e)) else { continue };
            if self.todo.remove(&entry.id).is_some() {
                self.fates.insert(entry.id, Fate::Blocked { by: moved.target.to_string() });
            }
        }
    }

    /// Leaves an elevator alone that would be BFQ again next to io.cost that stays.
    fn leave_bfq_out(&mut self) {
        for entry in &self.journal.entries {
            if !self.todo.contains_key(&entry.id) {
                continue;
            }
            if let Some(by) = self.io_cost_at(entry) {
                self.todo.remove(&entry.id);
                self.fates.insert(entry.id, Fate::Blocked { by });
            }
        }
    }

    /// Setting of io.cost that is not put back and may go on dividing the disk of this elevator,
    /// which was BFQ: of the two neither share would hold. Another program's that is off does not.
    fn io_cost_at(&self, elevator: &Entry) -> Option<String> {
        let Target { place: Place::Host, path, form: Form::Elevator } = &elevator.target else { return None };
        if elevator.old.as_deref() != Some("bfq") {
            return None;
        }
        let stays = |fate: &Fate| match fate {
            Fate::Conflict { found } => !found.parse::<CostQos>().is_ok_and(|qos| !qos.enable),
            fate => fate.is_open(),
        };
        let is_qos = |e: &&Entry| matches!(e.target.form, Form::IoCostQos { .. });
        let costs = self.journal.entries.iter().filter(is_qos);
        let open: Vec<&Entry> = costs.filter(|e| self.fates.get(&e.id).is_some_and(stays)).collect();
        if open.is_empty() {
            return None;
        }
        let number = match self.machine.host().read(&path.ancestors().nth(2)?.join("dev")) {
            Ok(number) => Some(number.trim().to_owned()),
            Err(e) if rtvirtio_kernel::is_gone(&e) => return None,
            // Of any disk, then.
            Err(_) => None,
        };
        let is_here = |e: &&Entry| number.as_deref().is_none_or(|number| e.target.dev() == Some(number));
        open.into_iter().find(is_here).map(|e| e.target.to_string())
    }

    /// Policy that keeps a thread in our cgroup: a real-time one that is not ours to put back,
    /// where its old cgroup has no real-time budget and so does not admit it
    /// (`sched_rt_can_attach()`). With `OnConflict::Force` the thread loses that policy. An error
    /// when that is unknown.
    fn stuck(&self, entry: &Entry) -> Result<Option<String>, String> {
        let (Form::ThreadCgroup { mount, .. }, Place::Thread { pid, tid, start }, Some(old)) =
            (&entry.target.form, &entry.target.place, &entry.old)
        else {
            return Ok(None);
        };
        if self.on_conflict == OnConflict::Force {
            return Ok(None);
        }
        let policy = Target::scheduling(*pid, *tid, *start);
        let now = match self.machine.read(&policy) {
            Ok(text) => text.trim().parse::<Attr>().map_err(|e| e.to_string())?,
            Err(Fault::Gone(_)) => return Ok(None),
            Err(Fault::Io(e)) => return Err(format!("its policy cannot be read: {e}")),
        };
        // Policies come after groups in the journal, so they are decided by now.
        let mut entries = self.policies.get(&policy).into_iter().flatten();
        let ours = entries.any(|id| matches!(self.fates.get(id), Some(Fate::Restored { .. })));
        if ours || !now.policy.is_real_time() {
            return Ok(None);
        }
        let file = mount.join(old.trim_start_matches('/')).join("cpu.rt_runtime_us");
        match self.machine.host().read(&file).map_err(Fault::from_io) {
            Ok(budget) => Ok((budget.trim() == "0").then(|| policy.to_string())),
            // A kernel without such budgets.
            Err(Fault::Gone(_)) => Ok(None),
            Err(Fault::Io(e)) => Err(format!("the budget of its old group cannot be read: {e}")),
        }
    }

    /// Entry of our cgroup that a thread with this value is in.
    fn group_of(&self, entry: &Entry, value: &str) -> Option<usize> {
        let (Form::ThreadCgroup { mount, .. } | Form::ResctrlTask { mount }) = &entry.target.form else {
            return None;
        };
        let group = mount.join(value.trim_start_matches('/'));
        self.groups.iter().find(|e| e.target.path == group).map(|e| e.id)
    }

    /// Decides for files that change along with a knob, before anything is written: from then on
    /// they change.
    fn classify_side_effects(&mut self) {
        for entry in &self.journal.entries {
            let Some(cause) = entry.changed_by else { continue };
            let ours = match self.fates.get(&cause) {
                Some(Fate::Restored { .. }) => true,
                // After a kill between the knob and this file; without one, the knob was never ours
                // when it was left.
                Some(Fate::Untouched) => self.journal.reverting,
                _ => continue,
            };
            let fate = match inspect(entry, true, self.machine) {
                State::Old => Fate::Untouched,
                State::Gone(_) if ours => Fate::Untouched,
                State::Gone(why) => Fate::Gone { why },
                State::Unreadable(error) => Fate::Failed { error },
                State::Ours(from) | State::Foreign(from) if ours || self.on_conflict == OnConflict::Force => {
                    Fate::Restored { from }
                }
                State::Ours(_) | State::Foreign(_) if self.on_conflict == OnConflict::Accept => {
                    Fate::Accepted
                }
                State::Ours(found) | State::Foreign(found) => Fate::Conflict { found },
            };
            self.fates.insert(entry.id, fate);
        }
    }

    fn put_back(&mut self, observer: &mut dyn Observer) {
        let is_open = |(id, fate): (&usize, &Fate)| fate.is_open().then_some(*id);
        self.open = self.fates.iter().filter_map(is_open).collect();
        self.put_back_units(observer);
        for entry in self.journal.entries.iter().rev().filter(|e| e.changed_by.is_none()) {
            if !self.todo.contains_key(&entry.id) || entry.target.form.unit().is_some() {
                continue;
            }
            if let Some(by) = self.held_by(entry) {
                self.fates.insert(entry.id, Fate::Blocked { by });
                self.open.insert(entry.id);
                continue;
            }
            // Without an old value the file vanishes with the write that created it; a cgroup's
            // line must be unset first, to see that nothing else relies on it.
            let Some(old) = entry.old.as_deref().or(entry.target.form.unset()) else { continue };
            // systemd may have taken the controller away with the property.
            if entry.old.is_none() || entry.target.in_cgroup() {
                if let Err(Fault::Gone(e)) = self.machine.read(&entry.target) {
                    if entry.old.is_some() {
                        self.fates.insert(entry.id, Fate::Gone { why: e.to_string() });
                    }
                    observer.step(Step::Restored);
                    continue;
                }
            }
            if let Err(error) = restore::restore(&entry.target, old, self.machine) {
                self.fail(entry, error);
            }
            observer.step(Step::Restored);
        }
    }

    /// Properties of units come before the files that systemd writes by them, and the I/O
    /// controller, which it may take away then, before the files that are there with it.
    fn put_back_units(&mut self, observer: &mut dyn Observer) {
        let mut any = false;
        for entry in self.journal.entries.iter().filter(|e| e.target.form.unit().is_some()) {
            let Some(old) = entry.old.as_deref().filter(|_| self.todo.contains_key(&entry.id)) else {
                continue;
            };
            any = true;
            if let Err(error) = restore::restore(&entry.target, old, self.machine) {
                self.fail(entry, error);
            }
            observer.step(Step::Restored);
        }
        let enabled = |e: &&Entry| e.changed_by.is_some() && e.target.form == Form::IoEnabled;
        for entry in self.journal.entries.iter().filter(|_| any).filter(enabled) {
            let Some(old) = self.to_settle(entry) else { continue };
            // From the root down; settling reports an error.
            let _ = restore::restore(&entry.target, old, self.machine);
        }
    }

    fn fail(&mut self, entry: &Entry, fate: Fate) {
        if matches!(fate, Fate::Failed { .. }) {
            self.moved.insert(entry.id);
        }
        if fate.is_open() {
            self.open.insert(entry.id);
        }
        self.fates.insert(entry.id, fate);
    }

    /// Knob that was not put back and needs this one: a file that this one creates, a thread in
    /// this cgroup, io.cost where this one is BFQ.
    fn held_by(&self, entry: &Entry) -> Option<String> {
        if self.open.is_empty() {
            return None;
        }
        let needs = |e: &&Entry| {
            let within = || self.todo.get(&e.id).and_then(|found| self.group_of(e, found)) == Some(entry.id);
            self.open.contains(&e.id) && (e.created_by == Some(entry.id) || within())
        };
        // A thread blocks only the cgroup that it is in.
        let holds = entry.target.place == Place::Host;
        let mut entries = self.journal.entries.iter().filter(|_| holds);
        entries.find(needs).map(|e| e.target.to_string()).or_else(|| self.io_cost_at(entry))
    }

    /// A knob that could not be put back keeps the files that it created, and those that changed
    /// along with it: the next attempt to put it back changes these again.
    fn keep_what_stays(&mut self) {
        for entry in &self.journal.entries {
            let open = |id: &usize| self.fates.get(id).is_some_and(Fate::is_open);
            let vanishes = entry.old.is_none() && entry.target.form.unset().is_none();
            if entry.changed_by.as_ref().is_some_and(open) {
                self.fates.remove(&entry.id);
            } else if let (true, Some(creator)) = (vanishes, entry.created_by.filter(open)) {
                if matches!(self.fates.get(&entry.id), Some(Fate::Restored { .. })) {
                    let by = self.journal.entry(creator).map(|e| e.target.to_string()).unwrap_or_default();
                    self.fates.insert(entry.id, Fate::Blocked { by });
                }
            }
        }
    }

    /// Puts back files that change along with knobs, and knobs that putting back another one has
    /// changed (`strict_guarantees` raises `slice_idle`): checks all again until everything stays
    /// as it is.
    fn settle(&mut self, observer: &mut dyn Observer) {
        // One round changes at most the files that depend on it; the second finds everything in
        // place. The third is a spare.
        for _ in 0..3 {
            if !self.settle_once(observer) {
                return;
            }
        }
        for entry in &self.journal.entries {
            let Some(old) = self.to_settle(entry) else { continue };
            match inspect(entry, true, self.machine) {
                State::Old | State::Gone(_) => {}
                State::Ours(found) | State::Foreign(found)
                    if entry.target.is_interrupt() || entry.target.form.is_left_of(&found, old) => {}
                State::Ours(found) | State::Foreign(found) => {
                    let error = format!("`{old}` was written repeatedly, but it shows `{found}`");
                    self.fail(entry, Fate::Failed { error });
                }
                State::Unreadable(error) => self.fail(entry, Fate::Failed { error }),
            }
        }
    }

    fn was_put_back(&self, entry: &Entry) -> bool {
        matches!(self.fates.get(&entry.id), Some(Fate::Restored { .. }))
    }

    /// Old value of an entry whose fate is to have it by now.
    fn to_settle<'e>(&self, entry: &'e Entry) -> Option<&'e str> {
        let back = matches!(self.fates.get(&entry.id), Some(Fate::Restored { .. } | Fate::Untouched));
        entry.old.as_deref().filter(|_| back)
    }

    /// Returns whether anything had to be written.
    fn settle_once(&mut self, observer: &mut dyn Observer) -> bool {
        let mut moved = false;
        for entry in &self.journal.entries {
            let Some(old) = self.to_settle(entry) else { continue };
            let found = match inspect(entry, true, self.machine) {
                State::Old => continue,
                // All that the kernel leaves of it was put back already, or irqbalance moves it.
                State::Ours(found) | State::Foreign(found)
                    if entry.target.is_interrupt()
                        || (self.was_put_back(entry) && entry.target.form.is_left_of(&found, old)) =>
                {
                    continue;
                }
                State::Ours(found) | State::Foreign(found) => found,
                State::Gone(why) => {
                    self.fates.insert(entry.id, Fate::Gone { why });
                    continue;
                }
                State::Unreadable(error) => {
                    self.fail(entry, Fate::Failed { error });
                    continue;
                }
            };
            let fate = match restore::restore(&entry.target, old, self.machine) {
                Ok(()) => Fate::Restored { from: found },
                Err(error) => error,
            };
            moved = true;
            // A knob that was put back before keeps the value that it was put back from.
            if fate.is_open() || self.fates.get(&entry.id) == Some(&Fate::Untouched) {
                self.fail(entry, fate);
            }
            observer.step(Step::Restored);
        }
        moved
    }
}
