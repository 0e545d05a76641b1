//! Text of plans and forecasts.

use std::collections::BTreeMap;

use rtvirtio_model::{Upper, UpperBasis};
use rtvirtio_planner::{Infeasible, Knob, Plan, TaskOutlook, scheme_name};
use rtvirtio_units::Nanos;

use super::{Cell, Column, Paint, Style, Table};
use crate::{cpu_time, num, words};

/// Bound in words: "below 12ms in 99% of runs of 8s".
pub(super) fn upper(u: &Upper) -> String {
    let basis = match u.basis {
        UpperBasis::Regime | UpperBasis::Pooled | UpperBasis::Guests => String::new(),
        UpperBasis::Extrapolated => format!(", NOT PROVEN: {}", outside(u)),
    };
    format!(
        "below {} in {} of runs{}{basis}",
        num::latency(u.latency_ns, ""),
        num::percent(u.confidence.0),
        of_length(u)
    )
}

/// Inputs outside of the learned range, in words.
fn outside(u: &Upper) -> String {
    let what = u.outside.join(", ");
    if what.is_empty() {
        "outside what was measured".to_owned()
    } else {
        format!("outside what was measured ({what})")
    }
}

/// Length of the runs, such as " of 8s"; empty where unknown.
fn of_length(u: &Upper) -> String {
    if u.run_s > 0.0 { format!(" of {}", Nanos::from_secs_f64(u.run_s)) } else { String::new() }
}

/// Text of a plan: settings in order, then the forecast of each task, then the conflicts.
///
/// `old` holds the current values, as read from the kernel, where they are known.
#[must_use]
pub fn plan(plan: &Plan, old: &BTreeMap<Knob, String>, style: &Style) -> String {
    let is_predicted = plan.is_predicted();
    let verdict = if !is_predicted {
        style.paint("not predicted", Paint::Open)
    } else if plan.tasks.iter().all(|task| task.target_ns.is_none()) {
        style.paint("no task has a target, so nothing is promised", Paint::Open)
    } else if plan.feasible && plan.tasks.iter().any(|t| t.target_ns.is_some() && t.lacks_cpu()) {
        style.paint(
            "every target is predicted to be met where CPU time is not short, as it is now",
            Paint::Open,
        )
    } else if plan.feasible && plan.tasks.iter().any(|t| t.target_ns.is_some() && t.cpu_unknown.is_some()) {
        style.paint(
            "every target is predicted to be met where CPU time is not short, which is not known",
            Paint::Open,
        )
    } else if plan.feasible {
        style.paint("every target is predicted to be met", Paint::Good)
    } else {
        style.paint("not every target can be met", Paint::Bad)
    };
    let mut out = format!(
        "{}: {verdict}\n",
        style.paint(&format!("plan {}", style.clean(scheme_name(&plan.scheme))), Paint::Strong)
    );
    if is_predicted {
        let basis = format!("{}; {} candidates evaluated", words::model(plan.model), plan.evaluated);
        out.push_str(&style.wrap(&basis, 0));
    }
    out.push('\n');
    out.push_str(&settings(plan, old, style));
    out.push('\n');
    out.push_str(&outlook(&plan.tasks, style));
    match &plan.infeasible {
        None => {}
        Some(i) if is_predicted => {
            out.push('\n');
            out.push_str(&infeasible(i, style));
        }
        Some(i) => out.push_str(&style.wrap(&i.reason, 0)),
    }
    out
}

/// Remarks below a plan, one a line.
#[must_use]
pub fn notes(notes: &[String], style: &Style) -> String {
    notes.iter().map(|note| style.wrap(&style.clean(&format!("note: {note}")), 0)).collect()
}

fn settings(plan: &Plan, old: &BTreeMap<Knob, String>, style: &Style) -> String {
    if plan.settings.is_empty() {
        return "nothing to change\n".to_owned();
    }
    let arrow = if style.ascii { "->" } else { "→" };
    let mut out = style.heading("settings, in the order in which they are written");
    let number_width = plan.settings.len().to_string().len();
    for (i, s) in plan.settings.iter().enumerate() {
        let new = style.clean(&words::knob_value(&s.knob, &s.value));
        let change = match old.get(&s.knob) {
            Some(o) if *o == s.value => format!("{new} (as it is)"),
            Some(o) => format!("{} {arrow} {new}", style.clean(&words::knob_value(&s.knob, o))),
            None => format!("{arrow} {new}"),
        };
        let knob = style.clean(&words::knob(&s.knob));
        let change = style.paint(&change, Paint::Strong);
        out.push_str(&format!("{:>number_width$}. {knob}: {change}  [{}]\n", i + 1, s.strength));
        out.push_str(&style.wrap(&s.reason, number_width + 2));
    }
    out
}

