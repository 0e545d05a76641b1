//! `rtvirtio apply`, `status` and `revert`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use rtvirtio_apply::{
    ApplyError, Fate, JOURNAL_FILE, KnobState, Machine, Observer, OnConflict, Reverted, Session, Silent,
    Status, Step, Write, append, dry_run, resolve,
};
use rtvirtio_host::Root;
use rtvirtio_model::ModelKind;
use rtvirtio_planner::{Knob, LimitKind, Plan, check_actable, plan};
use rtvirtio_report::{terminal, text};

use super::plan::{INFEASIBLE, load, load_profile, old_values};
use super::{need_root, show, style, write_file};
use crate::args::{ApplyArgs, Global, RevertArgs};
use crate::cpu_plan::{self, IN_FORCE_FILE, VmCpu};
use crate::guests::GuestAgents;
use crate::model_choice::ModelChoice;
use crate::site::{self, Site};
use crate::ui::{Cancelled, Ui};

/// Exit code when a setting was left alone because somebody else changed it.
const CONFLICT: u8 = 3;
/// The plan in force, beside the journal.
const PLAN_FILE: &str = "plan.json";

/// `rtvirtio apply`. What cannot be carried has the exit code of an infeasible plan, be it the disk's or the CPU's.
pub fn apply(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    match apply_any(args, global, ui) {
        Err(e) if cpu_plan::is_infeasible(&e) => {
            ui.warn(&format!("not applied: {e:#}"));
            Ok(ExitCode::from(INFEASIBLE))
        }
        done => done,
    }
}

