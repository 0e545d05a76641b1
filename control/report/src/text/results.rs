//! Text of measured runs, single and compared.

use rtvirtio_measure::{ResultFile, Run, TaskResult, Verdict};
use rtvirtio_units::{Iops, Nanos};

use super::{Cell, Column, Paint, Style, Table};
use crate::summary::{self, tail_is_max, tally};
use crate::{num, words};
use rtvirtio_planner::scheme_name;

/// All runs of a result file, with the facts about host and device.
#[must_use]
pub fn results(file: &ResultFile, style: &Style) -> String {
    let host = &file.host;
    let mut out = style.wrap(
        &format!("device {}; kernel {}, {} CPUs, VMM {}", host.device, host.kernel, host.cpus, host.vmm),
        0,
    );
    if words::is_twin(host) {
        out.push_str("the device is a twin: emulated from a service-time model\n");
    }
    if file.runs.is_empty() {
        out.push_str("no runs\n");
    }
    for r in &file.runs {
        out.push('\n');
        let what =
            format!("{}: {} s, {}", scheme_name(&r.scheme), num::sig3(r.seconds), words::kind(r, host));
        out.push_str(&style.heading(&what));
        out.push_str(&run(r, style));
    }
    out
}

/// Text of a run: a table, its footnotes, and the reason of every verdict that is not `met`.
#[must_use]
pub fn run(run: &Run, style: &Style) -> String {
    if run.tasks.is_empty() {
        return "no tasks were measured\n".to_owned();
    }
    let mut columns = vec![
        Column::name("vm"),
        Column::name("task"),
        Column::number("target"),
        Column::number("rate/s"),
        Column::number("n"),
        Column::number("p50"),
        Column::number("p99"),
        Column::number("p99.99"),
        Column::number("max"),
        Column::number("predicted"),
        Column::word("verdict"),
    ];
    // Shown where no other column has the target's percentile.
    let at_target = run.tasks.iter().any(has_own_percentile);
    if at_target {
        columns.insert(3, Column::number("at target"));
    }
    let mut table = Table::new(columns);
    let marks = any_mark(&run.tasks);
    for t in &run.tasks {
        let lat = |v| if t.n == 0 { "-".to_owned() } else { num::latency(v, "") };
        let mut row: Vec<Cell> = vec![
            t.vm.as_str().into(),
            t.task.as_str().into(),
            target(t).into(),
            rate(t.achieved_rate, t.declared_rate).into(),
            t.n.to_string().into(),
            lat(t.p50_ns).into(),
            lat(t.p99_ns).into(),
            tail(t, marks).into(),
            lat(t.max_ns).into(),
            t.predicted_ns.map_or_else(|| "-".to_owned(), |p| num::latency(p, "")).into(),
            verdict(t),
        ];
        if at_target {
            row.insert(3, t.at_target_ns.map_or_else(|| "-".to_owned(), lat).into());
        }
        table.row(row);
    }
    let mut out = table.draw(style);
    out.push_str(&footnote(&run.tasks, style));
    if run.tasks.iter().any(|t| t.predicted_ns.is_some()) {
        let what =
            "predicted: a model's estimate of the target's percentile, for choosing settings; no bound";
        out.push_str(&style.wrap(what, 0));
    }
    out.push_str(&estimates(&run.tasks, style));
    out.push_str(&flows(&run.tasks, style));
    out.push_str(&reasons(run, style));
    out.push_str(&sentence(run, style));
    out
}

/// Meaning of the latencies of flows, with the peer and loss of each.
fn flows(tasks: &[TaskResult], style: &Style) -> String {
    let mut out = String::new();
    for (t, facts) in tasks.iter().filter_map(|t| t.flow.as_ref().map(|facts| (t, facts))) {
        let late = num::latency(facts.sent_late_p9999_ns, "");
        let line = format!(
            "{}/{}: from {} to {} and back; {} lost; this host sent them up to {late} late (p99.99)",
            t.vm, t.task, facts.peer, facts.echo, facts.lost
        );
        out.push_str(&style.wrap(&style.clean(&line), 2));
    }
    if !out.is_empty() {
        let what = "latencies of flows: round trips from the moment at which each frame was due, against the target of one way";
        out.push_str(&style.wrap(what, 0));
    }
    out
}

