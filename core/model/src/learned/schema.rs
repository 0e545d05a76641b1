//! The file of a learned model: its fields and their checks.

use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::Forest;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::estimate::{check_bound, check_forest};
use super::features::NAMES;
use super::guests::GuestModel;
use super::non_idling::NonIdlingModel;
use crate::fingerprint;
use crate::types::Profile;

/// Version of the model file's format, and of the slice model whose errors it has learned.
pub const HOST_MODEL_SCHEMA: &str = "rtvirtio.model.v8";

/// Largest model file in bytes. One learned from 2500 tasks has about 4 MiB.
pub const MAX_MODEL_BYTES: usize = 64 << 20;

/// A learned model of one device on one host. Its file may hold more: the models of the RT-VirtIO
/// paper, which `rtvirtio-bench` alone reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostModel {
    /// Format version, always [`HOST_MODEL_SCHEMA`].
    pub schema: String,
    /// The device and host as measured before the runs. Forecasts rest on this profile, not on a
    /// later one: the formulas' errors were learned with its numbers.
    pub profile: Profile,
    /// Names of the features in order.
    pub features: Vec<String>,
    /// Length of the training runs, s: the prediction is the tail of such a run.
    pub seconds: f64,
    /// Number of training runs.
    pub points: usize,
    /// Number of tasks in these runs.
    pub rows: usize,
    /// Time of the fit, as text.
    pub generated: String,
    /// ln(latency in s) of the measured tasks, each with the share of its declared rate that was
    /// lost.
    pub forest: Forest,
    /// Level of the forest's quantile that the bound starts from, 0 to 1.
    pub high: f64,
    /// Calibrated score `ln(latency) - high quantile`: of all runs, or of those in which BFQ idles
    /// where [`HostModel::non_idling`] covers the others.
    pub bound: Quantile,
    /// Separate forest for runs in which BFQ does not idle; `None` when there were too few, or when
    /// one forest for all is sharper.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "flowing")]
    pub non_idling: Option<NonIdlingModel>,
    /// Addition to the bound for it to hold, at its confidence, for tails as measured: tails are
    /// learned without the host's own stalls, because no setting of ours changes them. `None` where
    /// the runs could not separate them; the tails then include them.
    pub host_stalls: Option<Nanos>,
    /// Separate forest for QEMU guests; `None` when all runs were of process VMs: guests are then
    /// predicted like processes, with a doubled bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guests: Option<GuestModel>,
}

/// Errors of reading a model file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// Not JSON of the known format.
    #[error("not a model of form {HOST_MODEL_SCHEMA}: {0}; make it again with `rtvirtio profile --sweep`")]
    Form(String),
    /// Right format, wrong content.
    #[error("the model is damaged: {0}; make it again with `rtvirtio profile --sweep`")]
    Damaged(String),
    /// Fitted on another device or host.
    #[error("the model is of {theirs}, this is {ours}; make one here with `rtvirtio profile --sweep`")]
    Elsewhere {
        /// Device and host of the fit.
        theirs: String,
        /// Device and host of the given profile.
        ours: String,
    },
}

impl HostModel {
    /// Reads and checks a model file's text.
    ///
    /// [`ModelFileError`] for another format, for more than [`MAX_MODEL_BYTES`] and for impossible
    /// numbers.
    pub fn from_json(text: &str) -> Result<Self, ModelFileError> {
        if text.len() > MAX_MODEL_BYTES {
            return Err(ModelFileError::Form(format!("it is larger than {} MiB", MAX_MODEL_BYTES >> 20)));
        }
        let model: Self = serde_json::from_str(text).map_err(|e| ModelFileError::Form(e.to_string()))?;
        model.check()?;
        Ok(model)
    }

    /// Checks a model as read from a file.
    pub fn check(&self) -> Result<(), ModelFileError> {
        let damaged = |what: String| Err(ModelFileError::Damaged(what));
        if self.schema != HOST_MODEL_SCHEMA {
            return Err(ModelFileError::Form(format!("it has form {}", self.schema)));
        }
        if self.features != NAMES {
            return damaged("it has other features than this rtvirtio".to_owned());
        }
        // From a millisecond to 30 years.
        if !(1e-3..=1e9).contains(&self.seconds) {
            return damaged("its runs have no length".to_owned());
        }
        self.profile.check().map_err(ModelFileError::Damaged)?;
        check_forest(&self.forest, self.high, 0.0..=1.0).map_err(ModelFileError::Damaged)?;
        if let Some(non_idling) = &self.non_idling {
            non_idling.check(self.bound.miss).map_err(ModelFileError::Damaged)?;
        }
        if let Some(guests) = &self.guests {
            guests.check().map_err(ModelFileError::Damaged)?;
        }
        check_bound(&self.bound).map_err(ModelFileError::Damaged)
    }

    /// Refuses a profile of another device or host.
    pub fn fits(&self, profile: &Profile) -> Result<(), ModelFileError> {
        let both = self.profile.identity.is_some() && profile.identity.is_some();
        let of = |p: &Profile| {
            let drive = p.identity.as_ref().filter(|_| both).map_or(String::new(), |id| format!(" ({id})"));
            format!("{}{drive} on Linux {} with {} CPUs", p.device, p.kernel, p.cpus)
        };
        let (ours, theirs) = (of(profile), of(&self.profile));
        if ours == theirs { Ok(()) } else { Err(ModelFileError::Elsewhere { theirs, ours }) }
    }

    /// [`fingerprint`] of the learned content, without the time of the fit.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let timeless = Self { generated: String::new(), ..self.clone() };
        fingerprint(&serde_json::to_vec(&timeless).unwrap_or_default())
    }

    /// Confidence of the bound, 0 to 1.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        1.0 - self.bound.miss
    }
}
