//! How well models and bound hold, and how many runs that takes: the paper's Figs. 5 and 6.

use rtvirtio_bench::accuracy::{Accuracy, Held};
use rtvirtio_report::svg::{Axis, Series, Spread, XyPlot};
use rtvirtio_report::{BenchSection, BenchTable, Plot};

use super::xy::axis;

/// What the tails are: as measured, or less what the host itself took where that is known.
fn tails(a: &Accuracy) -> &'static str {
    if a.with_host.is_some() { "measured tail less the host's own stalls" } else { "measured tail" }
}

/// Figs. 5 and 6 and the learning curve.
pub fn accuracy(device: &str, a: &Accuracy, curve: &[Accuracy]) -> Vec<BenchSection> {
    let tail = tails(a);
    let head = [
        "model",
        "n",
        "median predicted/actual",
        "typical factor",
        "90 % within factor",
        "below the tail",
        "within -500..0 ms",
    ]
    .map(str::to_owned)
    .to_vec();
    let rows = a
        .scores
        .iter()
        .map(|s| {
            vec![
                s.model.to_owned(),
                s.n.to_string(),
                format!("{:.2}", s.bias),
                format!("{:.2}", s.factor),
                format!("{:.1}", s.factor_p90),
                format!("{:.1} %", 100.0 * s.underestimated),
                format!("{:.1} %", 100.0 * s.paper_band),
            ]
        })
        .collect();
    let fig5 = BenchSection {
        title: format!("{device}: predicted and measured tails (the paper's Figs. 5 and 6)"),
        text: vec![format!(
            "{} runs with {} tasks, each judged by a model fitted on at most {} others. The paper reports most errors between -500 and 0 ms at tails of about \
             1800 ms; here the tails reach from below 1 ms to seconds, so factors say more than differences.",
            a.held_out,
            a.held.len(),
            a.trained
        )],
        plots: vec![(
            format!("{tail}, expected tail and upper bound of every held-out task, by rising tail"),
            Plot::Xy(Box::new(sorted(a))),
        )],
        tables: vec![BenchTable { label: "models".to_owned(), head, rows }],
    };
    let coverage = |s: f64| format!("{:.2} %", 100.0 * s);
    let groups =
        a.groups.iter().map(|(name, n, share)| vec![name.clone(), n.to_string(), coverage(*share)]).collect();
    let mut text = vec![format!(
        "{} of {} held-out tails are below their bound ({} to {} at 95 %); the bound is {:.2} times the {tail} (median).",
        coverage(a.coverage),
        a.held.len(),
        coverage(a.coverage_interval[0]),
        coverage(a.coverage_interval[1]),
        a.sharpness
    )];
    text.extend(a.with_host.as_ref().map(|w| {
        format!(
            "As measured, with the host's own stalls: {} of {} tails are below the bound plus {:.1} ms, which is {:.2} times the tail (median).",
            coverage(w.coverage),
            w.n,
            w.adds_ms,
            w.sharpness
        )
    }));
    let bound = BenchSection {
        title: format!("{device}: does the upper bound hold?"),
        text,
        plots: Vec::new(),
        tables: vec![BenchTable {
            label: "coverage by group".to_owned(),
            head: ["group", "tasks", "below the bound"].map(str::to_owned).to_vec(),
            rows: groups,
        }],
    };
    vec![fig5, bound, learning(device, curve)]
}

fn sorted(a: &Accuracy) -> XyPlot {
    let mut held: Vec<_> = a.held.iter().collect();
    held.sort_by(|x, y| x.actual_ms.total_cmp(&y.actual_ms));
    let series = |index: usize, name: &str, of: &dyn Fn(&Held) -> f64| Series {
        name: name.to_owned(),
        index,
        dashed: index > 0,
        points: held
            .iter()
            .enumerate()
            .map(|(i, h)| (i as f64, of(h), format!("{} task {}: {:.2} ms", h.id, h.task, of(h))))
            .collect(),
    };
    XyPlot {
        title: "measured, expected and bound".to_owned(),
        heading: String::new(),
        x: Axis {
            label: "held-out tasks by rising tail".to_owned(),
            spread: Spread::Linear,
            ends: None,
            marks: None,
            format: |v| format!("{v:.0}"),
        },
        y: axis("p99.99, ms", Spread::Log),
        series: vec![
            series(0, tails(a), &|h| h.actual_ms),
            series(1, "expected", &|h| h.expected_ms),
            series(2, "upper bound", &|h| h.upper_ms),
        ],
        limit: None,
        legend: true,
        height: 320.0,
    }
}

fn learning(device: &str, curve: &[Accuracy]) -> BenchSection {
    let series = |index: usize, name: &str, of: &dyn Fn(&Accuracy) -> f64| Series {
        name: name.to_owned(),
        index,
        dashed: false,
        points: curve
            .iter()
            .map(|a| (a.trained as f64, of(a), format!("{} runs: {:.2}", a.trained, of(a))))
            .collect(),
    };
    let plot = XyPlot {
        title: "learning curve".to_owned(),
        heading: String::new(),
        x: Axis {
            label: "runs that the model was fitted on".to_owned(),
            spread: Spread::Linear,
            ends: None,
            marks: None,
            format: |v| format!("{v:.0}"),
        },
        y: Axis {
            label: "factor".to_owned(),
            spread: Spread::Linear,
            ends: None,
            marks: None,
            format: |v| format!("{v:.1}"),
        },
        series: vec![
            series(
                0,
                &format!(
                    "typical factor between expected and {}",
                    curve.first().map_or("measured tail", tails)
                ),
                &|a| a.scores[0].factor,
            ),
            series(1, "upper bound over the same (median)", &|a| a.sharpness),
        ],
        limit: None,
        legend: true,
        height: 240.0,
    };
    BenchSection {
        title: format!("{device}: how many runs are needed"),
        text: vec!["The paper fits on 28 000 runs.".to_owned()],
        plots: vec![(
            "accuracy on the same held-out runs over the number of runs for fitting".to_owned(),
            Plot::Xy(Box::new(plot)),
        )],
        tables: Vec::new(),
    }
}
