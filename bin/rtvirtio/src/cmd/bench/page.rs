//! The experiments as one page: the paper's figures drawn from our measurements, its published values beside them.

use rtvirtio_bench::accuracy::Accuracy;
use rtvirtio_bench::claims::Claim;
use rtvirtio_bench::passes::{Cause, PUBLISHED, Table};
use rtvirtio_bench::train::median;
use rtvirtio_report::svg::{Axis, Bar, BarPlot, BarRow, Series, Spread, XyPlot};
use rtvirtio_report::{BenchSection, BenchTable, Plot};

/// Claims as a table.
pub fn claims(claims: &[Claim]) -> BenchSection {
    let limit = |c: &Claim| match (c.at_least, c.at_most) {
        (Some(l), _) => format!("at least {}", number(l)),
        (_, Some(l)) => format!("at most {}", number(l)),
        _ => "for comparison".to_owned(),
    };
    let rows = claims
        .iter()
        .map(|c| {
            let met = if c.at_least.or(c.at_most).is_none() {
                ""
            } else if c.met {
                "met"
            } else {
                "NOT MET"
            };
            vec![
                c.id.clone(),
                c.what.clone(),
                number(c.value),
                c.unit.clone(),
                c.n.to_string(),
                limit(c),
                met.to_owned(),
            ]
        })
        .collect();
    let head = ["claim", "what", "value", "unit", "n", "should be", ""].map(str::to_owned).to_vec();
    BenchSection {
        title: "Claims".to_owned(),
        tables: vec![BenchTable { label: "claims".to_owned(), head, rows }],
        ..BenchSection::default()
    }
}

fn number(v: f64) -> String {
    if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{v:.3}") }
}

/// Fig. 8: pass rates by scheme and tier, the paper's beside them.
pub fn pass_rates(tables: &[Table]) -> BenchSection {
    let mut series: Vec<String> = tables.iter().map(|t| format!("{} tier, here", t.tier.name())).collect();
    series.push("published by the paper (its own machine, its targets)".to_owned());
    let mut schemes: Vec<String> = tables.iter().flat_map(|t| t.schemes.clone()).collect();
    schemes.sort_by_key(|s| rtvirtio_bench::passes::order(s));
    schemes.dedup();
    let row = |scheme: &String| {
        let mut bars = Vec::new();
        for (i, t) in tables.iter().enumerate() {
            let (share, cases, n) = t.pass_rate(scheme);
            if n > 0 {
                bars.push(Bar { series: i, share, note: format!("of {n} runs, {cases} cases"), pale: false });
            }
        }
        if let Some((_, share)) = PUBLISHED.iter().find(|(name, _)| name == scheme) {
            bars.push(Bar { series: tables.len(), share: *share, note: "published".to_owned(), pale: true });
        }
        BarRow { name: scheme.clone(), bars }
    };
    let plot = BarPlot { title: "pass rates".to_owned(), series, rows: schemes.iter().map(row).collect() };
    BenchSection {
        title: "Pass rates (the paper's Fig. 8)".to_owned(),
        text: vec![
            "A run passes when every task keeps its p99.99 target and its declared rate. Pass rates of the paper are from other \
             hardware and runs of 100 minutes: what compares is the order of the schemes."
                .to_owned(),
        ],
        plots: vec![("share of runs that passed, mean over the cases".to_owned(), Plot::Bars(plot))],
        tables: Vec::new(),
    }
}

