//! The journal: what every knob was before, on disk before the first write.
//!
//! The first line is `{"schema":"rtvirtio.journal.v2","sha256":"..."}`, the rest is the journal as
//! JSON. The digest covers the schema and every byte of the rest, and the first line must be byte
//! for byte the one that is computed from them, so nothing in the file can change without being
//! noticed: not a letter of a path, not the boot id, not the header. SHA-256 rather than a CRC,
//! because damage need not be a single bit: a block of another file, or of an older journal, must
//! not pass with a chance of 2^-32 either. It protects from damage, not from a program that may
//! write to the file.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_planner::BfqTunable;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::ApplyError;
use crate::machine::{Fault, Machine};
use crate::readable::{Readable, escaped};
use crate::state_dir::{FileVersion, StateDir};
use crate::target::{Place, Target};

/// Version of the journal's form.
pub const JOURNAL_SCHEMA: &str = "rtvirtio.journal.v2";
/// File name in the state directory.
pub const JOURNAL_FILE: &str = "journal.json";
/// Readable by root alone: the journal names devices and processes.
const MODE: u32 = 0o600;

/// Journal entry of a knob, or of a file that changes along with a knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Unique in this journal; the order of the writes.
    pub id: usize,
    /// The setting as users know it.
    pub knob: String,
    /// File or thread of the setting.
    pub target: Target,
    /// Value before; `None` when the file came into being by the write `created_by`.
    pub old: Option<String>,
    /// Value that we write; `None` for a file that only changes along.
    pub new: Option<String>,
    /// Further values that are ours, because another of our writes causes them.
    #[serde(alias = "passing")]
    pub also_ours: Vec<String>,
    /// Values among which a program moves the setting while it is in force.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<String>,
    /// The entry whose write brings this file into being.
    pub created_by: Option<usize>,
    /// The entry along with which this file changes.
    pub changed_by: Option<usize>,
    /// Inode of the cgroup's directory: a VM that was restarted has another cgroup of the same
    /// name.
    pub identity: Option<u64>,
    /// Whether a restore failed after writing began, so that any value found may be ours.
    pub unsettled: bool,
}

impl Entry {
    /// Whether a value that is not the written one is ours all the same.
    pub fn is_ours(&self, found: &str) -> bool {
        self.also_ours.iter().any(|ours| ours == found) || self.is_level(found)
    }

    /// Whether the value is one that we set in place of another one.
    pub fn has_set(&self, value: &str) -> bool {
        let set = self.new.iter().chain(&self.also_ours);
        self.old.as_deref() != Some(value) && set.into_iter().any(|ours| ours == value)
    }

    /// Whether the value is one of `levels`.
    pub fn is_level(&self, found: &str) -> bool {
        self.levels.iter().any(|level| self.target.form.is(found, level))
    }

    /// Whether writing this file changes the other one: setting `strict_guarantees` raises
    /// `slice_idle` (`bfq_strict_guarantees_store()`).
    pub fn moves(&self, other: &Self) -> bool {
        let of_one_elevator = self.target.place == other.target.place
            && self.target.path.parent() == other.target.path.parent();
        self.may_move() && of_one_elevator && ["slice_idle", "slice_idle_us"].contains(&&*other.file())
    }

    /// Whether writing this file may change another one.
    pub fn may_move(&self) -> bool {
        self.file() == BfqTunable::StrictGuarantees.file_name()
    }

    fn file(&self) -> Cow<'_, str> {
        self.target.path.file_name().unwrap_or_default().to_string_lossy()
    }
}

/// Weight of another device in a file whose default must be rewritten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OtherWeight {
    pub target: Target,
    pub value: String,
    /// Inode of the cgroup's directory, as in [`Entry`].
    pub identity: Option<u64>,
}

