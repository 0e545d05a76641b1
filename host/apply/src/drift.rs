//! Settings in force that another program has changed: set to our value again, or left as they are.

use crate::amend::Amended;
use crate::capture::Line;
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal};
use crate::machine::Machine;
use crate::outcome::Fate;
use crate::revert::{State, inspect, restore as put_back};
use crate::state_dir::StateDir;
use crate::target::Target;
use crate::units;

/// Current value of a setting in force where it is neither the written value nor a level; `None`
/// where it is one of these, gone or unreadable.
fn drifted(entry: &Entry, machine: &Machine<'_>) -> Option<String> {
    let new = entry.new.as_ref()?;
    let found = match inspect(entry, true, machine) {
        State::Old => match (&entry.old, entry.target.form.unset()) {
            (Some(old), _) => old.clone(),
            (None, unset) => unset?.to_owned(),
        },
        State::Ours(found) | State::Foreign(found) => found,
        State::Gone(_) | State::Unreadable(_) => return None,
    };
    (!entry.target.form.is(&found, new) && !entry.is_level(&found)).then_some(found)
}

/// The journal need not change: it has the value from before us, and a kill leaves either the other
/// program's value or ours.
pub(crate) fn restore(
    dir: &StateDir,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Amended, ApplyError> {
    let journal = journal::load_whole(dir, machine)?;
    let mut out = Amended::default();
    for entry in journal.entries.iter().filter(|e| chosen(&e.knob, &e.target.to_string())) {
        let (Some(new), Some(found)) = (&entry.new, drifted(entry, machine)) else { continue };
        let text = entry.target.form.text(new);
        if let Err(fault) = machine.write(&entry.target, &text) {
            out.failed.push((entry.knob.clone(), fault.into_io().to_string()));
            continue;
        }
        match drifted(entry, machine) {
            None => out.written.push(Line {
                knob: entry.knob.clone(),
                path: entry.target.to_string(),
                old: Some(found),
                new: new.clone(),
            }),
            Some(now) => {
                out.failed.push((entry.knob.clone(), format!("`{text}` was written but it shows `{now}`")))
            }
        }
    }
    Ok(out)
}

/// Puts a unit's property back, unless another program has changed it too, so that systemd does not
/// write our value over that of the other program later. What systemd writes because of it gets its
/// value again: `file`, which was `found` there, and what changes along.
fn withdraw(
    property: &Entry,
    file: &Entry,
    found: &str,
    journal: &Journal,
    machine: &Machine<'_>,
) -> Result<(), ApplyError> {
    if !matches!(inspect(property, true, machine), State::Ours(_)) {
        return Ok(());
    }
    let Some(old) = &property.old else { return Ok(()) };
    let value = |target: &Target| target.form.value(&machine.read(target).ok()?);
    let along = journal.entries.iter().filter(|e| e.changed_by == Some(property.id));
    let before: Vec<_> = along.map(|e| (e, value(&e.target))).collect();
    put_back_as(&property.target, old, machine)?;
    for (entry, before) in before {
        // A value that systemd writes in either case is its own, and another program's is not.
        let is_systemds = before == value(&entry.target);
        let wanted = if is_systemds { entry.old.as_ref() } else { before.as_ref() };
        if let Some(wanted) = wanted {
            put_back_as(&entry.target, wanted, machine)?;
        }
    }
    put_back_as(&file.target, found, machine)
}

fn put_back_as(target: &Target, value: &str, machine: &Machine<'_>) -> Result<(), ApplyError> {
    let why = match put_back(target, value, machine) {
        Err(Fate::Failed { error }) => error,
        Err(Fate::Conflict { found }) => found,
        _ => return Ok(()),
    };
    Err(ApplyError::NotLeft { label: target.to_string(), value: value.to_owned(), why })
}

/// Leaves what another program has changed to it: the entries are dropped, with the properties that
/// give these files to systemd. A kill in between leaves the entries.
pub(crate) fn release(
    dir: &StateDir,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Vec<String>, ApplyError> {
    let mut journal = journal::load_whole(dir, machine)?;
    let mut left: Vec<(usize, String)> = Vec::new();
    for entry in journal.entries.iter().filter(|e| chosen(&e.knob, &e.target.to_string())) {
        let Some(found) = drifted(entry, machine) else { continue };
        for property in journal.entries.iter().filter(|e| units::gives(e, entry)) {
            if !left.iter().any(|(id, _)| *id == property.id) {
                withdraw(property, entry, &found, &journal, machine)?;
                left.push((property.id, property.knob.clone()));
            }
        }
        left.push((entry.id, entry.knob.clone()));
    }
    if left.is_empty() {
        return Ok(Vec::new());
    }
    let is_left = |id: &usize| left.iter().any(|(other, _)| other == id);
    journal.entries.retain(|e| !is_left(&e.id));
    for entry in &mut journal.entries {
        // A file that changed along with a setting that is left becomes an entry of its own.
        entry.created_by = entry.created_by.filter(|id| !is_left(id));
        entry.changed_by = entry.changed_by.filter(|id| !is_left(id));
    }
    journal::store(dir, &journal)?;
    Ok(left.into_iter().map(|(_, knob)| knob).collect())
}
