//! `rtvirtio apply`.

use std::path::Path;
use std::process::ExitCode;

use rtvirtio_console::{Global, INFEASIBLE, Ui, need_root, print, show, style};
use rtvirtio_kernel::Root;
use rtvirtio_report::text;
use rtvirtio_workflow::apply::{self, PlanWith, Resolved, Room, Wanted};
use rtvirtio_workflow::devices::Devices;
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::networks::warn_left_out;
use rtvirtio_workflow::plan::old_values;
use rtvirtio_workflow::plan_file::{DevicePlan, HostPlan};
use rtvirtio_workflow::{Dirs, Kind, Progress, contracts, domain, in_force, one_line, systemd_units};

use super::status::status;
use super::{one_profile, title};
use crate::args::ApplyArgs;

/// `rtvirtio apply`. Refusals for lack of disk or CPU capacity have the exit code of an infeasible
/// plan.
pub fn apply(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let infeasible = |e: &anyhow::Error| {
        e.downcast_ref().is_some_and(|e: &rtvirtio_workflow::Error| e.kind() == Kind::Infeasible)
    };
    match apply_any(args, global, ui) {
        Err(e) if infeasible(&e) => {
            ui.warn(&format!("not applied: {}", one_line(e.as_ref())));
            Ok(ExitCode::from(INFEASIBLE))
        }
        done => done,
    }
}

/// Kind of the given file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Spec,
    Plan,
    Domain,
}

impl Source {
    fn from_path(path: &Path) -> Self {
        match () {
            () if domain::is_config(path) => Self::Domain,
            () if apply::is_spec(path) => Self::Spec,
            () => Self::Plan,
        }
    }
}

/// Settings of a spec that are applied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    Cpu,
    Traffic,
}

impl Scope {
    fn from_args(args: &ApplyArgs) -> Self {
        match (args.cpu_only, args.traffic_only) {
            (true, _) => Self::Cpu,
            (_, true) => Self::Traffic,
            _ => Self::All,
        }
    }
}

