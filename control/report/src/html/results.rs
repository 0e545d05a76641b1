//! HTML of measured results: headline, plots, numbers.

use rtvirtio_measure::verdict::RATE_KEPT;
use rtvirtio_measure::{ResultFile, Run, TaskResult, Verdict};
use rtvirtio_units::{Nanos, Percentile};

use super::{GAP, HtmlTable, NarrowLayout, ReportInput, THIN, figure, keys, section};
use crate::summary::{
    self, Key, Tally, judged, most_critical, schemes, tail_is_max, tally, target_keys, task_keys,
};
use crate::svg::{
    Axis, Lane, LatencyPlot, LatencyRow, RateBar, RatePlot, RateRow, Series, Spread, XyPlot, svg_latency,
    svg_rate, svg_xy,
};
use crate::{num, words};
use rtvirtio_planner::scheme_name;
use rtvirtio_text::xml;

/// Most rows of the large plots; more are unreadable, and the table has all.
const ROWS: usize = 24;
/// Most panels of percentile curves.
const PANELS: usize = 12;

/// Counts per scheme, over all its runs.
fn by_scheme(result: &ResultFile) -> Vec<(&str, Tally, usize)> {
    let runs = |s: &str| result.runs.iter().filter(|r| r.scheme == s).map(tally).collect::<Vec<_>>();
    schemes(result)
        .into_iter()
        .map(|s| {
            let all = runs(s);
            (s, all.iter().fold(Tally::default(), |a, b| a.plus(*b)), all.len())
        })
        .collect()
}

/// Headline with one sentence, a card per scheme, and the origin of the numbers.
pub(super) fn headline(report: &ReportInput<'_>) -> String {
    let result = report.result;
    let counts = by_scheme(result);
    let mut out = String::new();
    if counts.is_empty() {
        return "<p class=\"lead\">Nothing was measured.</p>\n".to_owned();
    }
    let planned = report.plan.map(|p| p.scheme.as_str());
    let phrase = |(scheme, t, _): &(&str, Tally, usize)| {
        let subject = if planned == Some(scheme) && counts.len() > 1 { "the plan, " } else { "" };
        format!("Under {subject}<strong>{}</strong>: {}.", xml(scheme_name(scheme)), t.sentence())
    };
    for first in report.first {
        out.push_str(&format!("<p class=\"lead\"><strong>{}</strong></p>\n", xml(first)));
    }
    let all: Vec<String> = counts.iter().map(phrase).collect();
    out.push_str(&format!("<p class=\"lead\">{}</p>\n", all.join(" ")));
    out.push_str(&format!("<p>{}</p>\n", origin(result)));
    out.push_str("<div class=\"cards\">");
    for (i, (scheme, t, runs)) in counts.iter().enumerate() {
        let tone = match t {
            t if t.missed > 0 => "missed",
            t if t.targets() == 0 => "soft",
            _ => "",
        };
        let of_runs = if *runs > 1 { format!(", {runs} runs together") } else { String::new() };
        out.push_str(&format!(
            "<div class=\"card s{}\"><h3>{}</h3><p class=\"big {tone}\">{} of {} missed</p>\
             <p><span class=\"met\">{} met</span>, <span class=\"unproven\">{} unproven</span>\
             <span class=\"soft\">{of_runs}</span></p></div>",
            i % crate::svg::SERIES,
            xml(scheme_name(scheme)),
            t.missed,
            t.targets(),
            t.met,
            t.unproven
        ));
    }
    out.push_str("</div>\n");
    if counts.iter().any(|c| c.1.unproven > 0) {
        out.push_str(
            "<p class=\"soft\"><strong>Unproven</strong> means that nothing measured contradicts the target, but the \
             run was too short to claim it at 95&#160;% confidence.</p>\n",
        );
    }
    out
}

/// Kind of VM and of device, as a prominent note.
fn origin(result: &ResultFile) -> String {
    let mut kinds: Vec<String> = Vec::new();
    for run in &result.runs {
        let k = words::kind(run, &result.host);
        if !kinds.contains(&k) {
            kinds.push(k);
        }
    }
    let twin = if words::is_twin(&result.host) {
        "<span class=\"tag\">emulated device</span>The device is a twin: its service times come from a declared \
         model, not from hardware. "
    } else {
        ""
    };
    format!("{twin}Measured in {} on {}.", xml(&kinds.join("; and in ")), xml(&result.host.device))
}

