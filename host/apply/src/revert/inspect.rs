//! State of one knob compared with the journal.

use crate::journal::Entry;
use crate::machine::{Fault, Machine};

/// Current value of a knob, compared with the journal.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// The old value (or absent, as before).
    Old,
    /// A value of ours: written by the plan, or caused in the kernel by one of its writes.
    Ours(String),
    /// Any value that is neither.
    Foreign(String),
    /// The device, cgroup, guest or file is gone.
    Gone(String),
    /// Reading it failed, with the error.
    Unreadable(String),
}

impl State {
    fn from_fault(fault: Fault, what: &str) -> Self {
        match fault {
            Fault::Gone(e) => Self::Gone(format!("{what}: {e}")),
            Fault::Io(e) => Self::Unreadable(format!("{what}: {e}")),
        }
    }
}

/// Reads one knob. Only what the kernel reports as gone counts as gone: after any other error
/// our value may still be in force.
pub(crate) fn inspect(entry: &Entry, complete: bool, machine: &Machine<'_>) -> State {
    if let (Some(identity), Some(dir)) = (entry.identity, entry.target.path.parent()) {
        match machine.host().identity(dir) {
            Ok(now) if now == identity => {}
            Ok(_) => return State::Gone(format!("{} was removed and made again", dir.display())),
            Err(e) => return State::from_fault(Fault::from_io(e), &dir.display().to_string()),
        }
    }
    if let Some(dev) = entry.target.dev() {
        if let Err(e) = machine.host().identity(format!("/sys/dev/block/{dev}").as_ref()) {
            return State::from_fault(Fault::from_io(e), &format!("device {dev}"));
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
    // A missing line of a cgroup's file equals a line that sets nothing.
    if entry.old.as_deref().or(form.unset()).is_some_and(|old| entry.target.is_old(&found, old)) {
        return State::Old;
    }
    let ours = entry.new.as_ref().is_some_and(|new| form.is(&found, new))
        || entry.is_ours(&found)
        || entry.unsettled
        // Killed between the write that created the file and our own: the kernel's default.
        || (entry.old.is_none() && !complete);
    match &entry.old {
        _ if ours => State::Ours(found),
        Some(old) if form.is_left_of(&found, old) => State::Old,
        _ => State::Foreign(found),
    }
}
