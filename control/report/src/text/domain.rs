//! The plan of an I/O domain as text.

use std::fmt::Write as _;

use rtvirtio_domain_plan::DomainPlan;

use super::{Cell, Column, Paint, Style, Table};
use crate::terminal;

/// VMs and tasks that are promised nothing, and why.
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
        let (word, paint) = match task.met {
            Some(true) => ("guaranteed", Some(Paint::Good)),
            Some(false) => ("NOT PROMISED", Some(Paint::Bad)),
            None => ("shares the rest", None),
        };
        t.row(vec![
            task.vm.as_str().into(),
            task.task.as_str().into(),
            task.target.map_or_else(|| "-".to_owned(), |t| format!("{} {}", t.percentile, t.latency)).into(),
            task.bound.map_or_else(|| "-".to_owned(), |b| b.to_string()).into(),
            Cell::painted(word, paint),
        ]);
    }
    out.push_str(&t.draw(style));
    out.push_str(&domain_refusals(plan, style));
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
