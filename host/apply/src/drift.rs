//! Settings in force that another program has changed: set to our value again, or left as they are.

use std::collections::BTreeMap;

use crate::amend::Amended;
use crate::capture::Line;
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal};
use crate::machine::Machine;
use crate::outcome::Fate;
use crate::revert::{State, inspect, restore as put_back};
use crate::state_dir::StateDir;
use crate::target::{Form, Target};
use crate::units;

/// Current value of a setting in force where it is neither the written value nor a level; `None`
/// where it is one of these, gone or unreadable.
fn drifted(entry: &Entry, machine: &Machine<'_>) -> Option<String> {
    drift_in(entry, inspect(entry, true, machine))
}

/// Current value as by [`drifted`], in a state that is known.
fn drift_in(entry: &Entry, state: State) -> Option<String> {
    let new = entry.new.as_ref()?;
    let found = match state {
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
        let shown = text.trim_end();
        if let Err(fault) = machine.write(&entry.target, &text) {
            out.failed.push((entry.knob.clone(), fault.into_io().to_string()));
            continue;
        }
        let written = |now: &str| Line {
            knob: entry.knob.clone(),
            path: entry.target.to_string(),
            old: Some(found.clone()),
            new: now.to_owned(),
        };
        let now = match inspect(entry, true, machine) {
            State::Gone(why) | State::Unreadable(why) => {
                let why = format!("`{shown}` was written, and what it shows is not known: {why}");
                out.failed.push((entry.knob.clone(), why));
                continue;
            }
            state => drift_in(entry, state),
        };
        match now {
            None => out.written.push(written(new)),
            // The kernel gives a thread those of the CPUs that are online. An invalid partition is
            // none.
            Some(now)
                if now != found
                    && entry.target.form != Form::Partition
                    && entry.target.form.is_left_of(&now, new) =>
            {
                out.written.push(written(&now));
            }
            Some(now) => {
                out.failed.push((entry.knob.clone(), format!("`{shown}` was written but it shows `{now}`")));
            }
        }
    }
    Ok(out)
}

/// Puts units' properties back, so that systemd does not write our values over those of another
/// program later. What systemd writes because of it gets its value again.
fn withdraw(properties: &[&Entry], journal: &Journal, machine: &Machine<'_>) -> Result<(), ApplyError> {
    let value = |target: &Target| target.form.value(&machine.read(target).ok()?);
    // The controller stays: other settings may need it, and putting back asks for that.
    let is_along = |e: &&Entry| {
        properties.iter().any(|p| e.changed_by == Some(p.id)) && e.target.form != Form::IoEnabled
    };
    let before: Vec<_> = journal.entries.iter().filter(is_along).map(|e| (e, value(&e.target))).collect();
    let mut done = Ok(());
    for property in properties {
        if let Some(old) = &property.old {
            done = done.and(put_back_as(&property.target, old, machine));
        }
    }
    for (entry, before) in before {
        let Some(before) = before else { continue };
        // A value that systemd writes in either case is its own, and another program's is not.
        let is_systemds = value(&entry.target).as_ref() == Some(&before);
        let wanted = if is_systemds { entry.old.as_ref() } else { Some(&before) };
        if let Some(wanted) = wanted {
            done = done.and(put_back_as(&entry.target, wanted, machine));
        }
    }
    done
}

fn put_back_as(target: &Target, value: &str, machine: &Machine<'_>) -> Result<(), ApplyError> {
    let why = match put_back(target, value, machine) {
        Err(Fate::Failed { error }) => error,
        Err(Fate::Conflict { found }) => found,
        _ => return Ok(()),
    };
    Err(ApplyError::NotLeft { label: target.to_string(), value: value.to_owned(), why })
}

/// Entries of the properties that give files with these ids to systemd: those with our value, and
/// those with another one.
fn properties_of(
    journal: &Journal,
    found: &BTreeMap<usize, String>,
    machine: &Machine<'_>,
) -> Result<(Vec<usize>, Vec<usize>), ApplyError> {
    let gives_one =
        |p: &&Entry| journal.entries.iter().any(|e| found.contains_key(&e.id) && units::gives(p, e));
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for property in journal.entries.iter().filter(gives_one) {
        match inspect(property, true, machine) {
            State::Ours(_) => ours.push(property.id),
            State::Unreadable(why) => {
                let (label, value) = (property.target.to_string(), property.old.clone());
                return Err(ApplyError::NotLeft { label, value: value.unwrap_or_default(), why });
            }
            State::Old | State::Foreign(_) | State::Gone(_) => others.push(property.id),
        }
    }
    Ok((ours, others))
}

/// Leaves what another program has changed to it: the entries are dropped, with the properties that
/// give these files to systemd. A kill in between leaves the entries, with the other program's
/// values as those to be put back.
pub(crate) fn release(
    dir: &StateDir,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Vec<String>, ApplyError> {
    let mut journal = journal::load_whole(dir, machine)?;
    let is_chosen = |e: &&Entry| chosen(&e.knob, &e.target.to_string());
    let found: BTreeMap<usize, String> =
        journal.entries.iter().filter(is_chosen).filter_map(|e| Some((e.id, drifted(e, machine)?))).collect();
    let (ours, others) = properties_of(&journal, &found, machine)?;
    if !ours.is_empty() {
        for entry in &mut journal.entries {
            if let Some(found) = found.get(&entry.id) {
                entry.old = Some(found.clone());
            }
        }
        journal::store(dir, &journal)?;
        let properties: Vec<&Entry> = journal.entries.iter().filter(|e| ours.contains(&e.id)).collect();
        let mut done = withdraw(&properties, &journal, machine);
        // All of them after all properties: each of these makes systemd write the unit's files.
        for entry in &journal.entries {
            if let Some(found) = found.get(&entry.id) {
                done = done.and(put_back_as(&entry.target, found, machine));
            }
        }
        done?;
    }
    let is_given_up =
        |e: &&Entry| found.contains_key(&e.id) || ours.contains(&e.id) || others.contains(&e.id);
    let left: Vec<(usize, String)> =
        journal.entries.iter().filter(is_given_up).map(|e| (e.id, e.knob.clone())).collect();
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