fn apply_any(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if !args.dry_run {
        need_root("apply")?;
    }
    let is_spec = args.source.extension().is_some_and(|e| e == "toml");
    let is_domain = super::domain::is_config(&args.source);
    anyhow::ensure!(
        (is_spec && !is_domain) || args.margin.option().is_none(),
        "{} is a plan already: give --margin to `rtvirtio plan`, or apply the spec",
        args.source.display()
    );
    if is_domain {
        return super::domain::apply(&args.source, args.dry_run, global, ui);
    }
    if args.cpu_only {
        return cpu_only(args, global, ui);
    }
    let saved = if is_spec { None } else { Some(load(&args.source)?) };
    let spec_path = match (&args.spec, &saved) {
        (Some(spec), _) => spec.clone(),
        (None, None) => args.source.clone(),
        (None, Some(plan)) => match &plan.spec_file {
            Some(spec) => PathBuf::from(spec),
            None => bail!("say which spec the plan {} is for: --spec FILE.toml", args.source.display()),
        },
    };
    let site = Site::find(site::load_spec(&spec_path)?, global)?;
    let plan = match saved {
        Some(plan) => {
            // It may have been made, or edited, for another machine than this one.
            let options = site.plan_options(site.config()?, &ModelChoice::formula(ModelKind::Slice))?;
            // The models know no limits on bytes; written by hand they act all the same.
            let bytes = |knob: &Knob| {
                matches!(knob, Knob::VmLimit { limit: LimitKind::ReadBps | LimitKind::WriteBps, .. })
            };
            let known: Vec<_> = plan.settings.iter().filter(|s| !bytes(&s.knob)).cloned().collect();
            check_actable(&site.spec, options.mode, &options.start, &known)?;
            plan
        }
        None => plan_now(args, &site, global, ui)?,
    };
    if args.dry_run {
        let root = Root::default();
        let machine = Machine::new(&root, &GuestAgents);
        let mut writes = resolve(&plan, &site.binding()?, &machine)?;
        append(&mut writes, cpu_plan::writes(&site.spec, &args.cpu_profiles, global, ui)?.0);
        let lines = dry_run(&writes, &machine)?;
        show(ui, &lines, || match lines.as_slice() {
            [] => "nothing to change: the settings in force are the plan's\n".to_owned(),
            lines => lines.iter().map(|line| format!("{line}\n")).collect(),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    if !plan.feasible && !args.compromise {
        let reason = plan.infeasible.as_ref().map_or("", |i| i.reason.as_str());
        ui.warn(&format!("not applied: {reason}. Apply the compromise anyway with --compromise"));
        return Ok(ExitCode::from(INFEASIBLE));
    }
    // Before contracts are computed beside those that are in force.
    refuse_in_force(global)?;
    let (cpu, held) = cpu_plan::writes(&site.spec, &args.cpu_profiles, global, ui)?;
    let count = apply_with(&plan, (cpu, &held), &site, global, ui)?;
    cpu_plan::explain(&held, ui);
    ui.step(&format!("applied {count} settings; put them back with `rtvirtio revert`"));
    if ui.json {
        return status(global, ui);
    }
    Ok(ExitCode::SUCCESS)
}

fn plan_now(args: &ApplyArgs, site: &Site, global: &Global, ui: &Ui) -> anyhow::Result<Plan> {
    let profile = load_profile(&site.spec, args.profile.as_deref(), global)?;
    let found = site.config()?;
    let choice = ModelChoice::find(args.model, &site.spec, &profile, global, ui)?;
    let mut options = site.plan_options(found.clone(), &choice)?;
    options.enough = args.margin.enough();
    let plan = plan(&site.spec, &profile, &options)?;
    if !ui.json && !args.dry_run {
        print!("{}", text::plan(&plan, &old_values(&site.spec, &found, &plan), &style()));
    }
    Ok(plan)
}

/// Applies a plan and returns how many settings it has.
pub fn apply_plan(plan: &Plan, site: &Site, global: &Global, ui: &Ui) -> anyhow::Result<usize> {
    apply_with(plan, (Vec::new(), &[]), site, global, ui)
}

/// The same with further writes, in one journal.
fn apply_with(
    plan: &Plan,
    (more, held): (Vec<Write>, &[VmCpu]),
    site: &Site,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<usize> {
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let session = Session::open(&global.state_dir)?;
    let mut writes = resolve(plan, &site.binding()?, &machine)?;
    append(&mut writes, more);
    // Before the journal: a plan file without a journal means nothing, see `plan_in_force`.
    if !session.in_force()? {
        write_file(&global.state_dir.join(PLAN_FILE), &serde_json::to_vec_pretty(plan)?)?;
        cpu_plan::save(held, &global.state_dir)?;
    }
    carry_out(&session, &writes, &machine, ui)
}

/// `apply --cpu-only`: the contracts alone; no plan is involved, so none is saved.
fn cpu_only(args: &ApplyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let spec = site::load_spec(&args.source)?;
    if !args.dry_run {
        refuse_in_force(global)?;
    }
    let (writes, held) = cpu_plan::writes(&spec, &args.cpu_profiles, global, ui)?;
    if writes.is_empty() {
        bail!("no VM of {} has `cpu`: there is nothing to apply", args.source.display());
    }
    if args.dry_run {
        cpu_plan::explain(&held, ui);
        let lines = dry_run(&writes, &machine)?;
        show(ui, &lines, || lines.iter().map(|line| format!("{line}\n")).collect())?;
        return Ok(ExitCode::SUCCESS);
    }
    let session = Session::open(&global.state_dir)?;
    if !session.in_force()? {
        forget_plan(&global.state_dir)?;
        cpu_plan::save(&held, &global.state_dir)?;
    }
    let count = carry_out(&session, &writes, &machine, ui)?;
    cpu_plan::explain(&held, ui);
    ui.step(&format!("applied {count} settings; put them back with `rtvirtio revert`"));
    if ui.json {
        show(ui, &held, String::new)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn refuse_in_force(global: &Global) -> Result<(), ApplyError> {
    let path = global.state_dir.join(JOURNAL_FILE);
    if Session::open(&global.state_dir)?.in_force()? { Err(ApplyError::InForce { path }) } else { Ok(()) }
}

/// Applies writes and returns how many there are.
fn carry_out(session: &Session, writes: &[Write], machine: &Machine<'_>, ui: &Ui) -> anyhow::Result<usize> {
    match session.apply(writes, machine, &mut Watch(ui)) {
        Ok(applied) => Ok(applied.knobs.len()),
        Err(ApplyError::RolledBack { cause, rollback })
            if matches!(*cause, ApplyError::Interrupted) && rollback.done =>
        {
            Err(Cancelled.into())
        }
        Err(e) => Err(e.into()),
    }
}

/// The plan whose journal is in force.
pub fn plan_in_force(state_dir: &Path) -> Option<Plan> {
    state_dir.join(JOURNAL_FILE).exists().then(|| load(&state_dir.join(PLAN_FILE)).ok()).flatten()
}

/// Forgets the plan and the contracts of a journal that is gone: the next journal is not of these.
pub fn forget_plan(state_dir: &Path) -> anyhow::Result<()> {
    for file in [PLAN_FILE, IN_FORCE_FILE] {
        let path = state_dir.join(file);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Ctrl-C between two writes puts everything back.
struct Watch<'a>(&'a Ui);

impl Observer for Watch<'_> {
    fn step(&mut self, _: Step) {}

    fn stop(&mut self) -> bool {
        self.0.is_cancelled()
    }
}

/// `rtvirtio status`.
pub fn status(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let root = Root::default();
    let status = rtvirtio_apply::status(&global.state_dir, &Machine::new(&root, &GuestAgents))?;
    let domain = super::domain::status(global);
    let mut value = serde_json::to_value(&status)?;
    if let Some(pids) = super::domain::pids(global) {
        if value.is_null() {
            value = serde_json::json!({});
        }
        value["domain"] = serde_json::json!({ "pids": pids });
    }
    show(ui, &value, || {
        let plan = match &status {
            None if domain.is_some() => String::new(),
            None => "no plan is in force\n".to_owned(),
            Some(status) => status_text(status, plan_in_force(&global.state_dir).as_ref()),
        };
        plan + domain.as_deref().unwrap_or_default()
    })?;
    Ok(ExitCode::SUCCESS)
}

fn status_text(status: &Status, plan: Option<&Plan>) -> String {
    let mut out = String::new();
    let scheme = plan.map_or("a plan", |p| p.scheme.as_str());
    let state = match (status.complete, status.reverting) {
        (true, false) => "in force",
        (_, true) => "half put back: run `rtvirtio revert` again",
        (false, false) => "half applied: run `rtvirtio revert`",
    };
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{scheme}: {state} (applied by process {})", status.pid);
    if status.rebooted {
        let _ = writeln!(out, "the host was restarted since: the kernel has forgotten its settings");
    }
    for knob in &status.knobs {
        let old = knob.old.as_deref().unwrap_or("-");
        let state = match &knob.state {
            KnobState::InForce => "in force".to_owned(),
            KnobState::Original => "as before the plan".to_owned(),
            KnobState::Changed { found } => format!("CHANGED by somebody else to {}", terminal(found, false)),
            KnobState::Gone { why } => format!("gone: {why}"),
            KnobState::Unknown { error } => format!("not readable: {error}"),
        };
        let _ = writeln!(out, "  {:<28} {old:>12} -> {:<12} {state}", knob.knob, knob.new);
    }
    out
}

/// `rtvirtio revert`.
pub fn revert(args: &RevertArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("revert")?;
    let on_conflict = match (args.force, args.keep) {
        (true, _) => OnConflict::Force,
        (_, true) => OnConflict::Accept,
        _ => OnConflict::Report,
    };
    let stopped = super::domain::stop(global, args.force)?;
    if stopped {
        ui.step("the I/O domain is stopped");
    }
    let Some(reverted) = revert_with(global, on_conflict)? else {
        if stopped && !ui.json {
            return Ok(ExitCode::SUCCESS);
        }
        show(ui, &Option::<Reverted>::None, || "no plan is in force: nothing to put back\n".to_owned())?;
        return Ok(ExitCode::SUCCESS);
    };
    show(ui, &reverted, || revert_text(&reverted))?;
    Ok(if reverted.done { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) })
}

fn revert_text(reverted: &Reverted) -> String {
    let mut out = String::new();
    for o in &reverted.outcomes {
        let old = o.old.as_deref().unwrap_or("(absent)");
        let fate = match &o.fate {
            Fate::Restored { from } => format!("{from} -> {old}"),
            Fate::Untouched => format!("{old} already"),
            Fate::Conflict { found } => {
                format!("left alone: somebody else set {found} (it was {old}; --force puts it back)")
            }
            Fate::Blocked { by } => format!("left alone because of {by}"),
            Fate::Accepted => "left as somebody else set it".to_owned(),
            Fate::Gone { why } => format!("gone: {why}"),
            Fate::Failed { error } => format!("FAILED: {error}"),
        };
        let _ = writeln!(out, "  {:<28} {fate}", o.knob);
    }
    let _ = writeln!(out, "{}", reverted.summary());
    out
}

fn revert_with(global: &Global, on_conflict: OnConflict) -> anyhow::Result<Option<Reverted>> {
    if !global.state_dir.exists() {
        return Ok(None);
    }
    let root = Root::default();
    let session = Session::open(&global.state_dir)?;
    let reverted = session.revert(on_conflict, &Machine::new(&root, &GuestAgents), &mut Silent)?;
    if reverted.as_ref().is_some_and(|r| r.done) {
        // Without a journal they mean nothing.
        let _ = forget_plan(&global.state_dir);
    }
    Ok(reverted)
}

/// Puts everything back and says how many settings there were; an error when something was left.
pub fn revert_all(global: &Global) -> anyhow::Result<usize> {
    let Some(reverted) = revert_with(global, OnConflict::Report).context("putting settings back")? else {
        return Ok(0);
    };
    if reverted.done { Ok(reverted.outcomes.len()) } else { bail!(reverted.summary()) }
}
