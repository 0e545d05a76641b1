//! `rtvirtio predict` and `rtvirtio plan`.

use std::process::ExitCode;

use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style, write_file};
use rtvirtio_planner::plan;
use rtvirtio_report::text;
use rtvirtio_workflow::find::load_spec;
use rtvirtio_workflow::plan::{Basis, BasisOptions, demands, old_values, outlook};
use rtvirtio_workflow::{Dirs, Progress, contracts, domain};

use crate::args::{ModelArgs, PlanArgs, PredictArgs};

fn basis(args: &ModelArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<Basis> {
    let options =
        BasisOptions { profile: args.profile.as_deref(), model: args.model.into(), defaults: args.defaults };
    Ok(Basis::load(load_spec(&args.spec)?, &options, dirs, ui)?)
}

/// `rtvirtio predict`.
pub fn predict(args: &PredictArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let basis = basis(&args.model, &global.dirs(), ui)?;
    let tasks = outlook(&basis.spec, &basis.profile, &basis.choice, &basis.options.start)?;
    let measured = basis.profile.guest.as_ref().is_some_and(rtvirtio_model::GuestPoint::is_of_guest);
    show(ui, &tasks, || text::forecast(&tasks, measured, &style()))?;
    Ok(ExitCode::SUCCESS)
}

/// `rtvirtio plan`.
pub fn make(args: &PlanArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let dirs = &global.dirs();
    if args.domain {
        return super::domain::make(args, dirs, ui);
    }
    let mut basis = basis(&args.model, dirs, ui)?;
    basis.options.enough = args.margin.enough();
    let mut plan = plan(&basis.spec, &basis.profile, &basis.options)?;
    // A path that is not UTF-8 cannot stand in JSON; `apply` then asks for --spec.
    plan.spec_file = std::path::absolute(&args.model.spec)?.into_os_string().into_string().ok();
    if let Some(out) = &args.out {
        write_file(out, &(serde_json::to_vec_pretty(&plan)?))?;
        ui.step(&format!("saved {}; apply it with `rtvirtio apply {}`", out.display(), out.display()));
    }
    let cpu = demands(&basis.spec, &args.cpu_profiles, dirs, ui)?;
    let mut shown = serde_json::to_value(&plan)?;
    if let Some(Ok(contracts)) = &cpu {
        shown["cpu"] = serde_json::to_value(contracts)?;
    }
    show(ui, &shown, || {
        let mut out = text::plan(&plan, &old_values(&basis.spec, &basis.options.start, &plan), &style());
        for one in cpu.iter().flatten().flatten() {
            let choices = one.found.iter().map(|f| contracts::words(&one.vm, f));
            for line in choices.chain(one.notes.iter().map(|note| format!("{}: {note}", one.vm))) {
                out += &style().wrap(&line, 0);
            }
        }
        out
    })?;
    if !plan.feasible && domain::plan::would_do(&basis.spec, &basis.profile) {
        ui.step("the kernel's settings do not reach, but the I/O domain can promise every target: `rtvirtio plan --domain`");
    }
    if let Some(Err(why)) = &cpu {
        ui.warn(&format!("{why:#}"));
    }
    let feasible = plan.feasible && !matches!(cpu, Some(Err(_)));
    Ok(if feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}
