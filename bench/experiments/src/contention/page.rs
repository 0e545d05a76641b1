//! Contention and predictions over settings: the paper's Figs. 2 and 5.

use super::Figure;
use super::compare::Compared;
use crate::page::{Plot, Section, Table};
use rtvirtio_report::svg::{Axis, Series, Spread, XyPlot};

use crate::page::xy::axis;

/// Figs. 2 and 5: measured tails with their range, and predictions.
pub fn contention(figure: Figure, all: &[Compared]) -> Section {
    let rows: Vec<&Compared> = all.iter().filter(|c| c.row.figure == figure).collect();
    let (title, text) = match figure {
        Figure::Fig2 => (
            "Tails grow faster than means (the paper's Fig. 2)",
            "1 to 3 tasks (100, 500, 1500 requests per second) on one VM and on four, default BFQ. The paper reports means that grow by 4 \
             to 11 and tails that grow by 81 to 126, at rates that it does not print.",
        ),
        Figure::Fig5a => (
            "slice_idle and timeout_sync (the paper's Fig. 5a)",
            "4 VMs with one heavy task each. slice_idle 0 is ours: the paper's range begins at 1 ms.",
        ),
        Figure::Fig5b => (
            "Weight (the paper's Fig. 5b)",
            "4 VMs with one heavy task each: the tail of the first VM over its weight; the others have 100.",
        ),
        Figure::Fig5c => (
            "Kinds of tasks (the paper's Fig. 5c)",
            "4 VMs with a light, a medium and a heavy task each, with BFQ's defaults and without idling.",
        ),
    };
    let at = |of: &dyn Fn(&Compared) -> Option<f64>| -> Vec<(f64, f64, String)> {
        rows.iter()
            .enumerate()
            .filter_map(|(i, c)| {
                of(c).map(|v| (i as f64, v.max(1e-3), format!("{}: {v:.2} ms", c.row.label)))
            })
            .collect()
    };
    let mut series = Vec::new();
    let mut add = |name: &str, dashed: bool, points: Vec<(f64, f64, String)>| {
        if !points.is_empty() {
            series.push(Series { name: name.to_owned(), index: series.len(), dashed, points });
        }
    };
    add("measured p99.99 (median)", false, at(&|c| Some(c.row.tail.spread().0)));
    add("largest of the repetitions", true, at(&|c| Some(c.row.tail.spread().2)));
    add("less the host's own stalls (median)", false, at(&|c| Some(c.row.awake.spread().0)));
    if figure == Figure::Fig2 {
        add("measured mean", false, at(&|c| Some(c.row.mean.spread().0)));
    }
    add("paper's equations", true, at(&|c| c.analytical));
    add("paper's network", true, at(&|c| c.mlp));
    add("expected", true, at(&|c| c.expected));
    add("upper bound", true, at(&|c| c.upper));
    let marks = rows.iter().enumerate().map(|(i, c)| (i as f64, c.row.label.clone())).collect();
    let plot = XyPlot {
        title: title.to_owned(),
        heading: String::new(),
        x: Axis {
            label: "set-up".to_owned(),
            spread: Spread::Linear,
            ends: Some((-0.5, rows.len() as f64 - 0.5)),
            marks: Some(marks),
            format: |v| format!("{v:.0}"),
        },
        y: axis("latency, ms", Spread::Log),
        series,
        limits: Vec::new(),
        legend: true,
        height: 320.0,
    };
    let cell = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
    let table = rows
        .iter()
        .map(|c| {
            let (tail, low, high) = c.row.tail.spread();
            vec![
                c.row.label.clone(),
                c.row.tail.ms.len().to_string(),
                format!("{:.2}", c.row.mean.spread().0),
                format!("{tail:.1} ({low:.1} to {high:.1})"),
                format!("{:.1}", c.row.awake.spread().0),
                cell(c.analytical),
                cell(c.mlp),
                cell(c.expected),
                cell(c.upper),
            ]
        })
        .collect();
    let head =
        ["set-up", "n", "mean ms", "p99.99 ms", "less stalls", "equations", "network", "expected", "bound"];
    Section {
        title: title.to_owned(),
        text: vec![
            text.to_owned(),
            "Expected tail and bound are of tails less the host's own stalls. p99.99 of a task with fewer than 10 000 requests is its longest one."
                .to_owned(),
        ],
        plots: vec![("measured and predicted, logarithmic".to_owned(), Plot::Xy(Box::new(plot)))],
        tables: vec![Table {
            label: figure.name().to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: table,
        }],
    }
}
