//! Putting back what a journal names, whichever part of it happened.

mod restore;

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_host::sched::Attr;
use rtvirtio_host::text;
use serde::Serialize;

use crate::apply::rebooted;
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal, Kept};
use crate::machine::{Fault, Machine};
use crate::session::{Observer, Step};
use crate::state_dir::StateDir;
use crate::target::{Form, Place, Target};

/// What to do about a knob that somebody else changed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnConflict {
    /// Leave it, report it, and keep it in the journal.
    #[default]
    Report,
    /// Put the old value back over it.
    Force,
    /// Leave it and forget about it.
    Accept,
}

/// What became of one knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// It is as it was before.
    Restored {
        /// Value before putting back.
        from: String,
    },
    /// It already was as before.
    Untouched,
    /// Somebody else changed it; left alone, and still in the journal.
    Conflict {
        /// Its value now.
        found: String,
    },
    /// Left alone because another knob that depends on it was left alone; still in the journal.
    Blocked {
        /// The other knob.
        by: String,
    },
    /// Somebody else changed it; left alone and forgotten, as asked.
    Accepted,
    /// The device, cgroup, guest or file is gone, and the setting with it.
    Gone {
        /// What is gone.
        why: String,
    },
    /// It could not be put back; still in the journal.
    Failed {
        /// Why.
        error: String,
    },
}

impl Fate {
    /// Whether the knob has to stay in the journal.
    fn is_open(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Blocked { .. } | Self::Failed { .. })
    }
}

/// One knob and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The setting as users know it.
    pub knob: String,
    /// Its file; inside a guest with the VM's name before it.
    pub path: String,
    /// Value that it had before the plan; `None` when its file did not exist.
    pub old: Option<String>,
    /// What became of it.
    #[serde(flatten)]
    pub fate: Fate,
}

/// What putting back did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reverted {
    /// Whether everything is settled and the journal is gone.
    pub done: bool,
    /// Whether the machine was restarted since the plan was applied: the kernel has forgotten its knobs by itself then.
    pub rebooted: bool,
    /// Each knob in the order of the journal.
    pub outcomes: Vec<Outcome>,
    /// What went wrong beside the knobs.
    pub warnings: Vec<String>,
}

impl Reverted {
    /// One sentence: `everything was put back`, or what was not.
    #[must_use]
    pub fn summary(&self) -> String {
        let open: Vec<_> = self
            .outcomes
            .iter()
            .filter_map(|o| {
                let path = &o.path;
                match &o.fate {
                    Fate::Conflict { found } => {
                        Some(format!("{path} was changed by someone else to `{found}`"))
                    }
                    Fate::Blocked { by } => Some(format!("{path} was left because of {by}")),
                    Fate::Failed { error } => Some(format!("{path}: {error}")),
                    _ => None,
                }
            })
            .collect();
        match (open.is_empty(), self.warnings.is_empty()) {
            (true, true) => "everything was put back".to_owned(),
            (true, false) => format!("everything was put back, but: {}", self.warnings.join("; ")),
            (false, _) => format!("not put back: {}", open.join("; ")),
        }
    }
}

/// What a knob's file says, seen from the journal.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// As before the plan (or absent, as before).
    Old,
    /// As the plan set it, or as the kernel left it on our account.
    Ours(String),
    /// Anything else.
    Foreign(String),
    /// The thing itself is gone.
    Gone(String),
    /// It cannot be told.
    Unreadable(String),
}