/// Says which tasks a plot leaves out, if any.
fn selection(shown: usize, all: usize) -> String {
    if shown == all {
        return String::new();
    }
    format!(
        " Shown are {shown} of {all} tasks: those nearest to their target or farthest above it. The table has all."
    )
}

/// Index of the run's scheme, which selects colour and mark.
fn series_of(result: &ResultFile, run: &Run) -> usize {
    schemes(result).iter().position(|s| *s == run.scheme).unwrap_or(0)
}

fn tone(v: Option<Verdict>) -> &'static str {
    match v {
        Some(Verdict::Met) => "good",
        Some(Verdict::Missed) => "bad",
        Some(Verdict::Unproven) => "open",
        None => "",
    }
}

/// Main plot of latencies, and the accuracy of the predictions.
pub(super) fn latency(report: &ReportInput<'_>) -> String {
    let result = report.result;
    let keys = target_keys(&result.runs);
    if keys.is_empty() {
        return String::new();
    }
    let shown = most_critical(&result.runs, &keys, ROWS);
    let tasks = || result.runs.iter().flat_map(|r| &r.tasks);
    let uniform = tasks().all(|t| t.percentile == Percentile::P9999);
    let mark = if uniform { "p99.99" } else { "tail (the target's percentile)" };
    let rows = shown.iter().map(|&key| latency_row(result, key)).collect();
    let plot = LatencyPlot {
        title: format!(
            "Latency of {} tasks against their targets. The same numbers are in the table.",
            shown.len()
        ),
        series: schemes(result).into_iter().map(|s| scheme_name(s).to_owned()).collect(),
        rows,
        mark: mark.to_owned(),
    };
    let star = if tasks().any(|t| t.n > 0 && tail_is_max(t)) {
        " A * marks a run of fewer than 10\u{202f}000 requests, where the largest replaces p99.99."
    } else {
        ""
    };
    let caption = format!(
        "Each task's measured {mark} against its target, on a log scale.{star}{}",
        selection(shown.len(), keys.len())
    );
    let body = figure(&xml(&caption), |w| svg_latency(&plot, w)) + &accuracy(result);
    section("latency", "Latency against target", &body)
}

fn latency_row(result: &ResultFile, key: Key<'_>) -> LatencyRow {
    let mut target = None;
    let mut second = String::new();
    let mut lanes = Vec::new();
    for run in &result.runs {
        let Some(t) = summary::find(run, key) else { continue };
        if let Some(l) = t.target_ns {
            target = Some(l);
            second = format!("{} \u{2264} {}", t.percentile, num::latency(l, GAP));
        }
        let (value, name, _) = judged(t);
        lanes.push(Lane {
            series: series_of(result, run),
            measured: (t.n > 0).then_some([t.p50_ns, value, t.max_ns]),
            predicted: t.predicted_ns,
            verdict: t.verdict.map_or_else(String::new, |v| words::verdict(Some(v)).to_owned()),
            tone: tone(t.verdict),
            suffix: if name == "p99.99" && t.n > 0 && tail_is_max(t) { "*" } else { "" },
        });
    }
    LatencyRow { name: key.name(), second, target, lanes }
}

/// Measured over predicted, per scheme, in one sentence each. Only where results hold the predicted
/// percentile.
fn accuracy(result: &ResultFile) -> String {
    let mut out = String::new();
    for scheme in schemes(result) {
        let runs = result.runs.iter().filter(|r| r.scheme == scheme);
        let ratios: Vec<(f64, &TaskResult)> = runs
            .flat_map(|r| &r.tasks)
            .filter(|t| t.n > 0 && judged(t).2)
            .filter_map(|t| {
                let p = t.predicted_ns.filter(|p| p.0 > 0)?;
                Some((judged(t).0.0 as f64 / p.0 as f64, t))
            })
            .collect();
        let Some((worst, task)) = ratios.iter().max_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        let within = ratios.iter().filter(|r| r.0 <= 1.0).count();
        out.push_str(&format!(
            "<li><strong>{}</strong>: measured at or below the prediction in {within} of {}; the largest ratio of measured \
             to predicted is {} ({}).</li>\n",
            xml(scheme_name(scheme)),
            ratios.len(),
            num::sig3(*worst),
            xml(&format!("{}/{}", task.vm, task.task))
        ));
    }
    if out.is_empty() { out } else { format!("<h3>Predicted and measured</h3>\n<ul>{out}</ul>\n") }
}

