//! Journal, write, read back, compare; undo on failure.

use std::collections::BTreeMap;

use rtvirtio_kernel::leftovers;
use serde::Serialize;

use crate::asleep::when_it_has_run;
use crate::capture::{Line, capture, value_of};
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal};
use crate::machine::{Fault, Machine};
use crate::observer::{Observer, Step};
use crate::resolve::Write;
use crate::revert::{OnConflict, revert};
use crate::state_dir::StateDir;
use crate::target::Form;
use crate::units;

/// Result of a successful apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Applied {
    /// Each knob with its value before and after, in the order of the writes.
    pub knobs: Vec<Line>,
    /// Number of knobs that had the value already and were not written.
    pub unchanged: usize,
    /// Interrupts that were left as they are, and are in no journal.
    pub left: Vec<Left>,
}

/// Interrupt that was left as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The setting as users know it.
    pub knob: String,
    /// Error of the write, or the value that another program has set meanwhile.
    pub error: String,
    /// Cause of the error.
    pub cause: LeftCause,
}

/// Cause for which an interrupt was left as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeftCause {
    /// The kernel lets no program set it.
    Fixed,
    /// The kernel refuses this value, for the reason in the error.
    Refused,
    /// Value that another program has just set.
    Raced,
}

pub(crate) fn apply(
    dir: &StateDir,
    writes: &[Write],
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<Applied, ApplyError> {
    if journal::load(dir)?.is_some() {
        return Err(ApplyError::InForce { path: journal::path(dir) });
    }
    let writes = &units::given(writes, machine)?.writes;
    let entries = capture(writes, machine)?;
    observer.step(Step::Captured);
    let mut journal = Journal {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: journal::boot_id(machine)?,
        pid: std::process::id(),
        entries,
        ..Journal::default()
    };
    if let Err(e) = journal::store(dir, &journal) {
        // Nothing was touched, so a journal that is there all the same has nothing to put back and
        // does no harm.
        let _ = journal::remove(dir);
        return Err(e);
    }
    observer.step(Step::Journaled);
    let mut left = BTreeMap::new();
    match write_all(dir, &mut journal, &mut left, machine, observer) {
        Ok(unchanged) => {
            observer.step(Step::Completed);
            let line = |e: &Entry| {
                let shown = |v: &str| e.target.form.shown(v);
                Some(Line {
                    knob: e.knob.clone(),
                    path: e.target.to_string(),
                    old: e.old.as_deref().map(shown),
                    new: shown(e.new.as_deref()?),
                })
            };
            let knobs = journal.entries.iter().filter_map(line).collect();
            Ok(Applied { knobs, unchanged, left: left.into_values().collect() })
        }
        Err(cause) => {
            // Interrupts that were left have another program's value, or the old one.
            journal.entries.retain(|e| !left.contains_key(&e.id));
            // A value that another program set before our write is now the old value to put back.
            if let ApplyError::Raced { entry, found, .. } = &cause {
                journal.entries.retain(|e| e.changed_by != Some(*entry));
                for raced in journal.entries.iter_mut().filter(|e| e.id == *entry) {
                    raced.old = Some(found.clone());
                }
            }
            let cause = Box::new(cause);
            Err(match revert(dir, journal, OnConflict::Report, machine, observer) {
                Ok(rollback) => ApplyError::RolledBack { cause, rollback },
                Err(rollback) => ApplyError::RollbackFailed { cause, rollback: Box::new(rollback) },
            })
        }
    }
}

/// Returns how many knobs had their value already. Those that were left as they are go to `left`,
/// by the number of their entry.
fn write_all(
    dir: &StateDir,
    journal: &mut Journal,
    left: &mut BTreeMap<usize, Left>,
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<usize, ApplyError> {
    let planned: Vec<&Entry> = journal.entries.iter().filter(|e| e.new.is_some()).collect();
    let of = planned.len();
    let mut unchanged = 0;
    for (index, entry) in planned.iter().enumerate() {
        if observer.stop() {
            return Err(ApplyError::Interrupted);
        }
        match when_it_has_run(entry, machine, observer, || write_one(entry, machine)) {
            Ok(written) => unchanged += usize::from(written.is_none()),
            Err(e) => left.extend(leave(entry, e, machine)?.map(|of| (entry.id, of))),
        }
        if matches!(entry.target.form, Form::Group { .. }) {
            // For the search for leftovers, should the journal be lost. A cgroup that takes no
            // extended attribute is not found by it.
            let _ = leftovers::mark(machine.root(), &entry.target.path, &journal::path(dir));
        }
        observer.step(Step::Wrote { index: index + 1, of });
    }
    // Compare all once more: a later write may have changed an earlier knob.
    for entry in planned.iter().filter(|entry| !entry.target.is_interrupt()) {
        compare(entry, machine)?;
    }
    journal.entries.retain(|entry| !left.contains_key(&entry.id));
    journal.complete = true;
    journal::store_done(dir, journal)?;
    Ok(unchanged)
}

/// An interrupt that the kernel does not move, or that irqbalance moves at this moment, hinders
/// nothing. `None` for one that has our value all the same, which is to be put back.
fn leave(entry: &Entry, error: ApplyError, machine: &Machine<'_>) -> Result<Option<Left>, ApplyError> {
    if !entry.target.is_interrupt() {
        return Err(error);
    }
    let (cause, text) = match &error {
        ApplyError::Refused { source, .. } if entry.target.is_fixed(source) => {
            (LeftCause::Fixed, source.to_string())
        }
        ApplyError::Refused { source, .. } => (LeftCause::Refused, source.to_string()),
        ApplyError::Raced { .. } => (LeftCause::Raced, error.to_string()),
        ApplyError::ReadBack { .. } => {
            let (form, now) = (&entry.target.form, read_value(entry, machine)?);
            let is_ours = |now: &String| {
                entry.new.as_ref().is_some_and(|new| form.is(now, new) || form.is_left_of(now, new))
            };
            if now.as_ref().is_none_or(is_ours) {
                return Ok(None);
            }
            (LeftCause::Raced, error.to_string())
        }
        _ => return Err(error),
    };
    Ok(Some(Left { knob: entry.knob.clone(), error: text, cause }))
}

/// Returns the value before, where anything had to be written.
pub(crate) fn write_one(entry: &Entry, machine: &Machine<'_>) -> Result<Option<String>, ApplyError> {
    let Some(new) = &entry.new else { return Ok(None) };
    let Some(found) = read_value(entry, machine)? else { return Ok(None) };
    if let Some(was) = &entry.old {
        if found != *was && !entry.is_ours(&found) {
            return Err(ApplyError::Raced {
                entry: entry.id,
                label: entry.target.to_string(),
                was: was.clone(),
                found,
            });
        }
    }
    if entry.target.form.is(&found, new) {
        return Ok(None);
    }
    let text = entry.target.form.text(new);
    match machine.write(&entry.target, &text) {
        Ok(()) => {}
        Err(Fault::Gone(_)) if entry.target.may_end() => return Ok(None),
        Err(fault) => {
            let label = entry.target.to_string();
            let value = text.trim_end().to_owned();
            return Err(ApplyError::Refused { label, value, source: fault.into_io() });
        }
    }
    compare(entry, machine)?;
    Ok(Some(found))
}

fn compare(entry: &Entry, machine: &Machine<'_>) -> Result<(), ApplyError> {
    let Some(new) = &entry.new else { return Ok(()) };
    let Some(found) = read_value(entry, machine)? else { return Ok(()) };
    if entry.target.form.is(&found, new) {
        return Ok(());
    }
    Err(ApplyError::ReadBack { label: entry.target.to_string(), wanted: new.clone(), found })
}

/// Current value; `None` for a thread or an interrupt that has ended, which is no error: nothing is
/// left to set.
fn read_value(entry: &Entry, machine: &Machine<'_>) -> Result<Option<String>, ApplyError> {
    match machine.read(&entry.target) {
        Ok(text) => value_of(&entry.target, &text).map(Some),
        Err(Fault::Gone(_)) if entry.target.may_end() => Ok(None),
        Err(fault) => Err(ApplyError::Capture {
            label: entry.target.to_string(),
            source: fault.into_io(),
            hint: String::new(),
        }),
    }
}
