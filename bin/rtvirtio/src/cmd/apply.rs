//! `rtvirtio apply`.

use std::process::ExitCode;

use rtvirtio_console::{Global, INFEASIBLE, Ui, need_root, print, show, style};
use rtvirtio_kernel::Root;
use rtvirtio_report::text;
use rtvirtio_workflow::apply::{self, PlanWith, Resolved};
use rtvirtio_workflow::contracts::VmCpu;
use rtvirtio_workflow::devices::Devices;
use rtvirtio_workflow::networks::warn_left_out;
use rtvirtio_workflow::plan::old_values;
use rtvirtio_workflow::plan_file::{DevicePlan, HostPlan};
use rtvirtio_workflow::{Dirs, Kind, Progress, contracts, domain, in_force, one_line, systemd_units};

use super::one_profile;
use super::plan::title;
use super::status::status;
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

fn apply_any(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if !args.dry_run {
        need_root("apply")?;
    }
    let is_domain = domain::is_config(&args.source);
    anyhow::ensure!(
        (apply::is_spec(&args.source) && !is_domain) || args.margin.option().is_none(),
        "{} is a plan already: give --margin to `rtvirtio plan`, or apply the spec",
        args.source.display()
    );
    let dirs = &global.dirs();
    if is_domain {
        return super::domain::apply(&args.source, args.dry_run, dirs, ui);
    }
    if args.cpu_only {
        return cpu_only(args, dirs, ui);
    }
    if args.traffic_only {
        return traffic_only(args, global, ui);
    }
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
            plan
        }
        None => plan_now(args, &devices, dirs, ui)?,
    };
    let refused = !plan.is_feasible() && !args.compromise;
    let reasons = plan.reasons().join(". ");
    if args.dry_run {
        let resolved = apply::resolve(&plan, &devices, &args.cpu_profiles, dirs, ui)?;
        if refused {
            // Same verdict as of `plan` for the same spec.
            ui.warn(&format!("would not be applied: {reasons}. With --compromise this would be written:"));
            preview(&resolved, ui)?;
            return Ok(ExitCode::from(INFEASIBLE));
        }
        return preview(&resolved, ui);
    }
    if refused {
        ui.warn(&format!("not applied: {reasons}. Apply the compromise anyway with --compromise"));
        return Ok(ExitCode::from(INFEASIBLE));
    }
    // Checked before contracts are computed next to those in force.
    in_force::refuse(dirs)?;
    let resolved = apply::resolve(&plan, &devices, &args.cpu_profiles, dirs, ui)?;
    carry_out(&resolved, Some(&plan), dirs, ui)?;
    if ui.json {
        // The settings were read back when they were written.
        status(global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plan_now(args: &ApplyArgs, devices: &Devices, dirs: &Dirs, ui: &Ui) -> anyhow::Result<HostPlan> {
    one_profile(args.profile.as_deref(), &devices.host)?;
    let with =
        PlanWith { profile: args.profile.as_deref(), model: args.model.into(), enough: args.margin.enough() };
    let mut plans = Vec::new();
    for (part, site) in devices.host.parts().iter().zip(&devices.sites) {
        let (plan, found) = apply::plan_now(site, &with, dirs, ui)?;
        let notes = site.stack.notes_on_settings();
        if !ui.json && !args.dry_run {
            print(&title(part.name.as_deref(), devices.sites.len()))?;
            print(&text::plan(&plan, &old_values(&site.spec, &found, &plan), &style()))?;
            print(&text::notes(&notes, &style()))?;
        }
        plans.push(DevicePlan { device: part.name.clone(), plan, profile: None, notes });
    }
    // Lets the service find the VMs again after a restart.
    Ok(HostPlan::new(plans).of_spec_file(&args.source)?)
}

fn preview(resolved: &Resolved, ui: &Ui) -> anyhow::Result<ExitCode> {
    let lines = resolved.preview()?;
    warn_of_systemd(resolved, ui)?;
    show(ui, &lines, || match lines.as_slice() {
        [] => "nothing to change: the settings found are the plan's\n".to_owned(),
        lines => lines.iter().map(|line| format!("{line}\n")).collect(),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn carry_out(resolved: &Resolved, plan: Option<&HostPlan>, dirs: &Dirs, ui: &Ui) -> anyhow::Result<()> {
    let count = resolved.apply(plan, dirs, ui)?;
    explain(&resolved.held, ui);
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

/// `apply --cpu-only`: only the contracts; no plan is involved, so none is saved.
fn cpu_only(args: &ApplyArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = rtvirtio_workflow::named::named_host(&args.source)?;
    if !args.dry_run {
        in_force::refuse(dirs)?;
    }
    let resolved = apply::resolve_cpu(&host, &args.cpu_profiles, dirs, ui)?;
    if args.dry_run {
        explain(&resolved.held, ui);
        return preview(&resolved, ui);
    }
    carry_out(&resolved, None, dirs, ui)?;
    if ui.json {
        show(ui, &resolved.held, String::new)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `apply --traffic-only`: only the limits; no plan is involved, so none is saved.
fn traffic_only(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let dirs = &global.dirs();
    let host = rtvirtio_workflow::named::named_host(&args.source)?;
    if !args.dry_run {
        in_force::refuse(dirs)?;
    }
    let devices = Devices::find(host, dirs)?;
    devices.warn_uncovered(ui);
    let resolved = apply::resolve_traffic(&devices, dirs, ui)?;
    if args.dry_run {
        return preview(&resolved, ui);
    }
    carry_out(&resolved, None, dirs, ui)?;
    if ui.json {
        status(global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the mechanism of each contract, and the threads outside of it.
fn explain(all: &[VmCpu], ui: &Ui) {
    for VmCpu { vm, settings: s, found, .. } in all {
        if let Some(found) = found {
            ui.step(&contracts::words(vm, found));
        }
        let strength = format!("{:?}", s.strength).to_lowercase();
        ui.step(&format!("{vm}: its CPU contract is held by {} ({strength})", s.backend));
        for note in &s.notes {
            ui.step(&format!("{vm}: {note}"));
        }
        for (tid, why) in &s.outside {
            ui.step(&format!("{vm}: thread {tid} is outside of it: {why}"));
        }
    }
}
