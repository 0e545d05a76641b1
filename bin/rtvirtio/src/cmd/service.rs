//! Text of the service's state.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_console::CONFLICT;
use rtvirtio_daemon::observe::ObservedTargets;
use rtvirtio_daemon::{PlacementSnapshot, PlanSnapshot, Snapshot, VmSnapshot};
use rtvirtio_report::terminal;
use serde::Serialize;

/// A number of things.
fn count(n: usize, of: &str) -> String {
    format!("{n} {of}{}", if n == 1 { "" } else { "s" })
}

/// Exit code for contracts that are not all held as asked.
pub fn exit_code(status: &Snapshot) -> ExitCode {
    if status.is_whole() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) }
}

/// Name of an enum variant in JSON, with spaces.
pub fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().replace('_', " ")
}

/// Lines for each VM and each setting changed by another program; with `origins` also the file or
/// metadata of each contract.
pub fn vm_lines(vms: &[&VmSnapshot], origins: bool) -> String {
    let mut out = String::new();
    let width = vms.iter().map(|vm| vm.name.chars().count()).fold(20, usize::max);
    for vm in vms {
        let criticality = vm.criticality.map_or("-", |c| c.word());
        let why = vm.why.as_ref().map_or_else(String::new, |why| format!(": {}", terminal(why, false)));
        // Writing to a String cannot fail.
        let name = terminal(&vm.name, false);
        let _ = writeln!(out, "  {name:<width$} {criticality:<7} {}{why}", word(&vm.state));
        if let Some(origin) = vm.file.as_ref().filter(|_| origins) {
            let _ = writeln!(out, "    from {}", terminal(origin, false));
        }
        if let Some(other) = &vm.overrides {
            let other = terminal(other, false);
            let _ = writeln!(
                out,
                "    {other} has a contract of it too, which does not count: remove one of them"
            );
        }
        for drift in &vm.drift {
            let line = format!("    {}: CHANGED from {} to {}", drift.knob, drift.wanted, drift.found);
            let _ = writeln!(out, "{}", terminal(&line, false));
        }
    }
    out
}

/// Line of a VM: where its contract is written, and the verdict of each target.
pub fn shown(vm: &VmSnapshot, seen: &Result<ObservedTargets, String>) -> String {
    let mut out = vm_lines(&[vm], true);
    if vm.targets.is_empty() {
        return out;
    }
    let targets = match seen {
        Err(why) => Err(why.clone()),
        Ok(seen) => match seen.vms.get(&vm.name) {
            None => Err("not running, or not checked yet".to_owned()),
            Some(of) if of.targets.is_empty() => {
                Err(of.disks_unseen.clone().unwrap_or_else(|| "no request was seen yet".to_owned()))
            }
            Some(of) => Ok(of.lines()),
        },
    };
    match targets {
        Ok(lines) => lines.iter().for_each(|line| {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "    {}", terminal(line, false));
        }),
        Err(why) => {
            let _ = writeln!(out, "    targets not observed: {}", terminal(&why, false));
        }
    }
    out
}

/// Plan of the service; with `all` every setting of a waiting proposal.
pub fn plan_text(plan: &PlanSnapshot, all: bool) -> String {
    let why = plan.why.as_ref().map_or_else(String::new, |why| format!(": {}", terminal(why, false)));
    let mut out = format!("plan of the contracts: {}{why}\n", word(&plan.state));
    // Writing to a String cannot fail.
    if let (Some(reason), Some(since)) = (&plan.reason, &plan.since) {
        let vms = plan.vms.join(", ");
        let _ = writeln!(out, "  for {vms} since {since}: {}", terminal(reason, false));
    }
    if let Some(assumes) = &plan.assumes {
        let _ = writeln!(out, "  planned for: {}", terminal(assumes, false));
    }
    for device in &plan.unplanned {
        let _ = writeln!(out, "  {}", terminal(&device.message(), false));
        let _ = writeln!(out, "    nothing is promised for its tasks of {}", device.vms.join(", "));
    }
    for warning in &plan.warnings {
        let _ = writeln!(out, "  planning: {}", terminal(warning, false));
    }
    for task in &plan.given_up {
        let _ = writeln!(out, "  {task}: its target is predicted to be missed");
    }
    for drift in &plan.drift {
        let found = terminal(&drift.found, false);
        let _ = writeln!(out, "    {}: CHANGED from {} to {found}", drift.knob, drift.wanted);
    }
    for knob in &plan.yielded {
        let _ = writeln!(out, "    {knob}: left to another program");
    }
    let Some(proposal) = &plan.proposal else { return out };
    let (n, reason) = (proposal.changes.len(), terminal(&proposal.reason, false));
    let _ = writeln!(out, "  another plan, which changes {}: {reason}", count(n, "setting"));
    if !all {
        out.push_str("    `rtvirtio contract plan` shows it\n");
        return out;
    }
    for change in &proposal.changes {
        let old = terminal(change.old.as_deref().unwrap_or("(absent)"), false);
        let _ = writeln!(out, "    {:<28} {old} -> {}", change.knob, change.new);
    }
    for effect in &proposal.effects {
        let _ =
            writeln!(out, "    {:<20} {:<7} {}", effect.vm, effect.criticality.word(), effect.change.word());
    }
    for task in &proposal.given_up {
        let _ = writeln!(out, "    {task}: its target is predicted to be missed");
    }
    for reason in &proposal.reasons {
        let _ = writeln!(out, "    {}", terminal(reason, false));
    }
    out.push_str("  `rtvirtio contract plan accept` puts it in force, `refuse` drops it\n");
    out
}

/// Inventories published to OpenStack's Placement.
fn placement_text(of: &PlacementSnapshot) -> String {
    let since = match (&of.published, of.is_dry) {
        (_, true) => "nothing is published: the service only observes".to_owned(),
        (Some(time), false) => format!("published at {time}"),
        (None, false) => "nothing is published yet".to_owned(),
    };
    let mut out = format!("Placement, provider {}: {since}\n", terminal(&of.provider, false));
    for (class, i) in &of.inventories {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {class}: {} of {} reserved", i.reserved, i.total);
    }
    for words in of.problem.iter().chain(&of.notes) {
        let _ = writeln!(out, "  {}", terminal(words, false));
    }
    out
}

/// State of the whole service.
pub fn text(status: &Snapshot) -> String {
    let vms: Vec<&VmSnapshot> = status.vms.iter().collect();
    let mut out = format!(
        "rtvirtiod (process {}, {}): {}\n",
        status.pid,
        word(&status.mode),
        count(vms.len(), "contract")
    );
    out += &vm_lines(&vms, false);
    if let Some(plan) = &status.plan {
        out += &plan_text(plan, false);
    }
    if let Some(placement) = &status.placement {
        out += &placement_text(placement);
    }
    for of in &status.arrivals {
        let state = of.why.as_ref().map_or_else(|| "reserved".to_owned(), |why| format!("refused: {why}"));
        let in_libvirt = of.domain.as_ref().filter(|name| **name != of.vm);
        let in_libvirt = in_libvirt.map_or_else(String::new, |name| format!(" (domain {name})"));
        let [vm, state] = [of.vm.clone() + &in_libvirt, state].map(|text| terminal(&text, false));
        let _ = writeln!(out, "  {vm} is about to arrive, until {}: {state}", of.until);
    }
    for fault in &status.faults {
        let _ = writeln!(out, "  {} is not used: {}", fault.file, terminal(&fault.why, true));
    }
    for problem in &status.problems {
        let _ = writeln!(out, "  {}", terminal(problem, false));
    }
    out
}