/// Everything after the first line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Journal {
    /// Version of the program that wrote it.
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id`: shows whether the machine was restarted since.
    pub boot_id: String,
    /// Process that applied the plan.
    pub pid: u32,
    /// Whether all writes were done and compared. Until then a file that came into being may show
    /// the kernel's default.
    pub complete: bool,
    /// Whether putting back has begun. From then on a file that changes along may show the kernel's
    /// default.
    pub reverting: bool,
    /// Whether these are the entries that a revert left because of conflicts or errors: nothing is
    /// in force any more.
    #[serde(alias = "rest")]
    pub leftover: bool,
    /// Weights of other devices that must be written again should a revert be cut off.
    pub kept: Vec<OtherWeight>,
    /// The knobs: writes in order, then files that change along.
    pub entries: Vec<Entry>,
}

impl Journal {
    /// Whether the machine was restarted since the journal was written. Where most threads of the
    /// journal still run, by number and start time, it was not, whatever the boot id says: a
    /// container may hide it, and a restored checkpoint has another.
    pub fn is_of_another_boot(&self, machine: &Machine<'_>) -> Result<bool, ApplyError> {
        if boot_id(machine)? == self.boot_id {
            return Ok(false);
        }
        let threads = self.entries.iter().filter_map(|e| match e.target.place {
            Place::Thread { pid, tid, start } => Some(((pid, tid, start), &e.target)),
            _ => None,
        });
        let threads: BTreeMap<_, _> = threads.collect();
        let mut alive = 0;
        for target in threads.values() {
            match machine.read(target) {
                Ok(_) => alive += 1,
                Err(Fault::Gone(_)) => {}
                Err(Fault::Io(source)) => {
                    let hint = "; it shows whether the host was restarted since".to_owned();
                    return Err(ApplyError::Capture { label: target.to_string(), source, hint });
                }
            }
        }
        Ok(alive * 2 <= threads.len())
    }
}

/// The file that identifies this run of the kernel.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Identifies this run of the kernel. Every Linux has it; without it the names in a journal could
/// be those of other devices by now.
pub(crate) fn boot_id(machine: &Machine<'_>) -> Result<String, ApplyError> {
    let text = machine.host().read(Path::new(BOOT_ID)).map_err(|source| ApplyError::Capture {
        label: BOOT_ID.to_owned(),
        source,
        hint: "; it shows whether the host was restarted since: is /proc mounted?".to_owned(),
    })?;
    match text.trim() {
        "" => Err(ApplyError::Form { label: BOOT_ID.to_owned(), text }),
        id => Ok(id.to_owned()),
    }
}

/// Start of the schema of any version.
const SCHEMA_FAMILY: &str = "rtvirtio.journal.v";

/// Part of the first line that journals of all versions have.
#[derive(Deserialize)]
struct Header {
    schema: String,
}

/// Reason why bytes are not a journal of this version.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    /// Bytes were changed or lost.
    Damaged(String),
    /// The schema is that of another version.
    Other(String),
}

impl Journal {
    pub fn entry(&self, id: usize) -> Option<&Entry> {
        self.entries.iter().find(|e| e.id == id)
    }

    /// The bytes of the file.
    fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut body = serde_json::to_vec_pretty(self)?;
        body.push(b'\n');
        let mut bytes = header(&body).into_bytes();
        bytes.append(&mut body);
        Ok(bytes)
    }

    fn decode(bytes: &[u8]) -> Result<Self, Unusable> {
        let end = bytes.iter().position(|b| *b == b'\n').map_or(bytes.len(), |newline| newline + 1);
        let (first, body) = bytes.split_at(end);
        let expected = header(body);
        if first != expected.as_bytes() {
            return Err(unusable(bytes, first, &expected));
        }
        let journal: Self =
            serde_json::from_slice(body).map_err(|e| Unusable::Damaged(escaped(&e.to_string())))?;
        // References to entries that do not exist would make putting back skip something silently.
        let ids: BTreeSet<usize> = journal.entries.iter().map(|entry| entry.id).collect();
        for entry in &journal.entries {
            for reference in [entry.created_by, entry.changed_by].into_iter().flatten() {
                if !ids.contains(&reference) {
                    let why = format!("entry {} refers to entry {reference}, which is missing", entry.id);
                    return Err(Unusable::Damaged(why));
                }
            }
        }
        Ok(journal)
    }
}

/// The only first line that goes with a body.
fn header(body: &[u8]) -> String {
    let digest = Sha256::new().chain_update(JOURNAL_SCHEMA).chain_update(b"\n").chain_update(body).finalize();
    let mut line = format!("{{\"schema\":\"{JOURNAL_SCHEMA}\",\"sha256\":\"");
    for byte in digest {
        // Writing to a String cannot fail.
        let _ = write!(line, "{byte:02x}");
    }
    line.push_str("\"}\n");
    line
}

/// Separates another version from damage, which may have hit the version itself.
fn unusable(bytes: &[u8], first: &[u8], expected: &str) -> Unusable {
    let found = serde_json::Deserializer::from_slice(bytes).into_iter::<Header>().next();
    let Some(Ok(Header { schema })) = found else {
        return Unusable::Damaged("its first line is not a journal's".to_owned());
    };
    let digest_fits =
        expected.split_once(JOURNAL_SCHEMA).is_some_and(|(_, tail)| first.ends_with(tail.as_bytes()));
    if schema.starts_with(SCHEMA_FAMILY) && schema != JOURNAL_SCHEMA && !digest_fits {
        return Unusable::Other(escaped(&schema));
    }
    Unusable::Damaged("its checksum does not fit: a part of it was changed or lost".to_owned())
}

/// Reads a journal to which can be added: one that is whole, and of this run of the kernel.
///
/// # Errors
/// [`ApplyError::NothingInForce`], [`ApplyError::NotWhole`], or when it cannot be read.
pub(crate) fn load_whole(dir: &StateDir, machine: &Machine<'_>) -> Result<Journal, ApplyError> {
    let journal = load(dir)?.ok_or(ApplyError::NothingInForce)?;
    if journal.reverting || journal.leftover || !journal.complete || journal.is_of_another_boot(machine)? {
        return Err(ApplyError::NotWhole { path: path(dir) });
    }
    Ok(journal)
}

/// A journal that this process keeps in memory between two additions to it, because that of a VM
/// with thousands of threads takes long to read. Empty at first. Where the file has changed since,
/// and after 10 s, it is read again: then entries of threads that have ended are dropped.
#[derive(Debug, Default)]
pub struct KnownJournal(Option<Known>);

#[derive(Debug)]
struct Known {
    version: FileVersion,
    journal: Journal,
    read: Instant,
}

/// Age at which a journal in memory is read again.
const READ_AGAIN: Duration = Duration::from_secs(10);

impl KnownJournal {
    /// Takes out a journal to which can be added, and the time at which it was read from the file;
    /// `None` where that is just now.
    pub(crate) fn take(
        &mut self,
        dir: &StateDir,
        machine: &Machine<'_>,
    ) -> Result<(Journal, Option<Instant>), ApplyError> {
        if let Some(Known { version, journal, read }) = self.0.take() {
            let is_same = dir.version(JOURNAL_FILE).is_ok_and(|now| now == version);
            if is_same && read.elapsed() < READ_AGAIN && !journal.is_of_another_boot(machine)? {
                return Ok((journal, Some(read)));
            }
        }
        Ok((load_whole(dir, machine)?, None))
    }

    /// Keeps a journal that is just what the file has, and was read at this time.
    pub(crate) fn keep(&mut self, dir: &StateDir, journal: Journal, read: Option<Instant>) {
        let read = read.unwrap_or_else(Instant::now);
        self.0 = dir.version(JOURNAL_FILE).ok().map(|version| Known { version, journal, read });
    }

    /// Makes it older than it is.
    #[cfg(test)]
    pub(crate) fn age(&mut self) {
        let known = self.0.as_mut().expect("a journal in memory");
        known.read = known.read.checked_sub(READ_AGAIN).expect("a clock that runs for 10 s");
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
    match Journal::decode(&bytes) {
        Ok(journal) => Ok(Some(journal)),
        Err(Unusable::Other(found)) => Err(ApplyError::OtherVersion { path, found, known: JOURNAL_SCHEMA }),
        Err(Unusable::Damaged(why)) => {
            Err(ApplyError::BadJournal { path, why, readable: Readable::parse(&bytes) })
        }
    }
}

/// Writes the journal so that after a crash either the old or the new one is there, whole. After an
/// error too, but which of them is not known.
pub(crate) fn store(dir: &StateDir, journal: &Journal) -> Result<(), ApplyError> {
    dir.replace(JOURNAL_FILE, MODE, &bytes(dir, journal)?).map_err(|e| not_written(dir, e))
}

/// Stores a journal that only records finished writes: after a crash of the host the one before may
/// be there again. That one leads back too, and the settings have ended with the host's run.
pub(crate) fn store_done(dir: &StateDir, journal: &Journal) -> Result<(), ApplyError> {
    dir.replace_unordered(JOURNAL_FILE, MODE, &bytes(dir, journal)?).map_err(|e| not_written(dir, e))
}

fn bytes(dir: &StateDir, journal: &Journal) -> Result<Vec<u8>, ApplyError> {
    let failed = |e: serde_json::Error| {
        let (action, path, source) = ("serialise", path(dir), e.into());
        ApplyError::State { action, path, source }
    };
    journal.encode().map_err(failed)
}

fn not_written(dir: &StateDir, source: io::Error) -> ApplyError {
    ApplyError::State { action: "write", path: path(dir), source }
}

pub(crate) fn remove(dir: &StateDir) -> Result<(), ApplyError> {
    dir.remove(JOURNAL_FILE).map_err(|source| ApplyError::State { action: "remove", path: path(dir), source })
}

pub(crate) fn path(dir: &StateDir) -> PathBuf {
    dir.path().join(JOURNAL_FILE)
}

#[cfg(test)]
mod tests;