/// Looks at one knob.
pub(crate) fn look(entry: &Entry, complete: bool, machine: &Machine<'_>) -> State {
    if let (Some(identity), Some(dir)) = (entry.identity, entry.target.path.parent()) {
        match machine.host().identity(dir) {
            Ok(now) if now == identity => {}
            Ok(_) => return State::Gone(format!("{} was removed and made again", dir.display())),
            Err(e) => return State::Gone(format!("{}: {e}", dir.display())),
        }
    }
    if let Some(dev) = entry.target.dev() {
        if !machine.root().exists(format!("/sys/dev/block/{dev}")) {
            return State::Gone(format!("device {dev} is gone"));
        }
    }
    let text = match machine.read(&entry.target) {
        Ok(text) => text,
        Err(Fault::Gone(_)) if entry.old.is_none() => return State::Old,
        Err(Fault::Gone(e)) => return State::Gone(e.to_string()),
        Err(Fault::Io(e)) => return State::Unreadable(e.to_string()),
    };
    let form = &entry.target.form;
    let Some(found) = form.value(&text) else {
        return State::Unreadable(format!("it holds `{}`, which is not understood", text.trim()));
    };
    // A cgroup's file that did not exist is as before when it sets nothing.
    if entry.old.as_deref().or(form.unset()).is_some_and(|old| entry.target.is_old(&found, old)) {
        return State::Old;
    }
    let ours = entry.new.as_ref().is_some_and(|new| form.is(&found, new))
        || entry.passing.contains(&found)
        // Cut off between the write that made the file and our own: it shows the kernel's default.
        || (entry.old.is_none() && !complete);
    if ours { State::Ours(found) } else { State::Foreign(found) }
}

struct Pass<'a, 'm> {
    journal: &'a Journal,
    machine: &'a Machine<'m>,
    on_conflict: OnConflict,
    fates: BTreeMap<usize, Fate>,
    /// Knobs to be put back, with their value now.
    todo: BTreeMap<usize, String>,
}

