//! One host's part of a sweep that several hosts share.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use rtvirtio_model::Profile;
use serde::{Deserialize, Serialize};

use super::{DeviceKind, LibraryError, SHARE_SCHEMA, read_if_there};
use crate::dataset::Point;
use crate::train::FEWEST;

/// Limit of shards of a sweep: each has at least one of the conditions that a model needs.
pub const MOST_SHARDS: u32 = FEWEST as u32;

/// A part of a sweep, written `I/N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Shard {
    /// Number of the part, from 1.
    index: u32,
    of: u32,
}

impl Shard {
    /// Part `index`, from 1, of `of` parts.
    ///
    /// # Errors
    /// A number is out of range, in words.
    pub fn new(index: u32, of: u32) -> Result<Self, String> {
        if !(1..=MOST_SHARDS).contains(&of) {
            return Err(format!("a sweep has 1 to {MOST_SHARDS} parts, not {of}"));
        }
        if !(1..=of).contains(&index) {
            return Err(format!("{index} is none of 1 to {of}"));
        }
        Ok(Self { index, of })
    }

    /// Part of this task of a Slurm job array (`SLURM_ARRAY_TASK_*`, sbatch(1)), for any range of
    /// array indices.
    ///
    /// # Errors
    /// A variable is missing or invalid, in words.
    pub fn of_slurm(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str| -> Result<Option<u32>, String> {
            let Some(text) = variable(name) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| format!("{name} is {text:?}, which is no number"))
        };
        let needed = |name: &str| {
            number(name)?.ok_or_else(|| {
                format!("{name} is not set: start it as a job array, as by sbatch --array=1-8")
            })
        };
        let (id, count) = (needed("SLURM_ARRAY_TASK_ID")?, needed("SLURM_ARRAY_TASK_COUNT")?);
        let first = number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(1);
        let step = number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
        let uneven = || {
            format!("SLURM_ARRAY_TASK_ID {id} is not one of {count} even steps: give the array as FIRST-LAST")
        };
        let index = id.checked_sub(first).filter(|d| d % step == 0).ok_or_else(uneven)? / step + 1;
        if index > count {
            return Err(uneven());
        }
        Self::new(index, count)
    }

    /// Total number of parts.
    #[must_use]
    pub fn total(self) -> u32 {
        self.of
    }

    /// Number of this part, from 1.
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }

    /// Whether condition `i` of a design, from 0, belongs to this part.
    #[must_use]
    pub fn has(self, i: usize) -> bool {
        i % self.of as usize == self.index as usize - 1
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |t: &str| t.trim().parse().map_err(|_| format!("{text:?} is not I/N, such as 3/8"));
        let (index, of) = text.split_once('/').ok_or_else(|| format!("{text:?} is not I/N, such as 3/8"))?;
        Self::new(number(index)?, number(of)?)
    }
}

impl TryFrom<String> for Shard {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Shard> for String {
    fn from(shard: Shard) -> Self {
        shard.to_string()
    }
}

/// Profile and runs of one host, without the drive's serial number and the host's name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// Always [`SHARE_SCHEMA`], for readers of the file.
    pub schema: String,
    pub kind: DeviceKind,
    /// Part of the sweep with these runs.
    pub shard: Shard,
    /// Profile measured on the device.
    pub profile: Profile,
    /// Runs of this part.
    pub runs: Vec<Point>,
}

impl Share {
    /// From measurements; names and numbers of the device become those of its kind.
    #[must_use]
    pub fn new(kind: DeviceKind, shard: Shard, profile: &Profile, runs: &[Point]) -> Self {
        let key = kind.key();
        let runs = runs.iter().map(|p| Point { device: key.clone(), ..p.clone() }).collect();
        let profile = Profile { device: key, identity: None, guest: None, ..profile.clone() };
        Self { schema: SHARE_SCHEMA.to_owned(), kind, shard, profile, runs }
    }

    /// Reads a share from a JSON file.
    ///
    /// # Errors
    /// [`LibraryError::Io`], [`LibraryError::Form`].
    pub fn load(path: &Path) -> Result<Self, LibraryError> {
        let bad = |reason: String| LibraryError::Form { path: path.to_owned(), reason };
        let share: Self = read_if_there(path, SHARE_SCHEMA)?.ok_or_else(|| LibraryError::Io {
            path: path.to_owned(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        share.profile.check().map_err(bad)?;
        for run in &share.runs {
            run.check().map_err(|e| bad(format!("run {}: {e}", run.id)))?;
        }
        Ok(share)
    }
}
