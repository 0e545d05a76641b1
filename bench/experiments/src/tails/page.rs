//! Tails estimated from few samples, compared with those of long runs.

use crate::experiment::Experiment;
use std::fmt::Write as _;

use super::{LongRun, Summary, TailsData, TaskTails, claims, summary};
use crate::page::Section;
use crate::page::claims::text as claims_text;
use crate::report::ExperimentReport;
use rtvirtio_report::svg::Spread;

use crate::page::xy::{axis, plot, series, table};

const HEAD: [&str; 9] = [
    "set-up",
    "tasks",
    "left out",
    "pieces",
    "with a bound",
    "bound holds",
    "bound over whole run",
    "estimate over whole run",
    "longest request not below whole run",
];

fn row(run: &LongRun, s: &Summary) -> Vec<String> {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    vec![
        run.setup.clone(),
        run.tasks.len().to_string(),
        run.left_out.to_string(),
        s.pieces.to_string(),
        percent(s.bounded as f64 / s.pieces.max(1) as f64),
        percent(s.coverage),
        format!("{:.2}", s.upper),
        format!("{:.2}", s.estimate),
        percent(s.by_longest),
    ]
}

fn rows(data: &TailsData) -> Vec<Vec<String>> {
    data.runs.iter().map(|run| row(run, &summary(run.tasks.iter()))).collect()
}

/// Rows of the table as lines for a terminal.
pub fn tails_text(data: &TailsData) -> String {
    let mut s = String::new();
    for row in rows(data) {
        let cells = HEAD.iter().zip(&row).skip(1).map(|(head, cell)| format!("{head} {cell}"));
        let _ = writeln!(s, "{:<36} {}", row[0], cells.collect::<Vec<_>>().join(", "));
    }
    s
}

/// Figure and table of estimates and bounds over the tasks.
pub fn tails(data: &TailsData) -> Section {
    let mut tasks: Vec<(&str, &TaskTails)> =
        data.runs.iter().flat_map(|r| r.tasks.iter().map(|t| (r.setup.as_str(), t))).collect();
    tasks.sort_by_key(|(_, t)| t.p9999_ns);
    let line = |of: &dyn Fn(&TaskTails) -> Option<f64>| -> Vec<(f64, f64, String)> {
        let point = |(i, (setup, t)): (usize, &(&str, &TaskTails))| {
            let ms = of(t)?;
            Some((i as f64, ms, format!("{setup}, {:.0}/s: {ms:.2} ms", t.rate.0)))
        };
        tasks.iter().enumerate().filter_map(point).collect()
    };
    let middle = |t: &TaskTails, of: fn(&Summary) -> f64| {
        let s = summary(std::iter::once(t));
        (s.bounded > 0).then(|| of(&s) * t.p9999_ns.as_millis_f64())
    };
    let lines = vec![
        series(0, "whole run", line(&|t| Some(t.p9999_ns.as_millis_f64()))),
        series(1, "estimate, median of the pieces", line(&|t| middle(t, |s| s.estimate))),
        series(2, "upper bound, median of the pieces", line(&|t| middle(t, |s| s.upper))),
    ];
    let (x, y) = (axis("tasks by rising tail", Spread::Linear), axis("p99.99, ms", Spread::Log));
    Section {
        title: "Tails from few samples".to_owned(),
        text: vec![format!(
            "Each run of {} s is cut into pieces of {}. From the requests of a piece alone p99.99 is estimated by peaks over threshold, with an upper bound at \
             95 %, and compared with p99.99 of the whole run. Of 100 requests a second the whole run has three or four above its p99.99. Tasks with requests that were never made, which have the worst tails, are left out.",
            data.seconds, data.piece_ns
        )],
        plots: vec![("p99.99 of each task".to_owned(), plot("tails from few samples", x, y, lines, None))],
        tables: vec![table("pieces", &HEAD, rows(data))],
    }
}

impl Experiment for TailsData {
    const FORM: &str = "rtvirtio-tails/1";
    const FILE: &str = "tails.json";
    const TITLE: &str = "rtvirtio: tails from few samples";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: runs of {} s in pieces of {}, process VMs; {}.",
            self.host.device, self.seconds, self.piece_ns, self.command
        );
        let claims = claims(self);
        let text = tails_text(self) + &claims_text(&claims);
        let sections = vec![tails(self)];
        Ok(ExperimentReport {
            text,
            ..ExperimentReport::of_data(self, self.host.clone(), claims, lead, sections)?
        })
    }
}
