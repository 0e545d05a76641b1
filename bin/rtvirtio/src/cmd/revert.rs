//! `rtvirtio revert`: the settings, and the I/O domain, each by itself.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context, bail};
use rtvirtio_apply::{Fate, Machine, OnConflict, Reverted, Session, Silent, StateDir};
use rtvirtio_kernel::Root;
use rtvirtio_report::terminal;

use super::apply::forget_plan;
use super::domain::{self, Fate as DomainFate};
use super::{need_root, show};
use crate::args::{Global, RevertArgs};
use crate::guests::GuestAgents;
use crate::ui::Ui;

/// Exit code when something is not as applied, or was left and not put back: a setting that was
/// changed since, a domain with guests.
pub const CONFLICT: u8 = 3;

/// What was done, part by part.
struct Report {
    /// The settings; `None` when no plan was in force.
    settings: anyhow::Result<Option<Reverted>>,
    domain: DomainFate,
}

/// `rtvirtio revert`.
pub fn revert(args: &RevertArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("revert")?;
    let on_conflict = match (args.force, args.keep) {
        (true, _) => OnConflict::Force,
        (_, true) => OnConflict::Accept,
        _ => OnConflict::Report,
    };
    let report = match open(global)? {
        // The settings first: a domain that has to stay must not keep them from going back.
        Some(session) => Report {
            settings: put_back(&session, on_conflict, global),
            domain: domain::stop(global, args.stop_domain),
        },
        None => Report { settings: Ok(None), domain: DomainFate::None },
    };
    show(ui, &report.json()?, || report.text())?;
    if let Err(e) = report.settings {
        // The machine-readable form has it already.
        return if ui.json { Ok(ExitCode::FAILURE) } else { Err(e) };
    }
    Ok(if report.is_done() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) })
}

impl Report {
    fn is_done(&self) -> bool {
        let settings = self.settings.as_ref().is_ok_and(|s| s.as_ref().is_none_or(|r| r.done));
        settings && self.domain.is_settled()
    }

    /// The settings' part as it is, with `done` for both parts and the domain's part.
    fn json(&self) -> anyhow::Result<serde_json::Value> {
        let mut value = match &self.settings {
            Ok(reverted) => serde_json::to_value(reverted.clone().unwrap_or_default())?,
            Err(e) => serde_json::json!({ "error": format!("{e:#}") }),
        };
        value["plan"] = (!matches!(self.settings, Ok(None))).into();
        value["done"] = self.is_done().into();
        value["domain"] = serde_json::to_value(&self.domain)?;
        Ok(value)
    }

    fn text(&self) -> String {
        let mut out = String::new();
        if let Ok(Some(reverted)) = &self.settings {
            lines(reverted, &mut out);
        }
        // Writing to a String cannot fail.
        match &self.domain {
            DomainFate::None => {}
            DomainFate::Stopped { pids } if pids.is_empty() => {
                let _ = writeln!(out, "the I/O domain had ended; its files are removed");
            }
            DomainFate::Stopped { .. } => {
                let _ = writeln!(out, "the I/O domain is stopped");
            }
            DomainFate::Left { pids, why } => {
                let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
                let process =
                    if pids.is_empty() { String::new() } else { format!(" (process {})", pids.join(", ")) };
                let _ = writeln!(out, "the I/O domain{process} was left: {}", terminal(why, false));
            }
        }
        match (&self.settings, &self.domain) {
            (Err(_), _) => {}
            (Ok(None), DomainFate::None) => out.push_str("no plan is in force: nothing to put back\n"),
            (Ok(None), _) => {}
            // "everything was put back" is said of all that `apply` did, or not at all.
            (Ok(Some(reverted)), DomainFate::Left { .. }) if reverted.done => {
                out.push_str("every setting was put back, the I/O domain was not\n");
            }
            (Ok(Some(reverted)), _) => {
                let _ = writeln!(out, "{}", reverted.summary());
            }
        }
        out
    }
}

/// One line for each setting.
fn lines(reverted: &Reverted, out: &mut String) {
    for o in &reverted.outcomes {
        let old = o.old.as_deref().unwrap_or("(absent)");
        let fate = match &o.fate {
            Fate::Restored { from } => format!("{from} -> {old}"),
            Fate::Untouched => format!("{old} already"),
            Fate::Conflict { found } => {
                format!("left alone: changed since to {found} (it was {old}; --force puts it back)")
            }
            Fate::Blocked { by } => format!("left alone because of {by}"),
            Fate::Accepted => "left as it was changed since".to_owned(),
            Fate::Gone { why } => format!("gone: {why}"),
            Fate::Failed { error } => format!("FAILED: {error}"),
        };
        let _ = writeln!(out, "  {:<28} {fate}", o.knob);
    }
}

/// Locks the state directory; `None` when there is none, and so nothing that was applied.
fn open(global: &Global) -> anyhow::Result<Option<Session>> {
    match StateDir::find(&global.state_dir)? {
        Some(_) => Ok(Some(Session::open(&global.state_dir)?)),
        None => Ok(None),
    }
}

fn put_back(session: &Session, on_conflict: OnConflict, global: &Global) -> anyhow::Result<Option<Reverted>> {
    let root = Root::default();
    let mut reverted = session.revert(on_conflict, &Machine::new(&root, &GuestAgents), &mut Silent)?;
    if let Some(reverted) = reverted.as_mut().filter(|r| r.done) {
        // Without a journal they mean nothing, so the settings are back all the same.
        if let Err(e) = forget_plan(&global.state_dir) {
            reverted.warnings.push(format!("{e:#}"));
        }
    }
    Ok(reverted)
}

/// Puts every setting back and says how many there were; an error when something was left.
pub fn revert_all(global: &Global) -> anyhow::Result<usize> {
    let Some(session) = open(global)? else { return Ok(0) };
    let Some(reverted) = put_back(&session, OnConflict::Report, global).context("putting settings back")?
    else {
        return Ok(0);
    };
    if reverted.done { Ok(reverted.outcomes.len()) } else { bail!(reverted.summary()) }
}
