//! `rtvirtio predict` and `rtvirtio plan`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::{Config, Profile, model};
use rtvirtio_planner::{Knob, Plan, PlanOptions, TaskOutlook, plan, settings_of};
use rtvirtio_report::text;
use rtvirtio_spec::{CpuNeed, Device, Spec};

use super::{is_there, show, style, write_file};
use crate::args::{Global, ModelArgs, PlanArgs, PredictArgs};
use crate::cpu_plan::{self, Contracted};
use crate::model_choice::ModelChoice;
use crate::site::{self, Site};
use crate::ui::Ui;

/// Exit code when some target cannot be met.
pub const INFEASIBLE: u8 = 2;

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
}

/// The saved profile of a spec's device.
pub fn load_profile(spec: &Spec, file: Option<&Path>, global: &Global) -> anyhow::Result<Profile> {
    if let Some(file) = file {
        return Ok(rtvirtio_measure::profile::load(file)?);
    }
    let key = site::profile_key(&spec.device)?;
    let path = site::profile_path(global, &key);
    if !is_there(&path)? {
        let remedy = match &spec.device {
            Device::Path(path) => format!("run `rtvirtio profile {}` first", path.display()),
            Device::Twin { profile, .. } => format!("run `rtvirtio profile twin:{profile}` first"),
            Device::File { .. } => "run `rtvirtio lab up SPEC` and `rtvirtio profile SPEC` first".to_owned(),
        };
        anyhow::bail!("the device has not been measured ({} does not exist): {remedy}", path.display());
    }
    let profile = rtvirtio_measure::profile::load(&path)?;
    if let Device::Path(device) = &spec.device {
        same_drive(device, &profile)?;
    }
    Ok(profile)
}

/// Refuses the profile of another disk that had the name before. A disk that is not here, as in a plan for another machine, is nobody's mistake.
fn same_drive(device: &Path, profile: &Profile) -> anyhow::Result<()> {
    let root = Root::default();
    let now = match BlockDevice::find(&root, device) {
        Ok(found) => found.identity(&root)?,
        Err(e) if e.is_gone() => None,
        Err(e) => return Err(e.into()),
    };
    if let (Some(then), Some(now)) = (&profile.identity, now) {
        let name = device.display();
        anyhow::ensure!(
            *then == now,
            "{name} was measured when it was {then}, now it is {now}: run `rtvirtio profile {name}` again"
        );
    }
    Ok(())
}

impl Basis {
    fn load(args: &ModelArgs, global: &Global, ui: &Ui) -> anyhow::Result<Self> {
        let spec = site::load_spec(&args.spec)?;
        let profile = load_profile(&spec, args.profile.as_deref(), global)?;
        match profile.doubts.as_slice() {
            [] => {}
            [one] => ui.warn(&format!("the profile is in doubt: {one}")),
            [first, rest @ ..] => {
                ui.warn(&format!("the profile is in doubt: {first} (and {} more in it)", rest.len()))
            }
        }
        let choice = ModelChoice::find(args.model, &spec, &profile, global, ui)?;
        if args.defaults {
            let options = choice.options(site::default_config(&spec));
            return Ok(Self { spec, profile, options, choice });
        }
        // A plan for VMs that do not run yet starts from the defaults; that is said, never silently assumed.
        let options = match Site::find(spec.clone(), global)
            .inspect(|site| site.warn_without_bfq(ui))
            .and_then(|site| site.plan_options(site.config()?, &choice))
        {
            Ok(options) => options,
            Err(e) => {
                ui.warn(&format!("starting from the kernel's default settings, because {e:#}"));
                choice.options(site::default_config(&spec))
            }
        };
        Ok(Self { spec, profile, options, choice })
    }
}

/// What a model expects of every task under a configuration.
pub fn outlook(
    spec: &Spec,
    profile: &Profile,
    choice: &ModelChoice,
    config: &Config,
) -> anyhow::Result<Vec<TaskOutlook>> {
    let model = model(choice.kind, choice.learned.as_ref())?;
    Ok(rtvirtio_planner::outlook(spec, model.forecast(profile, spec, config)?))
}

