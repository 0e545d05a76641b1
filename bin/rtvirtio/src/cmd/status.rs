//! `rtvirtio status`.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_apply::{KnobState, Machine, Status};
use rtvirtio_console::{CONFLICT, Global, Ui, show};
use rtvirtio_daemon::Snapshot;
use rtvirtio_daemon::api::Client;
use rtvirtio_kernel::Root;
use rtvirtio_report::terminal;
use rtvirtio_workflow::core_faults::core_faults;
use rtvirtio_workflow::covered::{self, InForce};
use rtvirtio_workflow::guests::GuestAgents;
use rtvirtio_workflow::holders::{self, OfResource};
use rtvirtio_workflow::plan_file::HostPlan;
use rtvirtio_workflow::{
    Progress, acting, domain, in_force, interrupts, scope_files, scopes, service_plan, started,
};

use super::domain::status_text;
use super::service;

/// Version of the form of `status --json`.
const STATUS_SCHEMA: &str = "rtvirtio.status.v1";

/// `rtvirtio status`. Changes nothing.
pub fn status(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let root = Root::default();
    let mut status = rtvirtio_apply::status(&global.state_dir, &Machine::new(&root, &GuestAgents))?;
    let domain = domain::status(&global.dirs());
    let ended = match &status {
        Some(_) => started::ended(&global.state_dir)?,
        None => Vec::new(),
    };
    // Errors of one part do not hide the others.
    let mut is_seen = true;
    let mut or_warn = |what: &str, e: rtvirtio_workflow::Error| {
        ui.warn(&format!("{what} is not known: {e:#}"));
        is_seen = false;
    };
    let mut uncovered: Vec<InForce> = Vec::new();
    for dir in [&global.state_dir, &global.dirs().held_plan()] {
        match covered::uncovered(dir) {
            Ok(found) => uncovered.extend(found),
            Err(e) => or_warn("what no setting acts on", e),
        }
    }
    if let Some(status) = &mut status {
        let counted = interrupts::count_by_vcpus(status, &global.dirs());
        counted.unwrap_or_else(|e| or_warn("whether interrupts are off the vCPUs' CPUs", e));
    }
    let faults = core_faults(&root, &global.dirs()).unwrap_or_else(|e| {
        or_warn("whether VMs have the CPUs of their `cores`", e);
        Vec::new()
    });
    let mut value = match &status {
        Some(status) => serde_json::to_value(status)?,
        None => serde_json::json!({}),
    };
    // A service that does not answer does not hide the other parts.
    let (service, unknown) = match Client::status_of(&global.run_dir) {
        Ok(service) => (service, None),
        Err(e) => (None, Some(e.to_string())),
    };
    // A service with another run directory may work on this state directory.
    let other_service = match (&service, &unknown) {
        (None, None) => rtvirtio_daemon::running(&global.dirs()).map_err(|e| format!("{e:#}")),
        _ => Ok(None),
    };
    let (other_service, unknown) = match other_service {
        Ok(other_service) => (other_service, unknown),
        Err(e) => (None, Some(format!("whether rtvirtiod runs is not known: {e}"))),
    };
    let mut kept = scope_files::vms(&global.dirs())?;
    kept.extend(service_plan::is_in_force(&global.dirs())?.then(|| scopes::HELD.to_owned()));
    let of_resources = holders::resources(&global.dirs()).unwrap_or_else(|e| {
        or_warn("what Pacemaker's agents hold", e);
        Vec::new()
    });
    let elsewhere = acting::elsewhere(&global.dirs()).unwrap_or_else(|e| {
        or_warn("what acts of other state directories", e);
        Vec::new()
    });
    value["schema"] = STATUS_SCHEMA.into();
    if !elsewhere.is_empty() {
        value["acting_elsewhere"] = serde_json::to_value(&elsewhere)?;
    }
    value["in_force"] =
        (status.is_some() || domain.is_some() || !kept.is_empty() || !of_resources.is_empty()).into();
    if let Some(service) = &service {
        value["service"] = serde_json::to_value(service)?;
    }
    if let Some(why) = &unknown {
        value["service_unknown"] = why.as_str().into();
    }
    if let Some(service) = &other_service {
        value["service_elsewhere"] = service.description().into();
    }
    if !kept.is_empty() {
        value["contracts_in_force"] = serde_json::to_value(&kept)?;
    }
    if !of_resources.is_empty() {
        value["contracts_of_resources"] = of_resources.iter().map(resource_value).collect();
    }
    if !ended.is_empty() {
        value["ended_vms"] = serde_json::to_value(&ended)?;
    }
    if !uncovered.is_empty() {
        value["uncovered"] = serde_json::to_value(&uncovered)?;
    }
    if !faults.is_empty() {
        value["cores"] = serde_json::to_value(&faults)?;
    }
    if let Some(domain) = &domain {
        value["domain"] = serde_json::to_value(domain)?;
    }
    // Only names the plan; the settings are in the journal.
    let plan = match in_force::plan(&global.state_dir) {
        Ok(plan) => plan,
        Err(e) => {
            ui.warn(&format!("the plan's file is not used: {e:#}"));
            None
        }
    };
    show(ui, &value, || {
        let plan = match &status {
            None if domain.is_some()
                || service.is_some()
                || unknown.is_some()
                || !kept.is_empty()
                || !of_resources.is_empty() =>
            {
                String::new()
            }
            None if !elsewhere.is_empty() => "no plan of this state directory is in force\n".to_owned(),
            None => "no plan is in force\n".to_owned(),
            Some(status) => {
                let ended: String = ended.iter().map(|vm| vm.message() + "\n").collect();
                let notes = interrupts::notes(status).into_iter().map(|note| note + "\n");
                text(status, plan.as_ref()) + &ended + &notes.collect::<String>()
            }
        };
        let service = match (&service, &unknown) {
            (Some(service), _) => service::text(service),
            (None, Some(why)) => {
                let kept = if kept.is_empty() { "none".to_owned() } else { kept.join(", ") };
                format!("{why}\n  contracts in force: {kept}\n")
            }
            (None, None) if other_service.is_some() => {
                let words = other_service
                    .as_ref()
                    .map(rtvirtio_daemon::RunningService::description)
                    .unwrap_or_default();
                let kept = if kept.is_empty() { "none".to_owned() } else { kept.join(", ") };
                format!(
                    "{words} manages the contracts of this state directory: use its --run-dir\n  contracts in force: {kept}\n"
                )
            }
            (None, None) if kept.is_empty() => String::new(),
            (None, None) => format!(
                "contracts in force, and rtvirtiod does not run, so that nothing keeps them: {}\n",
                kept.join(", ")
            ),
        };
        let uncovered: String = uncovered.iter().map(|of| terminal(&of.to_string(), false) + "\n").collect();
        let elsewhere: String = elsewhere.iter().map(|of| terminal(&of.to_string(), false) + "\n").collect();
        let agents: String = of_resources.iter().map(resource_text).collect();
        let faults: String = faults.iter().map(|of| terminal(&of.text, false) + "\n").collect();
        plan + &uncovered
            + &faults
            + &elsewhere
            + &service
            + &agents
            + &domain.as_ref().map(status_text).unwrap_or_default()
    })?;
    let whole = status.as_ref().is_none_or(|s| Count::from_status(s).is_whole(s))
        && ended.is_empty()
        && uncovered.iter().all(|of| of.void.is_empty())
        && elsewhere.is_empty()
        && faults.is_empty()
        && domain.is_none_or(|d| d.runs())
        && unknown.is_none()
        && is_seen
        && of_resources
            .iter()
            .all(|of| Count::from_status(&of.status).is_whole(&of.status) && !of.has_ended())
        && service.as_ref().map_or(kept.is_empty(), Snapshot::is_whole);
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) })
}

