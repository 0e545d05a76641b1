//! Settings in force that another program has changed: set to our value again, or left as they are.

use crate::amend::Amended;
use crate::capture::Line;
use crate::error::ApplyError;
use crate::journal::{self, Entry};
use crate::machine::Machine;
use crate::revert::{State, inspect};
use crate::state_dir::StateDir;

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

pub(crate) fn release(
    dir: &StateDir,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Vec<String>, ApplyError> {
    let mut journal = journal::load_whole(dir, machine)?;
    let left: Vec<(usize, String)> = journal
        .entries
        .iter()
        .filter(|e| chosen(&e.knob, &e.target.to_string()) && drifted(e, machine).is_some())
        .map(|e| (e.id, e.knob.clone()))
        .collect();
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
