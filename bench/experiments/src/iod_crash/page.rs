//! The rounds as a page.

use std::path::Path;

use super::{CrashData, claims};
use crate::page::{Section, Table};
use crate::report::{ExperimentReport, read};

/// The report of a saved result.
///
/// # Errors
/// When the file cannot be read.
pub fn report(path: &Path) -> anyhow::Result<ExperimentReport> {
    let data: CrashData = read(path)?;
    let lead = format!(
        "{}: {} kills in {} rounds under a guest ({} under {}); {}.",
        data.host.device,
        data.kills.len(),
        data.rounds.len(),
        data.host.vmm,
        data.host.accelerator,
        data.command
    );
    ExperimentReport::of_data(&data, data.host.clone(), claims(&data), lead, vec![section(&data)])
}

fn section(data: &CrashData) -> Section {
    let head =
        ["round", "region", "seed", "written", "read", "flushes", "lost", "corrupt", "errors", "longest ms"]
            .map(str::to_owned)
            .to_vec();
    let rows = data.rounds.iter().enumerate().map(|(i, r)| {
        let name = if r.again { format!("{} (again)", i + 1) } else { (i + 1).to_string() };
        let numbers = [r.region, r.seed, r.written, r.read, r.flushes, r.lost, r.corrupt, r.io_errors];
        let mut row = vec![name];
        row.extend(numbers.map(|n| n.to_string()));
        row.push(format!("{:.0}", r.longest_ms));
        row
    });
    Section {
        title: "The domain is killed under a guest".to_owned(),
        tables: vec![Table { label: "rounds".to_owned(), head, rows: rows.collect() }],
        ..Section::default()
    }
}
