//! `rtvirtio verify`.

use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_console::{Global, Ui, exit_code, generated, need_root, show, style, write_file};
use rtvirtio_measure::{HostFacts, RESULT_SCHEMA, ResultFile};
use rtvirtio_model::ModelKind;
use rtvirtio_planner::scheme_name;
use rtvirtio_report::{ReportInput, html, terminal, text};
use rtvirtio_workflow::check_writable;
use rtvirtio_workflow::devices::{Devices, Predictions};
use rtvirtio_workflow::find::load_host;
use rtvirtio_workflow::model_choice::{ModelChoice, ModelName};
use rtvirtio_workflow::networks::flows::{self, Flows};
use rtvirtio_workflow::networks::warn_not_run;
use rtvirtio_workflow::plan::{load_profile, outlook};
use rtvirtio_workflow::run::measure_all;
use rtvirtio_workflow::verified::{self, AsFound};
use rtvirtio_workflow::{Dirs, Progress, domain, in_force, started};

use crate::args::VerifyArgs;

/// A report shows plan and profile of one device.
const SEVERAL: &str =
    "Several devices: their plans and profiles are not in this report; `rtvirtio plan` shows them.";

/// `rtvirtio verify`.
pub fn run(args: &VerifyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    [&args.out, &args.html].into_iter().flatten().try_for_each(|path| check_writable(path))?;
    need_root("verify")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let host = load_host(&args.spec)?;
    let length = Duration::from_nanos(args.length.0);
    let flows = if args.network_peers.is_empty() {
        warn_not_run(&host, ui);
        None
    } else {
        let named = (args.network_peers.as_slice(), args.network_echoes.as_slice());
        Some(flows::prepare(&host, named, length, dirs, ui)?)
    };
    if let Some(flows) = flows.as_ref().filter(|_| args.network_only) {
        return network_only(args, flows, flows::facts(&host), dirs, ui);
    }
    let mut devices = Devices::find(host, dirs)?;
    devices.sites.iter_mut().for_each(|site| site.preload = args.fio_preload);
    devices.warn_without_agent(ui);
    devices.guard_data(args.destroy_data)?;
    let in_force = in_force::plan(&dirs.state)?;
    // What is measured is the start that runs now, under the settings that it has.
    let ended = started::ended(&dirs.state)?;
    ended.iter().for_each(|vm| ui.warn(&vm.words()));
    let name = match in_force.as_ref().and_then(|plan| Some(plan.devices.first()?.plan.model)) {
        Some(ModelKind::Analytical) => ModelName::Analytical,
        Some(ModelKind::Slice) => ModelName::Slice,
        Some(ModelKind::Mlp) => ModelName::Mlp,
        Some(ModelKind::Bound) | None => ModelName::Auto,
    };
    // A prediction next to the measurement when there is a profile; measuring does not depend on
    // it.
    let none = |e: &rtvirtio_workflow::Error| {
        ui.step(&format!("no prediction next to the measurement: {e:#}"));
    };
    let mut predicted = Predictions::new();
    let mut profiles = Vec::new();
    for site in &devices.sites {
        let survey = site.survey(ui)?;
        site.bypassed(&survey.controls).iter().for_each(|control| ui.warn(&control.to_string()));
        let Ok(profile) = load_profile(&site.spec, None, dirs).inspect_err(none) else { continue };
        let (config, placements) = (&survey.config, &survey.controls.placements);
        let tasks = ModelChoice::find(name, &site.spec, &profile, dirs, ui)
            .and_then(|choice| outlook(&site.spec, &profile, &choice, config, placements))
            .inspect_err(none)
            .unwrap_or_default();
        for task in tasks {
            predicted.entry((task.vm, task.task)).or_default().push(task.forecast.latency_ns);
        }
        profiles.push(profile);
    }
    // Whether settings, or an I/O domain, of ours are in force.
    let ours = in_force::applied_by(dirs)?.is_some() || domain::status(dirs).is_some();
    let scheme = match &in_force {
        Some(plan) if ended.is_empty() => plan.scheme().to_owned(),
        Some(plan) => format!("{} (a part of it)", scheme_name(plan.scheme())),
        None => "as-found".to_owned(),
    };
    let tasks = || measure_all(&devices, &scheme, length, &predicted, dirs, ui);
    let run = match &flows {
        Some(flows) => flows.run_with(length, ui, tasks)?,
        None => tasks()?,
    };
    let file = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: devices.facts(), runs: vec![run] };
    let before = if ours { before(&file, dirs, ui) } else { None };
    // Shown first: a full disk must not cost the measurement.
    let mut value = serde_json::to_value(&file)?;
    if let Some(before) = &before {
        value["before"] = serde_json::to_value(before)?;
    }
    show(ui, &value, || {
        text::results(&file, &style()) + &before.as_ref().map(|b| change(b, &file)).unwrap_or_default()
    })?;
    if !ours {
        verified::keep(&file, dirs)?;
    }
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&file)?)?;
    }
    if let Some(out) = &args.html {
        let one = devices.sites.len() == 1;
        let plan = in_force.as_ref().and_then(|plan| plan.devices.first()).map(|d| &d.plan);
        let several = [SEVERAL.to_owned()];
        let report = ReportInput {
            title: "rtvirtio verify",
            result: &file,
            plan: plan.filter(|_| one),
            profile: profiles.first().filter(|_| one),
            notes: if one { &[] } else { &several },
            generated: &generated(),
        };
        write_file(out, html(&report).as_bytes())?;
    }
    Ok(exit_code(&file.runs[0]))
}

/// The flows alone: nothing of a disk is looked at, kept or compared.
fn network_only(
    args: &VerifyArgs,
    flows: &Flows,
    facts: HostFacts,
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    let scheme = if domain::status(dirs).is_some() { "I/O domain" } else { "as-found" };
    let run = flows.run_alone(scheme, Duration::from_nanos(args.length.0), ui)?;
    let file = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: facts, runs: vec![run] };
    show(ui, &file, || text::results(&file, &style()))?;
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&file)?)?;
    }
    Ok(exit_code(&file.runs[0]))
}

/// The verification under the settings found that one under ours is compared with.
fn before(now: &ResultFile, dirs: &Dirs, ui: &Ui) -> Option<AsFound> {
    // A comparison that cannot be made must not cost the measurement.
    let found = verified::comparable(now, dirs);
    found.inspect_err(|e| ui.warn(&format!("not compared with the last verification: {e:#}"))).ok()?
}

/// The last lines: what the settings have changed.
fn change(before: &AsFound, now: &ResultFile) -> String {
    let (Some(old), Some(new)) = (before.result.runs.first(), now.runs.first()) else {
        return String::new();
    };
    format!(
        "\nlargest of all tasks, compared with the verification before `apply` ({}):\n{}",
        terminal(&before.generated, false),
        text::before_after(old, new, &style())
    )
}