/// Percentile curves, a panel per task, all on one latency axis.
pub(super) fn curves(report: &ReportInput<'_>) -> String {
    let result = report.result;
    let all = task_keys(&result.runs);
    let shown = most_critical(&result.runs, &all, PANELS);
    let with_data = |t: &&TaskResult| t.n > 0;
    let tasks = || result.runs.iter().flat_map(|r| &r.tasks).filter(with_data);
    let positive =
        || tasks().flat_map(|t| [t.p50_ns, t.max_ns]).filter(|v| v.0 > 0).map(Nanos::as_millis_f64);
    let Some(lo) = positive().min_by(f64::total_cmp) else { return String::new() };
    let targets = tasks().filter_map(|t| t.target_ns).map(Nanos::as_millis_f64);
    let hi = positive().chain(targets).fold(lo * 10.0, f64::max);
    let last = tasks().map(|t| (t.n as f64).log10()).fold(4.0, f64::max) + 0.15;
    let mut panels = String::new();
    for &key in &shown {
        let mut series = Vec::new();
        let mut limits = Vec::new();
        for run in &result.runs {
            let Some(t) = summary::find(run, key) else { continue };
            let of_task = summary::keyed(run).filter(|(k, _)| (k.vm, k.task) == (key.vm, key.task));
            let targets: Vec<_> =
                of_task.filter_map(|(_, t)| t.target_ns.map(|l| (t.percentile, l))).collect();
            limits = if targets.is_empty() { limits } else { targets };
            if t.n > 0 {
                let (index, points) = (series_of(result, run), percentile_points(t));
                series.push(Series {
                    name: scheme_name(&run.scheme).to_owned(),
                    index,
                    dashed: false,
                    points,
                });
            }
        }
        let plot = XyPlot {
            title: format!("Latency percentiles of {}", key.name()),
            heading: key.name(),
            x: Axis {
                label: "percentile".to_owned(),
                spread: Spread::Linear,
                ends: Some((0.0, last)),
                marks: Some(vec![
                    (0.301, "50".into()),
                    (1.0, "90".into()),
                    (2.0, "99".into()),
                    (3.0, "99.9".into()),
                    (4.0, "99.99".into()),
                ]),
                format: num::sig3,
            },
            y: Axis {
                label: "latency".to_owned(),
                spread: Spread::Log,
                ends: Some((lo / 1.5, hi * 1.5)),
                marks: None,
                format: |ms| num::latency(Nanos((ms * 1e6).round() as u64), GAP),
            },
            series,
            limits: limits.iter().map(|l| limit(*l, limits.len() > 1)).collect(),
            legend: false,
            height: 150.0,
        };
        panels.push_str(&svg_xy(&plot, 300.0).inline());
    }
    let caption = format!(
        "Points are the median, p99, p99.99 where there are 10\u{202f}000 requests for it, and the maximum (at the \
         percentile that one request of all is); lines only join them. The dashed line is the target.{}",
        selection(shown.len(), all.len())
    );
    let body = format!(
        "{}<figure><figcaption>{}</figcaption><div class=\"panels\">{panels}</div></figure>\n",
        keys(schemes(result).into_iter().map(scheme_name)),
        xml(&caption)
    );
    section("curves", "How latency grows towards the tail", &body)
}

/// Position and label of a target's line; with its percentile where there are several.
fn limit((percentile, latency): (Percentile, Nanos), several: bool) -> (f64, String) {
    let at = if several { format!("{percentile} ") } else { String::new() };
    (latency.as_millis_f64(), format!("target {at}{}", num::latency(latency, GAP)))
}

/// Stored percentiles over `-log10(1 - p)`: 50 % at 0.3, 99 % at 2, 99.99 % at 4. The maximum of n
/// stands at `log10 n`.
fn percentile_points(t: &TaskResult) -> Vec<(f64, f64, String)> {
    let mut points = vec![(0.301, "p50", t.p50_ns)];
    if t.n >= 100 {
        points.push((2.0, "p99", t.p99_ns));
    }
    if !tail_is_max(t) {
        points.push((4.0, "p99.99", t.p9999_ns));
    }
    points.push(((t.n as f64).log10().max(0.301), "max", t.max_ns));
    points
        .into_iter()
        .map(|(x, n, v)| (x, v.as_millis_f64(), format!("{n} {}", num::latency(v, " "))))
        .collect()
}

