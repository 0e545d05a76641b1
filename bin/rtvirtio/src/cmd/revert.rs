//! `rtvirtio revert`: settings, contracts and the I/O domain, each reverted independently.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use rtvirtio_apply::{Fate, OnConflict, Reverted};
use rtvirtio_console::{CONFLICT, Global, Ui, need_root, show};
use rtvirtio_kernel::Root;
use rtvirtio_learn::process_vms;
use rtvirtio_report::terminal;
use rtvirtio_workflow::acting::{self, Acting};
use rtvirtio_workflow::apply::{open_session, put_back};
use rtvirtio_workflow::domain::{self, Fate as DomainFate};
use rtvirtio_workflow::holders::{self, OfResource};
use rtvirtio_workflow::leftovers;
use rtvirtio_workflow::scope_files;
use rtvirtio_workflow::scopes::{self, Scopes};
use rtvirtio_workflow::service_plan;
use rtvirtio_workflow::{Dirs, Progress as _};

use crate::args::RevertArgs;

/// Outcome of each part of `revert`.
struct Report {
    /// Settings of the plan; `None` when no plan was in force.
    settings: rtvirtio_workflow::Result<Option<Reverted>>,
    /// Contracts of the service, VM by VM.
    contracts: rtvirtio_workflow::Result<Contracts>,
    domain: DomainFate,
    /// Removed cgroups of processes that have ended.
    leftovers: Vec<PathBuf>,
    /// Settings in force of other state directories, which this journal does not have.
    elsewhere: Vec<Acting>,
    /// Whether other state directories could be read.
    is_seen: bool,
}

pub fn revert(args: &RevertArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("revert")?;
    let on_conflict = match (args.force, args.keep) {
        (true, _) => OnConflict::Force,
        (_, true) => OnConflict::Accept,
        _ => OnConflict::Report,
    };
    let dirs = &global.dirs();
    let report = match open_session(dirs)? {
        // Settings first: they are put back even if the I/O domain has to stay.
        Some(session) => {
            let settings = put_back(&session, on_conflict, dirs);
            // Contracts are changed under the same lock.
            drop(session);
            let contracts = contracts(dirs, on_conflict);
            let domain = domain::stop(dirs, args.stop_domain);
            let (leftovers, (elsewhere, is_seen)) = (remove_leftovers(ui), elsewhere(dirs, ui));
            Report { settings, contracts, domain, leftovers, elsewhere, is_seen }
        }
        None => {
            let (leftovers, (elsewhere, is_seen)) = (remove_leftovers(ui), elsewhere(dirs, ui));
            let (contracts, domain) = (Ok(Contracts::default()), DomainFate::None);
            Report { settings: Ok(None), contracts, domain, leftovers, elsewhere, is_seen }
        }
    };
    if let Ok(Contracts { unseen: Some(why), .. }) = &report.contracts {
        ui.warn(why);
    }
    let done = report.is_done();
    show(ui, &report.json()?, || report.text())?;
    if let Some(e) = report.settings.err().or(report.contracts.err()) {
        // The JSON output contains the error already.
        return if ui.json { Ok(ExitCode::FAILURE) } else { Err(e.into()) };
    }
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) })
}

/// Outcome for the service's contracts.
#[derive(Default)]
struct Contracts {
    put_back: Vec<(String, Reverted)>,
    /// Contracts not reverted, because a running service would apply them again.
    kept: Vec<String>,
    /// Description of that service.
    keeper: Option<String>,
    /// Contracts held by a cluster's resource agents: VM and resource.
    of_resources: Vec<(String, String)>,
    /// Error that prevented reading `of_resources`.
    unseen: Option<String>,
}