fn apply_any(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if !args.dry_run {
        need_root("apply")?;
    }
    let (source, scope) = (Source::from_path(&args.source), Scope::from_args(args));
    anyhow::ensure!(
        source == Source::Spec || args.margin.option().is_none(),
        "{} is a plan already: give --margin to `rtvirtio plan`, or apply the spec",
        args.source.display()
    );
    let dirs = &global.dirs();
    if source == Source::Domain {
        return super::domain::apply(&args.source, args.dry_run, dirs, ui);
    }
    if !args.dry_run {
        // Before anything is looked for, and before contracts are computed next to those in force.
        in_force::refuse(dirs)?;
    }
    let wanted = find(args, scope, dirs, ui)?;
    let refused = wanted.plan().filter(|plan| !plan.is_feasible() && !args.compromise);
    let reasons = refused.map(|plan| plan.reasons().join(". "));
    if !args.dry_run {
        if let Some(reasons) = reasons {
            ui.warn(&format!("not applied: {reasons}. Apply the compromise anyway with --compromise"));
            return Ok(ExitCode::from(INFEASIBLE));
        }
    }
    let resolved = apply::resolve(&wanted, &args.cpu_profiles, Room::OwnAndHost, dirs, ui)?;
    if args.dry_run {
        if let Some(reasons) = &reasons {
            ui.warn(&format!("would not be applied: {reasons}. With --compromise this would be written:"));
        }
        if scope == Scope::Cpu {
            contracts::explain(&resolved.held, ui);
        }
        preview(&resolved, ui)?;
        // Same verdict as of `plan` for the same spec.
        return Ok(if reasons.is_some() { ExitCode::from(INFEASIBLE) } else { ExitCode::SUCCESS });
    }
    carry_out(&resolved, wanted.plan(), dirs, ui)?;
    match scope {
        _ if !ui.json => {}
        Scope::Cpu => show(ui, &resolved.held, String::new)?,
        // The settings were read back when they were written.
        Scope::All | Scope::Traffic => {
            status(global, ui)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds on this host what is to be applied, with a plan where the scope needs one.
fn find(args: &ApplyArgs, scope: Scope, dirs: &Dirs, ui: &Ui) -> anyhow::Result<Wanted> {
    match scope {
        Scope::All => with_plan(args, dirs, ui),
        Scope::Cpu => Ok(Wanted::Cpu { host: named_host(&args.source)? }),
        Scope::Traffic => {
            let devices = Devices::find(named_host(&args.source)?, dirs)?;
            devices.warn_uncovered(ui);
            Ok(Wanted::Traffic { devices })
        }
    }
}

fn with_plan(args: &ApplyArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<Wanted> {
    let (host, saved) = apply::load(&args.source, args.spec.as_deref())?;
    warn_left_out(&host, "apply", ui);
    let devices = Devices::find(host, dirs)?;
    if args.dry_run {
        devices.warn_without_bfq(ui);
    } else {
        // Loaded before the search, which uses only elevators that the device offers. Without BFQ
        // the plan uses the others.
        devices.load_bfq(ui);
    }
    let plan = match saved {
        Some(plan) => {
            check_saved(&plan, args, &devices, dirs, ui)?;
            plan
        }
        None => plan_now(args, &devices, dirs, ui)?,
    };
    Ok(Wanted::All { plan, devices })
}

/// Checks that a plan file is still of this spec, these measurements and this host.
fn check_saved(
    plan: &HostPlan,
    args: &ApplyArgs,
    devices: &Devices,
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<()> {
    let changes = plan.changes_since(&devices.host, dirs)?;
    if args.force {
        changes.iter().for_each(|change| ui.warn(&format!("{change}: applied all the same")));
    } else if !changes.is_empty() {
        let (what, plan) = (changes.join("; "), args.source.display());
        anyhow::bail!("{plan} is not applied: {what}: plan again, or apply it as it is with --force");
    }
    for (of, site) in plan.devices.iter().zip(&devices.sites) {
        apply::check_saved(&of.plan, site)?;
    }
    devices.warn_uncovered(ui);
    Ok(())
}

fn plan_now(args: &ApplyArgs, devices: &Devices, dirs: &Dirs, ui: &Ui) -> anyhow::Result<HostPlan> {
    one_profile(args.profile.as_deref(), &devices.host)?;
    let with =
        PlanWith { profile: args.profile.as_deref(), model: args.model.into(), enough: args.margin.enough() };
    let is_shown = !ui.json && !args.dry_run;
    let time = if is_shown { Some(apply::cpu_time(devices, &with, dirs, ui)?) } else { None };
    let mut plans = Vec::new();
    for (part, site) in devices.host.parts().iter().zip(&devices.sites) {
        let (plan, found) = apply::plan_now(site, &with, dirs, ui)?;
        let mut shown = plan.clone();
        if let Some(time) = &time {
            time.add_to(&mut shown.tasks, &site.spec);
        }
        let notes = site.stack.notes_on_settings();
        if is_shown {
            print(&title(part.name.as_deref(), devices.sites.len()))?;
            print(&text::plan(&shown, &old_values(&site.spec, &found, &plan), &style()))?;
            print(&text::notes(&notes, &style()))?;
        }
        plans.push(DevicePlan { device: part.name.clone(), plan, profile: None, notes });
    }
    // Lets the service find the VMs again after a restart.
    Ok(HostPlan::new(plans).of_spec_file(&args.source)?)
}

fn preview(resolved: &Resolved, ui: &Ui) -> anyhow::Result<()> {
    let lines = resolved.preview()?;
    warn_of_systemd(resolved, ui)?;
    show(ui, &lines, || match lines.as_slice() {
        [] => "nothing to change: the settings found are the plan's\n".to_owned(),
        lines => lines.iter().map(|line| format!("{line}\n")).collect(),
    })
}

fn carry_out(resolved: &Resolved, plan: Option<&HostPlan>, dirs: &Dirs, ui: &Ui) -> anyhow::Result<()> {
    let count = resolved.apply(plan, dirs, ui)?;
    contracts::explain(&resolved.held, ui);
    warn_of_systemd(resolved, ui)?;
    ui.step(&match count {
        0 => "nothing to set: the settings found are the plan's, so nothing is in force".to_owned(),
        _ => format!("applied {count} settings; put them back with `rtvirtio revert`"),
    });
    Ok(())
}

fn warn_of_systemd(resolved: &Resolved, ui: &Ui) -> anyhow::Result<()> {
    if let Some(warning) = systemd_units::warning(&resolved.writes, &Root::default())? {
        ui.warn(&warning);
    }
    Ok(())
}
