//! What a run rests on, as the command line names it.

use anyhow::Context;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::Device;
use rtvirtio_workflow::site::{cpus, kernel_release};

use super::bed::owns;
use crate::args::BenchRuns;

/// The profile that everything rests on, where none need be measured: the one named, or the one that the model was learned with. Both are of this
/// device, and a model is of this host.
pub fn profile(
    args: &BenchRuns,
    learned: Option<&HostModel>,
    device: &Device,
) -> anyhow::Result<Option<Profile>> {
    if let Some(model) = learned {
        owns(device, &model.profile)?;
        if !args.other_host {
            let here = Profile { kernel: kernel_release(), cpus: cpus(), ..model.profile.clone() };
            model.fits(&here).context("with --other-host a model of another host is taken")?;
        }
    }
    let Some(path) = &args.profile else { return Ok(learned.map(|model| model.profile.clone())) };
    let named = rtvirtio_measure::profile::load(path)?;
    owns(device, &named)?;
    Ok(Some(named))
}

/// Whether the file may be of another host.
pub fn other_host(args: &BenchRuns) -> OtherHost {
    if args.other_host { OtherHost::Noted } else { OtherHost::Refused }
}
