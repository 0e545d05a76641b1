//! A VM's measured curves, as a file.

use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::curve::{Point, Run, points};
use crate::{Backend, Order};

/// Version of the file's form.
pub const CPU_PROFILE_SCHEMA: &str = "rtvirtio.cpu-profile.v1";

/// What was measured, and how. Two profiles with the same setup can be joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The VM's name.
    pub vm: String,
    /// Kernel release of the host.
    pub kernel: String,
    /// Model of its CPUs.
    pub cpu_model: String,
    /// CPUs online.
    pub cpus: u32,
    /// vCPUs of the VM.
    pub vcpus: usize,
    /// What held the contracts.
    pub backend: Backend,
    /// Order of the VM's threads.
    pub order: Order,
    /// Period of the contracts, in microseconds.
    pub period_us: u64,
    /// Length of each measurement, in seconds.
    pub seconds: f64,
    /// What made the load: a URL, or a command.
    pub load: String,
    /// The neighbour and its load, where one took part.
    pub neighbour: Option<Neighbour>,
    /// The VM's budgets, in percent of the period.
    pub budgets: Vec<u64>,
    /// Rounds.
    pub repeat: usize,
}

/// The loaded VM alongside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    /// Its name.
    pub vm: String,
    /// What made its load.
    pub load: String,
    /// Its budgets, in percent of the period.
    pub budgets: Vec<u64>,
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    /// [`CPU_PROFILE_SCHEMA`].
    pub schema: String,
    /// Version of the program that wrote it.
    pub version: String,
    /// When it was begun.
    pub generated: String,
    /// How it was measured.
    pub setup: Setup,
    /// Requests a second without any contract, before all else.
    pub free_requests_per_s: f64,
    /// Every measurement, in its order.
    pub runs: Vec<Run>,
}

/// A profile that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is no profile of this version.
    #[error("{path} is no CPU profile: {why}; measure again with `rtvirtio profile cpu`")]
    Form {
        /// Which file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
}

/// With what follows from the runs, for readers of the file.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    profile: &'a CpuProfile,
    points: Vec<Point>,
}

impl CpuProfile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ProfileError`] when it cannot be read, is of another version or says the impossible.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let text = rtvirtio_kernel::trusted::read_config_text(path, CONFIG_LIMIT)
            .map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        let bad = |why: String| ProfileError::Form { path: path.to_owned(), why };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        match value.get("schema").and_then(|s| s.as_str()) {
            Some(CPU_PROFILE_SCHEMA) => {}
            Some(other) => {
                return Err(bad(format!(
                    "its schema is {other:?}, this program knows {CPU_PROFILE_SCHEMA:?}"
                )));
            }
            None => return Err(bad("it has no schema".to_owned())),
        }
        let profile: Self = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        profile.check().map_err(bad)?;
        Ok(profile)
    }

    /// A file from elsewhere may say anything; what is used below must be true of it.
    fn check(&self) -> Result<(), String> {
        if !(1000..=1_000_000).contains(&self.setup.period_us) {
            return Err(format!("its period is {} us", self.setup.period_us));
        }
        let good = |v: f64| v.is_finite() && v >= 0.0;
        let wrong = self
            .runs
            .iter()
            .position(|r| !good(r.requests_per_s) || !good(r.cpu) || !(1..=100).contains(&r.budget_percent));
        match wrong {
            Some(i) => Err(format!("run {i} is impossible")),
            None => Ok(()),
        }
    }

    /// As JSON, with the points.
    ///
    /// # Errors
    /// None that a profile can cause.
    pub fn to_json(&self) -> serde_json::Result<serde_json::Value> {
        serde_json::to_value(Shown { profile: self, points: self.points() })
    }

    /// All curves, alone first, each by rising budget.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        points(&self.runs)
    }

    /// The period of the contracts.
    #[must_use]
    pub fn period(&self) -> Nanos {
        Nanos(self.setup.period_us * 1000)
    }
}
