//! File with a VM's measured curves.

use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::curve::{Point, Run, points};
use crate::{Backend, Order};

/// Schema of the file: name and version.
pub const CPU_PROFILE_SCHEMA: &str = "rtvirtio.cpu-profile.v1";

/// Subject and method of a measurement. Two profiles with the same setup can be joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// Name of the measured VM.
    pub vm: String,
    /// Kernel release of the host.
    pub kernel: String,
    /// Model name of its CPUs.
    pub cpu_model: String,
    /// Number of CPUs online.
    pub cpus: u32,
    /// Number of vCPUs of the VM.
    pub vcpus: usize,
    /// Mechanism that enforced the contracts.
    pub backend: Backend,
    /// Order of the VM's threads.
    pub order: Order,
    /// Period of the contracts, in microseconds.
    pub period_us: u64,
    /// Length of each measurement, in seconds.
    pub seconds: f64,
    /// Source of the load: a URL, or a command.
    pub load: String,
    /// The neighbour and its load, where one took part.
    pub neighbour: Option<Neighbour>,
    /// The VM's budgets, in percent of the period.
    pub budgets: Vec<u64>,
    /// Number of rounds of measurements.
    pub repeat: usize,
}

/// Loaded VM that ran alongside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    pub vm: String,
    /// Source of its load: a URL, or a command.
    pub load: String,
    /// Budgets of this VM, in percent of the period.
    pub budgets: Vec<u64>,
}

/// Content of a profile file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuProfile {
    /// Equal to [`CPU_PROFILE_SCHEMA`] in a profile that was loaded.
    pub schema: String,
    /// Version of the program that wrote it.
    pub version: String,
    /// Time at which the measurement began.
    pub generated: String,
    /// Subject and method of the measurement.
    pub setup: Setup,
    /// Requests a second without any contract, before all else.
    pub free_requests_per_s: f64,
    /// All measurements, in the order in which they were made.
    pub runs: Vec<Run>,
}

/// Error of loading a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is no profile of this version, or holds impossible values.
    #[error("{path} is no CPU profile: {why}; measure again with `rtvirtio profile cpu`")]
    Form {
        path: PathBuf,
        /// Reason why it was refused.
        why: String,
    },
}

/// Profile with the points that follow from its runs, for readers of the file.
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
    /// [`ProfileError`] when it cannot be read, is of another version or holds impossible values.
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

    /// Checks values of a file from elsewhere that later code relies on.
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

    /// JSON of the profile, with its points.
    ///
    /// # Errors
    /// None that a profile can cause.
    pub fn to_json(&self) -> serde_json::Result<serde_json::Value> {
        serde_json::to_value(Shown { profile: self, points: self.points() })
    }

    /// Points of all curves, those measured alone first, each by rising budget.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        points(&self.runs)
    }

    /// Period of the contracts.
    #[must_use]
    pub fn period(&self) -> Nanos {
        Nanos(self.setup.period_us * 1000)
    }
}
