//! The journal: what every knob was before, on disk before the first write.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::ApplyError;
use crate::state_dir::StateDir;
use crate::target::Target;

/// Version of the journal's form.
pub const JOURNAL_SCHEMA: &str = "rtvirtio.journal.v1";
/// Its name in the state directory.
pub const JOURNAL_FILE: &str = "journal.json";
/// It names devices and processes: of no use to other users.
const MODE: u32 = 0o600;

/// One knob, or one file that changes along with a knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Unique in this journal; the order of the writes.
    pub id: usize,
    /// The setting as users know it.
    pub knob: String,
    /// Its file.
    pub target: Target,
    /// Value before; `None` when the file came into being by the write `created_by`.
    pub old: Option<String>,
    /// Value that we write; `None` for a file that only changes along.
    pub new: Option<String>,
    /// Further values that are ours, because another of our writes causes them.
    pub passing: Vec<String>,
    /// The entry whose write brings this file into being.
    pub created_by: Option<usize>,
    /// The entry along with which this file changes.
    pub changed_by: Option<usize>,
    /// Inode of the cgroup's directory: a VM that was restarted has another cgroup of the same name.
    pub identity: Option<u64>,
}

/// A weight of another device in a file where we must rewrite the default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub target: Target,
    pub value: String,
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Journal {
    /// Always [`JOURNAL_SCHEMA`].
    pub schema: String,
    /// Version of the program that wrote it.
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id`: tells whether the machine was restarted since.
    pub boot_id: String,
    /// Process that applied.
    pub pid: u32,
    /// Whether all writes were done and compared. Until then a file that came into being may show the kernel's default.
    pub complete: bool,
    /// Whether putting back has begun. From then on a file that changes along may show the kernel's default.
    pub reverting: bool,
    /// Whether this is what putting back has left, because somebody else had changed it: nothing is in force any more.
    #[serde(default)]
    pub rest: bool,
    /// Weights of other devices to be written again should putting back be cut off.
    pub kept: Vec<Kept>,
    /// The knobs: writes in order, then files that change along.
    pub entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Header {
    schema: String,
}

impl Journal {
    pub fn entry(&self, id: usize) -> Option<&Entry> {
        self.entries.iter().find(|e| e.id == id)
    }
}

/// Reads the journal; `None` when there is none.
pub(crate) fn load(dir: &StateDir) -> Result<Option<Journal>, ApplyError> {
    let path = path(dir);
    let bytes = match dir.read(JOURNAL_FILE) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ApplyError::State { action: "read", path, source }),
    };
    let bad = |why: String| ApplyError::BadJournal { path: path.clone(), why };
    let header: Header = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    if header.schema != JOURNAL_SCHEMA {
        return Err(ApplyError::OtherVersion { path, found: header.schema, known: JOURNAL_SCHEMA });
    }
    let journal: Journal = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    // References to entries that do not exist would make putting back skip something silently.
    for entry in &journal.entries {
        for reference in [entry.created_by, entry.changed_by].into_iter().flatten() {
            if journal.entry(reference).is_none() {
                return Err(bad(format!("entry {} refers to entry {reference}, which is missing", entry.id)));
            }
        }
    }
    Ok(Some(journal))
}

/// Writes the journal so that after a crash either the old or the new one is there, whole. After an error too, but which of them
/// is not known.
pub(crate) fn store(dir: &StateDir, journal: &Journal) -> Result<(), ApplyError> {
    let failed = |action, source| ApplyError::State { action, path: path(dir), source };
    let mut text = serde_json::to_vec_pretty(journal).map_err(|e| failed("serialise", e.into()))?;
    text.push(b'\n');
    dir.replace(JOURNAL_FILE, MODE, &text).map_err(|e| failed("write", e))
}

/// Removes the journal, durably.
pub(crate) fn remove(dir: &StateDir) -> Result<(), ApplyError> {
    let removed = dir.remove(JOURNAL_FILE).and_then(|()| dir.sync());
    removed.map_err(|source| ApplyError::State { action: "remove", path: path(dir), source })
}

pub(crate) fn path(dir: &StateDir) -> PathBuf {
    dir.path().join(JOURNAL_FILE)
}
