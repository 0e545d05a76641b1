//! Accuracy of models and bound, and the number of runs that it takes: the paper's Figs. 5 and 6.

use super::calibrate::Calibration;
use super::judge::{Accuracy, HeldOut};
use crate::page::{Plot, Section, Table};
use rtvirtio_report::svg::{Axis, Series, Spread, XyPlot};

use crate::page::xy::{axis, plot, series, table};

/// Label of the tails: as measured, or less the host's own stalls where these are known.
fn tails(a: &Accuracy) -> &'static str {
    if a.with_host.is_some() { "measured tail less the host's own stalls" } else { "measured tail" }
}

/// Figs. 5 and 6 and the learning curve.
pub fn accuracy(device: &str, a: &Accuracy, curve: &[Accuracy]) -> Vec<Section> {
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
    let fig5 = Section {
        title: format!("{device}: predicted and measured tails (the paper's Figs. 5 and 6)"),
        text: vec![format!(
            "{} runs with {} tasks, each judged by a model fitted on at most {} others. The paper reports most errors between -500 and 0 ms at tails of about \
             1800 ms; here the tails reach from below 1 ms to seconds, so factors say more than differences.",
            a.held_out,
            a.held.len(),
            a.trained
        )],
        plots: vec![
            (
                format!("{tail}, expected tail and upper bound of every held-out task, by rising tail"),
                Plot::Xy(Box::new(sorted(a))),
            ),
            (
                "how far measured tails are above the predicted ones (the paper's Fig. 6)".to_owned(),
                errors(a),
            ),
        ],
        tables: vec![Table { label: "models".to_owned(), head, rows }],
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
    let bound = Section {
        title: format!("{device}: does the upper bound hold?"),
        text,
        plots: Vec::new(),
        tables: vec![Table {
            label: "coverage by group".to_owned(),
            head: ["group", "tasks", "below the bound"].map(str::to_owned).to_vec(),
            rows: groups,
        }],
    };
    vec![fig5, bound, learning(device, curve)]
}

/// Half of the range of drawn errors, ms; larger errors count at its ends.
const RANGE: f64 = 2_000.0;
/// Width of a bin, ms.
const BIN: f64 = 250.0;

/// The paper's Fig. 6: how errors are distributed, on the tasks that the paper's models cover.
fn errors(a: &Accuracy) -> Plot {
    type Model = (&'static str, fn(&HeldOut) -> Option<f64>);
    let models: [Model; 4] = [
        ("expected, ours", |h| Some(h.expected_ms)),
        ("paper's equations, Table III", |h| h.analytical_ms),
        ("paper's equations, fitted", |h| h.fitted_ms),
        ("paper's network", |h| h.mlp_ms),
    ];
    let bins = (2.0 * RANGE / BIN) as usize;
    let covered: Vec<&HeldOut> =
        a.held.iter().filter(|h| h.analytical_ms.is_some() && h.mlp_ms.is_some()).collect();
    let lines = models.into_iter().enumerate().map(|(index, (name, of))| {
        let mut counts = vec![0.0; bins];
        let errors: Vec<f64> = covered.iter().filter_map(|h| of(h).map(|p| h.actual_ms - p)).collect();
        for error in &errors {
            counts[(((error + RANGE) / BIN).max(0.0) as usize).min(bins - 1)] += 1.0;
        }
        let point = |(i, count): (usize, &f64)| {
            let from = i as f64 * BIN - RANGE;
            let share = 100.0 * count / errors.len().max(1) as f64;
            (
                from + BIN / 2.0,
                share,
                format!("{from:.0} to {:.0} ms: {share:.1} % of {}", from + BIN, errors.len()),
            )
        };
        series(index, name, counts.iter().enumerate().map(point).collect())
    });
    // A linear axis begins at zero by default.
    let x = Axis {
        ends: Some((-RANGE, RANGE)),
        ..axis("measured less predicted, ms; more than 2 s counts at the ends", Spread::Linear)
    };
    plot("errors", x, axis("% of tasks", Spread::Linear), lines.collect(), None)
}

/// Table III and the coefficients of this host's runs.
pub fn calibration(device: &str, c: &Calibration) -> Section {
    let rows = c.fits.iter().zip(c.in_use()).map(|(f, (_, used))| {
        vec![
            f.name.to_owned(),
            f.published.to_string(),
            format!("{:.3}", f.value),
            format!("{:.3} to {:.3}", f.interval[0], f.interval[1]),
            if f.at_limit { "at its limit" } else { "" }.to_owned(),
            format!("{used:.3}"),
        ]
    });
    let residuals: Vec<String> = c.residuals.iter().map(|r| format!("{:.2}", r.exp())).collect();
    Section {
        title: format!("{device}: the influence coefficients (the paper's Table III)"),
        text: vec![
            format!(
                "Least squares of the latency over {} tasks of {} runs of the paper's kind. The equations are off by a factor of {:.2} with Table III and of {:.2} \
                 as fitted (median); fitted they explain {:.2} of the variance of ln(tail). Measured over predicted, deciles: {}.",
                c.tasks, c.runs, c.factor[0], c.factor[1], c.r_squared, residuals.join(" ")
            ),
            "One that ends at its limit is not determined by these runs: models use Table III for it, and the others are fitted again with it fixed.".to_owned(),
        ],
        plots: Vec::new(),
        tables: vec![table(
            "coefficients",
            &["coefficient", "Table III", "fitted", "95 % interval", "", "in use"],
            rows.collect(),
        )],
    }
}

fn sorted(a: &Accuracy) -> XyPlot {
    let mut held: Vec<_> = a.held.iter().collect();
    held.sort_by(|x, y| x.actual_ms.total_cmp(&y.actual_ms));
    let series = |index: usize, name: &str, of: &dyn Fn(&HeldOut) -> f64| Series {
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
        limits: Vec::new(),
        legend: true,
        height: 320.0,
    }
}

fn learning(device: &str, curve: &[Accuracy]) -> Section {
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
        limits: Vec::new(),
        legend: true,
        height: 240.0,
    };
    Section {
        title: format!("{device}: how many runs are needed"),
        text: vec!["The paper fits on 28 000 runs.".to_owned()],
        plots: vec![(
            "accuracy on the same held-out runs over the number of runs for fitting".to_owned(),
            Plot::Xy(Box::new(plot)),
        )],
        tables: Vec::new(),
    }
}
