//! Measured runs on a bed, kept in a file as they come: what every experiment does.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use rtvirtio_bench::dataset::{OtherHost, Point, Recorder};
use rtvirtio_bench::load::Stream;
use rtvirtio_bench::passes::TRIAL;
use rtvirtio_bench::run::{self, Job};
use rtvirtio_bench::stage::{Stage, Treatment};
use rtvirtio_model::{Forecast, HostModel, Profile};
use rtvirtio_units::Nanos;

use super::bed::Bed;
use crate::args::{BenchRuns, TRIES};
use rtvirtio_console::{Cancelled, Ui};
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::site::{cpus, kernel_release};

/// The profile that everything rests on, where none need be measured: the one named, or the one that the model was learned with. Both are of this
/// bed's device, and a model is of this host.
pub fn profile(
    args: &BenchRuns,
    learned: Option<&HostModel>,
    bed: &Bed<'_>,
) -> anyhow::Result<Option<Profile>> {
    if let Some(model) = learned {
        bed.owns(&model.profile)?;
        if !args.other_host {
            let here = Profile { kernel: kernel_release(), cpus: cpus(), ..model.profile.clone() };
            model.fits(&here).context("with --other-host a model of another host is taken")?;
        }
    }
    let Some(path) = &args.profile else { return Ok(learned.map(|model| model.profile.clone())) };
    let named = rtvirtio_measure::profile::load(path)?;
    bed.owns(&named)?;
    Ok(Some(named))
}

/// Whether the file may be of another host.
pub fn other_host(args: &BenchRuns) -> OtherHost {
    if args.other_host { OtherHost::Noted } else { OtherHost::Refused }
}

/// Runs so far, and the means to make more.
pub struct Runs<'a> {
    /// The device as measured before the first of them.
    pub profile: Profile,
    /// Every run in the file, oldest first.
    pub points: Vec<Point>,
    /// How often a run is measured at most when the host is not quiet.
    pub tries: u32,
    bed: &'a Bed<'a>,
    stage: Stage<'a>,
    recorder: Recorder,
    length: Duration,
    ui: &'a Ui,
}

/// One run to be made.
pub struct Wanted<'a> {
    /// Unique name.
    pub id: String,
    /// Who chose the treatment.
    pub scheme: &'a str,
    /// What is done to the host.
    pub treatment: Treatment,
    /// What the VMs do.
    pub vms: &'a [Vec<Stream>],
    /// Seed of the addresses.
    pub seed: u64,
    /// What a model said before the run, one for each task; empty without a model.
    pub forecasts: Vec<Forecast>,
}

impl<'a> Runs<'a> {
    /// Begins a file, or goes on with one. `basis` is the profile, where it need not be measured, and a learned model that takes part.
    pub fn begin(
        bed: &'a Bed<'a>,
        path: &Path,
        command: String,
        length: Nanos,
        basis: (Option<Profile>, Option<&HostModel>),
        other: OtherHost,
        ui: &'a Ui,
    ) -> anyhow::Result<Self> {
        let (profile, recorder, points) = bed.record(path, command, basis, other)?;
        if !points.is_empty() {
            ui.step(&format!("going on with {} runs in {}", points.len(), path.display()));
        }
        let length = Duration::from_nanos(length.0);
        Ok(Self { profile, points, tries: TRIES, bed, stage: bed.stage()?, recorder, length, ui })
    }

    /// The run of this name, if it was made.
    pub fn find(&self, id: &str) -> Option<&Point> {
        self.points.iter().find(|p| p.id == id)
    }

    /// Keeps a run under another name too, for a scheme that chose what another one had chosen before.
    pub fn share(&mut self, run: &Point, id: String, scheme: &str) -> anyhow::Result<()> {
        let point = Point { id, scheme: scheme.to_owned(), ..run.clone() };
        self.recorder.add(&point)?;
        self.points.push(point);
        Ok(())
    }

    /// Makes a run and keeps it.
    pub fn measure(&mut self, wanted: Wanted<'_>) -> anyhow::Result<Point> {
        let job = Job {
            id: wanted.id,
            device: &self.bed.device,
            spec_device: &self.bed.spec_device,
            scheme: wanted.scheme,
            treatment: wanted.treatment,
            vms: wanted.vms,
            length: self.length,
            seed: wanted.seed,
            // Tuning takes the host's own stalls off what it sees: another try shows it nothing new.
            tries: if wanted.scheme == TRIAL { 1 } else { self.tries },
        };
        match run::measure(&job, &self.stage, self.ui.cancel_flag(), &mut |_| {}) {
            Ok(mut point) => {
                for (outcome, forecast) in point.results.iter_mut().zip(wanted.forecasts) {
                    outcome.upper = Some(forecast.judged());
                    outcome.promised = Some(forecast.promised());
                }
                self.recorder.add(&point)?;
                self.points.push(point.clone());
                Ok(point)
            }
            Err(e) if e.is_cancelled() => {
                self.ui.step(&format!("{} runs are kept; the same command goes on", self.points.len()));
                Err(Cancelled.into())
            }
            Err(e) => Err(e.into()),
        }
    }
}