/// Contract of a cluster's resource agent, as JSON.
fn resource_value(of: &OfResource) -> serde_json::Value {
    let is_whole = Count::from_status(&of.status).is_whole(&of.status);
    serde_json::json!({
        "resource": of.resource, "vms": of.names(), "whole": is_whole, "ended": of.has_ended(),
    })
}

fn resource_text(of: &OfResource) -> String {
    let count = Count::from_status(&of.status);
    let ended = if of.has_ended() { "; the VM that it was applied to has ended" } else { "" };
    let cut = if of.status.is_whole() { "" } else { "; half applied, or half put back" };
    format!(
        "contract of {}: {}, held by resource {} of Pacemaker{ended}{cut}\n",
        terminal(&of.names().join(", "), false),
        count.text(),
        terminal(&of.resource, false)
    )
}

/// Number of settings by state.
#[derive(Default)]
struct Count {
    in_force: usize,
    /// Changed since, or still as before the plan.
    other: usize,
    unreadable: usize,
    gone: usize,
}

impl Count {
    fn from_status(status: &Status) -> Self {
        let mut count = Self::default();
        for knob in &status.knobs {
            *match &knob.state {
                KnobState::InForce => &mut count.in_force,
                KnobState::Original | KnobState::Changed { .. } => &mut count.other,
                KnobState::Unknown { .. } => &mut count.unreadable,
                KnobState::Gone { .. } => &mut count.gone,
            } += 1;
        }
        count
    }

