//! `rtvirtio predict` and `rtvirtio plan`.

use std::path::Path;
use std::process::ExitCode;

use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style, write_file};
use rtvirtio_planner::{TaskOutlook, io_cost_plan, io_latency_plan, plan};
use rtvirtio_report::{terminal, text};
use rtvirtio_spec::HostSpec;
use rtvirtio_text::shell_path;
use rtvirtio_workflow::cpu_room::{self, CpuTime};
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::networks::{tc_script, warn_left_out};
use rtvirtio_workflow::plan::{Basis, BasisOptions, demands, old_values, outlook, warn_throttled};
use rtvirtio_workflow::plan_file::{DevicePlan, HostPlan, ProfileUsed};
use rtvirtio_workflow::{Dirs, Progress, contracts, domain};

use super::{one_profile, title};
use crate::args::{ModelArgs, PlanArgs, PredictArgs};

/// Inputs of the predictions, for each device with its name.
fn bases(
    args: &ModelArgs,
    host: &HostSpec,
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<Vec<(Option<String>, Basis)>> {
    one_profile(args.profile.as_deref(), host)?;
    let options = BasisOptions {
        profile: args.profile.as_deref(),
        model: args.model.into(),
        defaults: args.defaults,
        parts: host.parts(),
    };
    let of =
        |part: &rtvirtio_spec::Part| Ok((part.name.clone(), Basis::load(part.clone(), &options, dirs, ui)?));
    host.parts().iter().map(of).collect()
}

pub fn predict(args: &PredictArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = named_host(&args.model.spec)?;
    warn_left_out(&host, "predict", ui);
    let bases = bases(&args.model, &host, &global.dirs(), ui)?;
    let of = |(_, basis): &(Option<String>, Basis)| {
        let (start, placements) = (&basis.options.start, &basis.options.placements);
        Ok(outlook(&basis.spec, &basis.profile, &basis.choice, start, placements)?)
    };
    let mut tasks = bases.iter().map(of).collect::<anyhow::Result<Vec<Vec<TaskOutlook>>>>()?;
    let time = cpu_time(&args.model, &host, &bases, &global.dirs(), ui)?;
    bases.iter().zip(&mut tasks).for_each(|((_, of), tasks)| time.add_to(tasks, &of.spec));
    let all: Vec<&TaskOutlook> = tasks.iter().flatten().collect();
    show(ui, &all, || {
        let one = |((name, basis), tasks): (&(Option<String>, Basis), &Vec<TaskOutlook>)| {
            let measured = basis.profile.guest.as_ref().is_some_and(rtvirtio_model::GuestPoint::is_of_guest);
            title(name.as_deref(), bases.len()) + &text::forecast(tasks, measured, &style())
        };
        bases.iter().zip(&tasks).map(one).collect::<Vec<_>>().join("\n")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// CPU time for the requests of the host's guests now.
fn cpu_time(
    args: &ModelArgs,
    host: &HostSpec,
    bases: &[(Option<String>, Basis)],
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<CpuTime> {
    if args.defaults {
        // For a host as it is after its start, not as it is now.
        return Ok(CpuTime::default());
    }
    let parts = bases.iter().map(|(_, basis)| (&basis.spec, &basis.profile));
    Ok(cpu_room::measure(host, parts, dirs, ui)?)
}

/// `rtvirtio plan --tc`: prints or saves the script.
fn tc(host: &HostSpec, of: &str, out: Option<&Path>, ui: &Ui) -> anyhow::Result<ExitCode> {
    let script = tc_script(host, of)?;
    if let Some(out) = out {
        write_file(out, script.text.as_bytes())?;
        let out = terminal(&out.display().to_string(), false);
        ui.step(&format!("saved {out}; read it, and run it as root: sh {out}"));
    }
    script.refused.iter().for_each(|why| ui.warn(why));
    show(ui, &script, || if out.is_some() { String::new() } else { script.text.clone() })?;
    Ok(if script.refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

pub fn make(args: &PlanArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let dirs = &global.dirs();
    if args.domain {
        return super::domain::make(args, dirs, ui);
    }
    if args.traffic {
        return super::neighbours::make(args, dirs, ui);
    }
    let host = named_host(&args.model.spec)?;
    if let Some(of) = &args.tc {
        return tc(&host, of, args.out.as_deref(), ui);
    }
    warn_left_out(&host, "plan", ui);
    let mut bases = bases(&args.model, &host, dirs, ui)?;
    let mut devices = Vec::new();
    for (device, basis) in &mut bases {
        basis.options.enough = args.margin.enough();
        let make = match (args.io_cost, args.io_latency) {
            (true, _) => io_cost_plan,
            (_, true) => io_latency_plan,
            _ => plan,
        };
        let plan = make(&basis.spec, &basis.profile, &basis.options)?;
        warn_throttled(&basis.spec, &basis.profile, &basis.options.start, &plan, ui)?;
        let profile = Some(ProfileUsed::from_profile(&basis.profile, args.model.profile.as_deref())?);
        devices.push(DevicePlan { device: device.clone(), plan, profile, notes: basis.notes.clone() });
    }
    let mut plan = HostPlan::new(devices).of_spec_file(&args.model.spec)?.of_spec(&host)?;
    if let Some(out) = &args.out {
        write_file(out, &(serde_json::to_vec_pretty(&plan)?))?;
        ui.step(&format!("saved {}; apply it with `rtvirtio apply {}`", out.display(), shell_path(out)));
    }
    // Of this moment, so it stands in no file.
    let time = cpu_time(&args.model, &host, &bases, dirs, ui)?;
    let of = plan.devices.iter_mut().zip(&bases);
    of.for_each(|(of, (_, basis))| time.add_to(&mut of.plan.tasks, &basis.spec));
    let cpu = demands(host.vms(), &args.cpu_profiles, dirs, ui)?;
    let mut shown = serde_json::to_value(&plan)?;
    let controls: Vec<_> = bases.iter().flat_map(|(_, basis)| &basis.controls).collect();
    if !controls.is_empty() {
        shown["controls"] = serde_json::to_value(&controls)?;
    }
    if let Some(Ok(contracts)) = &cpu {
        shown["cpu"] = serde_json::to_value(contracts)?;
    }
    show(ui, &shown, || {
        let one = |(of, (_, basis)): (&DevicePlan, &(Option<String>, Basis))| {
            let old = old_values(&basis.spec, &basis.options.start, &of.plan);
            title(of.device.as_deref(), plan.devices.len())
                + &text::plan(&of.plan, &old, &style())
                + &text::notes(&of.notes, &style())
        };
        let mut out = plan.devices.iter().zip(&bases).map(one).collect::<Vec<_>>().join("\n");
        for one in cpu.iter().flatten().flatten() {
            let choices = one.found.iter().map(|f| contracts::demand_text(&one.vm, f));
            for line in choices.chain(one.notes.iter().map(|note| format!("{}: {note}", one.vm))) {
                out += &style().wrap(&line, 0);
            }
        }
        let contracts: Vec<&str> =
            host.vms().iter().filter(|vm| vm.cpu.need.is_some()).map(|vm| vm.name.as_str()).collect();
        if !contracts.is_empty() {
            let line = format!(
                "CPU contracts of {}: `apply` sets budgets and the policies of their threads too; `apply --dry-run` shows each",
                contracts.join(", ")
            );
            out += &style().wrap(&line, 0);
        }
        out
    })?;
    if let ([(_, basis)], false) = (bases.as_slice(), plan.is_feasible()) {
        if domain::plan::would_do(&basis.spec, &basis.profile) {
            ui.step("the kernel's settings do not reach, but the I/O domain can promise every target: `rtvirtio plan --domain`");
        }
    }
    if let Some(Err(why)) = &cpu {
        ui.warn(&format!("{why:#}"));
    }
    let feasible = plan.is_feasible() && !matches!(cpu, Some(Err(_)));
    Ok(if feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}
