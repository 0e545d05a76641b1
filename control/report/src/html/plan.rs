//! HTML of a plan: settings with reasons, forecast, terms of the latency, conflicts.

use rtvirtio_planner::{Enforcement, Infeasible, Plan, TaskOutlook, scheme_name};

use super::{GAP, HtmlTable, NarrowLayout, THIN, figure, section};
use crate::svg::{Segment, StackPlot, StackRow, svg_stack};
use crate::text::Paint;
use crate::{num, words};
use rtvirtio_text::xml;

/// Most rows of the stacked bars.
const ROWS: usize = 24;

/// Section with verdict, settings and forecast.
pub(super) fn settings(plan: &Plan) -> String {
    let verdict = if !plan.is_predicted() {
        not_predicted(plan)
    } else if plan.tasks.iter().all(|task| task.target_ns.is_none()) {
        "<p>No task has a target, so <span class=\"open\">nothing is promised</span>.</p>\n".to_owned()
    } else if plan.feasible && plan.tasks.iter().any(needs_cpus) {
        "<p>Every target is <span class=\"open\">predicted to be met where CPU time is not short</span>.</p>\n"
            .to_owned()
    } else if plan.feasible {
        "<p>Every target is <span class=\"good\">predicted to be met</span>.</p>\n".to_owned()
    } else {
        plan.infeasible
            .as_ref()
            .map_or_else(|| "<p class=\"bad\">Not every target can be met.</p>\n".to_owned(), infeasible)
    };
    let basis = if plan.is_predicted() {
        format!(
            ", {}; {} candidates evaluated",
            xml(words::model(plan.model)),
            num::count(plan.evaluated, THIN)
        )
    } else {
        String::new()
    };
    let mut body =
        format!("{verdict}<p class=\"soft\">Scheme {}{basis}.</p>\n", xml(scheme_name(&plan.scheme)));
    if plan.settings.is_empty() {
        body.push_str("<p>Nothing to change.</p>\n");
    } else {
        let mut table = HtmlTable::new(
            "settings of the plan",
            NarrowLayout::Stack,
            &[("", "num"), ("setting", ""), ("value", ""), ("holds as", ""), ("reason", "wrap")],
        );
        for (i, s) in plan.settings.iter().enumerate() {
            table.row(
                0,
                &[
                    ((i + 1).to_string(), "num"),
                    (words::knob(&s.knob), "knob"),
                    (words::knob_value(&s.knob, &s.value), "name"),
                    (s.strength.to_string(), ""),
                    (s.reason.clone(), "wrap"),
                ],
            );
        }
        body.push_str(&table.done());
        body.push_str(&strengths(plan));
    }
    body.push_str(&outlook(plan));
    section("plan", "The plan", &body)
}

/// Whether a target depends on CPU time that is short, or not known to suffice.
fn needs_cpus(task: &TaskOutlook) -> bool {
    task.target_ns.is_some() && (task.lacks_cpu() || task.cpu_unknown.is_some())
}

/// Verdict on a plan that no model covers.
fn not_predicted(plan: &Plan) -> String {
    let reason = plan.infeasible.as_ref().map(|i| i.reason.trim_start_matches("not predicted: "));
    let why = reason.map_or_else(String::new, |why| format!(": {}", xml(why)));
    format!("<p><span class=\"open\">Not predicted</span>{why}.</p>\n")
}

/// Explains the words for the strength of settings in the table.
fn strengths(plan: &Plan) -> String {
    let mut parts = Vec::new();
    for (s, text) in [
        (Enforcement::Guarantee, "a guarantee holds by construction whatever the other VMs do"),
        (Enforcement::Cap, "a cap is an upper limit that the kernel enforces"),
        (Enforcement::Hint, "a hint shifts shares or order and bounds nothing by itself"),
    ] {
        if plan.settings.iter().any(|x| x.strength == s) {
            parts.push(text);
        }
    }
    let mut text = parts.join("; ");
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    format!("<p class=\"soft\">{text}.</p>\n")
}

