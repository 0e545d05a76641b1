//! The start-ups as a page.

use std::path::Path;

use super::{StartupData, claims};
use crate::page::{Section, Table};
use crate::report::{ExperimentReport, read};

/// The report of a saved result.
///
/// # Errors
/// When the file cannot be read.
pub fn report(path: &Path) -> anyhow::Result<ExperimentReport> {
    let data: StartupData = read(path)?;
    let lead = format!(
        "{}: start-ups of `{}` in a guest ({} under {}); {}.",
        data.host.device,
        data.app.join(" "),
        data.host.vmm,
        data.host.accelerator,
        data.command
    );
    ExperimentReport::of_data(&data, data.host.clone(), claims(&data), lead, vec![section(&data)])
}

fn section(data: &StartupData) -> Section {
    let head = ["round", "scheme", "seconds", "requests", "bytes", "by reservation", "other VM, MB/s"];
    let rows = data.starts.iter().map(|s| {
        vec![
            (s.round + 1).to_string(),
            s.scheme.clone(),
            if s.timed_out { format!("over {}", data.limit) } else { format!("{:.2}", s.seconds) },
            s.requests.to_string(),
            s.bytes.to_string(),
            s.reserved.to_string(),
            format!("{:.2}", s.flood / 1e6),
        ]
    });
    Section {
        title: "Start-up of an application in a guest".to_owned(),
        tables: vec![Table {
            label: "starts".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: rows.collect(),
        }],
        ..Section::default()
    }
}