fn outlook(tasks: &[TaskOutlook], style: &Style) -> String {
    if tasks.is_empty() {
        return String::new();
    }
    let bounded = tasks.iter().any(|t| t.not_predicted.is_none() && t.forecast.upper.is_some());
    let mut columns = vec![
        Column::name("vm"),
        Column::name("task"),
        Column::word("of"),
        Column::number("target"),
        Column::number("predicted"),
    ];
    if bounded {
        columns.push(Column::number("at most"));
    }
    columns.extend([Column::number("margin"), Column::number("rate kept"), Column::word("outlook")]);
    let mut table = Table::new(columns);
    for t in tasks {
        let (word, paint) = words::outlook(t);
        let predicted = |text: String| if t.not_predicted.is_none() { text } else { "-".to_owned() };
        let mut cells: Vec<Cell> = vec![
            t.vm.as_str().into(),
            t.task.as_str().into(),
            t.percentile.to_string().into(),
            t.target_ns.map_or_else(|| "-".to_owned(), |l| num::latency(l, "")).into(),
            predicted(num::latency(t.forecast.latency_ns, "")).into(),
        ];
        if bounded {
            cells.push(predicted(num::latency(t.forecast.judged(), "")).into());
        }
        cells.extend([
            predicted(t.margin_ns.map_or_else(|| "-".to_owned(), |m| num::margin(m, ""))).into(),
            predicted(num::percent(t.forecast.rate_kept)).into(),
            Cell::painted(word, paint),
        ]);
        table.row(cells);
    }
    let mut out = format!("{}{}", style.heading("expected"), table.draw(style));
    if bounded {
        out.push_str(&bound_note(tasks, style));
    }
    out.push_str(&cpu_note(tasks, style));
    out
}

/// CPU time of the guests' requests, where it was looked at.
pub(super) fn cpu_note(tasks: &[TaskOutlook], style: &Style) -> String {
    let unknown = cpu_time::unknown_of_tasks(tasks).map(|said| (said, false));
    let notes =
        cpu_time::rooms_of_tasks(tasks).into_iter().chain(unknown).chain(cpu_time::waits_of_tasks(tasks));
    let one = |(said, is_bad): (String, bool)| {
        let text = style.wrap(&said, 0);
        if is_bad { style.paint(&text, Paint::Bad) } else { text }
    };
    notes.map(one).collect()
}

/// The meaning of "at most", and where it is extrapolated.
fn bound_note(tasks: &[TaskOutlook], style: &Style) -> String {
    // Bounds of guests may have less confidence than those of processes: the lowest is shown, which
    // holds for all.
    let uppers = tasks.iter().filter_map(|t| t.forecast.upper.as_ref());
    let Some(first) = uppers.min_by(|a, b| a.confidence.0.total_cmp(&b.confidence.0)) else {
        return String::new();
    };
    let mut note = format!(
        "at most: the tail stays below it in {} of runs{} like those measured here; margins count from it. With fewer than 10 000 \
         requests in a run its p99.99 is the longest one, so longer runs have longer tails",
        num::percent(first.confidence.0),
        of_length(first)
    );
    if first.host_ns.0 > 0 {
        note.push_str(&format!(
            "; the host's own stalls, which no I/O setting changes, come on top: as measured, tails stay below it plus {}",
            num::latency(first.host_ns, "")
        ));
    } else if first.basis == UpperBasis::Guests {
        note.push_str("; in guests these tails hold the host's own stalls");
    }
    // Tasks are often outside in the same way: such tasks share a remark.
    let mut guessed: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for t in tasks {
        let upper = t.forecast.upper.as_ref().filter(|u| u.basis == UpperBasis::Extrapolated);
        if let Some(upper) = upper {
            guessed.entry(outside(upper)).or_default().push(format!("{}/{}", t.vm, t.task));
        }
    }
    for (why, tasks) in guessed {
        note.push_str(&format!("; NOT PROVEN for {}: {why}, so widened", tasks.join(", ")));
    }
    style.wrap(&note, 0)
}

fn infeasible(i: &Infeasible, style: &Style) -> String {
    let mut out = format!("{}\n", style.paint("what does not fit", Paint::Bad));
    out.push_str(&style.wrap(&i.reason, 2));
    if !i.conflict.is_empty() {
        out.push_str(
            &style.wrap(
                &format!("targets that are not predicted to hold together: {}", i.conflict.join(", ")),
                2,
            ),
        );
    }
    if !i.sacrificed.is_empty() {
        out.push_str(&style.wrap(&format!("given up, least urgent first: {}", i.sacrificed.join(", ")), 2));
    }
    for r in &i.relaxation {
        let line = format!(
            "{}/{} would fit with {} instead of {}",
            r.vm,
            r.task,
            words::target(r.percentile, r.fits_ns, ""),
            num::latency(r.declared_ns, "")
        );
        out.push_str(&style.wrap(&line, 2));
    }
    out
}