    /// Whether all settings are as applied. Settings of an ended thread do not count: threads end
    /// all the time. VMs that have ended are counted by [`started::ended`].
    fn is_whole(&self, status: &Status) -> bool {
        status.is_whole()
            && self.other == 0
            && self.unreadable == 0
            && (self.in_force > 0 || status.knobs.is_empty())
    }

    fn text(&self) -> String {
        let of = |n: usize, what: &str| (n > 0).then(|| format!("{n} {what}"));
        let all = self.in_force + self.other + self.unreadable + self.gone;
        let parts: Vec<String> = [
            of(self.other, "not as applied"),
            of(self.unreadable, "not readable"),
            of(self.gone, "gone with their device, cgroup, thread or guest"),
        ]
        .into_iter()
        .flatten()
        .collect();
        match parts.as_slice() {
            [] if all == 1 => "in force, 1 setting".to_owned(),
            [] => format!("in force, {all} settings"),
            parts => format!("{} of {all} settings in force, {}", self.in_force, parts.join(", ")),
        }
    }
}

fn text(status: &Status, plan: Option<&HostPlan>) -> String {
    let mut out = String::new();
    // CPU contracts, limits and a running measurement have no plan.
    let scheme = plan.map_or("no plan, but settings", HostPlan::scheme_name);
    let count = Count::from_status(status).text();
    let state = match (status.complete, status.reverting) {
        (_, true) => format!("HALF PUT BACK ({count}): run `rtvirtio revert` again"),
        _ if status.leftover => format!("LEFT BY A REVERT ({count}): run `rtvirtio revert` again"),
        (true, false) => count,
        (false, false) => format!("HALF APPLIED ({count}): run `rtvirtio revert`"),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{scheme}: {state} (applied by process {})", status.pid);
    if status.rebooted {
        let _ = writeln!(out, "the host was restarted since: the kernel has forgotten its settings");
    }
    let names = status.knobs.iter().map(|knob| knob.knob.to_string().chars().count());
    let width = names.fold(28, usize::max);
    for knob in &status.knobs {
        let old = knob.old.as_deref().unwrap_or("-");
        let state = match &knob.state {
            KnobState::InForce => "in force".to_owned(),
            KnobState::Original => "as before the plan".to_owned(),
            KnobState::Changed { found } => format!("CHANGED to {found}"),
            KnobState::Gone { why } => format!("gone: {why}"),
            KnobState::Unknown { error } => format!("NOT READABLE: {error}"),
        };
        let line = format!("  {:<width$} {old:>12} -> {:<12} {state}", knob.knob, knob.new);
        let _ = writeln!(out, "{}", terminal(&line, false));
    }
    out
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
