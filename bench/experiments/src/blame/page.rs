//! Planted causes by named ones, as a table.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{BlameData, MatrixRow, claims};
use crate::experiment::Experiment;
use crate::page::Section;
use crate::page::claims::text as claims_text;
use crate::page::xy::table;
use crate::report::ExperimentReport;

fn line(row: &MatrixRow) -> String {
    let mut cells: Vec<String> = row.named.iter().map(|(name, n)| format!("{name} {n}")).collect();
    let others = [("not seen", row.unseen), ("no miss", row.no_miss), ("no result", row.failed)];
    cells.extend(others.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")));
    cells.join(", ")
}

/// Rows of the table as lines for a terminal.
fn text(data: &BlameData) -> String {
    let mut out = String::from("planted                        named first, runs\n");
    for row in &data.matrix {
        let _ = writeln!(out, "{:<30} {}", row.planted, line(row));
    }
    out
}

fn section(data: &BlameData) -> Section {
    let names: BTreeSet<&str> =
        data.matrix.iter().flat_map(|row| row.named.keys()).map(String::as_str).collect();
    let mut head = vec!["planted"];
    head.extend(&names);
    head.extend(["not seen", "no miss", "no result"]);
    let cells = |row: &MatrixRow| {
        let mut cells = vec![row.planted.clone()];
        cells.extend(names.iter().map(|name| row.named.get(*name).copied().unwrap_or(0).to_string()));
        cells.extend([row.unseen, row.no_miss, row.failed].map(|n| n.to_string()));
        cells
    };
    Section {
        title: "Causes planted and named".to_owned(),
        text: vec![
            "A row is what was planted, alone or two at once, with strengths drawn from the seed; a column is the first cause that the run named \
             for the missed target. Runs that missed no target, or have no result, are in no share."
                .to_owned(),
        ],
        plots: Vec::new(),
        tables: vec![table("runs", &head, data.matrix.iter().map(cells).collect())],
    }
}

impl Experiment for BlameData {
    const FORM: &str = "rtvirtio-blame/1";
    const FILE: &str = "blame.json";
    const TITLE: &str = "rtvirtio: causes of missed targets";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} runs of {} s, a {} VM and a neighbour, seed {}; {}.",
            self.host.device,
            self.runs.len(),
            self.seconds,
            self.vm,
            self.seed,
            self.command
        );
        let claims = claims(self);
        let text = text(self) + &claims_text(&claims);
        let sections = vec![section(self)];
        Ok(ExperimentReport {
            text,
            ..ExperimentReport::of_data(self, self.host.clone(), claims, lead, sections)?
        })
    }
}
