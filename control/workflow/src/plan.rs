//! Basis of a plan: the measured device, a model, the settings in force.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::{Root, Stack};
use rtvirtio_model::{Config, Profile, model};
use rtvirtio_planner::{
    Knob, Placements, Plan, PlanOptions, TaskOutlook, mark_not_predicted, settings_of, throttled,
};
use rtvirtio_spec::{CpuNeed, Device, Part, Spec, Vm};
use rtvirtio_text::{shell_path, shell_word};

use crate::block_sizes;
use crate::contracts::{self, Contracted};
use crate::controls::Control;
use crate::dirs::{Dirs, is_there, profile_key};
use crate::error::{Error, Kind, Result, bail};
use crate::identity;
use crate::model_choice::{ModelChoice, ModelName};
use crate::progress::Progress;
use crate::site::{self, Site};

/// Everything that a prediction rests on.
pub struct Basis {
    /// Spec of one device.
    pub spec: Spec,
    /// Measurement of the device.
    pub profile: Profile,
    /// Search options, with the start configuration.
    pub options: PlanOptions,
    /// Model that predicts, with its learned part.
    pub choice: ModelChoice,
    /// Controls that act on the VMs already and are set by no plan; also in the options, as far as
    /// they can be counted.
    pub controls: Vec<Control>,
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
            Device::Path(path) => format!("run `rtvirtio profile {}` first", shell_path(path)),
            Device::Twin { profile, .. } => {
                format!("run `rtvirtio-lab profile {}` first", shell_word(&format!("twin:{profile}")))
            }
            Device::File { .. } => "run `rtvirtio-lab up SPEC` and `rtvirtio profile SPEC` first".to_owned(),
        };
        bail!(NotMeasured, "the device has not been measured ({} does not exist): {remedy}", path.display());
    }
    let profile = rtvirtio_measure::profile::load(&path)?;
    identity::check(&spec.device, &profile)?;
    Ok(profile)
}

/// Profile, model and start configuration of a plan.
#[derive(Clone, Copy, Debug)]
pub struct BasisOptions<'a> {
    /// A profile file instead of the one saved for the device.
    pub profile: Option<&'a Path>,
    /// Name of the model that predicts.
    pub model: ModelName,
    /// Start from the kernel's default settings instead of those found on this host.
    pub defaults: bool,
    /// All parts of the file: a VM may have disks on several.
    pub parts: &'a [Part],
}

impl Basis {
    /// Loads the profile and the model, and finds the start configuration. VMs that do not run are
    /// no error: the plan then starts from the kernel's defaults, with a warning.
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
        if let Some(stack) = present(&spec.device)? {
            block_sizes::check(&spec, &stack.device, progress)?;
        }
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
            let (controls, notes) = (Vec::new(), notes(&spec.device)?);
            return Ok(Self { spec, profile, options, choice, controls, notes });
        }
        let found = Site::find(part, dirs).map(|site| site.among(options.parts)).and_then(|site| {
            site.warn_without_bfq(progress);
            site.warn_without_agent(progress);
            let survey = site.survey(progress)?;
            let controls = survey.controls.list.clone();
            Ok((site.options(survey, &choice)?, controls))
        });
        let (options, controls) = match found {
            Ok(found) => found,
            Err(e) => {
                progress.warn(&format!("starting from the kernel's default settings, because {e:#}"));
                (choice.options(site::default_config(&spec)), Vec::new())
            }
        };
        let notes = notes(&spec.device)?;
        Ok(Self { spec, profile, options, choice, controls, notes })
    }
}

/// Notes on where the settings of a real device act, for which its VMs need not run. Empty for a
/// device that is not here, as in a plan for another machine.
fn notes(device: &Device) -> Result<Vec<String>> {
    Ok(present(device)?.map(|stack| stack.notes_on_settings()).unwrap_or_default())
}

/// A real device; `None` for one that is not here.
fn present(device: &Device) -> Result<Option<Stack>> {
    let Device::Path(path) = device else { return Ok(None) };
    match Stack::find(&Root::default(), path) {
        Ok(stack) => Ok(Some(stack)),
        Err(e) if e.is_gone() => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A model's forecast of every task under a configuration, with what acts on the VMs besides.
///
/// # Errors
/// When the model does not cover it.
pub fn outlook(
    spec: &Spec,
    profile: &Profile,
    choice: &ModelChoice,
    config: &Config,
    placements: &Placements,
) -> Result<Vec<TaskOutlook>> {
    let model = model(choice.kind, choice.learned.as_ref())?;
    let forecasts = model.forecast(profile, spec, &placements.in_effect(config))?;
    let mut tasks = rtvirtio_planner::outlook(spec, forecasts);
    mark_not_predicted(&mut tasks, placements);
    Ok(tasks)
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

/// Warns of VMs that a plan all but stops.
pub fn warn_throttled(
    spec: &Spec,
    profile: &Profile,
    start: &Config,
    plan: &Plan,
    progress: &dyn Progress,
) -> Result<()> {
    for held in throttled(spec, profile, start, &plan.settings)? {
        if held.is_all_but_stopped() {
            progress.warn(&format!(
                "vm {}: {held}: give it a target, or the others longer ones, where it has to do more",
                held.vm
            ));
        }
    }
    Ok(())
}

/// The value that each of the plan's knobs has now.
#[must_use]
pub fn old_values(spec: &Spec, start: &Config, plan: &Plan) -> BTreeMap<Knob, String> {
    let Ok(target) = plan.config(spec, start) else { return BTreeMap::new() };
    // The settings that lead back are the old values.
    settings_of(spec, &target, start).into_iter().map(|s| (s.knob, s.value)).collect()
}
