//! Puts back the settings that a journal names, however far its apply came.

mod heirs;
mod inspect;
mod pass;
mod restore;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal};
use crate::machine::Machine;
use crate::observer::{Observer, Step};
use crate::outcome::{Fate, Outcome, Reverted};
use crate::state_dir::StateDir;

pub(crate) use inspect::{State, inspect};
use pass::Pass;
pub(crate) use restore::restore;

/// Treatment of a knob that another program changed since.
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

pub(crate) fn revert(
    dir: &StateDir,
    mut journal: Journal,
    on_conflict: OnConflict,
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<Reverted, ApplyError> {
    if journal.is_of_another_boot(machine)? {
        return Ok(forgotten(dir, &journal, observer));
    }
    let mut warnings = Vec::new();
    let (mut fates, mut todo) = Pass::new(&journal, machine, on_conflict).decide();

    observer.step(Step::Reverting);
    // On disk before the first write, so that a kill here is not taken for a change by another
    // program. Without room on the disk, go on: the knobs matter more.
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
            // The old journal is still there and still right: restored knobs already count as
            // untouched next time.
            warnings.push(e.to_string());
        }
    }
    Ok(Reverted { done, rebooted: false, outcomes, warnings })
}

/// After a restart of the host there is nothing to put back: the kernel has forgotten the settings,
/// the guests with it, and the journal's names (`/sys/block/sdb`, `8:16`) may now stand for other
/// devices.
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

/// Removes the journal; returns whether it is gone. An error is only a warning: settings that were
/// put back stay so without it.
fn remove_journal(dir: &StateDir, warnings: &mut Vec<String>) -> bool {
    if let Err(e) = journal::remove(dir) {
        warnings.push(format!("the journal is still there: {e}"));
        return false;
    }
    // Should the file reappear after a power failure, it is of another boot, and forgotten.
    if let Err(e) = dir.sync() {
        warnings.push(format!("the journal is removed, but that is perhaps not on disk: {e}"));
    }
    true
}

/// Leaves in the journal only the entries that are still to be put back. `moved` are knobs that an
/// error has left somewhere between two values.
fn keep_open(
    journal: &mut Journal,
    fates: &BTreeMap<usize, Fate>,
    moved: &BTreeSet<usize>,
    machine: &Machine<'_>,
) {
    let open = |id: &usize| fates.get(id).is_some_and(Fate::is_open);
    let stays =
        |e: &Entry| open(&e.id) || (!fates.contains_key(&e.id) && e.changed_by.as_ref().is_some_and(open));
    // A restored file must still be known when a knob that moves it is put back later.
    let movers: Vec<&Entry> = journal.entries.iter().filter(|e| e.may_move() && stays(e)).collect();
    let moved_later = |e: &Entry| movers.iter().any(|other| other.moves(e));
    let ids: BTreeSet<usize> =
        journal.entries.iter().filter(|e| stays(e) || moved_later(e)).map(|e| e.id).collect();
    journal.entries.retain(|e| ids.contains(&e.id));
    for entry in &mut journal.entries {
        entry.unsettled |= moved.contains(&entry.id);
        if entry.created_by.is_some_and(|id| !ids.contains(&id)) {
            entry.created_by = None;
        }
        if entry.changed_by.is_some_and(|id| !ids.contains(&id)) {
            // Its knob is settled; from now on it is an entry of its own.
            entry.changed_by = None;
            let now = machine.read(&entry.target).ok().and_then(|t| entry.target.form.value(&t));
            // The knob has changed it along, and its value now cannot be read: any value is ours.
            entry.unsettled |= now.is_none();
            entry.new = now;
        }
    }
    // A knob may be back although the kernel reported an error; files that changed along with it
    // are then still to be put back.
    journal.reverting = journal.entries.iter().any(|e| e.unsettled);
    journal.leftover = true;
}
