//! The journal: what every knob was before, on disk before the first write.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::ApplyError;
use crate::target::Target;

/// Version of the journal's form.
pub const JOURNAL_SCHEMA: &str = "rtvirtio.journal.v1";
/// Its name in the state directory.
pub const JOURNAL_FILE: &str = "journal.json";
const TEMP_FILE: &str = "journal.json.new";

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
pub(crate) fn load(dir: &Path) -> Result<Option<Journal>, ApplyError> {
    let path = dir.join(JOURNAL_FILE);
    let bytes = match fs::read(&path) {
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

/// Writes the journal so that after a crash either the old or the new one is there, whole.
pub(crate) fn store(dir: &Path, journal: &Journal) -> Result<(), ApplyError> {
    let temp = dir.join(TEMP_FILE);
    let path = dir.join(JOURNAL_FILE);
    let mut text = serde_json::to_vec_pretty(journal).map_err(|e| ApplyError::State {
        action: "serialise",
        path: path.clone(),
        source: e.into(),
    })?;
    text.push(b'\n');
    let written =
        write_synced(&temp, &text).and_then(|()| fs::rename(&temp, &path)).and_then(|()| sync_dir(dir));
    written.map_err(|source| {
        // The old journal, if any, is untouched; a partial new one is of no use, and may fill the disk.
        let _ = fs::remove_file(&temp);
        ApplyError::State { action: "write", path, source }
    })
}

/// Removes the journal, durably.
pub(crate) fn remove(dir: &Path) -> Result<(), ApplyError> {
    let path = dir.join(JOURNAL_FILE);
    fs::remove_file(&path).and_then(|()| sync_dir(dir)).map_err(|source| ApplyError::State {
        action: "remove",
        path,
        source,
    })
}

pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join(JOURNAL_FILE)
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
