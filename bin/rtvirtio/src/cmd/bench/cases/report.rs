//! What the cases show: tables, claims, a page.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use rtvirtio_bench::cases::{CaseOptions, Tier, cases};
use rtvirtio_bench::dataset::{Dataset, Point};
use rtvirtio_bench::misses::{Miss, misses};
use rtvirtio_bench::passes::{PUBLISHED, Table};
use rtvirtio_bench::promises;
use rtvirtio_bench::train::median;
use rtvirtio_planner::tune::TuneGoal;

use super::TRIAL;
use crate::cmd::bench::found::Found;
use crate::cmd::bench::page;

/// Tables and claims from what is measured.
pub fn found(tiers: &[Tier], data: &Dataset) -> Found {
    let options = CaseOptions { writes: 0.0, third_of: None };
    let measured: Vec<Point> = data.points.iter().filter(|p| p.scheme != TRIAL).cloned().collect();
    let mut claims = Vec::new();
    let mut text = String::new();
    let mut tables = Vec::new();
    let mut sections = Vec::new();
    for &tier in tiers {
        let of_tier = cases(tier, &options);
        let table = Table::new(tier, &of_tier, &measured);
        if table.cells.iter().flatten().all(|c| c.n == 0) {
            continue;
        }
        claims.extend(table.claims());
        text.push_str(&table_text(&table));
        let misses = misses(&of_tier, &data.points, &data.header.profiles);
        text.push_str(&misses_text(&misses));
        sections.push(page::cases(&table));
        sections.extend(page::achieved(&of_tier, &table.schemes, &measured));
        sections.extend(page::misses(tier, &misses));
        tables.push(table);
    }
    let possible: BTreeSet<String> = tables.iter().flat_map(|t| t.possible().0).collect();
    claims.extend(promises::trials(&data.points, TRIAL, &possible, &TuneGoal::default()));
    claims.extend(promises::chosen(&data.points));
    Found {
        runs: data.points.iter().map(rtvirtio_bench::run::as_result).collect(),
        claims,
        text,
        sections: std::iter::once(page::pass_rates(&tables)).chain(sections).collect(),
        ..Found::of(data)
    }
}

/// Ours that missed, one by one, and why.
fn misses_text(misses: &[Miss]) -> String {
    let mut s = String::new();
    if !misses.is_empty() {
        s.push_str("\nmissed by ours (runs that passed of all that were tried; what stood in the way)\n");
    }
    for miss in misses {
        let (case, passed, tried, limit) = (&miss.case, miss.passed, miss.tried, miss.limit.name());
        let _ = writeln!(s, "{case:<26} {passed:>2}/{tried:<2} {limit:<8} {}", miss.why);
    }
    s
}

fn table_text(table: &Table) -> String {
    let mut s = format!("\n{} tier\n{:<26}", table.tier.name(), "case");
    for scheme in &table.schemes {
        let _ = write!(s, " {scheme:>20}");
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
