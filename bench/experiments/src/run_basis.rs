//! Device, model and result directory of experiments that make runs, and the profile they start
//! from.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::Device;
use rtvirtio_workflow::model_choice::read_if;
use rtvirtio_workflow::{check_writable, cpus, kernel_release};

use rtvirtio_harness::test_bed::{check_profile, spec_device};

/// Options of experiments that make runs on a device.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards.
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Learned model: for the schemes that need one, or to draw its predictions.
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// A profile of the device, instead of measuring it.
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Directory of the results.
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
    /// Continue results of another host kernel, which the file then notes, and accept a learned
    /// model of another host.
    #[arg(long)]
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
