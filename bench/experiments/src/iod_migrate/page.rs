//! The migrations as a page.

use super::{
    Answer, CardMove, Contract, DiskKind, Evidence, Kill, MigrateData, Outcome, Part, Piece, Refusal,
    Summary, Window, claims, kills,
};
use crate::experiment::Experiment;
use crate::page::xy::table;
use crate::page::{Section, Table};
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
        row.push(if f.unanswered { "no" } else { "yes" }.to_owned());
        row
    });
    let rounds = data.rounds.iter().enumerate().map(|(i, r)| {
        let mut row = vec![(i + 1).to_string()];
        row.extend([r.fixed, r.ready, r.logging].map(|rate| format!("{rate:.0}")));
        row
    });
    let of_moves = ["disk", "n", "failed", "downtime ms", "longest", "duration ms", "longest"];
    let of_findings = ["disk", "runs of fio", "bad blocks", "sums", "wrong sums", "errors", "answered"];
    let of_rounds = ["round", "without `migrate`", "`migrate = true`", "log in use"];
    let mut tables = vec![
        table("migrations", &of_moves, Vec::from(moves)),
        table("findings of the guests", &of_findings, findings.collect()),
        table("requests per second at depth 32", &of_rounds, rounds.collect()),
    ];
    tables.extend(of_failures(data));
    Section { title: "Live migration".to_owned(), tables, ..Section::default() }
}

/// Tables of what is not in every file, without empty ones.
fn of_failures(data: &MigrateData) -> impl Iterator<Item = Table> {
    let all = [
        table(
            "killed migrations",
            &["killed", "phase", "guest may run", "ran", "contract", "data", "not seen"],
            data.kills.iter().map(kill_row).collect(),
        ),
        table(
            "moves to a target without room",
            &["answer of the target", "requests", "longest ms", "before", "longest ms", "contract"],
            data.refusals.iter().map(refusal_row).collect(),
        ),
        table(
            "moves with a network card, and a frame each 5 ms",
            &["downtime ms", "duration ms", "frames", "lost", "longest gap ms", "not seen"],
            data.cards.iter().map(card_row).collect(),
        ),
        table(
            "pieces",
            &["command", "date", "commit", "VMM", "host", "from move", "refusal", "card", "kill", "round"],
            data.pieces.iter().map(piece_row).collect(),
        ),
        table(
            "evidence of failures",
            &["failure", "part", "state", "console or messages"],
            data.evidence.iter().flat_map(evidence_rows).collect(),
        ),
    ];
    all.into_iter().filter(|table| !table.rows.is_empty())
}

fn piece_row(piece: &Piece) -> Vec<String> {
    let host = &piece.host;
    vec![
        piece.command.clone(),
        piece.generated.clone(),
        piece.commit.clone().unwrap_or_else(|| "not known".to_owned()),
        format!("{} ({})", host.vmm, host.accelerator),
        format!("Linux {}, {} CPUs", host.kernel, host.cpus),
        (piece.moves + 1).to_string(),
        (piece.refusals + 1).to_string(),
        (piece.cards + 1).to_string(),
        (piece.kills + 1).to_string(),
        (piece.rounds + 1).to_string(),
    ]
}

fn evidence_rows(evidence: &Evidence) -> impl Iterator<Item = Vec<String>> + '_ {
    let cells = |part: &Part| [&part.name, &part.state, &part.log].map(String::clone);
    evidence.parts.iter().map(move |part| [vec![evidence.what.clone()], cells(part).to_vec()].concat())
}

fn contract_text(contract: Option<&Contract>) -> &str {
    match contract {
        None => "-",
        Some(Contract::InForce) => "in force",
        Some(Contract::Unverified(why)) => why.as_str(),
    }
}

fn refusal_row(refusal: &Refusal) -> Vec<String> {
    let answer = match &refusal.answer {
        Answer::Refused(why) => format!("refused: {why}"),
        Answer::Admitted => "admitted".to_owned(),
        Answer::Failed(why) => format!("failed: {why}"),
    };
    let cells =
        |window: Window| [window.requests.to_string(), format!("{:.1}", window.longest_ns as f64 / 1e6)];
    let [during, before] = [refusal.during, refusal.before].map(cells);
    let contract = contract_text(Some(&refusal.contract)).to_owned();
    [vec![answer], during.to_vec(), before.to_vec(), vec![contract]].concat()
}

fn card_row(card: &CardMove) -> Vec<String> {
    let unseen = card.moved.failed.as_deref().or((!card.covered).then_some("the flow ended before"));
    vec![
        card.moved.downtime_ms.to_string(),
        card.moved.total_ms.to_string(),
        card.sent.to_string(),
        card.lost.to_string(),
        format!("{:.0}", card.gap_ns as f64 / 1e6),
        unseen.unwrap_or_default().to_owned(),
    ]
}

fn kill_row(kill: &Kill) -> Vec<String> {
    let may_run = kills::expected(kill.victim, kill.phase).iter().map(|outcome| outcome.as_str());
    let contract = contract_text(kill.contract.as_ref());
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
