//! A library of device profiles: one for each kind of device, measured on several hosts.
//!
//! Hosts measure [`Share`]s, [`merge()`] makes one [`Entry`] of those of one kind or says why they
//! do not belong together, and [`confirm()`] compares a few points of a device with an entry. A
//! kind is a drive's model, firmware and size with the kernel and the number of CPUs; nothing in a
//! share or an entry tells one drive or host from another.

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

/// Version of an entry's form.
pub const LIBRARY_SCHEMA: &str = "rtvirtio.device-library.v1";
/// Version of a share's form.
pub const SHARE_SCHEMA: &str = "rtvirtio.profile-share.v1";
/// Largest file that is read, in bytes: a share with a hundred runs has less than 1 MiB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What is known of a kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Always [`LIBRARY_SCHEMA`].
    pub schema: String,
    /// The kind.
    pub kind: DeviceKind,
    /// Shares that it was made of.
    pub shares: usize,
    /// Their runs.
    pub runs: usize,
    /// Medians of throughput and median latency over the shares; of every tail the longest.
    pub profile: Profile,
    /// When it was made.
    pub generated: String,
}

/// Why shares are not merged, or a library is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// A file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file that is something else, or of another version.
    #[error("{}: {reason}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Nothing to merge.
    #[error("no share is given: `rtvirtio profile DEVICE --sweep TIME --shard I/N -o FILE` makes them")]
    Nothing,
    /// A share without the measurement of its device.
    #[error(
        "{} has no measurement of its device: measure it again with `rtvirtio profile DEVICE --sweep TIME --shard I/N -o FILE`",
        path.display()
    )]
    NoMeasurement {
        /// The file.
        path: PathBuf,
    },
    /// The device has no model.
    #[error(
        "the kernel knows no model of {device}, so nothing tells its kind: name it with --kind, the same on every host"
    )]
    NoModel {
        /// The device.
        device: String,
    },
    /// Two kinds of devices.
    #[error(
        "{} is of another kind than {}: {what}; merge each kind by itself",
        path.display(),
        first.display()
    )]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// The one that it is compared with.
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
        /// The file.
        path: PathBuf,
        /// The one that it is compared with.
        first: PathBuf,
        /// What differs.
        what: String,
    },
    /// One share twice.
    #[error(
        "{} and {} are both shard {shard}: give one of them, or split the sweep again",
        path.display(),
        first.display()
    )]
    SameShard {
        /// The file.
        path: PathBuf,
        /// The other one.
        first: PathBuf,
        /// Its number.
        shard: Shard,
    },
    /// Devices of one kind that do not behave alike.
    #[error(
        "{} contradicts {others}: {what}. Nothing is merged: one device is worn, throttled or used by something else; look at that host, and measure it again or leave its file out",
        path.display()
    )]
    Contradiction {
        /// The file that is farthest from the others.
        path: PathBuf,
        /// The others, in words.
        others: String,
        /// Where, with numbers.
        what: String,
    },
    /// The library has the kind.
    #[error(
        "{} is there already, of {shares} shares: give its shares again with the new ones and --replace",
        path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
        /// Shares behind it.
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
    /// The library in a directory, which need not be there yet.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The file of a kind.
    #[must_use]
    pub fn entry_file(&self, kind: &DeviceKind) -> PathBuf {
        self.dir.join(format!("{}.json", kind.key()))
    }

    /// The file of the model that was learned of a kind.
    #[must_use]
    pub fn model_file(&self, kind: &DeviceKind) -> PathBuf {
        self.dir.join(format!("{}.model.json", kind.key()))
    }

    /// What is known of a kind; `None` when nothing is.
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

/// A JSON file of a schema; `None` when it is not there.
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
