//! Old values: read before anything is written.

use std::fmt;
use std::io;

use rustix::io::Errno;
use serde::Serialize;

use crate::error::ApplyError;
use crate::journal::Entry;
use crate::machine::{Fault, Machine};
use crate::resolve::Write;
use crate::target::{Form, Place, Target};
use crate::units::{self, Unkept};

/// Line of a dry run; prints as `path: old -> new`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// The setting as users know it.
    pub knob: String,
    /// The file; inside a guest with the VM's name before it.
    pub path: String,
    /// Value now; `None` when the file comes into being only while applying.
    pub old: Option<String>,
    /// Value to be written.
    pub new: String,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let old = self.old.as_deref().unwrap_or("(not there yet)");
        write!(f, "{}: {old} -> {}", self.path, self.new)
    }
}

/// Lines for all writes, in order, without writing any.
///
/// # Errors
/// As capturing before a real apply: a file that is missing or not understood.
pub fn dry_run(writes: &[Write], machine: &Machine<'_>) -> Result<Vec<Line>, ApplyError> {
    let entries = capture(&units::given(writes, machine)?.writes, machine)?;
    let planned = entries.into_iter().filter_map(|e| {
        let new = e.new?;
        let shown = |v: &str| e.target.form.shown(v);
        Some(Line {
            knob: e.knob,
            path: e.target.to_string(),
            old: e.old.as_deref().map(shown),
            new: shown(&new),
        })
    });
    Ok(planned.collect())
}

/// Settings that will not last, because systemd writes its units' files anew.
///
/// # Errors
/// When it is not known whether systemd runs here.
pub fn unkept(writes: &[Write], machine: &Machine<'_>) -> Result<Vec<Unkept>, ApplyError> {
    Ok(units::given(writes, machine)?.unkept)
}

/// Reads every file that will be written or changes along. Entry `i` belongs to write `i`; side
/// effects follow. Threads that have ended are left out: they come and go by themselves.
pub(crate) fn capture(all: &[Write], machine: &Machine<'_>) -> Result<Vec<Entry>, ApplyError> {
    let (writes, values): (Vec<Write>, Vec<Option<String>>) = found(all, machine)?.into_iter().unzip();
    let mut entries = Vec::with_capacity(writes.len());
    for (id, (write, old)) in writes.iter().zip(values).enumerate() {
        entries.push(Entry {
            id,
            knob: write.knob.clone(),
            target: write.target.clone(),
            old,
            new: Some(write.value.clone()),
            also_ours: write.also_ours.clone(),
            levels: write.levels.clone(),
            created_by: write.created_by,
            changed_by: None,
            identity: identity(&write.target, write.created_by.is_some(), machine)?,
            unsettled: false,
        });
    }
    // A knob that already has its value is not written, so nothing changes along.
    let has_it: Vec<bool> = writes
        .iter()
        .zip(&entries)
        .map(|(w, e)| e.old.as_ref().is_some_and(|old| w.target.form.is(old, &w.value)))
        .collect();
    let written = |i: usize| !has_it[i];
    for (cause, write) in writes.iter().enumerate() {
        if !written(cause) {
            continue;
        }
        for target in &write.side_effects {
            // Of several writes that change a file, the last one that happens decides what becomes
            // of it.
            let later =
                (cause + 1..writes.len()).any(|i| written(i) && writes[i].side_effects.contains(target));
            if later {
                continue;
            }
            let text = match machine.read(target) {
                Ok(text) => text,
                Err(Fault::Gone(_)) => continue,
                Err(Fault::Io(e)) if is_not_readable(target, &e) => continue,
                // Neither an error of a slow guest nor any other may lose an old value for good.
                Err(fault) => return Err(unreadable(target, fault)),
            };
            entries.push(Entry {
                id: entries.len(),
                knob: format!("{} (changes with {})", target.path.display(), write.knob),
                target: target.clone(),
                old: Some(value_of(target, &text)?),
                new: None,
                also_ours: Vec::new(),
                levels: Vec::new(),
                created_by: None,
                changed_by: Some(cause),
                identity: identity(target, false, machine)?,
                unsettled: false,
            });
        }
    }
    Ok(entries)
}

/// The value in a text that was read from a knob.
pub(crate) fn value_of(target: &Target, text: &str) -> Result<String, ApplyError> {
    target
        .form
        .value(text)
        .ok_or_else(|| ApplyError::Form { label: target.to_string(), text: text.trim().to_owned() })
}

/// Each write with the value of its target; `None` where an earlier write creates the file. Threads
/// and interrupts that have ended are left out (no other write depends on them). Each target is
/// read once, because a thread may end between two reads.
fn found(all: &[Write], machine: &Machine<'_>) -> Result<Vec<(Write, Option<String>)>, ApplyError> {
    let mut kept: Vec<(Write, Option<String>)> = Vec::with_capacity(all.len());
    // Index in `kept` of each write.
    let mut places = Vec::with_capacity(all.len());
    for write in all {
        places.push(kept.len());
        let value = match machine.read(&write.target) {
            Ok(text) => Some(value_of(&write.target, &text)?),
            Err(Fault::Gone(_)) if write.target.may_end() => continue,
            Err(Fault::Gone(_)) if write.created_by.is_some() => None,
            Err(fault) => return Err(unreadable(&write.target, fault)),
        };
        let created_by = write.created_by.and_then(|by| places.get(by).copied());
        kept.push((Write { created_by, ..write.clone() }, value));
    }
    Ok(kept)
}

/// Distinguishes a cgroup from a later one of the same name; `None` for one that an earlier write
/// makes.
fn identity(target: &Target, made: bool, machine: &Machine<'_>) -> Result<Option<u64>, ApplyError> {
    match (target.in_cgroup(), target.path.parent()) {
        (true, Some(dir)) => match machine.host().identity(dir) {
            Ok(id) => Ok(Some(id)),
            Err(e) => match Fault::from_io(e) {
                Fault::Gone(_) if made => Ok(None),
                fault => Err(unreadable(target, fault)),
            },
        },
        _ => Ok(None),
    }
}

/// Whether the kernel has no value to show: `wbt_lat_usec` answers `EINVAL` while the device has no
/// writeback throttling (`queue_wb_lat_show()` in `block/blk-sysfs.c`).
fn is_not_readable(target: &Target, error: &io::Error) -> bool {
    target.place == Place::Host && error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
}

fn unreadable(target: &Target, fault: Fault) -> ApplyError {
    let hint = match (&fault, &target.form) {
        (Fault::Gone(_), Form::DeviceWeight { .. }) => {
            "; is the VM running, and BFQ loaded (`modprobe bfq`)?"
        }
        (Fault::Gone(_), _) if target.in_cgroup() => "; is the VM running?",
        (Fault::Gone(_), _) => "; is the device still there?",
        (Fault::Io(_), _) => "",
    };
    ApplyError::Capture { label: target.to_string(), source: fault.into_io(), hint: hint.to_owned() }
}
