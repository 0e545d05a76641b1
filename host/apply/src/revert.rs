//! Putting back what a journal names, whichever part of it happened.

mod look;
mod pass;
mod restore;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::apply::rebooted;
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal};
use crate::machine::Machine;
use crate::session::{Observer, Step};
use crate::state_dir::StateDir;

pub(crate) use look::{State, look};
use pass::Pass;

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

pub(crate) fn revert(
    dir: &StateDir,
    mut journal: Journal,
    on_conflict: OnConflict,
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<Reverted, ApplyError> {
    if rebooted(&journal, machine)? {
        return Ok(forgotten(dir, &journal, observer));
    }
    let mut warnings = Vec::new();
    let (mut fates, mut todo) = Pass::new(&journal, machine, on_conflict).decide();

    observer.step(Step::Reverting);
    // On disk before the first write, so that a cut here is told from a change by someone else. Without room for it, go on: the
    // knobs matter more.
    weights::remember(&mut journal, &mut todo, &mut fates, machine);
    journal.reverting = true;
    if let Err(e) = journal::store(dir, &journal) {
        warnings.push(format!("not protected against being killed: {e}"));
    }

    let mut pass = Pass::new(&journal, machine, on_conflict);
    let (fates, moved) = pass.carry_out((fates, todo), observer);
    let other_weights = weights::rewrite(&mut journal, machine);

    let mut outcomes: Vec<_> = journal
        .entries
        .iter()
        .filter_map(|e| {
            let fate = fates.get(&e.id)?.clone();
            Some(Outcome { knob: e.knob.clone(), path: e.target.to_string(), old: e.old.clone(), fate })
        })
        .collect();
    outcomes.extend(other_weights);
    let mut done = !outcomes.iter().any(|o| o.fate.is_open());
    if done {
        observer.step(Step::AllBack);
        done = remove_journal(dir, &mut warnings);
    } else {
        keep_open(&mut journal, &fates, &moved, machine);
        if let Err(e) = journal::store(dir, &journal) {
            // The old journal is still there and still right: what is back already counts as untouched next time.
            warnings.push(e.to_string());
        }
    }
    Ok(Reverted { done, rebooted: false, outcomes, warnings })
}

/// After a restart of the host there is nothing to put back: the kernel has forgotten the settings, the guests with it, and the
/// journal's names (`/sys/block/sdb`, `8:16`) may now stand for other devices.
fn forgotten(dir: &StateDir, journal: &Journal, observer: &mut dyn Observer) -> Reverted {
    let why = "the host was restarted since: its kernel has forgotten this setting".to_owned();
    let outcomes = journal.entries.iter().map(|e| Outcome {
        knob: e.knob.clone(),
        path: e.target.to_string(),
        old: e.old.clone(),
        fate: Fate::Gone { why: why.clone() },
    });
    let outcomes = outcomes.collect();
    observer.step(Step::AllBack);
    let mut warnings = Vec::new();
    let done = remove_journal(dir, &mut warnings);
    Reverted { done, rebooted: true, outcomes, warnings }
}

/// Removes the journal; whether it is gone. That what was put back stays so does not depend on it,
/// so an error is a warning.
fn remove_journal(dir: &StateDir, warnings: &mut Vec<String>) -> bool {
    if let Err(e) = journal::remove(dir) {
        warnings.push(format!("the journal is still there: {e}"));
        return false;
    }
    // Should it come back after a power failure, the host was restarted, and it is forgotten then.
    if let Err(e) = dir.sync() {
        warnings.push(format!("the journal is removed, but that is perhaps not on disk: {e}"));
    }
    true
}

/// Leaves in the journal only what is still to be put back. `moved` are knobs that an error has
/// left somewhere between two values.
fn keep_open(
    journal: &mut Journal,
    fates: &BTreeMap<usize, Fate>,
    moved: &BTreeSet<usize>,
    machine: &Machine<'_>,
) {
    let open = |id: &usize| fates.get(id).is_some_and(Fate::is_open);
    let stays =
        |e: &Entry| open(&e.id) || (!fates.contains_key(&e.id) && e.changed_by.as_ref().is_some_and(open));
    // What is back must still be known when a knob that moves it is put back later.
    let moved_later = |e: &Entry| journal.entries.iter().any(|other| stays(other) && other.moves(e));
    let ids: BTreeSet<usize> =
        journal.entries.iter().filter(|e| stays(e) || moved_later(e)).map(|e| e.id).collect();
    journal.entries.retain(|e| ids.contains(&e.id));
    for entry in &mut journal.entries {
        entry.unsettled |= moved.contains(&entry.id);
        if entry.created_by.is_some_and(|id| !ids.contains(&id)) {
            entry.created_by = None;
        }
        if entry.changed_by.is_some_and(|id| !ids.contains(&id)) {
            // Its knob is settled; from now on it stands for itself.
            entry.changed_by = None;
            let now = machine.read(&entry.target).ok().and_then(|t| entry.target.form.value(&t));
            // The knob has changed it along, and what it is now cannot be read: any value is ours.
            entry.unsettled |= now.is_none();
            entry.new = now;
        }
    }
    // A knob may be back although the kernel reported an error; what changed along with it is then
    // still to be put back.
    journal.reverting = journal.entries.iter().any(|e| e.unsettled);
    journal.rest = true;
}