/// Kept rates of all tasks that declare one.
pub(super) fn rates(report: &ReportInput<'_>) -> String {
    let result = report.result;
    let all: Vec<_> = task_keys(&result.runs)
        .into_iter()
        .filter(|k| {
            result.runs.iter().filter_map(|r| summary::find(r, *k)).any(|t| t.declared_rate.is_some())
        })
        .collect();
    if all.is_empty() {
        return String::new();
    }
    let shown = most_critical(&result.runs, &all, ROWS);
    let row = |&key: &Key<'_>| RateRow {
        name: key.name(),
        bars: result
            .runs
            .iter()
            .filter_map(|run| {
                let t = summary::find(run, key)?;
                let declared = t.declared_rate?.0;
                Some(RateBar { series: series_of(result, run), achieved: t.achieved_rate.0, declared })
            })
            .collect(),
    };
    let plot = RatePlot {
        title: "Achieved over declared rate per task. The same numbers are in the table.".to_owned(),
        series: schemes(result).into_iter().map(|s| scheme_name(s).to_owned()).collect(),
        rows: shown.iter().map(row).collect(),
        limit: RATE_KEPT,
    };
    let caption = format!(
        "A short tail is worth nothing if the task got less work done. Requests completed per second over those \
         declared; below 99\u{a0}% a target counts as missed whatever its latency.{}",
        selection(shown.len(), all.len())
    );
    section("rates", "Rate kept", &figure(&xml(&caption), |w| svg_rate(&plot, w)))
}

/// Every number of every run.
pub(super) fn numbers(report: &ReportInput<'_>) -> String {
    let mut body = String::new();
    for run in &report.result.runs {
        let kind = words::kind(run, &report.result.host);
        body.push_str(&format!("<h3>{}</h3>\n<p class=\"soft\">", xml(scheme_name(&run.scheme))));
        body.push_str(&xml(&format!("{}{GAP}s, {kind}", num::sig3(run.seconds))));
        body.push_str("</p>\n");
        if run.tasks.is_empty() {
            body.push_str("<p>No tasks were measured.</p>\n");
            continue;
        }
        let mut table = HtmlTable::new(
            &format!("numbers of {}", scheme_name(&run.scheme)),
            NarrowLayout::Scroll,
            &[
                ("task", ""),
                ("verdict", ""),
                ("target", "num"),
                ("requests/s of declared", "num"),
                ("requests", "num"),
                ("p50", "num"),
                ("p99", "num"),
                ("p99.99", "num"),
                ("max", "num"),
                ("p99.99 by fio", "num"),
                ("predicted", "num"),
                ("why", "wrap"),
            ],
        );
        for t in &run.tasks {
            number_row(&mut table, t);
        }
        body.push_str(&table.done());
        for note in summary::doubts(run) {
            body.push_str(&format!("<p>{}</p>\n", xml(&note)));
        }
    }
    if body.is_empty() {
        return body;
    }
    body.push_str(
        "<p class=\"soft\">Latencies count from the intended start of a request. \u{201c}By fio\u{201d} counts from when it was \
         really issued; the difference is what a stalled queue would have hidden. * is the largest of fewer than \
         10\u{202f}000.</p>\n",
    );
    section("numbers", "All numbers", &body)
}

fn number_row(table: &mut HtmlTable, t: &TaskResult) {
    let none = || "\u{2013}".to_owned();
    let lat = |v: Nanos| if t.n == 0 { none() } else { num::latency(v, GAP) };
    let target = t.target_ns.map_or_else(none, |l| words::target(t.percentile, l, GAP));
    let mark = if t.n > 0 && tail_is_max(t) { "*" } else { "" };
    let verdict = words::verdict(t.verdict);
    let achieved = num::rate(t.achieved_rate);
    let rate =
        t.declared_rate.map_or_else(|| achieved.clone(), |d| format!("{achieved} of {}", num::rate(d)));
    table.row(
        1,
        &[
            (format!("{}/{}", t.vm, t.task), "name"),
            (verdict.to_owned(), if t.verdict.is_some() { verdict } else { "" }),
            (target, "num"),
            (rate, "num"),
            (num::count(t.n, THIN), "num"),
            (lat(t.p50_ns), "num"),
            (lat(t.p99_ns), "num"),
            (format!("{}{mark}", lat(t.p9999_ns)), "num"),
            (lat(t.max_ns), "num"),
            (lat(t.fio_p9999_ns), "num"),
            (t.predicted_ns.map_or_else(none, |p| num::latency(p, GAP)), "num"),
            (words::reason(t), "wrap"),
        ],
    );
}
