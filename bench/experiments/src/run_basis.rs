//! Device, model and result directory of experiments that make runs, and the profile they start
//! from.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::Device;
use rtvirtio_workflow::model_choice::read_if;
use rtvirtio_workflow::{check_writable, cpus, kernel_release};

use rtvirtio_harness::test_bed::{check_profile, spec_device};

/// Options of experiments that make runs on a device.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Device, `twin:NAME` or `file:PATH`.
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

impl RunOptions {
    /// Refuses options that cannot be measured or written, before a device is made.
    ///
    /// # Errors
    /// An unknown device, a profile or model of another device or host, a directory that cannot be
    /// written.
    pub fn check(&self) -> anyhow::Result<()> {
        let device = spec_device(&self.device)?;
        profile(self, read_if(self.model.as_deref())?.as_deref(), &device)?;
        check_out(&self.out)
    }
}

/// Refuses a directory of results that cannot be written.
///
/// # Errors
/// A directory that cannot be written, as `--out`.
pub fn check_out(out: &Path) -> anyhow::Result<()> {
    check_writable(&out.join("result")).with_context(|| format!("--out {}", out.display()))
}

/// The profile to start from: the named one, or the one that the model was learned with; `None`
/// when the device has to be measured.
///
/// # Errors
/// When profile or model is of another device, or the model of another host.
pub fn profile(
    options: &RunOptions,
    learned: Option<&HostModel>,
    device: &Device,
) -> anyhow::Result<Option<Profile>> {
    if let Some(model) = learned {
        check_profile(device, &model.profile)?;
        if !options.other_host {
            let on_this_host = Profile { kernel: kernel_release(), cpus: cpus(), ..model.profile.clone() };
            model.fits(&on_this_host).context("with --other-host a model of another host is taken")?;
        }
    }
    let Some(path) = &options.profile else { return Ok(learned.map(|model| model.profile.clone())) };
    let named = rtvirtio_measure::profile::load(path)?;
    check_profile(device, &named)?;
    Ok(Some(named))
}

/// Whether the file may be of another host.
#[must_use]
pub fn other_host(options: &RunOptions) -> OtherHost {
    if options.other_host { OtherHost::Noted } else { OtherHost::Refused }
}
