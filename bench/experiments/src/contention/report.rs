//! The report of a dataset.

use std::fmt::Write as _;
use std::sync::Arc;

use rtvirtio_learn::dataset::Dataset;
use rtvirtio_learn::run::as_result;
use rtvirtio_model::HostModel;
use rtvirtio_paper::PaperModels;
use rtvirtio_workflow::Progress;

use super::compare::{Compared, compare};
use super::{Figure, Growth, Row, growth, page, rows, setups};
use crate::claims::Claim;
use crate::report::ExperimentReport;

/// The report of a dataset, with the predictions of a learned model and of the paper's.
///
/// # Errors
/// A dataset without a profile or without runs.
pub fn report(
    (learned, paper): (Option<&Arc<HostModel>>, &PaperModels),
    data: &Dataset,
    progress: &dyn Progress,
) -> anyhow::Result<ExperimentReport> {
    let Some(profile) = data.header.profiles.values().next() else {
        anyhow::bail!("the data hold no profile of their device; measure again");
    };
    // The figures need no model: a model of another host is left out.
    let learned = learned.filter(|model| {
        let fits =
            model.fits(profile).inspect_err(|e| progress.warn(&format!("predictions are left out: {e}")));
        fits.is_ok()
    });
    let paper = if learned.is_some() { paper.clone() } else { PaperModels::default() };
    let mut compared = Vec::new();
    for setup in setups() {
        for row in rows(&setup, &data.points) {
            if !row.tail.ms.is_empty() {
                compared.push(compare(&setup, row, profile, (learned, &paper)));
            }
        }
    }
    anyhow::ensure!(!compared.is_empty(), "nothing is measured yet");
    let mut report = ExperimentReport::new(data);
    let fitted = paper.fitted_coefficients().is_some();
    let coefficients = if fitted { "fitted on this host" } else { "of the paper's Table III" };
    report.lead.push(format!("The paper's equations with coefficients {coefficients}."));
    Ok(ExperimentReport {
        runs: data.points.iter().map(as_result).collect(),
        claims: claims(&compared),
        text: table(&compared),
        sections: Figure::ALL.iter().map(|f| page::contention(*f, &compared)).collect(),
        ..report
    })
}

/// Numbers for comparison with the paper's Fig. 2; another device and machine have others.
fn claims(compared: &[Compared]) -> Vec<Claim> {
    let measured: Vec<Row> = compared.iter().map(|c| c.row.clone()).collect();
    let growth = growth(&measured);
    let n = measured.iter().filter(|r| r.figure == Figure::Fig2).map(|r| r.tail.ms.len()).sum();
    type Part = fn(&Growth) -> f64;
    let parts: [(&str, &str, Part); 3] = [
        ("mean_growth", "mean latency of four VMs over one, default BFQ (the paper: 4 to 11)", |g| g.mean),
        ("tail_growth", "p99.99 as measured of four VMs over one, default BFQ (the paper: 81 to 126)", |g| {
            g.tail
        }),
        (
            "tail_growth_awake",
            "the same less the host's own stalls, which are most of what one VM alone waits for",
            |g| g.awake,
        ),
    ];
    let mut out = Vec::new();
    for (name, what, part) in parts {
        for (which, choose) in [("least", f64::min as fn(f64, f64) -> f64), ("most", f64::max)] {
            let value = growth.iter().map(part).reduce(choose).unwrap_or(0.0);
            out.push(Claim::new(format!("contention.{name}.{which}"), what, value, "ratio", n));
        }
    }
    out
}

fn table(compared: &[Compared]) -> String {
    let mut s = format!(
        "{:<6} {:<22} {:>2} {:>9} {:>28} {:>9} {:>11} {:>9} {:>9} {:>9}\n",
        "figure",
        "set-up",
        "n",
        "mean ms",
        "p99.99 ms (least to most)",
        "no stalls",
        "analytical",
        "mlp",
        "expected",
        "bound"
    );
    for c in compared {
        let (tail, low, high) = c.row.tail.spread();
        let number = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let _ = writeln!(
            s,
            "{:<6} {:<22} {:>2} {:>9.2} {:>28} {:>9.1} {:>11} {:>9} {:>9} {:>9}",
            c.row.figure.name(),
            c.row.label,
            c.row.tail.ms.len(),
            c.row.mean.spread().0,
            format!("{tail:.1} ({low:.1} to {high:.1})"),
            c.row.awake.spread().0,
            number(c.analytical),
            number(c.mlp),
            number(c.expected),
            number(c.upper)
        );
    }
    s.push_str("p99.99 of a task with fewer than 10 000 requests is its longest one\n");
    s.push_str("no stalls: p99.99 less the host's own stalls; expected tail and bound are of that\n");
    s
}
