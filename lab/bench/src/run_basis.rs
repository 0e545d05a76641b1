//! Device, model and result directory of experiments that make runs, and the profile they start from.

use std::path::PathBuf;

use anyhow::Context;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_workflow::{cpus, kernel_release};

use crate::test_bed::TestBed;

/// Options of experiments that make runs on a device.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// `twin:NAME`, or `file:PATH`.
    pub device: String,
    /// File of the learned model.
    pub model: Option<PathBuf>,
    /// File of the device's profile; without it the device is measured.
    pub profile: Option<PathBuf>,
    /// Directory of the results.
    pub out: PathBuf,
    /// Whether results and model may be of another host.
    pub other_host: bool,
}

/// The profile to start from: the named one, or the one that the model was learned with; `None` when
/// the device has to be measured.
///
/// # Errors
/// When profile or model is of another device, or the model of another host.
pub fn profile(
    options: &RunOptions,
    learned: Option<&HostModel>,
    bed: &TestBed<'_>,
) -> anyhow::Result<Option<Profile>> {
    if let Some(model) = learned {
        bed.check_profile(&model.profile)?;
        if !options.other_host {
            let here = Profile { kernel: kernel_release(), cpus: cpus(), ..model.profile.clone() };
            model.fits(&here).context("with --other-host a model of another host is taken")?;
        }
    }
    let Some(path) = &options.profile else { return Ok(learned.map(|model| model.profile.clone())) };
    let named = rtvirtio_measure::profile::load(path)?;
    bed.check_profile(&named)?;
    Ok(Some(named))
}

/// Whether the file may be of another host.
#[must_use]
pub fn other_host(options: &RunOptions) -> OtherHost {
    if options.other_host { OtherHost::Noted } else { OtherHost::Refused }
}