pub(crate) fn revert(
    dir: &StateDir,
    mut journal: Journal,
    on_conflict: OnConflict,
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<Reverted, ApplyError> {
    if rebooted(&journal, machine) {
        return forgotten(dir, &journal, observer);
    }
    let resumed = journal.reverting;
    let mut warnings = Vec::new();

    let mut pass =
        Pass { journal: &journal, machine, on_conflict, fates: BTreeMap::new(), todo: BTreeMap::new() };
    pass.classify();
    pass.classify_side_effects(resumed);
    let Pass { mut fates, todo, .. } = pass;

    observer.step(Step::Reverting);
    // On disk before the first write, so that a cut here is told from a change by someone else. Without room for it, go on: the
    // knobs matter more.
    remember_other_weights(&mut journal, &todo, machine);
    journal.reverting = true;
    if let Err(e) = journal::store(dir, &journal) {
        warnings.push(format!("not protected against being killed: {e}"));
    }

    let mut pass = Pass { journal: &journal, machine, on_conflict, fates: std::mem::take(&mut fates), todo };
    pass.put_back(observer);
    pass.rewrite_other_weights(&mut warnings);
    pass.settle(observer);
    let fates = pass.fates;

    let outcomes: Vec<_> = journal
        .entries
        .iter()
        .filter_map(|e| {
            let fate = fates.get(&e.id)?.clone();
            Some(Outcome { knob: e.knob.clone(), path: e.target.to_string(), old: e.old.clone(), fate })
        })
        .collect();
    let done = !outcomes.iter().any(|o| o.fate.is_open());
    if done {
        observer.step(Step::AllBack);
        journal::remove(dir)?;
    } else {
        keep_open(&mut journal, &fates, machine);
        if let Err(e) = journal::store(dir, &journal) {
            // The old journal is still there and still right: what is back already counts as untouched next time.
            warnings.push(e.to_string());
        }
    }
    Ok(Reverted { done, rebooted: false, outcomes, warnings })
}

/// After a restart of the host there is nothing to put back: the kernel has forgotten the settings, the guests with it, and the
/// journal's names (`/sys/block/sdb`, `8:16`) may now stand for other devices.
fn forgotten(dir: &StateDir, journal: &Journal, observer: &mut dyn Observer) -> Result<Reverted, ApplyError> {
    let why = "the host was restarted since: its kernel has forgotten this setting".to_owned();
    let outcomes = journal.entries.iter().map(|e| Outcome {
        knob: e.knob.clone(),
        path: e.target.to_string(),
        old: e.old.clone(),
        fate: Fate::Gone { why: why.clone() },
    });
    let outcomes = outcomes.collect();
    observer.step(Step::AllBack);
    journal::remove(dir)?;
    Ok(Reverted { done: true, rebooted: true, outcomes, warnings: Vec::new() })
}

impl Pass<'_, '_> {
    /// Decides for every written knob what is to be done, before anything is written.
    fn classify(&mut self) {
        let mut blocked: BTreeMap<usize, String> = BTreeMap::new();
        let mut kept: BTreeSet<usize> = BTreeSet::new();
        // From the last to the first: a file comes after the one that brings it into being.
        for entry in self.journal.entries.iter().rev().filter(|e| e.changed_by.is_none()) {
            let id = entry.id;
            let mut state = look(entry, self.journal.complete, self.machine);
            if let (State::Foreign(found), OnConflict::Force) = (&state, self.on_conflict) {
                state = State::Ours(found.clone());
            }
            let mut stays = None;
            let fate = match state {
                State::Gone(why) => Fate::Gone { why },
                State::Unreadable(error) => Fate::Failed { error },
                State::Foreign(_) if self.on_conflict == OnConflict::Accept => Fate::Accepted,
                State::Foreign(found) => Fate::Conflict { found },
                State::Old => Fate::Untouched,
                State::Ours(found) => {
                    if let Some(by) = blocked.get(&id) {
                        Fate::Blocked { by: by.clone() }
                    } else if kept.contains(&id) {
                        Fate::Accepted
                    } else if let Some(by) = self.stuck(entry) {
                        // The group stays with it.
                        stays = self.group_of(entry, &found);
                        match self.on_conflict {
                            OnConflict::Accept => Fate::Accepted,
                            _ => Fate::Blocked { by },
                        }
                    } else {
                        self.todo.insert(id, found.clone());
                        Fate::Restored { from: found }
                    }
                }
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
        // What a blocked or accepted knob brought into being stays with it.
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

    /// What keeps a thread in the group of ours that it is in: a real-time policy that is not ours to put back, where its old group has no budget for
    /// one and so lets it in no more (`sched_rt_can_attach()`). With force it loses that policy.
    fn stuck(&self, entry: &Entry) -> Option<String> {
        let (Form::ThreadCgroup { mount, .. }, Place::Thread { pid, tid, start }) =
            (&entry.target.form, &entry.target.place)
        else {
            return None;
        };
        if self.on_conflict == OnConflict::Force {
            return None;
        }
        let policy = Target::scheduling(*pid, *tid, *start);
        let now = self.machine.read(&policy).ok()?.trim().parse::<Attr>().ok()?;
        // Policies come after groups in the journal, so they are decided by now.
        let same = |e: &&Entry| e.target == policy && e.changed_by.is_none();
        let entries = self.journal.entries.iter().filter(same);
        let ours = entries.filter_map(|e| self.fates.get(&e.id)).any(|f| matches!(f, Fate::Restored { .. }));
        if ours || !now.policy.is_real_time() {
            return None;
        }
        let home = mount.join(entry.old.as_ref()?.trim_start_matches('/'));
        let budget = self.machine.host().read(&home.join("cpu.rt_runtime_us")).ok()?;
        (budget.trim() == "0").then(|| policy.to_string())
    }

    /// The group of ours that a thread is in.
    fn group_of(&self, entry: &Entry, found: &str) -> Option<usize> {
        let Form::ThreadCgroup { mount, .. } = &entry.target.form else { return None };
        let group = mount.join(found.trim_start_matches('/'));
        let is = |e: &&Entry| matches!(e.target.form, Form::Group { .. }) && e.target.path == group;
        self.journal.entries.iter().find(is).map(|e| e.id)
    }

    fn put_back(&mut self, observer: &mut dyn Observer) {
        for entry in self.journal.entries.iter().rev() {
            // Without an old value the file vanishes with the one that brought it into being; a cgroup's must be unset first, to
            // tell that nobody relies on it.
            let old = entry.old.as_deref().or(entry.target.form.unset());
            let (true, Some(old)) = (self.todo.contains_key(&entry.id), old) else { continue };
            if let Err(error) = restore::restore(&entry.target, old, self.machine) {
                self.fates.insert(entry.id, error);
            }
            observer.step(Step::Restored);
        }
    }

    /// Files that change along with a knob: decided before anything is written, because from then on they move.
    fn classify_side_effects(&mut self, resumed: bool) {
        for entry in &self.journal.entries {
            let Some(cause) = entry.changed_by else { continue };
            let ours = match self.fates.get(&cause) {
                Some(Fate::Restored { .. }) => true,
                // After a cut between the knob and this file; without one, the knob was never ours when it was left.
                Some(Fate::Untouched) => resumed,
                _ => continue,
            };
            let fate = match look(entry, true, self.machine) {
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

    /// After a cut while a group's default weight was rewritten, lines of other devices may be missing.
    fn rewrite_other_weights(&self, warnings: &mut Vec<String>) {
        for kept in &self.journal.kept {
            let Ok(file) = self.machine.read(&kept.target) else { continue };
            if kept.target.form.value(&file).as_deref() == Some("default") {
                if let Err(fault) = self.machine.write(&kept.target, &kept.target.form.text(&kept.value)) {
                    warnings.push(format!("{}: {}", kept.target, fault.into_io()));
                }
            }
        }
    }

    /// Puts back what changes along with knobs, and what putting one knob back did to another (`strict_guarantees` raises
    /// `slice_idle`): looks again at all.
    fn settle(&mut self, observer: &mut dyn Observer) {
        // One round moves at most what depends on it; the second finds everything in place. One to spare.
        for _ in 0..3 {
            if !self.settle_once(observer) {
                break;
            }
        }
    }

    /// Returns whether anything had to be written.
    fn settle_once(&mut self, observer: &mut dyn Observer) -> bool {
        let mut moved = false;
        for entry in &self.journal.entries {
            let back = matches!(self.fates.get(&entry.id), Some(Fate::Restored { .. } | Fate::Untouched));
            let (true, Some(old)) = (back, &entry.old) else { continue };
            let found = match look(entry, true, self.machine) {
                State::Old => continue,
                State::Ours(found) | State::Foreign(found) => found,
                State::Gone(why) => {
                    self.fates.insert(entry.id, Fate::Gone { why });
                    continue;
                }
                State::Unreadable(error) => {
                    self.fates.insert(entry.id, Fate::Failed { error });
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
                self.fates.insert(entry.id, fate);
            }
            observer.step(Step::Restored);
        }
        moved
    }
}

/// Notes the weights of other devices in files whose default must be rewritten.
fn remember_other_weights(journal: &mut Journal, todo: &BTreeMap<usize, String>, machine: &Machine<'_>) {
    let mut kept = std::mem::take(&mut journal.kept);
    for entry in journal.entries.iter().filter(|e| todo.contains_key(&e.id)) {
        let (Form::DeviceWeight { dev }, Some("default")) = (&entry.target.form, entry.old.as_deref()) else {
            continue;
        };
        let weights = machine.read(&entry.target).ok().and_then(|t| text::weights(&t)).unwrap_or_default();
        for (other, weight) in weights.devices.into_iter().filter(|(d, _)| d != dev) {
            let mut target = entry.target.clone();
            target.form = Form::DeviceWeight { dev: other };
            if !kept.iter().any(|k| k.target == target) {
                kept.push(Kept { target, value: weight.to_string() });
            }
        }
    }
    journal.kept = kept;
}

/// Leaves in the journal only what is still to be put back.
fn keep_open(journal: &mut Journal, fates: &BTreeMap<usize, Fate>, machine: &Machine<'_>) {
    let open = |id: &usize| fates.get(id).is_some_and(Fate::is_open);
    let ids: BTreeSet<usize> = journal
        .entries
        .iter()
        .filter(|e| open(&e.id) || (!fates.contains_key(&e.id) && e.changed_by.as_ref().is_some_and(open)))
        .map(|e| e.id)
        .collect();
    journal.entries.retain(|e| ids.contains(&e.id));
    for entry in &mut journal.entries {
        if entry.created_by.is_some_and(|id| !ids.contains(&id)) {
            entry.created_by = None;
        }
        if entry.changed_by.is_some_and(|id| !ids.contains(&id)) {
            // Its knob is settled; from now on it stands for itself.
            entry.changed_by = None;
            entry.new = machine.read(&entry.target).ok().and_then(|t| entry.target.form.value(&t));
        }
    }
    journal.reverting = false;
    journal.rest = true;
    journal.kept.clear();
}
