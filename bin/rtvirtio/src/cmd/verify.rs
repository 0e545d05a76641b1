//! `rtvirtio verify`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use rtvirtio_console::{Global, UNPROVEN, Ui, exit_code, generated, need_root, show, style, write_file};
use rtvirtio_measure::{HostFacts, RESULT_SCHEMA, ResultFile, Run, Verdict};
use rtvirtio_model::{ModelKind, Profile};
use rtvirtio_planner::Plan;
use rtvirtio_report::{ReportInput, html, terminal, text};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::check_writable;
use rtvirtio_workflow::devices::{Devices, Predictions};
use rtvirtio_workflow::model_choice::{ModelChoice, ModelName};
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::networks::flows::{self, Flows};
use rtvirtio_workflow::networks::warn_not_run;
use rtvirtio_workflow::plan::{load_profile, outlook};
use rtvirtio_workflow::plan_file::HostPlan;
use rtvirtio_workflow::run::measure_all;
use rtvirtio_workflow::service_plan::ServicePlan;
use rtvirtio_workflow::verified::{self, ActiveSettings, AsFound};
use rtvirtio_workflow::{Dirs, Progress, domain};
use serde_json::{Value, json};

use crate::args::VerifyArgs;

/// Note of a report on several devices.
const SEVERAL: &str =
    "Several devices: their plans and profiles are not in this report; `rtvirtio plan` shows them.";

/// Shortest run of fio.
const LEAST: Nanos = Nanos::from_millis(1);

pub fn run(args: &VerifyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    ensure!(args.length >= LEAST, "--for: at least {LEAST}, better 60s");
    [&args.out, &args.html].into_iter().flatten().try_for_each(|path| check_writable(path))?;
    need_root("verify")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let host = named_host(&args.spec)?;
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
    // Measures the running VMs under their current settings.
    let under = ActiveSettings::find(dirs)?;
    under.ended.iter().for_each(|vm| ui.warn(&vm.message()));
    under.gaps.iter().for_each(|gap| ui.warn(&terminal(gap, false)));
    let in_force = devices.sites.first().and_then(|site| under.plan_of(&site.spec.device));
    let name = match in_force.map(|plan| plan.model) {
        Some(ModelKind::Slice) => ModelName::Slice,
        Some(ModelKind::Bound) | None => ModelName::Auto,
    };
    let (predicted, profiles) = predict(&devices, name, dirs, ui)?;
    let scheme = under.scheme();
    let tasks = || measure_all(&devices, &scheme, length, &predicted, dirs, ui);
    let mut run = match &flows {
        Some(flows) => flows.run_with(length, ui, tasks)?,
        None => tasks()?,
    };
    let changed = under.changed(dirs);
    if let Some(why) = &changed {
        ui.warn(&terminal(why, false));
        run.scheme = under.changed_scheme();
    }
    let file = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: devices.facts(), runs: vec![run] };
    let before = if under.any && changed.is_none() { before(&file, dirs, ui) } else { None };
    // Printed first: a full disk must not cost the measurement.
    show(ui, &result_json(&file, before.as_ref(), &under, changed.as_deref())?, || {
        text::results(&file, &style())
            + &under.held.as_ref().map(held_text).unwrap_or_default()
            + &before.as_ref().map(|b| change(b, &file, under.held.is_some())).unwrap_or_default()
    })?;
    if !under.any && changed.is_none() {
        verified::keep(&file, dirs)?;
    }
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&file)?)?;
    }
    if let Some(out) = &args.html {
        let profile = profiles.first();
        write_report(out, &file, (devices.sites.len() == 1).then_some((in_force, profile)))?;
    }
    Ok(code_of(&file.runs[0], changed.as_deref()))
}

/// Exit code of a run. Where the settings changed meanwhile, what it met proves nothing of either.
fn code_of(run: &Run, changed: Option<&str>) -> ExitCode {
    let is_missed = run.tasks.iter().any(|task| task.verdict == Some(Verdict::Missed));
    if changed.is_none() || is_missed { exit_code(run) } else { ExitCode::from(UNPROVEN) }
}

/// Result with the verification before, the held plan, and what changed during the run.
fn result_json(
    file: &ResultFile,
    before: Option<&AsFound>,
    under: &ActiveSettings,
    changed: Option<&str>,
) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(file)?;
    if let Some(before) = before {
        value["before"] = serde_json::to_value(before)?;
    }
    if let Some(held) = &under.held {
        value["held"] = held_json(held, under.plan.as_ref())?;
    }
    if let Some(why) = changed {
        value["changed"] = why.into();
    }
    Ok(value)
}

