//! State of the plan in force.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rtvirtio_kernel::flock;
use serde::Serialize;

use crate::error::ApplyError;
use crate::journal::{self, Entry, JOURNAL_FILE};
use crate::lock::{self, LOCK_FILE};
use crate::machine::Machine;
use crate::revert::{State, inspect};
use crate::state_dir::{FileVersion, StateDir};

/// Further looks at settings that differ, while another rtvirtio changes the journal.
const LOOKS: u32 = 10;
/// Pause before each of these.
const PAUSE: Duration = Duration::from_millis(20);

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
    Changed { found: String },
    /// The device, cgroup, guest or file is gone.
    Gone {
        /// Object that is gone, and the error.
        why: String,
    },
    /// The value cannot be read.
    Unknown { error: String },
}

impl KnobState {
    fn differs(&self) -> bool {
        matches!(self, Self::Original | Self::Changed { .. })
    }
}

/// Reads the journal and every knob of it; `None` when no plan is in force. Takes no lock: a knob
/// that differs may be one that another rtvirtio has journaled and not written yet. Such a knob is
/// compared again with the journal read anew, for 0.2 s at most while the lock is held.
///
/// # Errors
/// When the journal cannot be read as one: [`ApplyError::BadJournal`] has what can be read of it.
/// When the boot id cannot be read.
pub fn status(dir: &Path, machine: &Machine<'_>) -> Result<Option<Status>, ApplyError> {
    let Some(dir) = StateDir::find(dir)? else { return Ok(None) };
    let Some(mut status) = compare(&dir, &[], machine)? else { return Ok(None) };
    for _ in 0..LOOKS {
        if !status.knobs.iter().any(|knob| knob.state.differs()) {
            break;
        }
        let version = version_at_rest(&dir);
        if version.is_none() {
            thread::sleep(PAUSE);
        }
        let Some(again) = compare(&dir, &status.knobs, machine)? else { return Ok(None) };
        status = again;
        if version.is_some() && version == version_at_rest(&dir) {
            break;
        }
    }
    Ok(Some(status))
}

/// Version of the journal; `None` where another rtvirtio may be changing it.
fn version_at_rest(dir: &StateDir) -> Option<FileVersion> {
    let is_free = match dir.exists(LOCK_FILE) {
        Ok(true) => matches!(flock::is_held(&lock::open(dir).ok()?), Ok(false)),
        exists => matches!(exists, Ok(false)),
    };
    dir.version(JOURNAL_FILE).ok().filter(|_| is_free)
}

/// Compares the journal with the machine, except for knobs of the same value that did not differ
/// `before`.
fn compare(
    dir: &StateDir,
    before: &[KnobStatus],
    machine: &Machine<'_>,
) -> Result<Option<Status>, ApplyError> {
    let Some(journal) = journal::load(dir)? else { return Ok(None) };
    let rebooted = journal.is_of_another_boot(machine)?;
    let settled = before.iter().filter(|knob| !knob.state.differs());
    let settled: BTreeMap<_, _> =
        settled.map(|k| ((k.knob.clone(), k.path.clone(), k.new.clone()), &k.state)).collect();
    let of = |entry: &Entry| {
        let key = (entry.knob.clone(), entry.target.to_string(), entry.new.clone()?);
        let state =
            settled.get(&key).map_or_else(|| state_of(entry, &key.2, machine), |state| (*state).clone());
        let (knob, path, new) = key;
        Some(KnobStatus { knob, path, old: entry.old.clone(), new, state })
    };
    let knobs = journal.entries.iter().filter_map(of).collect();
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

fn state_of(entry: &Entry, new: &str, machine: &Machine<'_>) -> KnobState {
    let in_force = |found: &str| entry.target.form.is(found, new) || entry.is_level(found);
    match inspect(entry, true, machine) {
        // A knob that had the plan's value already counts as in force.
        State::Old if entry.old.as_deref().is_some_and(in_force) => KnobState::InForce,
        State::Old => KnobState::Original,
        State::Ours(found) if in_force(&found) => KnobState::InForce,
        State::Ours(found) | State::Foreign(found) => KnobState::Changed { found },
        State::Gone(why) => KnobState::Gone { why },
        State::Unreadable(error) => KnobState::Unknown { error },
    }
}