/// Whether the target's percentile is in no other column.
fn has_own_percentile(t: &TaskResult) -> bool {
    let shown = [50.0, 99.0, 99.99].iter().any(|p| (t.percentile.0 - p).abs() < 1e-9);
    t.at_target_ns.is_some() && !shown
}

/// Estimates of p99.99 where the samples are too few to measure it.
fn estimates(tasks: &[TaskResult], style: &Style) -> String {
    let mut out = String::new();
    for (t, e) in tasks.iter().filter_map(|t| t.tail.as_ref().map(|e| (t, e))) {
        let bound = match e.upper_ns {
            Some(upper) => format!("below {} at 95%", num::latency(upper, "")),
            None => "without a bound".to_owned(),
        };
        let line = format!(
            "{}/{}: {} is probably {}, {bound} (extreme values: {} exceedances in {} clusters)",
            t.vm,
            t.task,
            e.percentile,
            num::latency(e.estimate_ns, ""),
            e.exceedances,
            e.clusters
        );
        out.push_str(&style.wrap(&style.clean(&line), 2));
    }
    if !out.is_empty() {
        // Measured: of bounds from 5 s of real runs 73 % hold for six minutes
        // (docs/explanation/measuring.md, Tails from few samples).
        let limit = "an estimate rests on what this run saw: what is rarer than the run is long is not in it";
        out.push_str(&style.wrap(limit, 2));
    }
    out
}

/// Two runs side by side, matched by VM and task: typically the defaults and a plan.
#[must_use]
pub fn compare(before: &Run, after: &Run, style: &Style) -> String {
    let runs = [before.clone(), after.clone()];
    let keys = summary::target_keys(&runs);
    if keys.is_empty() {
        return "no tasks were measured\n".to_owned();
    }
    let mut columns = vec![Column::name("vm"), Column::name("task"), Column::number("target")];
    for _ in &runs {
        columns.extend([Column::number("p99.99"), Column::number("rate kept"), Column::word("verdict")]);
    }
    columns.push(Column::number("predicted"));
    let groups = vec![
        (3, String::new()),
        (3, scheme_name(&before.scheme).to_owned()),
        (4, scheme_name(&after.scheme).to_owned()),
    ];
    let mut table = Table::new(columns).grouped(groups);
    let marks = [any_mark(&before.tasks), any_mark(&after.tasks)];
    for key in keys {
        let pair = [summary::find(before, key), summary::find(after, key)];
        let any = pair[1].or(pair[0]);
        let mut row: Vec<Cell> =
            vec![key.vm.into(), key.task.into(), any.map_or_else(String::new, target).into()];
        for (t, marks) in pair.into_iter().zip(marks) {
            match t {
                None => row.extend(["-".into(), "-".into(), "not run".into()]),
                Some(t) => row.extend([tail(t, marks).into(), kept(t).into(), verdict(t)]),
            }
        }
        let predicted = pair[1].and_then(|t| t.predicted_ns);
        row.push(predicted.map_or_else(|| "-".to_owned(), |p| num::latency(p, "")).into());
        table.row(row);
    }
    let mut out = table.draw(style);
    let all: Vec<TaskResult> = before.tasks.iter().chain(&after.tasks).cloned().collect();
    out.push_str(&footnote(&all, style));
    for r in [before, after] {
        out.push('\n');
        out.push_str(&sentence(r, style));
        out.push_str(&reasons(r, style));
    }
    out
}

/// Line with the changes between two runs of the same tasks: the largest p99 and p99.99 of any
/// task, then the verdicts.
#[must_use]
pub fn before_after(before: &Run, after: &Run, style: &Style) -> String {
    let arrow = if style.ascii { "->" } else { "→" };
    let worst = |run: &Run, of: fn(&TaskResult) -> Nanos| {
        run.tasks
            .iter()
            .filter(|t| t.n > 0)
            .map(of)
            .max()
            .map_or_else(|| "-".to_owned(), |v| num::latency(v, ""))
    };
    let change = |of: fn(&TaskResult) -> Nanos| format!("{} {arrow} {}", worst(before, of), worst(after, of));
    let (old, new) = (tally(before), tally(after));
    let counts = |old: usize, new: usize| format!("{old} {arrow} {new}");
    let mut line = format!(
        "before {arrow} after: p99 {}, p99.99 {}; missed {}, met {}",
        change(|t| t.p99_ns),
        change(|t| t.p9999_ns),
        counts(old.missed, new.missed),
        counts(old.met, new.met),
    );
    if old.unproven + new.unproven > 0 {
        line.push_str(&format!(", unproven {}", counts(old.unproven, new.unproven)));
    }
    line.push_str(&format!(" of {}", new.targets()));
    style.wrap(&line, 0)
}

