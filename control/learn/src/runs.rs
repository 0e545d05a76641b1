//! Measured runs of one device, appended to a file.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_measure::HostFacts;
use rtvirtio_model::{Forecast, HostModel, Profile};
use rtvirtio_spec::Device;
use rtvirtio_units::Nanos;

use crate::dataset::{DATASET_SCHEMA, Dataset, DatasetError, Header, OtherHost, Point, Recorder};
use crate::load::Stream;
use crate::run::{Job, Measurer};
use crate::stage::{StageError, Treatment};
use rtvirtio_workflow::{Kind, Progress};

/// Default limit of tries of a run while the host stalls too long.
pub const TRIES: u32 = 2;

/// Errors of making a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunsError {
    /// Cancelled by the user; the runs so far are in the file.
    #[error("stopped as asked")]
    Cancelled,
    /// The dataset cannot be used.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// The run could not be measured.
    #[error(transparent)]
    Stage(StageError),
    /// The file's directory cannot be created.
    #[error("cannot create {}: {source}", path.display())]
    Directory {
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

impl From<StageError> for RunsError {
    fn from(e: StageError) -> Self {
        if e.is_cancelled() { Self::Cancelled } else { Self::Stage(e) }
    }
}

impl From<RunsError> for rtvirtio_workflow::Error {
    fn from(e: RunsError) -> Self {
        match e {
            RunsError::Cancelled => Self::cancelled(),
            other => Self::from_source(Kind::System, other),
        }
    }
}

/// A device and its name in datasets.
#[derive(Clone, Debug)]
pub struct MeasuredDevice {
    /// Name in datasets, such as `qlc-nvme`.
    pub name: String,
    /// Device in the form of a spec.
    pub spec: Device,
}

/// A file of runs and its header.
#[derive(Clone, Debug)]
pub struct RunsFile<'a> {
    /// Path of the dataset.
    pub path: &'a Path,
    /// Command that makes the file again, with every option that affects a run.
    pub command: String,
    /// Time of the start, as text.
    pub generated: String,
    /// Facts about this host.
    pub host: HostFacts,
    /// Profile of the device; a continued file keeps its first profile ([`began_with`]).
    pub profile: Profile,
    /// Learned model used by schemes.
    pub model: Option<&'a HostModel>,
    /// Whether a file of another host may be continued.
    pub other: OtherHost,
}

/// First profile of a device in a file of runs; `None` without the file, or the device in it.
///
/// # Errors
/// When the file is no dataset.
pub fn began_with(path: &Path, device: &str) -> Result<Option<Profile>, DatasetError> {
    // Only a file known to be absent counts: otherwise reading it reports the error.
    if matches!(path.try_exists(), Ok(false)) {
        return Ok(None);
    }
    Ok(Dataset::header(path)?.profiles.remove(device))
}

/// Runs of a file, with the means to add more.
pub struct Runs<'a> {
    /// Profile of the device before the first run.
    pub profile: Profile,
    /// Every run in the file, oldest first.
    pub points: Vec<Point>,
    /// Limit of tries of a run while the host stalls too long.
    pub tries: u32,
    device: &'a MeasuredDevice,
    measurer: Box<dyn Measurer + 'a>,
    recorder: Recorder,
    length: Duration,
    progress: &'a dyn Progress,
}

/// A run to be made.
pub struct RunRequest<'a> {
    /// Unique name of the point.
    pub id: String,
    /// Scheme that chose the treatment.
    pub scheme: &'a str,
    /// Settings of the host.
    pub treatment: Treatment,
    /// Streams of the VMs.
    pub vms: &'a [Vec<Stream>],
    /// Seed of the addresses.
    pub seed: u64,
    /// Model's forecasts before the run, one for each task; empty without a model.
    pub forecasts: Vec<Forecast>,
    /// Overrides [`Runs::tries`] for this run.
    pub tries: Option<u32>,
}

impl<'a> Runs<'a> {
    /// Begins or continues a file.
    ///
    /// # Errors
    /// [`RunsError`]; also when the file was begun by another command, or on another host where
    /// that is not allowed.
    pub fn begin(
        device: &'a MeasuredDevice,
        measurer: impl Measurer + 'a,
        file: RunsFile<'_>,
        length: Nanos,
        progress: &'a dyn Progress,
    ) -> Result<Self, RunsError> {
        if let Some(dir) = file.path.parent() {
            let failed = |source| RunsError::Directory { path: dir.to_owned(), source };
            std::fs::create_dir_all(dir).map_err(failed)?;
        }
        let profile = began_with(file.path, &device.name)?.unwrap_or(file.profile);
        let header = Header {
            schema: DATASET_SCHEMA.to_owned(),
            host: file.host,
            command: file.command,
            generated: file.generated,
            model: file.model.map(HostModel::fingerprint),
            confidence: file.model.map(HostModel::confidence),
            profiles: BTreeMap::from([(device.name.clone(), profile.clone())]),
        };
        let (recorder, points) = Recorder::open(file.path, &header, file.other)?;
        if !points.is_empty() {
            progress.step(&format!("continuing with {} runs in {}", points.len(), file.path.display()));
        }
        Ok(Self {
            profile,
            points,
            tries: TRIES,
            device,
            measurer: Box::new(measurer),
            recorder,
            length: Duration::from_nanos(length.0),
            progress,
        })
    }

    /// Path of the dataset.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.recorder.path()
    }

    /// Run of this name; `None` if it was not made.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<&Point> {
        self.points.iter().find(|p| p.id == id)
    }

    /// Records a run under another name as well, for a scheme that chose the same settings.
    pub fn share(&mut self, run: &Point, id: String, scheme: &str) -> Result<(), RunsError> {
        self.keep(Point { id, scheme: scheme.to_owned(), ..run.clone() })
    }

    /// Measures a run and records it.
    pub fn measure(&mut self, wanted: RunRequest<'_>) -> Result<Point, RunsError> {
        let job = Job {
            id: wanted.id,
            device: &self.device.name,
            spec_device: &self.device.spec,
            scheme: wanted.scheme,
            treatment: wanted.treatment,
            vms: wanted.vms,
            length: self.length,
            seed: wanted.seed,
            tries: wanted.tries.unwrap_or(self.tries),
        };
        let measured = self.measurer.measure(&job, self.progress.cancel_flag()).map_err(RunsError::from);
        if matches!(measured, Err(RunsError::Cancelled)) {
            let kept = self.points.len();
            self.progress.step(&format!("{kept} runs are kept; the same command continues"));
        }
        let mut point = measured?;
        for (outcome, forecast) in point.results.iter_mut().zip(wanted.forecasts) {
            outcome.upper = Some(forecast.judged());
            outcome.promised = Some(forecast.promised());
        }
        self.keep(point.clone())?;
        Ok(point)
    }

    fn keep(&mut self, point: Point) -> Result<(), RunsError> {
        self.recorder.add(&point)?;
        self.points.push(point);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