fn contracts(dirs: &Dirs, on_conflict: OnConflict) -> rtvirtio_workflow::Result<Contracts> {
    let of = |of: OfResource| of.names().into_iter().map(move |vm| (vm, of.resource.clone()));
    // An unreadable journal of an agent does not prevent other parts from being reverted.
    let (of_resources, unseen) = match holders::resources(dirs) {
        Ok(all) => (all.into_iter().flat_map(of).collect(), None),
        Err(e) => (Vec::new(), Some(format!("what Pacemaker's agents hold is not known: {e:#}"))),
    };
    if !scope_files::any_in_force(dirs)? {
        return Ok(Contracts { of_resources, unseen, ..Contracts::default() });
    }
    if let Some(service) = rtvirtio_daemon::running(dirs)? {
        let mut kept = scope_files::vms(dirs)?;
        kept.extend(service_plan::is_in_force(dirs)?.then(|| scopes::HELD.to_owned()));
        let keeper = Some(service.description());
        return Ok(Contracts { kept, keeper, of_resources, unseen, ..Contracts::default() });
    }
    let put_back = Scopes::lock(dirs)?.put_all_back(on_conflict)?;
    Ok(Contracts { put_back, of_resources, unseen, ..Contracts::default() })
}

/// Settings in force of other state directories, and whether these could be read: an error hides no
/// result.
fn elsewhere(dirs: &Dirs, ui: &Ui) -> (Vec<Acting>, bool) {
    match acting::elsewhere(dirs) {
        Ok(all) => (all, true),
        Err(e) => {
            ui.warn(&format!("what acts of other state directories is not known: {e:#}"));
            (Vec::new(), false)
        }
    }
}