/// Every case: passes and how near its worst task came to its target.
pub fn cases(table: &Table) -> BenchSection {
    let mut head = vec!["case".to_owned()];
    head.extend(table.schemes.clone());
    let rows = table
        .cases
        .iter()
        .zip(&table.cells)
        .filter(|(_, row)| row.iter().any(|c| c.n > 0))
        .map(|(case, row)| {
            let cell = |c: &rtvirtio_bench::passes::Cell| {
                if c.n == 0 {
                    "-".to_owned()
                } else {
                    let (low, high) =
                        c.worst.iter().fold((f64::INFINITY, 0.0f64), |(l, h), w| (l.min(*w), h.max(*w)));
                    format!("{}/{}; {:.2} ({low:.2} to {high:.2})", c.passed, c.n, median(c.worst.clone()))
                }
            };
            std::iter::once(case.clone()).chain(row.iter().map(cell)).collect()
        })
        .collect();
    let causes: Vec<String> = table
        .schemes
        .iter()
        .filter(|s| !table.causes(s).is_empty())
        .map(|s| {
            let of = table.causes(s);
            let n = |c: Cause| of.get(&c).copied().unwrap_or(0);
            format!("{s}: {} rate, {} host, {} waiting", n(Cause::Rate), n(Cause::Host), n(Cause::Waiting))
        })
        .collect();
    let (any, ours) = table.possible();
    let missed: Vec<&String> = any.iter().filter(|c| !ours.contains(c)).collect();
    let mut text = vec![format!(
        "passed/runs; median (smallest to largest) of the worst task's measured p99.99 over its target. Some scheme passes {} of {} \
         measured cases in at least half of its runs, ours {}.",
        any.len(),
        table.cells.iter().filter(|row| row.iter().any(|c| c.n > 0)).count(),
        ours.len()
    )];
    if !causes.is_empty() {
        text.push(format!(
            "Runs missed because a rate was not kept, because the host itself stood still for at least half of the worst tail, or because \
             requests waited: {}.",
            causes.join("; ")
        ));
    }
    if !missed.is_empty() {
        let names: Vec<&str> = missed.iter().map(|s| s.as_str()).collect();
        text.push(format!("Passed by another scheme and not by ours: {}.", names.join(", ")));
    }
    BenchSection {
        title: format!("The {} tier, case by case", table.tier.name()),
        text,
        plots: Vec::new(),
        tables: vec![BenchTable { label: format!("{} tier", table.tier.name()), head, rows }],
    }
}

/// Figs. 5 and 6 and the learning curve.
pub fn accuracy(device: &str, a: &Accuracy, curve: &[Accuracy]) -> Vec<BenchSection> {
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
            "{} runs for fitting, {} held out with {} tasks. The paper reports most errors between -500 and 0 ms at tails of about \
             1800 ms; here the tails reach from below 1 ms to seconds, so factors say more than differences.",
            a.trained,
            a.held_out,
            a.held.len()
        )],
        plots: vec![(
            "measured tail, expected tail and upper bound of every held-out task, by rising tail".to_owned(),
            Plot::Xy(Box::new(sorted(a))),
        )],
        tables: vec![BenchTable { label: "models".to_owned(), head, rows }],
    };
    let coverage = |s: f64| format!("{:.2} %", 100.0 * s);
    let groups =
        a.groups.iter().map(|(name, n, share)| vec![name.clone(), n.to_string(), coverage(*share)]).collect();
    let bound = BenchSection {
        title: format!("{device}: does the upper bound hold?"),
        text: vec![format!(
            "{} of {} held-out tails are below their bound ({} to {} at 95 %); the bound is {:.2} times the measured tail (median).",
            coverage(a.coverage),
            a.held.len(),
            coverage(a.coverage_interval[0]),
            coverage(a.coverage_interval[1]),
            a.sharpness
        )],
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
    let series = |index: usize, name: &str, of: &dyn Fn(&rtvirtio_bench::accuracy::Held) -> f64| Series {
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
        y: Axis {
            label: "p99.99, ms".to_owned(),
            spread: Spread::Log,
            ends: None,
            marks: None,
            format: |v| format!("{v}"),
        },
        series: vec![
            series(0, "measured", &|h| h.actual_ms),
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
            series(0, "typical factor between expected and measured", &|a| a.scores[0].factor),
            series(1, "upper bound over measured (median)", &|a| a.sharpness),
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
