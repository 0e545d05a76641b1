//! Basis of a plan: the measured device, a model, the settings in force.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::{BlockDevice, Root, Stack};
use rtvirtio_model::{Config, Profile, model};
use rtvirtio_planner::{Knob, Plan, PlanOptions, TaskOutlook, settings_of};
use rtvirtio_spec::{CpuNeed, Device, Part, Spec, Vm};

use crate::contracts::{self, Contracted};
use crate::dirs::{Dirs, is_there, profile_key};
use crate::error::{Error, Kind, Result, bail, ensure};
use crate::model_choice::{ModelChoice, ModelName};
use crate::progress::Progress;
use crate::site::{self, Site};

/// Everything that a prediction rests on.
pub struct Basis {
    /// The spec.
    pub spec: Spec,
    /// The measured device.
    pub profile: Profile,
    /// Search options, with the start configuration.
    pub options: PlanOptions,
    /// The model.
    pub choice: ModelChoice,
    /// [`rtvirtio_kernel::Stack::notes_on_settings`] of the device; none for one that is not here.
    pub notes: Vec<String>,
}

/// The saved profile of a spec's device, or that of a file.
///
/// # Errors
/// [`Kind::NotMeasured`] when there is none, or it is of another disk.
pub fn load_profile(spec: &Spec, file: Option<&Path>, dirs: &Dirs) -> Result<Profile> {
    if let Some(file) = file {
        return Ok(rtvirtio_measure::profile::load(file)?);
    }
    let path = dirs.profile(&profile_key(&spec.device)?);
    if !is_there(&path)? {
        let remedy = match &spec.device {
            Device::Path(path) => format!("run `rtvirtio profile {}` first", path.display()),
            Device::Twin { profile, .. } => format!("run `rtvirtio-lab profile twin:{profile}` first"),
            Device::File { .. } => "run `rtvirtio-lab up SPEC` and `rtvirtio profile SPEC` first".to_owned(),
        };
        bail!(NotMeasured, "the device has not been measured ({} does not exist): {remedy}", path.display());
    }
    let profile = rtvirtio_measure::profile::load(&path)?;
    if let Device::Path(device) = &spec.device {
        same_drive(device, &profile)?;
    }
    Ok(profile)
}

/// Refuses the profile of another disk that had the name before. A disk that is not here, as in a
/// plan for another machine, is no mistake.
fn same_drive(device: &Path, profile: &Profile) -> Result<()> {
    let root = Root::default();
    let now = match BlockDevice::find(&root, device) {
        Ok(found) => found.identity(&root)?,
        Err(e) if e.is_gone() => None,
        Err(e) => return Err(e.into()),
    };
    if let (Some(then), Some(now)) = (&profile.identity, now) {
        let name = device.display();
        ensure!(
            *then == now,
            NotMeasured,
            "{name} was measured when it was {then}, now it is {now}: run `rtvirtio profile {name}` again"
        );
    }
    Ok(())
}

/// Which profile, model and start a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct BasisOptions<'a> {
    /// A profile file instead of the one saved for the device.
    pub profile: Option<&'a Path>,
    /// Which model predicts.
    pub model: ModelName,
    /// Start from the kernel's default settings instead of those found on this host.
    pub defaults: bool,
}

impl Basis {
    /// Loads and finds it. VMs that do not run are no error: the plan then starts from the kernel's
    /// defaults, with a warning.
    ///
    /// # Errors
    /// [`Kind::NotMeasured`] without a profile.
    pub fn load(
        part: impl Into<Part>,
        options: &BasisOptions<'_>,
        dirs: &Dirs,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let part = part.into();
        let spec = part.spec.clone();
        let profile = load_profile(&spec, options.profile, dirs)?;
        match profile.doubts.as_slice() {
            [] => {}
            [one] => progress.warn(&format!("the profile is in doubt: {one}")),
            [first, more @ ..] => {
                progress.warn(&format!("the profile is in doubt: {first} (and {} more in it)", more.len()));
            }
        }
        let choice = ModelChoice::find(options.model, &spec, &profile, dirs, progress)?;
        if options.defaults {
            let options = choice.options(site::default_config(&spec));
            let notes = notes(&spec.device)?;
            return Ok(Self { spec, profile, options, choice, notes });
        }
        let options = match Site::find(part, dirs)
            .inspect(|site| {
                site.warn_without_bfq(progress);
                site.warn_without_agent(progress);
            })
            .and_then(|site| site.plan_options(site.config()?, &choice))
        {
            Ok(options) => options,
            Err(e) => {
                progress.warn(&format!("starting from the kernel's default settings, because {e:#}"));
                choice.options(site::default_config(&spec))
            }
        };
        let notes = notes(&spec.device)?;
        Ok(Self { spec, profile, options, choice, notes })
    }
}

/// Where the settings of a real device act, which its VMs need not run for. A device that is not
/// here, as in a plan for another machine, has none.
fn notes(device: &Device) -> Result<Vec<String>> {
    let Device::Path(path) = device else { return Ok(Vec::new()) };
    match Stack::find(&Root::default(), path) {
        Ok(stack) => Ok(stack.notes_on_settings()),
        Err(e) if e.is_gone() => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}

/// A model's forecast of every task under a configuration.
///
/// # Errors
/// When the model does not cover it.
pub fn outlook(
    spec: &Spec,
    profile: &Profile,
    choice: &ModelChoice,
    config: &Config,
) -> Result<Vec<TaskOutlook>> {
    let model = model(choice.kind, choice.learned.as_ref())?;
    Ok(rtvirtio_planner::outlook(spec, model.forecast(profile, spec, config)?))
}

/// Contracts of a spec's VMs with demands, or why these cannot be carried; `None` for a spec
/// without demands: contracts that are given need no plan.
///
/// # Errors
/// Others than that the VMs ask for more than there is.
pub fn demands(
    vms: &[Vm],
    cpu_profiles: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Option<std::result::Result<Vec<Contracted>, Error>>> {
    if !vms.iter().any(|vm| matches!(vm.cpu.need, Some(CpuNeed::Demand { .. }))) {
        return Ok(None);
    }
    match contracts::of_vms(vms, cpu_profiles, dirs, progress) {
        Ok(admitted) => Ok(admitted.map(|admitted| Ok(admitted.contracts))),
        Err(e) if e.kind() == Kind::Infeasible => Ok(Some(Err(e))),
        Err(e) => Err(e),
    }
}

/// The value that each of the plan's knobs has now.
#[must_use]
pub fn old_values(spec: &Spec, start: &Config, plan: &Plan) -> BTreeMap<Knob, String> {
    let Ok(target) = plan.config(spec, start) else { return BTreeMap::new() };
    // The settings that lead back are the old values.
    settings_of(spec, &target, start).into_iter().map(|s| (s.knob, s.value)).collect()
}
