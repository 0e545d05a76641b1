//! Predictions with their terms.

use rtvirtio_model::{Forecast, Term};
use rtvirtio_planner::TaskOutlook;
use rtvirtio_units::Nanos;
use unicode_width::UnicodeWidthStr;

use super::plan::{cpu_note, upper};
use super::{Paint, Style};
use crate::{num, words};

/// Share of a prediction from which on a term's statistic is shown.
const WORTH_NAMING: f64 = 0.1;

/// Length of the longest bar, in columns.
const BAR: usize = 40;

/// Meaning of the terms' names, in the order in which a request meets them.
const LEGEND: [(&str, &str); 11] = [
    ("virtualization", "guest kernel and VMM"),
    ("other-tasks", "requests of the VM's other tasks, inside the guest"),
    ("switch", "BFQ's change from one VM to the next"),
    ("own-service", "the request itself at the device"),
    ("own-vm", "requests of the same VM before it"),
    ("other-vms", "the other VMs' turns"),
    ("timeout-sync", "the end of a slice by `timeout_sync`"),
    ("cap", "waiting for the VM's own limit"),
    ("device", "the device's own stalls, as measured"),
    ("catch-up", "what a stall or a burst has left to be made up for"),
    ("backlog", "what piles up because the declared rate is not kept"),
];

/// Name of the term that is assumed when no guest was measured.
const VIRTUALIZATION: &str = "virtualization";

/// Predictions with their terms. Tasks with equal terms share a block; terms of 0 are left out.
/// Without a guest in the profile (`guest_measured`) the guest's part is an assumption, and marked
/// as one.
///
/// The bars of one task are shares of its own predicted latency.
#[must_use]
pub fn forecast(tasks: &[TaskOutlook], guest_measured: bool, style: &Style) -> String {
    if tasks.is_empty() {
        return "no tasks to predict\n".to_owned();
    }
    let shown = |t: &&Term| t.latency_ns.0 > 0;
    let label = |t: &Term| match t.name.as_ref() {
        VIRTUALIZATION if !guest_measured => format!("{VIRTUALIZATION} (assumed)"),
        name => style.clean(name),
    };
    let names = tasks.iter().flat_map(|t| &t.forecast.terms).filter(shown).map(|t| label(t).width());
    let name_width = names.max().unwrap_or(0).min(24);
    // Groups tasks with equal blocks, in the order of their first task.
    let mut blocks: Vec<(String, Vec<&TaskOutlook>)> = Vec::new();
    for t in tasks {
        let terms = terms(&t.forecast, name_width, &label, style);
        match blocks.iter_mut().find(|(known, _)| *known == terms) {
            Some((_, tasks)) => tasks.push(t),
            None => blocks.push((terms, vec![t])),
        }
    }
    let mut out = String::new();
    for (terms, tasks) in &blocks {
        out.push_str(&heads(tasks, style));
        out.push_str(terms);
        out.push('\n');
    }
    out.push_str(&legend(tasks, guest_measured, style));
    out.push_str(&cpu_note(tasks, style));
    out
}

/// Part of a heading, and its colour.
type Part = (String, Option<Paint>);

/// Headings of a block; tasks with equal parts share a line.
fn heads(tasks: &[&TaskOutlook], style: &Style) -> String {
    let mut heads: Vec<(Vec<Part>, Vec<String>)> = Vec::new();
    for t in tasks {
        let (parts, name) = (parts(t), style.clean(&format!("{}/{}", t.vm, t.task)));
        match heads.iter_mut().find(|(known, _)| *known == parts) {
            Some((_, names)) => names.push(name),
            None => heads.push((parts, vec![name])),
        }
    }
    heads.iter().map(|(parts, names)| head(&names.join(", "), parts, style)).collect()
}

/// Prediction, target, margin and rate.
fn parts(t: &TaskOutlook) -> Vec<Part> {
    let mut parts = vec![(format!("{} {}", t.percentile, num::latency(t.forecast.latency_ns, "")), None)];
    if let Some(why) = &t.not_predicted {
        parts[0].0.insert_str(0, "without it ");
        parts.insert(0, (format!("not predicted: {why}"), Some(Paint::Open)));
        return parts;
    }
    parts.extend(t.forecast.upper.as_ref().map(|u| (upper(u), None)));
    parts.extend(t.target_ns.map(|l| (format!("target {}", num::latency(l, "")), None)));
    parts.extend(t.margin_ns.map(|m| {
        let size = num::latency(Nanos(m.unsigned_abs()), "");
        if m < 0 {
            (format!("predicted to miss by {size}"), Some(Paint::Bad))
        } else {
            (format!("margin {size}"), Some(Paint::Good))
        }
    }));
    parts.push((format!("rate kept {}", num::percent(t.forecast.rate_kept)), None));
    parts
}

/// Names and parts on one line where they fit, else the names on separate lines.
fn head(names: &str, parts: &[Part], style: &Style) -> String {
    let plain: Vec<&str> = parts.iter().map(|p| p.0.as_str()).collect();
    let painted: Vec<String> = parts
        .iter()
        .map(|(text, paint)| paint.map_or_else(|| text.clone(), |p| style.paint(text, p)))
        .collect();
    if names.width() + 2 + plain.join(", ").width() > style.width {
        format!("{}  {}\n", style.heading(names), painted.join(", "))
    } else {
        format!("{}  {}\n", style.paint(names, Paint::Strong), painted.join(", "))
    }
}

fn terms(f: &Forecast, name_width: usize, label: &dyn Fn(&Term) -> String, style: &Style) -> String {
    let whole = f.terms.iter().map(|t| t.latency_ns.0 as f64).sum::<f64>().max(1.0);
    let line = |t: &Term| {
        let share = t.latency_ns.0 as f64 / whole;
        let mut out = format!(
            "  {:5}  {:name_width$}  {}  {:>7}  {:>5}\n",
            words::side(t.side),
            style.shorten(&label(t), name_width),
            style.bar(share, BAR),
            num::latency(t.latency_ns, ""),
            num::percent(share),
        );
        // The statistic of a small term is not shown.
        if let Some(statistic) = t.statistic.as_ref().filter(|_| share >= WORTH_NAMING) {
            out.push_str(&style.wrap(&format!("({})", style.clean(statistic)), 9));
        }
        out
    };
    f.terms.iter().filter(|t| t.latency_ns.0 > 0).map(line).collect()
}

/// Meaning of the shown terms, and the kind of the numbers.
fn legend(tasks: &[TaskOutlook], guest_measured: bool, style: &Style) -> String {
    let shown = |name: &str| {
        tasks.iter().flat_map(|t| &t.forecast.terms).any(|t| t.name == name && t.latency_ns.0 > 0)
    };
    let mut out = String::new();
    for (name, what) in LEGEND.iter().filter(|(name, _)| shown(name)) {
        let assumed = *name == VIRTUALIZATION && !guest_measured;
        let note = if assumed { "; no guest was measured, so it is an assumption" } else { "" };
        out.push_str(&style.wrap(&format!("{name}: {what}{note}"), 2));
    }
    let kind = if tasks.iter().any(|t| t.forecast.upper.is_some()) {
        "each number is a model's estimate; \"below\" is a bound learned on this host. `verify` measures"
    } else {
        "each number is a model's estimate, for choosing settings, and no bound. `verify` measures"
    };
    out.push_str(&style.wrap(kind, 2));
    out
}
