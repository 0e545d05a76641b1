//! `rtvirtio apply`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use rtvirtio_apply::{
    ApplyError, JOURNAL_FILE, Machine, Observer, Session, StateDir, Step, Write, append, dry_run, resolve,
};
use rtvirtio_kernel::Root;
use rtvirtio_model::ModelKind;
use rtvirtio_planner::{Knob, LimitKind, Plan, check_actable, plan};
use rtvirtio_report::text;

use super::plan::{INFEASIBLE, load, load_profile, old_values, parse};
use super::status::status;
use super::{need_root, show, style, write_state};
use crate::args::{ApplyArgs, Global};
use crate::cpu_plan::{self, IN_FORCE_FILE, VmCpu};
use crate::guests::GuestAgents;
use crate::model_choice::ModelChoice;
use crate::site::{self, Site};
use crate::ui::{Cancelled, Ui};

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
    if args.dry_run {
        site.warn_without_bfq(ui);
    } else {
        // Before the search, which knows only what the device offers. Without BFQ the plan is made from what there is.
        site.load_bfq();
    }
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
        // What it says of the settings was compared when they were written.
        status(global, ui)?;
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
        write_state(&global.state_dir, PLAN_FILE, &serde_json::to_vec_pretty(plan)?)?;
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
            ui.step(&rollback.summary());
            Err(Cancelled.into())
        }
        Err(e) => Err(e.into()),
    }
}

/// The plan whose journal is there; `None` without a journal, and for a journal without a plan, as that of `apply --cpu-only`.
///
/// # Errors
/// When that cannot be told.
pub fn plan_in_force(state_dir: &Path) -> anyhow::Result<Option<Plan>> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(None) };
    let at = |name: &'static str| move || state_dir.join(name).display().to_string();
    if !dir.exists(JOURNAL_FILE).with_context(at(JOURNAL_FILE))? {
        return Ok(None);
    }
    match dir.read(PLAN_FILE) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => parse(&state_dir.join(PLAN_FILE), &read.with_context(at(PLAN_FILE))?).map(Some),
    }
}

/// Forgets the plan and the contracts of a journal that is gone: the next journal is not of these.
pub fn forget_plan(state_dir: &Path) -> anyhow::Result<()> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(()) };
    for file in [PLAN_FILE, IN_FORCE_FILE] {
        dir.remove(file).with_context(|| format!("cannot remove {}", state_dir.join(file).display()))?;
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
