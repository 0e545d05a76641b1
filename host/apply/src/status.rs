//! State of the plan in force.

use std::path::Path;

use serde::Serialize;

use crate::error::ApplyError;
use crate::journal;
use crate::machine::Machine;
use crate::revert::{State, inspect};
use crate::state_dir::StateDir;

/// Journal compared with the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Process that applied the plan.
    pub pid: u32,
    /// Version of rtvirtio that applied it.
    pub version: String,
    /// Whether applying came to its end; when not, `revert` puts back the part that happened.
    pub complete: bool,
    /// Whether putting back was begun and cut off, or failed on the way.
    pub reverting: bool,
    /// Whether it was put back except for these knobs, so that nothing is in force any more.
    pub leftover: bool,
    /// Whether the machine was restarted since.
    pub rebooted: bool,
    /// The knobs in the order of the writes.
    pub knobs: Vec<KnobStatus>,
}

impl Status {
    /// Whether all of it was applied, in this run of the kernel, and nothing of it put back since.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.complete && !self.reverting && !self.leftover && !self.rebooted
    }
}

/// Knob of the plan, compared with the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KnobStatus {
    /// The setting as users know it.
    pub knob: String,
    /// Path of its file; inside a guest with the VM's name before it.
    pub path: String,
    /// Value before the plan; `None` when the file did not exist.
    pub old: Option<String>,
    /// Value that the plan sets.
    pub new: String,
    /// Comparison of its current value with the plan's and the old one.
    #[serde(flatten)]
    pub state: KnobState,
}

/// Current value of a knob, by comparison with the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum KnobState {
    /// The plan's value, or one of its levels.
    InForce,
    /// The old value, from before the plan.
    Original,
    /// Neither the plan's value nor the old one.
    Changed {
        /// Value that it has now.
        found: String,
    },
    /// The device, cgroup, guest or file is gone.
    Gone {
        /// Object that is gone, and the error.
        why: String,
    },
    /// The value cannot be read.
    Unknown {
        /// Error of the read.
        error: String,
    },
}

/// Reads the journal and every knob of it; `None` when no plan is in force. Needs no lock.
///
/// # Errors
/// When the journal cannot be read as one: [`ApplyError::BadJournal`] has what can be read of it.
/// When the boot id cannot be read.
pub fn status(dir: &Path, machine: &Machine<'_>) -> Result<Option<Status>, ApplyError> {
    let Some(dir) = StateDir::find(dir)? else { return Ok(None) };
    let Some(journal) = journal::load(&dir)? else { return Ok(None) };
    let rebooted = journal.is_of_another_boot(machine)?;
    let knobs = journal
        .entries
        .iter()
        .filter_map(|entry| {
            let new = entry.new.clone()?;
            let in_force = |found: &str| entry.target.form.is(found, &new) || entry.is_level(found);
            let state = match inspect(entry, true, machine) {
                // A knob that had the plan's value already counts as in force.
                State::Old if entry.old.as_deref().is_some_and(in_force) => KnobState::InForce,
                State::Old => KnobState::Original,
                State::Ours(found) if in_force(&found) => KnobState::InForce,
                State::Ours(found) | State::Foreign(found) => KnobState::Changed { found },
                State::Gone(why) => KnobState::Gone { why },
                State::Unreadable(error) => KnobState::Unknown { error },
            };
            Some(KnobStatus {
                knob: entry.knob.clone(),
                path: entry.target.to_string(),
                old: entry.old.clone(),
                new,
                state,
            })
        })
        .collect();
    Ok(Some(Status {
        pid: journal.pid,
        version: journal.version,
        complete: journal.complete,
        reverting: journal.reverting,
        leftover: journal.leftover,
        rebooted,
        knobs,
    }))
}
