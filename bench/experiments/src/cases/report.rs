//! The report of the cases: tables, claims, sections of a page.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::misses::{Miss, misses};
use super::neighbours::{self, NeighbourRates, neighbour_rates};
use super::passes::{OURS, PUBLISHED, PassTable, case_of};
use super::promises;
use super::{Case, CaseOptions, Tier, cases, page};
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_learn::train::{MISS, median};
use rtvirtio_planner::scheme_name;
use rtvirtio_planner::tune::TuneGoal;

use crate::report::ExperimentReport;

#[must_use]
pub fn report(tiers: &[Tier], data: &Dataset) -> ExperimentReport {
    let options = CaseOptions { writes: 0.0, third_of: None };
    let mut claims = Vec::new();
    let mut text = String::new();
    let mut tables = Vec::new();
    let mut sections = Vec::new();
    for &tier in tiers {
        let mut of_tier = cases(tier, &options);
        of_tier.iter_mut().for_each(|case| use_measured_rates(case, data));
        let table = PassTable::new(tier, &of_tier, &data.points);
        if table.cells.iter().flatten().all(|c| c.n == 0) {
            continue;
        }
        claims.extend(table.claims());
        claims.extend(neighbours::claims(tier, &of_tier, &table.schemes, &data.points));
        text.push_str(&table_text(&table));
        let rates = neighbour_rates(&of_tier, &table.schemes, &data.points);
        text.push_str(&neighbour_text(&rates));
        let misses = misses(&of_tier, &data.points, &data.header.profiles);
        text.push_str(&misses_text(&misses));
        sections.push(page::cases(&table, &rates));
        sections.extend(page::achieved(&of_tier, &table.schemes, &data.points));
        sections.extend(page::misses(tier, &misses));
        tables.push(table);
    }
    let possible: BTreeSet<String> = tables.iter().flat_map(|t| t.possible.clone()).collect();
    claims.extend(promises::trials(&data.points, &possible, &TuneGoal::default()));
    claims.extend(promises::chosen(&data.points, data.header.confidence.unwrap_or(1.0 - MISS)));
    let mut report = ExperimentReport::new(data);
    report.lead.extend(remarks(data));
    let remarks: String = report.lead.iter().skip(1).map(|line| format!("{line}\n")).collect();
    text.push_str(&remarks);
    ExperimentReport {
        runs: data.points.iter().map(rtvirtio_learn::run::as_result).collect(),
        claims,
        text,
        sections: std::iter::once(page::pass_rates(&tables)).chain(sections).collect(),
        ..report
    }
}

/// Replaces the declared rates by those of the runs, which may be scaled to the device.
fn use_measured_rates(case: &mut Case, data: &Dataset) {
    if let Some(run) = data.points.iter().find(|p| case_of(&p.id) == case.name) {
        case.vms.clone_from(&run.vms);
    }
}

/// Conditions of the runs that the numbers depend on.
fn remarks(data: &Dataset) -> Vec<String> {
    let has = |option: &str| data.header.command.split_whitespace().any(|word| word == option);
    let mut out = Vec::new();
    if has("--scaled") {
        out.push(
            "Rates are scaled so that all tasks of a case take a third of what the device can do.".to_owned(),
        );
    }
    if !has("--model") {
        out.push(
            "Without --model: rtvirtio (tuned) begins with the slice model, paper (equations) has the coefficients of Table III, and no bound was given before a run."
                .to_owned(),
        );
    }
    let ran = |name: &str| data.points.iter().any(|p| p.is_of(name));
    let all = PUBLISHED.iter().map(|(name, _)| *name).chain(OURS);
    let missing: Vec<&str> = all.filter(|name| !ran(name)).map(scheme_name).collect();
    if !missing.is_empty() {
        out.push(format!(
            "Not run: {}; not chosen, or without a model (paper (network) and rtvirtio (bound) need --model, the former with enough runs of the paper's kind).",
            missing.join(", ")
        ));
    }
    out.push(format!(
        "Runs of {}: p99.99 of a task with fewer than 10 000 requests is its longest one.",
        lengths(data)
    ));
    out
}

/// Lengths of the runs, without duplicates.
fn lengths(data: &Dataset) -> String {
    let mut seconds: Vec<f64> = data.points.iter().map(|p| p.seconds).collect();
    seconds.sort_unstable_by(f64::total_cmp);
    seconds.dedup();
    seconds.iter().map(|s| format!("{s} s")).collect::<Vec<_>>().join(" and ")
}

/// Rates of VMs without a target, below the table and in its columns.
fn neighbour_text(rates: &[NeighbourRates]) -> String {
    let mut s = String::new();
    for kind in rates {
        let _ = write!(s, "{:<26}", format!("rate of the {}, /s", kind.neighbour));
        for text in kind.cells() {
            let _ = write!(s, " {text:>20}");
        }
        let _ = writeln!(s, "  (median over {} cases)", kind.cases);
    }
    s
}

/// Lines on each miss of our schemes, and its cause.
fn misses_text(misses: &[Miss]) -> String {
    let mut s = String::new();
    if !misses.is_empty() {
        s.push_str("\nmissed by rtvirtio (runs that passed of all tried runs; cause)\n");
    }
    for miss in misses {
        let (case, passed, tried, limit) = (&miss.case, miss.passed, miss.tried, miss.limit.name());
        let _ = writeln!(s, "{case:<26} {passed:>2}/{tried:<2} {limit:<8} {}", miss.why);
    }
    s
}

fn table_text(table: &PassTable) -> String {
    let mut s = format!("\n{} tier\n{:<26}", table.tier.name(), "case");
    for scheme in &table.schemes {
        let _ = write!(s, " {:>20}", scheme_name(scheme));
    }
    s.push('\n');
    for (case, row) in table.cases.iter().zip(&table.cells) {
        if row.iter().all(|c| c.n == 0) {
            continue;
        }
        let _ = write!(s, "{case:<26}");
        for cell in row {
            let worst = median(cell.worst.clone());
            let text =
                if cell.n == 0 { "-".to_owned() } else { format!("{}/{} {worst:.2}", cell.passed, cell.n) };
            let _ = write!(s, " {text:>20}");
        }
        s.push('\n');
    }
    let _ = write!(s, "{:<26}", "pass rate");
    for scheme in &table.schemes {
        let _ = write!(s, " {:>19.1}%", 100.0 * table.pass_rate(scheme).0);
    }
    let _ = write!(s, "\n{:<26}", "less the host's stalls");
    for scheme in &table.schemes {
        let _ = write!(s, " {:>19.1}%", 100.0 * table.pass_rate_awake(scheme).0);
    }
    if table.tier != Tier::Paper {
        s.push_str("\npassed/runs, and the median over runs of the worst measured/target\n");
        return s;
    }
    let _ = write!(s, "\n{:<26}", "published (paper)");
    for scheme in &table.schemes {
        let text = PUBLISHED
            .iter()
            .find(|(n, _)| n == scheme)
            .map_or(String::new(), |(_, v)| format!("{:.1}%", 100.0 * v));
        let _ = write!(s, " {text:>20}");
    }
    s.push_str("\npassed/runs, and the median over runs of the worst measured/target\n");
    s
}
