//! `rtvirtio revert`: the settings, and the I/O domain, each by itself.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use rtvirtio_apply::{Fate, OnConflict, Reverted};
use rtvirtio_console::{CONFLICT, Global, Ui, need_root, show};
use rtvirtio_kernel::Root;
use rtvirtio_learn::process_vms;
use rtvirtio_report::terminal;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::apply::{open_session, put_back};
use rtvirtio_workflow::domain::{self, Fate as DomainFate};
use rtvirtio_workflow::leftovers;

use crate::args::RevertArgs;

/// Outcome, part by part.
struct Report {
    /// The settings; `None` when no plan was in force.
    settings: rtvirtio_workflow::Result<Option<Reverted>>,
    domain: DomainFate,
    /// Cgroups that processes which are gone had left.
    leftovers: Vec<PathBuf>,
}

/// `rtvirtio revert`.
pub fn revert(args: &RevertArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("revert")?;
    let on_conflict = match (args.force, args.keep) {
        (true, _) => OnConflict::Force,
        (_, true) => OnConflict::Accept,
        _ => OnConflict::Report,
    };
    let dirs = &global.dirs();
    let report = match open_session(dirs)? {
        // The settings first: a domain that has to stay must not keep them from going back.
        Some(session) => Report {
            settings: put_back(&session, on_conflict, dirs),
            domain: domain::stop(dirs, args.stop_domain),
            leftovers: remove_leftovers(ui),
        },
        None => Report { settings: Ok(None), domain: DomainFate::None, leftovers: remove_leftovers(ui) },
    };
    show(ui, &report.json()?, || report.text())?;
    if let Err(e) = report.settings {
        // The machine-readable form has it already.
        return if ui.json { Ok(ExitCode::FAILURE) } else { Err(e.into()) };
    }
    Ok(if report.is_done() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) })
}

/// What cannot be removed keeps nothing else from going back.
fn remove_leftovers(ui: &Ui) -> Vec<PathBuf> {
    let root = Root::default();
    let contracts = leftovers::remove_contracts(&root).inspect_err(|e| ui.warn(&format!("{e:#}")));
    let learned = process_vms::remove_leftovers(&root).inspect_err(|e| ui.warn(&e.to_string()));
    [contracts.unwrap_or_default(), learned.unwrap_or_default()].concat()
}

/// Version of the form of `revert --json`.
const REVERT_SCHEMA: &str = "rtvirtio.revert.v1";

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
        value["schema"] = REVERT_SCHEMA.into();
        value["plan"] = (!matches!(self.settings, Ok(None))).into();
        value["done"] = self.is_done().into();
        value["leftovers"] = serde_json::to_value(&self.leftovers)?;
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
        for group in &self.leftovers {
            let group = group.display().to_string();
            let _ =
                writeln!(out, "removed {}, which a process that is gone had left", terminal(&group, false));
        }
        match (&self.settings, &self.domain) {
            (Err(_), _) => {}
            (Ok(None), DomainFate::None) => out.push_str("no plan is in force: nothing to put back\n"),
            (Ok(None), _) => {}
            // "everything was put back" is printed only when all changes of `apply` are reverted.
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