fn outlook(plan: &Plan) -> String {
    if plan.tasks.is_empty() {
        return String::new();
    }
    let mut table = HtmlTable::new(
        "expected latency per task",
        NarrowLayout::Scroll,
        &[
            ("VM", ""),
            ("task", ""),
            ("percentile", ""),
            ("target", "num"),
            ("predicted", "num"),
            ("margin", "num"),
            ("rate kept", "num"),
            ("outlook", ""),
        ],
    );
    for t in &plan.tasks {
        let (word, paint) = words::outlook(t);
        let class = match paint {
            Some(Paint::Good) => "good",
            Some(Paint::Bad) => "bad",
            Some(Paint::Open) => "open",
            _ => "",
        };
        let none = || "\u{2013}".to_owned();
        let predicted = |text: String| if t.not_predicted.is_none() { text } else { none() };
        table.row(
            2,
            &[
                (t.vm.clone(), "name"),
                (t.task.clone(), "name"),
                (t.percentile.to_string(), ""),
                (t.target_ns.map_or_else(none, |l| num::latency(l, GAP)), "num"),
                (predicted(num::latency(t.forecast.latency_ns, GAP)), "num"),
                (predicted(t.margin_ns.map_or_else(none, |m| num::margin(m, GAP))), "num"),
                (predicted(num::percent(t.forecast.rate_kept)), "num"),
                (word.to_owned(), class),
            ],
        );
    }
    format!("<h3>What it should bring</h3>\n{}", table.done())
}

fn infeasible(i: &Infeasible) -> String {
    let mut items = String::new();
    let mut item = |text: String| items.push_str(&format!("<li>{}</li>", xml(&text)));
    if !i.conflict.is_empty() {
        item(format!("Targets that are not predicted to hold together: {}.", i.conflict.join(", ")));
    }
    if !i.sacrificed.is_empty() {
        item(format!("Given up, least urgent first: {}.", i.sacrificed.join(", ")));
    }
    for r in &i.relaxation {
        item(format!(
            "{}/{} would fit with {} instead of {}.",
            r.vm,
            r.task,
            words::target(r.percentile, r.fits_ns, GAP),
            num::latency(r.declared_ns, GAP)
        ));
    }
    format!(
        "<div class=\"alert\"><p><span class=\"bad\">Not every target can be met.</span> {}</p><ul>{items}</ul></div>\n",
        xml(&i.reason)
    )
}

/// Stacked bars of the prediction's terms.
pub(super) fn terms(plan: &Plan) -> String {
    let has_terms = |t: &&TaskOutlook| t.not_predicted.is_none() && !t.forecast.terms.is_empty();
    let mut tasks: Vec<_> = plan.tasks.iter().filter(has_terms).collect();
    if tasks.is_empty() {
        return String::new();
    }
    let all = tasks.len();
    if all > ROWS {
        tasks.sort_by_key(|t| std::cmp::Reverse(t.forecast.latency_ns));
        tasks.truncate(ROWS);
    }
    let mut parts: Vec<(String, bool)> = Vec::new();
    let mut rows = Vec::new();
    for t in &tasks {
        let mut segments = Vec::new();
        for term in &t.forecast.terms {
            let name = (
                format!("{}: {}", words::side(term.side), term.name),
                term.side == rtvirtio_model::Side::Guest,
            );
            let part = parts.iter().position(|p| *p == name).unwrap_or_else(|| {
                parts.push(name);
                parts.len() - 1
            });
            segments.push(Segment { part, value: term.latency_ns });
        }
        let several = plan.tasks.iter().filter(|o| (&o.vm, &o.task) == (&t.vm, &t.task)).count() > 1;
        let at = if several { format!(" {}", t.percentile) } else { String::new() };
        let name = format!("{}/{}{at}", t.vm, t.task);
        rows.push(StackRow { name, segments, whole: t.forecast.latency_ns });
    }
    let plot = StackPlot { title: "Terms of the predicted latency per task".to_owned(), parts, rows };
    let which = if all > ROWS { format!(" Shown are the {ROWS} longest of {all}.") } else { String::new() };
    let caption = format!(
        "Terms of each task's predicted tail, on a linear axis. Pale parts arise in the guest and its VMM, full ones on \
         the host and its device.{which}"
    );
    section("terms", "Where the predicted time goes", &figure(&xml(&caption), |w| svg_stack(&plot, w)))
}