/// Target of a task, with its percentile when that is not p99.99.
fn target(t: &TaskResult) -> String {
    t.target_ns.map_or_else(|| "-".to_owned(), |l| words::target(t.percentile, l, ""))
}

/// p99.99, with a mark when it is the maximum. With `marks`, values without one are padded, so that
/// the digits of a column are aligned.
fn tail(t: &TaskResult, marks: bool) -> String {
    let mark = match t.n {
        0 => return if marks { "- " } else { "-" }.to_owned(),
        _ if tail_is_max(t) => "*",
        _ if marks => " ",
        _ => "",
    };
    format!("{}{mark}", num::latency(t.p9999_ns, ""))
}

/// Whether any p99.99 needs a mark.
fn any_mark(tasks: &[TaskResult]) -> bool {
    tasks.iter().any(|t| t.n > 0 && tail_is_max(t))
}

fn rate(achieved: Iops, declared: Option<Iops>) -> String {
    match declared {
        Some(d) => format!("{}/{}", num::rate(achieved), num::rate(d)),
        None => num::rate(achieved),
    }
}

fn kept(t: &TaskResult) -> String {
    t.declared_rate.map_or_else(|| "-".to_owned(), |d| num::percent(t.achieved_rate.0 / d.0))
}

fn verdict(t: &TaskResult) -> Cell {
    Cell::painted(words::verdict(t.verdict), t.verdict.map(paint))
}

fn paint(v: Verdict) -> Paint {
    match v {
        Verdict::Met => Paint::Good,
        Verdict::Missed => Paint::Bad,
        Verdict::Unproven => Paint::Open,
    }
}

/// Footnote for the mark `*`, with the sample counts.
fn footnote(tasks: &[TaskResult], style: &Style) -> String {
    let few = tasks.iter().filter(|t| t.n > 0 && tail_is_max(t));
    let Some((lo, hi)) = few
        .map(|t| t.n)
        .fold(None, |acc: Option<(u64, u64)>, n| Some(acc.map_or((n, n), |(lo, hi)| (lo.min(n), hi.max(n)))))
    else {
        return String::new();
    };
    let n = if lo == hi { lo.to_string() } else { format!("{lo} to {hi}") };
    style.wrap(
        &format!("* max of {n}: below 10000 samples p99.99 is not known and the largest replaces it"),
        0,
    )
}

/// Reasons of all verdicts that are not `met`; tasks with the same verdict and reason share a line.
fn reasons(run: &Run, style: &Style) -> String {
    let mut groups: Vec<(&str, String, Vec<String>)> = Vec::new();
    for t in run.tasks.iter().filter(|t| matches!(t.verdict, Some(Verdict::Missed | Verdict::Unproven))) {
        let (word, why, name) = (words::verdict(t.verdict), words::reason(t), named(t, run));
        match groups.iter_mut().find(|g| g.0 == word && g.1 == why) {
            Some(g) => g.2.push(name),
            None => groups.push((word, why, vec![name])),
        }
    }
    let mut out: String = groups
        .iter()
        .map(|(word, why, names)| style.wrap(&format!("{word} {}: {why}", names.join(", ")), 2))
        .collect();
    for note in summary::doubts(run) {
        out.push_str(&style.wrap(&note, 2));
    }
    out
}

/// Name as `vm/task`, with the percentile where the task has several targets.
fn named(t: &TaskResult, run: &Run) -> String {
    let of_task = run.tasks.iter().filter(|o| (&o.vm, &o.task) == (&t.vm, &t.task)).count();
    let at = if of_task > 1 { format!(" {}", t.percentile) } else { String::new() };
    format!("{}/{}{at}", t.vm, t.task)
}

/// The run's targets in one line.
fn sentence(run: &Run, style: &Style) -> String {
    let counts = tally(run);
    let colour = match counts {
        c if c.missed > 0 => Paint::Bad,
        c if c.unproven > 0 => Paint::Open,
        _ => Paint::Good,
    };
    format!("{}: {}\n", style.clean(scheme_name(&run.scheme)), style.paint(&counts.sentence(), colour))
}
