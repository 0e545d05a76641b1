//! The migrations as a page.

use super::{Contract, DiskKind, Kill, MigrateData, Outcome, Summary, claims, kills};
use crate::experiment::Experiment;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for MigrateData {
    const FORM: &str = "rtvirtio-iod-migrate/1";
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
    let of_moves = ["disk", "n", "failed", "downtime ms", "longest", "duration ms", "longest"];
    let of_findings = ["disk", "runs of fio", "bad blocks", "sums", "wrong sums", "errors"];
    let of_rounds = ["round", "without `migrate`", "`migrate = true`", "log in use"];
    let mut tables = vec![
        table("migrations", &of_moves, Vec::from(moves)),
        table("findings of the guests", &of_findings, findings.collect()),
        table("requests per second at depth 32", &of_rounds, rounds.collect()),
    ];
    if !data.kills.is_empty() {
        let head = ["killed", "phase", "guest may run", "ran", "contract", "data", "not seen"];
        tables.push(table("killed migrations", &head, data.kills.iter().map(kill_row).collect()));
    }
    Section { title: "Live migration".to_owned(), tables, ..Section::default() }
}

fn kill_row(kill: &Kill) -> Vec<String> {
    let may_run = kills::expected(kill.victim, kill.phase).iter().map(|outcome| outcome.as_str());
    let contract = match &kill.contract {
        None => "-",
        Some(Contract::InForce) => "in force",
        Some(Contract::Unverified(why)) => why.as_str(),
    };
    let data = match &kill.findings {
        None => "-",
        Some(findings) if findings.is_clean() => "right",
        Some(_) => "wrong",
    };
    vec![
        kill.victim.as_str().to_owned(),
        kill.phase.as_str().to_owned(),
        may_run.collect::<Vec<_>>().join(" or "),
        kill.outcome.map_or("not seen", Outcome::as_str).to_owned(),
        contract.to_owned(),
        data.to_owned(),
        kill.failed.clone().unwrap_or_default(),
    ]
}
