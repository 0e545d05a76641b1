//! A library of device profiles: one for each kind of device, measured on several hosts.
//!
//! Hosts measure [`Share`]s, [`merge()`] makes one [`Entry`] of those of one kind or reports why
//! they cannot be merged, and [`confirm()`] compares a few points of a device with an entry. A kind
//! is a drive's model, firmware and size with the kernel and the number of CPUs; a share or an
//! entry does not identify a drive or a host.

mod confirm;
mod kind;
mod merge;
mod share;

use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_model::Profile;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use confirm::{Confirmation, Deviation, confirm};
pub use kind::DeviceKind;
pub use merge::{Merged, merge};
pub use share::{MOST_SHARDS, Shard, Share};

/// Version of the JSON of an entry.
pub const LIBRARY_SCHEMA: &str = "rtvirtio.device-library.v1";
/// Version of the JSON of a share.
pub const SHARE_SCHEMA: &str = "rtvirtio.profile-share.v1";
/// Largest file that is read, in bytes: a share with a hundred runs has less than 1 MiB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Merged measurements of a kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Always [`LIBRARY_SCHEMA`], for readers of the file.
    pub schema: String,
    pub kind: DeviceKind,
    /// Number of merged shares.
    pub shares: usize,
    /// Number of runs in the merged shares.
    pub runs: usize,
    /// Medians of throughput and median latency over the shares; of every tail the longest.
    pub profile: Profile,
    /// Time of the merge, as text.
    pub generated: String,
}

/// Errors of merging shares and of using a library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file that is something else, or of another version.
    #[error("{}: {reason}", path.display())]
    Form {
        path: PathBuf,
        /// Parse error, or the unexpected value.
        reason: String,
    },
    /// No share is given to merge.
    #[error("no share is given: `rtvirtio profile DEVICE --sweep TIME --shard I/N -o FILE` makes them")]
    Nothing,
    /// A share without the measurement of its device.
    #[error(
        "{} has no measurement of its device: measure it again with `rtvirtio profile DEVICE --sweep TIME --shard I/N -o FILE`",
        path.display()
    )]
    NoMeasurement {
        /// Path of the share.
        path: PathBuf,
    },
    /// The device has no model, and no name for its kind is given.
    #[error(
        "the kernel knows no model of {device}, so its kind is not known: name it with --kind, the same on every host"
    )]
    NoModel { device: String },
    /// Two kinds of devices.
    #[error(
        "{} is of another kind than {}: {what}; merge each kind by itself",
        path.display(),
        first.display()
    )]
    OtherKind {
        /// Path of the share.
        path: PathBuf,
        /// Path of the share that it is compared with.
        first: PathBuf,
        /// The fact that differs.
        what: String,
    },
    /// Two kinds of measurements.
    #[error(
        "{} and {} were not measured in the same way: {what}; measure both with the same options",
        path.display(),
        first.display()
    )]
    OtherMeasurement {
        /// Path of the share.
        path: PathBuf,
        /// Path of the share that it is compared with.
        first: PathBuf,
        /// Difference of block sizes or depths, in words.
        what: String,
    },
    /// Two shares are of the same shard.
    #[error(
        "{} and {} are both shard {shard}: give one of them, or split the sweep again",
        path.display(),
        first.display()
    )]
    SameShard {
        /// Path of the share.
        path: PathBuf,
        /// Path of the earlier share.
        first: PathBuf,
        /// Number of the shard in both.
        shard: Shard,
    },
    /// Devices of one kind differ too much.
    #[error(
        "{} contradicts {others}: {what}. Nothing is merged: one device is worn, throttled or used by something else; look at that host, and measure it again or leave its file out",
        path.display()
    )]
    Contradiction {
        /// Path of the share that is farthest from the others.
        path: PathBuf,
        /// Other shares, in words.
        others: String,
        /// Series, depth and numbers that differ.
        what: String,
    },
    /// The library has an entry of the kind.
    #[error(
        "{} is there already, of {shares} shares: give its shares again with the new ones and --replace",
        path.display()
    )]
    Exists {
        /// Path of the entry.
        path: PathBuf,
        /// Number of shares merged in it.
        shares: usize,
    },
}

impl From<LibraryError> for rtvirtio_workflow::Error {
    fn from(e: LibraryError) -> Self {
        use rtvirtio_workflow::Kind;
        let kind = match &e {
            LibraryError::Io { .. } => Kind::System,
            LibraryError::Form { .. } => Kind::File,
            LibraryError::Contradiction { .. } => Kind::NotMeasured,
            _ => Kind::Argument,
        };
        Self::from_source(kind, e)
    }
}

/// A directory with an entry for each kind of device.
#[derive(Clone, Debug)]
pub struct Library {
    dir: PathBuf,
}

impl Library {
    /// Library in a directory, which need not exist yet.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    #[must_use]
    pub fn entry_file(&self, kind: &DeviceKind) -> PathBuf {
        self.dir.join(format!("{}.json", kind.key()))
    }

    /// Path of the model learned for a kind.
    #[must_use]
    pub fn model_file(&self, kind: &DeviceKind) -> PathBuf {
        self.dir.join(format!("{}.model.json", kind.key()))
    }

    /// Entry of a kind; `None` when there is none.
    ///
    /// # Errors
    /// [`LibraryError::Io`], and [`LibraryError::Form`] for a file that is no entry of this kind.
    pub fn find(&self, kind: &DeviceKind) -> Result<Option<Entry>, LibraryError> {
        let path = self.entry_file(kind);
        let Some(entry) = read_if_there::<Entry>(&path, LIBRARY_SCHEMA)? else { return Ok(None) };
        let bad = |reason: String| LibraryError::Form { path: path.clone(), reason };
        entry.profile.check().map_err(bad)?;
        match entry.kind.differs(kind) {
            None => Ok(Some(entry)),
            Some(what) => Err(bad(format!("it is of another kind than its name says: {what}"))),
        }
    }

    /// Refuses to write over an entry.
    ///
    /// # Errors
    /// [`LibraryError::Exists`], and those of [`Library::find`].
    pub fn refuse_existing(&self, kind: &DeviceKind) -> Result<(), LibraryError> {
        match self.find(kind)? {
            None => Ok(()),
            Some(entry) => Err(LibraryError::Exists { path: self.entry_file(kind), shares: entry.shares }),
        }
    }
}

/// Reads a JSON file of a schema; `None` when it does not exist.
fn read_if_there<T: DeserializeOwned>(path: &Path, schema: &str) -> Result<Option<T>, LibraryError> {
    let io = |source| LibraryError::Io { path: path.to_owned(), source };
    let bad = |reason: String| LibraryError::Form { path: path.to_owned(), reason };
    let length = match std::fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    if length > MAX_FILE_BYTES {
        return Err(bad(format!("it is larger than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    let bytes = rtvirtio_kernel::trusted::read_config(path, MAX_FILE_BYTES).map_err(io)?;
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| bad(format!("it is not JSON: {e}")))?;
    // The version first: a file of another version would only say that some field is unknown.
    match value.get("schema").and_then(|s| s.as_str()) {
        Some(found) if found == schema => {}
        Some(other) => return Err(bad(format!("its schema is {other:?}, not {schema:?}"))),
        None => return Err(bad("it has no schema".to_owned())),
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|e| bad(e.to_string()))
}

#[cfg(test)]
mod tests;
