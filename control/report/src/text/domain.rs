//! The plan of an I/O domain as text.

use std::fmt::Write as _;

use rtvirtio_domain_plan::{DomainPlan, NetworkPlan};
use rtvirtio_spec::Direction;
use rtvirtio_units::Nanos;

use super::{Cell, Column, Paint, Style, Table};
use crate::terminal;

/// VMs and tasks without a promise, with the reasons.
#[must_use]
pub fn domain_refusals(plan: &DomainPlan, style: &Style) -> String {
    let ascii = style.ascii;
    let refused = plan.vms.iter().filter_map(|vm| Some((vm, vm.refused.as_ref()?)));
    let mut out: String = refused
        .map(|(vm, why)| format!("{}: no promise: {}\n", terminal(&vm.vm, ascii), terminal(why, ascii)))
        .collect();
    for (task, why) in plan.unpromised() {
        let line = format!("{}/{}: no promise: {why}", task.vm, task.task);
        out.push_str(&style.wrap(&style.clean(&line), 0));
    }
    out
}

fn promised(met: Option<bool>) -> Cell {
    let (word, paint) = match met {
        Some(true) => ("guaranteed", Some(Paint::Good)),
        Some(false) => ("NOT PROMISED", Some(Paint::Bad)),
        None => ("shares the rest", None),
    };
    Cell::painted(word, paint)
}

/// The plan of a network, flow by flow.
fn network_plan(plan: &NetworkPlan, style: &Style) -> String {
    let mut out = format!(
        "\nnetwork {}: link of {}Mbit/s, {} reserved\n",
        terminal(&plan.network, style.ascii),
        plan.link.0 * 8.0 / 1e6,
        plan.reserved
    );
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("flow"),
        Column::word("direction"),
        Column::number("target"),
        Column::number("worst case"),
        Column::word(""),
    ]);
    for flow in &plan.flows {
        t.row(vec![
            flow.vm.as_str().into(),
            flow.flow.as_str().into(),
            match flow.direction {
                Direction::Tx => "tx",
                Direction::Rx => "rx",
            }
            .into(),
            flow.target.map_or_else(|| "-".to_owned(), |t| t.latency.to_string()).into(),
            flow.bound.map_or_else(|| "-".to_owned(), |b| b.to_string()).into(),
            promised(flow.met),
        ]);
    }
    if plan.flows.is_empty() {
        out.push_str("no flow is declared: the ports share the link\n");
    } else {
        out.push_str(&t.draw(style));
    }
    if plan.flows.iter().any(|flow| flow.met == Some(true)) {
        out.push_str(&style.wrap(
            "guaranteed: from the VM's queue to the link, for frames within the declared rate and burst, if the link is no slower than declared",
            0,
        ));
    }
    for (name, why) in plan.unpromised() {
        out.push_str(&style.wrap(&style.clean(&format!("{name}: no promise: {why}")), 0));
    }
    out
}

/// The plans of paths, part by part with their sums.
fn path_plans(plan: &DomainPlan, style: &Style) -> String {
    if plan.paths.is_empty() {
        return String::new();
    }
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("path"),
        Column::name("part"),
        Column::number("target"),
        Column::number("worst case"),
        Column::word(""),
    ]);
    let time = |bound: Option<Nanos>| bound.map_or_else(|| "-".to_owned(), |b| b.to_string());
    for path in &plan.paths {
        for part in &path.parts {
            let of = format!("{} {}", part.part, part.of);
            let row: [Cell; 6] = [
                path.vm.as_str().into(),
                path.path.as_str().into(),
                of.into(),
                "-".into(),
                time(part.bound).into(),
                "".into(),
            ];
            t.row(row.into());
        }
        t.row(vec![
            path.vm.as_str().into(),
            path.path.as_str().into(),
            "sum".into(),
            path.target.latency.to_string().into(),
            time(path.bound).into(),
            promised(Some(path.met)),
        ]);
    }
    let mut out = format!("\n{}", t.draw(style));
    for path in plan.paths.iter() {
        let Some(remedy) = &path.remedy else { continue };
        let line = format!("{}/{}: no promise: {remedy}", path.vm, path.path);
        out.push_str(&style.wrap(&style.clean(&line), 0));
    }
    out
}

/// Bounds from the times at which requests are due, as measurements count them, once for each task
/// with a bound.
fn from_intended(plan: &DomainPlan, style: &Style) -> String {
    let mut out = String::new();
    for (i, task) in plan.tasks.iter().enumerate().filter(|(_, task)| task.bound.is_some()) {
        if plan.tasks[..i].iter().any(|t| (&t.vm, &t.task) == (&task.vm, &task.task)) {
            continue;
        }
        let says = match task.from_intended {
            Some(due) => format!(
                "from the time at which a request is due {} at most, while the guest stalls for no longer than {}",
                due.bound, due.stall
            ),
            None => {
                "bounded from the submission only, while its requests are within its reservation: nothing bounds how late they are submitted".to_owned()
            }
        };
        out.push_str(&style.wrap(&format!("{}/{}: {says}", task.vm, task.task), 0));
    }
    out
}

/// The plan of an I/O domain, task by task.
#[must_use]
pub fn domain_plan(plan: &DomainPlan, style: &Style) -> String {
    let mut out = format!(
        "I/O domain on {}: {} reserved, window {}{}, pieces of {}, guests may catch up {}\n",
        terminal(&plan.device.name, style.ascii),
        plan.reserved,
        plan.window,
        if plan.window < plan.full_window {
            format!(" (of {}: costs throughput)", plan.full_window)
        } else {
            String::new()
        },
        plan.quantum,
        plan.catch_up,
    );
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("task"),
        Column::number("target"),
        Column::number("worst case"),
        Column::word(""),
    ]);
    for task in &plan.tasks {
        t.row(vec![
            task.vm.as_str().into(),
            task.task.as_str().into(),
            task.target.map_or_else(|| "-".to_owned(), |t| format!("{} {}", t.percentile, t.latency)).into(),
            task.bound.map_or_else(|| "-".to_owned(), |b| b.to_string()).into(),
            promised(task.met),
        ]);
    }
    out.push_str(&t.draw(style));
    if plan.tasks.iter().any(|task| task.met == Some(true)) {
        out.push_str(&style.wrap(
            "guaranteed: from the submission of a request, if device and host are never slower than the profile says",
            0,
        ));
    }
    out.push_str(&from_intended(plan, style));
    out.push_str(&domain_refusals(plan, style));
    plan.networks.iter().for_each(|network| out.push_str(&network_plan(network, style)));
    out.push_str(&path_plans(plan, style));
    for vm in &plan.vms {
        if vm.urgent_only && vm.reserve.is_some() {
            let _ = writeln!(
                out,
                "{}: has tasks that are promised nothing; run the others under `ionice -c1` in the guest, or their promise is void",
                terminal(&vm.vm, style.ascii)
            );
        }
    }
    out
}
