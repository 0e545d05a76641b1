//! The migrations as a page.

use super::{DiskKind, MigrateData, Summary, claims};
use crate::experiment::Experiment;
use crate::page::{Section, Table};
use crate::report::ExperimentReport;

impl Experiment for MigrateData {
    const FILE: &str = "iod-migrate.json";
    const TITLE: &str = "rtvirtio: live migration";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} migrations of two guests in turn ({} under {}); {}.",
            self.host.device,
            self.moves.len(),
            self.host.vmm,
            self.host.accelerator,
            self.command
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section(self)])
    }
}

fn section(data: &MigrateData) -> Section {
    let head = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let moves = [DiskKind::Domain, DiskKind::Qemu].map(|disk| {
        let all = Summary::of_disk(&data.moves, disk);
        let ms = |value: f64| format!("{value:.0}");
        vec![
            disk.as_str().to_owned(),
            all.n.to_string(),
            all.failed.to_string(),
            ms(all.downtime_ms),
            ms(all.longest_downtime_ms),
            ms(all.total_ms),
            ms(all.longest_ms),
        ]
    });
    let findings = data.findings.iter().map(|f| {
        let mut row = vec![f.disk.as_str().to_owned()];
        let numbers = [f.fio_runs, f.bad_blocks, f.sums, f.wrong_sums, f.errors];
        row.extend(numbers.map(|n| n.to_string()));
        row
    });
    let rounds = data.rounds.iter().enumerate().map(|(i, r)| {
        let mut row = vec![(i + 1).to_string()];
        row.extend([r.fixed, r.ready, r.logging].map(|rate| format!("{rate:.0}")));
        row
    });
    let tables = vec![
        Table {
            label: "migrations".to_owned(),
            head: head(&["disk", "n", "failed", "downtime ms", "longest", "duration ms", "longest"]),
            rows: Vec::from(moves),
        },
        Table {
            label: "findings of the guests".to_owned(),
            head: head(&["disk", "runs of fio", "bad blocks", "sums", "wrong sums", "errors"]),
            rows: findings.collect(),
        },
        Table {
            label: "requests per second at depth 32".to_owned(),
            head: head(&["round", "without `migrate`", "`migrate = true`", "log in use"]),
            rows: rounds.collect(),
        },
    ];
    Section { title: "Live migration".to_owned(), tables, ..Section::default() }
}
