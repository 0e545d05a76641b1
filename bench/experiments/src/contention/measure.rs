//! Runs of all set-ups, interleaved.

use std::path::PathBuf;

use super::{PREFIX, Setup, setups};
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_learn::stage::Treatment;
use rtvirtio_model::HostModel;
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;

use crate::run_basis::{RunOptions, other_host, profile};
use rtvirtio_harness::test_bed::{TestBed, device_name};
use rtvirtio_learn::runs::RunRequest;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::model_choice::read_if;

/// Scheme of the dataset's points.
const SCHEME: &str = "contention";

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct ContentionOptions {
    /// Device, model and results.
    pub runs: RunOptions,
    /// Only set-ups whose name contains this.
    pub only: Option<String>,
    /// Repetitions of every set-up.
    pub repeat: usize,
    /// Length of each run.
    pub length: Nanos,
}

impl ContentionOptions {
    /// Refuses options that cannot be measured or written, before a device is made.
    ///
    /// # Errors
    /// An invalid option, by its name.
    pub fn check(&self) -> anyhow::Result<()> {
        let is_chosen =
            |setup: &Setup| self.only.as_ref().is_none_or(|only| setup.id(0).contains(only.as_str()));
        anyhow::ensure!(
            setups().iter().any(is_chosen),
            "--only: no set-up is named like that: names begin with fig2, fig5a, fig5b, fig5c"
        );
        self.runs.check()
    }

    /// File of the dataset, below the results directory.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.runs.out.join(format!("{PREFIX}{}.jsonl", device_name(&self.runs.device)))
    }
}

/// Measures all set-ups into the dataset.
///
/// # Errors
/// An unknown set-up, a device that cannot be made, a dataset of another host, and cancellation.
pub fn measure(options: &ContentionOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<()> {
    options.check()?;
    let model = read_if(options.runs.model.as_deref())?;
    let _lock = labs.dirs.lock_vms()?;
    let bed = TestBed::make(&options.runs.device, MAX_VMS, LabKind::Process, labs, progress)?;
    let measured = measure_on(options, model.as_deref(), &bed, progress);
    bed.remove()?;
    measured
}

fn measure_on(
    options: &ContentionOptions,
    model: Option<&HostModel>,
    bed: &TestBed<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let profile = profile(&options.runs, model, &bed.device.spec)?;
    let command = format!("rtvirtio-bench contention {} --for {}", options.runs.device, options.length);
    let mut runs =
        bed.runs(&options.path(), command, options.length, (profile, None), other_host(&options.runs))?;
    if let Some(model) = model {
        model.fits(&runs.profile)?;
    }
    let mut all = setups();
    all.retain(|s| options.only.as_ref().is_none_or(|only| s.id(0).contains(only.as_str())));
    let mut todo: Vec<(usize, &Setup)> =
        (0..options.repeat).flat_map(|r| all.iter().map(move |s| (r, s))).collect();
    // Interleaved: a slow change of the host affects all set-ups alike.
    for (i, round) in todo.chunks_mut(all.len()).enumerate() {
        Random::new(i as u64 + 1).shuffle(round);
    }
    let mut bar =
        progress.bar(&format!("{} set-ups, {} repetitions", all.len(), options.repeat), todo.len() as u64);
    for (i, (repetition, setup)) in todo.into_iter().enumerate() {
        bar.set(i as u64);
        let id = setup.id(repetition);
        bar.set_message(&id);
        if runs.find(&id).is_none() {
            runs.measure(RunRequest {
                id,
                scheme: SCHEME,
                treatment: Treatment::knobs(setup.knobs.config()),
                vms: &setup.vms,
                seed: repetition as u64 + 1,
                forecasts: Vec::new(),
                tries: None,
            })
            .map_err(rtvirtio_workflow::Error::from)?;
        }
    }
    Ok(())
}