/// Removes leftover cgroups; an error is reported and does not prevent the other parts.
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
        let contracts = self.contracts.as_ref().is_ok_and(|c| {
            let all_back = c.put_back.iter().all(|(_, r)| r.done);
            all_back && c.kept.is_empty() && c.of_resources.is_empty() && c.unseen.is_none()
        });
        settings && contracts && self.domain.is_settled() && self.elsewhere.is_empty() && self.is_seen
    }

    fn has_contracts(&self) -> bool {
        self.contracts
            .as_ref()
            .map_or(true, |c| !c.put_back.is_empty() || !c.kept.is_empty() || !c.of_resources.is_empty())
    }

    /// Outcome of the settings, extended by `done` for all parts and by the other parts.
    fn json(&self) -> anyhow::Result<serde_json::Value> {
        let mut value = match &self.settings {
            Ok(reverted) => serde_json::to_value(reverted.clone().unwrap_or_default())?,
            Err(e) => serde_json::json!({ "error": format!("{e:#}") }),
        };
        match &self.contracts {
            Ok(contracts) => {
                let of =
                    |(vm, reverted): &(String, Reverted)| Ok((vm.clone(), serde_json::to_value(reverted)?));
                let all = contracts.put_back.iter().map(of);
                value["contracts"] = all.collect::<serde_json::Result<serde_json::Map<_, _>>>()?.into();
                value["contracts_kept"] = serde_json::to_value(&contracts.kept)?;
                let of =
                    |(vm, resource): &(String, String)| serde_json::json!({ "vm": vm, "resource": resource });
                value["contracts_of_resources"] = contracts.of_resources.iter().map(of).collect();
            }
            Err(e) => value["contracts_error"] = format!("{e:#}").into(),
        }
        value["schema"] = REVERT_SCHEMA.into();
        value["plan"] = (!matches!(self.settings, Ok(None))).into();
        value["done"] = self.is_done().into();
        if !self.elsewhere.is_empty() {
            value["acting_elsewhere"] = serde_json::to_value(&self.elsewhere)?;
        }
        value["leftovers"] = serde_json::to_value(&self.leftovers)?;
        value["domain"] = serde_json::to_value(&self.domain)?;
        Ok(value)
    }

    fn text(&self) -> String {
        let mut out = String::new();
        if let Ok(Some(reverted)) = &self.settings {
            lines(reverted, &mut out);
        }
        let contracts = self.contracts.as_ref().ok();
        for (vm, reverted) in contracts.iter().flat_map(|c| &c.put_back) {
            // Writing to a String cannot fail.
            let of = if vm == scopes::HELD { "plan of the contracts" } else { "contract of" };
            let vm = if vm == scopes::HELD { "" } else { vm.as_str() };
            let _ = writeln!(out, "{}:", format!("{of} {vm}").trim_end());
            lines(reverted, &mut out);
            let _ = writeln!(out, "  {}", reverted.summary());
        }
        let kept = || contracts.iter().flat_map(|c| &c.kept);
        let keeper = contracts.and_then(|c| c.keeper.as_deref()).unwrap_or("rtvirtiod");
        if kept().any(|vm| vm == scopes::HELD) {
            let _ = writeln!(
                out,
                "plan of the contracts: {keeper} holds it: take `[plan]` out of its configuration, or stop it first"
            );
        }
        for vm in kept().filter(|vm| *vm != scopes::HELD) {
            let _ = writeln!(
                out,
                "contract of {vm}: {keeper} keeps it in force: `rtvirtio contract remove {vm}`, or stop rtvirtiod first"
            );
        }
        for (vm, resource) in contracts.iter().flat_map(|c| &c.of_resources) {
            let resource = terminal(resource, false);
            let _ = writeln!(
                out,
                "contract of {vm}: resource {resource} of Pacemaker holds it: stop the resource, or without a cluster \
                 `OCF_RESKEY_spec=- OCF_RESOURCE_INSTANCE={resource} rtvirtio-pacemaker agent stop`"
            );
        }
        // Writing to a String cannot fail.
        match &self.domain {
            DomainFate::None => {}
            DomainFate::Stopped { pids, kept } => {
                let what = if pids.is_empty() { "had ended; its files are removed" } else { "is stopped" };
                let _ = writeln!(out, "the I/O domain {what}");
                if let Some(kept) = kept {
                    let _ = writeln!(out, "{}", super::domain::kept_text(kept));
                }
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
        for of in &self.elsewhere {
            let _ = writeln!(out, "{}", terminal(&of.to_string(), false));
        }
        out + &self.summary()
    }

    /// Last line, which is "everything was put back" only where nothing was left; empty where the
    /// lines above say all.
    fn summary(&self) -> String {
        match (&self.settings, &self.domain) {
            (Ok(None), DomainFate::None) if self.is_done() && !self.has_contracts() => {
                "no plan is in force: nothing to put back\n".to_owned()
            }
            (Err(_) | Ok(None), _) => String::new(),
            (Ok(Some(reverted)), DomainFate::Left { .. }) if reverted.done => {
                "every setting was put back, the I/O domain was not\n".to_owned()
            }
            (Ok(Some(reverted)), _) if reverted.done && !self.is_done() => {
                "every setting of `rtvirtio apply` was put back; the rest was left\n".to_owned()
            }
            (Ok(Some(reverted)), _) if reverted.outcomes.iter().any(|o| matches!(o.fate, Fate::Accepted)) => {
                reverted.summary().replacen("everything was", "everything else was", 1) + "\n"
            }
            (Ok(Some(reverted)), _) => reverted.summary() + "\n",
        }
    }
}

/// Appends a line for each setting.
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
        // Both may have names of cgroups, threads and other programs.
        let _ = writeln!(out, "{}", terminal(&format!("  {:<28} {fate}", o.knob), false));
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::Outcome;

    use super::*;

    fn report(reverted: Reverted, kept: &[&str]) -> Report {
        let kept = kept.iter().map(|vm| (*vm).to_owned()).collect();
        Report {
            settings: Ok(Some(reverted)),
            contracts: Ok(Contracts { kept, ..Contracts::default() }),
            domain: DomainFate::None,
            leftovers: Vec::new(),
            elsewhere: Vec::new(),
            is_seen: true,
        }
    }

    #[test]
    fn everything_is_back_only_where_nothing_was_left() {
        let done = || Reverted { done: true, ..Reverted::default() };
        assert_eq!(report(done(), &[]).summary(), "everything was put back\n");
        let said = report(done(), &["plc"]).text();
        assert!(said.contains("keeps it in force") && said.ends_with("the rest was left\n"), "{said}");
        let unread = Report { is_seen: false, ..report(done(), &[]) };
        assert!(!unread.summary().contains("everything"), "{}", unread.summary());
        let none = Report { settings: Ok(None), ..report(done(), &[]) };
        assert!(none.summary().contains("nothing to put back"), "{}", none.summary());
        assert_eq!(Report { is_seen: false, ..none }.summary(), "");
        let (knob, path) = ("elevator of sda".to_owned(), "/sys/block/sda/queue/scheduler".to_owned());
        let accepted = Outcome { knob, path, old: None, fate: Fate::Accepted };
        let with_accepted = Reverted { outcomes: vec![accepted], ..done() };
        assert_eq!(report(with_accepted, &[]).summary(), "everything else was put back\n");
    }
}