/// Predictions to print next to the measurement where there is a profile, and the profiles; the
/// measurement does not depend on them.
fn predict(
    devices: &Devices,
    model: ModelName,
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<(Predictions, Vec<Profile>)> {
    let none = |e: &rtvirtio_workflow::Error| {
        ui.step(&format!("no prediction next to the measurement: {e:#}"));
    };
    let (mut predicted, mut profiles) = (Predictions::new(), Vec::new());
    for site in &devices.sites {
        let survey = site.survey(ui)?;
        site.bypassed(&survey.controls).iter().for_each(|control| ui.warn(&control.to_string()));
        let Ok(profile) = load_profile(&site.spec, None, dirs).inspect_err(none) else { continue };
        let (config, placements) = (&survey.config, &survey.controls.placements);
        let tasks = ModelChoice::find(model, &site.spec, &profile, dirs, ui)
            .and_then(|choice| outlook(&site.spec, &profile, &choice, config, placements))
            .inspect_err(none)
            .unwrap_or_default();
        for task in tasks.into_iter().filter(|task| task.not_predicted.is_none()) {
            predicted.entry((task.vm, task.task)).or_default().push(task.forecast.latency_ns);
        }
        profiles.push(profile);
    }
    Ok((predicted, profiles))
}

/// Writes the HTML report; for a single device with its plan and its profile.
fn write_report(
    out: &Path,
    file: &ResultFile,
    one: Option<(Option<&Plan>, Option<&Profile>)>,
) -> anyhow::Result<()> {
    let several = [SEVERAL.to_owned()];
    let (plan, profile) = one.unwrap_or_default();
    let report = ReportInput {
        title: "rtvirtio verify",
        result: file,
        plan,
        profile,
        first: &[],
        notes: if one.is_some() { &[] } else { &several },
        generated: &generated(),
    };
    Ok(write_file(out, html(&report).as_bytes())?)
}

/// Measures only the flows: no disk is measured, no result kept or compared.
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

/// Earlier verification under the settings found, for comparison with one under a plan.
fn before(now: &ResultFile, dirs: &Dirs, ui: &Ui) -> Option<AsFound> {
    // A failed comparison must not cost the measurement.
    let found = verified::comparable(now, dirs);
    found.inspect_err(|e| ui.warn(&format!("not compared with the last verification: {e:#}"))).ok()?
}

/// Text on the plan that the service holds during the measurement.
fn held_text(held: &ServicePlan) -> String {
    let vms: Vec<&str> = held.input.vms.iter().map(String::as_str).collect();
    let mut out = format!(
        "\nmeasured under the plan that rtvirtiod holds for {} since {}: {}\n",
        vms.join(", "),
        terminal(&held.since, false),
        terminal(&held.reason, false)
    );
    for device in &held.input.without {
        out += &format!("  {} is not planned: `rtvirtio contract plan` says why\n", terminal(device, false));
    }
    for task in &held.given_up {
        out += &format!("  {task}: its target is predicted to be missed\n");
    }
    out
}

fn held_json(held: &ServicePlan, plan: Option<&HostPlan>) -> anyhow::Result<Value> {
    Ok(json!({
        "since": held.since,
        "reason": held.reason,
        "vms": held.input.vms,
        "unplanned": held.input.without,
        "given_up": held.given_up,
        "devices": serde_json::to_value(plan.map(|plan| &plan.devices))?,
    }))
}

/// Closing lines with the effect of the settings.
fn change(before: &AsFound, now: &ResultFile, is_held: bool) -> String {
    let ours = if is_held { "rtvirtiod's plan" } else { "`apply`" };
    let (Some(old), Some(new)) = (before.result.runs.first(), now.runs.first()) else {
        return String::new();
    };
    format!(
        "\nlargest of all tasks, compared with the verification before {ours} ({}):\n{}",
        terminal(&before.generated, false),
        text::before_after(old, new, &style())
    )
}

#[cfg(test)]
mod tests {
    use rtvirtio_console::MISSED;

    use super::*;

    #[test]
    fn a_change_meanwhile_is_told_and_proves_no_target_met() {
        let run = |verdict: &str| -> Run {
            let task = json!({ "vm": "plc", "task": "t", "percentile": 99.0, "target_ns": 1, "declared_rate": null,
                "achieved_rate": 1.0, "n": 9, "p50_ns": 1, "p99_ns": 1, "p9999_ns": 1, "max_ns": 1, "fio_p9999_ns": 1,
                "predicted_ns": null, "verdict": verdict, "why": "" });
            let run = json!({ "scheme": "by-hand", "kind": "process", "seconds": 1.0, "tasks": [task] });
            serde_json::from_value(run).unwrap()
        };
        // What a process returns has no other comparison on every compiler.
        let code = |verdict, changed| format!("{:?}", code_of(&run(verdict), changed));
        let is = |code: u8| format!("{:?}", ExitCode::from(code));
        let changed = Some("the settings were changed");
        for (verdict, kept, meanwhile) in
            [("met", 0, UNPROVEN), ("unproven", UNPROVEN, UNPROVEN), ("missed", MISSED, MISSED)]
        {
            assert_eq!((code(verdict, None), code(verdict, changed)), (is(kept), is(meanwhile)), "{verdict}");
        }
        let file = ResultFile {
            schema: RESULT_SCHEMA.to_owned(),
            host: HostFacts::default(),
            runs: vec![run("met")],
        };
        let value = |changed| result_json(&file, None, &ActiveSettings::default(), changed).unwrap();
        assert_eq!(value(changed)["changed"], "the settings were changed");
        assert!(value(None).get("changed").is_none(), "{}", value(None));
    }
}