/// `rtvirtio predict`.
pub fn predict(args: &PredictArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let basis = Basis::load(&args.model, global, ui)?;
    let tasks = outlook(&basis.spec, &basis.profile, &basis.choice, &basis.options.start)?;
    show(ui, &tasks, || text::forecast(&tasks, &style()))?;
    Ok(ExitCode::SUCCESS)
}

/// `rtvirtio plan`.
pub fn make(args: &PlanArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if args.domain {
        return super::domain::make(args, global, ui);
    }
    let mut basis = Basis::load(&args.model, global, ui)?;
    basis.options.enough = args.margin.enough();
    let mut plan = plan(&basis.spec, &basis.profile, &basis.options)?;
    // A path that is not UTF-8 cannot stand in JSON; `apply` then asks for --spec.
    plan.spec_file = std::path::absolute(&args.model.spec)?.into_os_string().into_string().ok();
    if let Some(out) = &args.out {
        write_file(out, &(serde_json::to_vec_pretty(&plan)?))?;
        ui.step(&format!("saved {}; apply it with `rtvirtio apply {}`", out.display(), out.display()));
    }
    let cpu = cpu(&basis.spec, args, global, ui)?;
    let mut shown = serde_json::to_value(&plan)?;
    if let Some(Ok(contracts)) = &cpu {
        shown["cpu"] = serde_json::to_value(contracts)?;
    }
    show(ui, &shown, || {
        let mut out = text::plan(&plan, &old_values(&basis.spec, &basis.options.start, &plan), &style());
        for one in cpu.iter().flatten().flatten() {
            let found = one.found.iter().map(|f| cpu_plan::words(&one.vm, f));
            for line in found.chain(one.notes.iter().map(|note| format!("{}: {note}", one.vm))) {
                out += &style().wrap(&line, 0);
            }
        }
        out
    })?;
    if !plan.feasible && super::domain::would_do(&basis.spec, &basis.profile) {
        ui.step("the kernel's settings do not reach, but the I/O domain can promise every target: `rtvirtio plan --domain`");
    }
    if let Some(Err(why)) = &cpu {
        ui.warn(why);
    }
    let feasible = plan.feasible && !matches!(cpu, Some(Err(_)));
    Ok(if feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Contracts of a spec with demands, or why these cannot be carried. Contracts that are given need no plan.
fn cpu(
    spec: &Spec,
    args: &PlanArgs,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Option<Result<Vec<Contracted>, String>>> {
    if !spec.vms.iter().any(|vm| matches!(vm.cpu.need, Some(CpuNeed::Demand { .. }))) {
        return Ok(None);
    }
    match cpu_plan::contracts(spec, &args.cpu_profiles, global, ui) {
        Ok((_, contracts)) => Ok(Some(Ok(contracts))),
        Err(e) if cpu_plan::is_infeasible(&e) => Ok(Some(Err(format!("{e:#}")))),
        Err(e) => Err(e),
    }
}

/// The value that each of the plan's knobs has now, for the table.
pub fn old_values(spec: &Spec, start: &Config, plan: &Plan) -> BTreeMap<Knob, String> {
    let Ok(target) = plan.config(spec, start) else { return BTreeMap::new() };
    // The settings that lead back are the old values.
    settings_of(spec, &target, start).into_iter().map(|s| (s.knob, s.value)).collect()
}

/// Reads a plan file.
pub fn load(path: &Path) -> anyhow::Result<Plan> {
    parse(path, &std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?)
}

/// The plan in a file's content.
pub fn parse(path: &Path, text: &[u8]) -> anyhow::Result<Plan> {
    let plan: Plan = serde_json::from_slice(text).with_context(|| {
        format!("{} is not a plan: make one with `rtvirtio plan SPEC -o FILE`", path.display())
    })?;
    anyhow::ensure!(
        plan.schema == rtvirtio_planner::PLAN_SCHEMA,
        "{} has form {}, this rtvirtio knows {}: plan again",
        path.display(),
        plan.schema,
        rtvirtio_planner::PLAN_SCHEMA
    );
    Ok(plan)
}
