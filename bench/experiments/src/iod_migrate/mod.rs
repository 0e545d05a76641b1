//! Live migrations there and back of a guest that writes and verifies its disk, and the cost of the
//! log that they need.
//!
//! Two I/O domains in two directories of one host serve one image with `migrate = true`, and the
//! guest moves between two QEMUs, one on each. The same guest on QEMU's own virtio-blk, on a file
//! of its own, moves in turn with it. Both guests write and verify all the time.
//!
//! The disk has a reservation on both I/O domains, which is looked at after each arrival.
//! Migrations of further guests are killed in each phase: source, target, and either I/O domain.
//!
//! The log of written pages is measured without a VM: requests per second of one disk with the log
//! in use, with `migrate = true` alone, and without it, in turn.

mod cards;
mod contract;
mod evidence;
mod guest_load;
mod kills;
mod log_cost;
mod measure;
mod page;
mod pieces;
mod refusals;
#[cfg(test)]
mod tests;

pub use cards::CardMove;
pub use contract::Contract;
pub use evidence::{Evidence, Part};
pub use kills::{Kill, Outcome, Phase, Victim};
pub use measure::{MigrateOptions, measure};
pub use pieces::Piece;
pub use refusals::{Answer, Refusal, Window};

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;

/// Largest share of QEMU's own downtime.
const DOWNTIME_RATIO: f64 = 1.2;
/// Largest share of requests per second that the log takes.
const LOG_COST: f64 = 0.1;
/// Largest share of requests per second that `migrate = true` takes without a log.
const LOG_COST_OFF: f64 = 0.01;

/// Back end of a guest's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskKind {
    /// The I/O domain.
    #[default]
    Domain,
    /// QEMU's own virtio-blk.
    Qemu,
}

impl DiskKind {
    /// Name in messages and tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Domain => "I/O domain",
            Self::Qemu => "QEMU's own",
        }
    }
}

/// A migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// Back end of the guest's disk.
    pub disk: DiskKind,
    /// Time for which the guest stood still, as QEMU says it, ms.
    pub downtime_ms: u64,
    /// Duration in all, ms.
    pub total_ms: u64,
    /// Passes over memory that was written meanwhile.
    pub syncs: u64,
    /// Reservation of the disk after the arrival; `None` where it was not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contract: Option<Contract>,
    /// Reason of a migration that failed, whose numbers are 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Findings of a guest after all its migrations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Findings {
    /// Back end of the guest's disk.
    pub disk: DiskKind,
    /// Runs of fio that ended without an error.
    pub fio_runs: u64,
    /// Blocks in which fio found another content than it had written.
    pub bad_blocks: u64,
    /// Checksums that were made of parts of 4 MiB.
    pub sums: u64,
    /// Checksums that were not those of the part.
    pub wrong_sums: u64,
    /// I/O errors of fio and the guest's kernel.
    pub errors: u64,
    /// Whether the guest did not answer, or not to all questions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unanswered: bool,
}

impl Findings {
    /// Whether the guest has written and verified, and found nothing wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        let has_checked = self.fio_runs > 0 && self.sums > 0;
        has_checked && !self.unanswered && self.bad_blocks + self.wrong_sums + self.errors == 0
    }
}

/// Requests per second of a round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogRound {
    /// Rate of a disk without `migrate`.
    pub fixed: f64,
    /// Rate with `migrate = true`, and no log in use.
    pub ready: f64,
    /// Rate with a log in use.
    pub logging: f64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Runs of the program that made it; empty for a single one without this record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Piece>,
    /// Migrations in the order made.
    pub moves: Vec<Move>,
    /// Findings of the guests of each piece; none of a piece that was stopped before.
    pub findings: Vec<Findings>,
    /// Migrations that were killed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kills: Vec<Kill>,
    /// Moves that were asked for at a target without room.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<Refusal>,
    /// Migrations of a guest with a network card.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<CardMove>,
    /// Requests per second with and without the log.
    pub rounds: Vec<LogRound>,
    /// State of all parts at each failure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl MigrateData {
    /// Migrations of guests with this kind of disk, failed ones included.
    fn moves_with(&self, disk: DiskKind) -> usize {
        self.moves.iter().filter(|m| m.disk == disk).count()
    }

    /// Shows and keeps the evidence of a failure.
    fn keep(&mut self, evidence: Option<Evidence>, progress: &dyn Progress) {
        if let Some(evidence) = evidence {
            progress.warn(&evidence.to_string());
            self.evidence.push(evidence);
        }
    }
}

/// Numbers of the migrations with one kind of disk.
struct Summary {
    /// Completed migrations.
    n: usize,
    failed: usize,
    downtime_ms: f64,
    longest_downtime_ms: f64,
    total_ms: f64,
    longest_ms: f64,
}

impl Summary {
    fn of_disk(moves: &[Move], disk: DiskKind) -> Self {
        let (failed, done): (Vec<&Move>, Vec<&Move>) =
            moves.iter().filter(|m| m.disk == disk).partition(|m| m.failed.is_some());
        let all = |of: fn(&Move) -> u64| done.iter().map(|m| of(m) as f64).collect::<Vec<f64>>();
        let (downtimes, totals) = (all(|m| m.downtime_ms), all(|m| m.total_ms));
        let longest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        Self {
            n: done.len(),
            failed: failed.len(),
            longest_downtime_ms: longest(&downtimes),
            downtime_ms: median(downtimes),
            longest_ms: longest(&totals),
            total_ms: median(totals),
        }
    }
}

/// Findings of all guests with one kind of disk.
#[derive(Default)]
struct Checks {
    /// Migrations, failed ones included, of guests that were asked afterwards.
    asked: usize,
    /// Migrations of these whose guest had verified by fio and by sums.
    checked: usize,
    /// Failed migrations, errors, and guests that did not answer: one that is lost counts once.
    lost: u64,
    wrong: u64,
    sums: u64,
}

impl Checks {
    fn of_disk(data: &MigrateData, disk: DiskKind) -> Self {
        let mut all = Self::default();
        for (moves, findings) in pieces::parts(data) {
            let moves: Vec<&Move> = moves.iter().filter(|m| m.disk == disk).collect();
            let failed = moves.iter().filter(|m| m.failed.is_some()).count();
            all.lost += failed as u64;
            let Some(found) = findings.iter().find(|f| f.disk == disk) else { continue };
            all.asked += moves.len();
            all.lost += found.errors + u64::from(found.unanswered && failed == 0);
            all.wrong += found.bad_blocks + found.wrong_sums;
            // Sums without a run of fio, or the other way round, are half a check.
            if found.sums > 0 && found.fio_runs + found.bad_blocks > 0 {
                all.checked += moves.len();
                all.sums += found.sums;
            }
        }
        all
    }
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &MigrateData) -> Vec<Claim> {
    let [ours, peer] = [DiskKind::Domain, DiskKind::Qemu].map(|disk| Summary::of_disk(&data.moves, disk));
    let mut claims = integrity(&Checks::of_disk(data, DiskKind::Domain), ours.n + ours.failed);
    claims.extend(contracts(data));
    claims.extend(refused(&data.refusals));
    claims.extend(flows(&data.cards));
    claims.extend(downtimes(&ours, &peer));
    claims.push(Claim::new(
        "migrate.lost.qemu",
        "the same on QEMU's own disk",
        Checks::of_disk(data, DiskKind::Qemu).lost as f64,
        "errors",
        peer.n + peer.failed,
    ));
    claims.extend(log_costs(&data.rounds));
    claims
}

/// Claims of integrity, which are not met without the guests' findings.
fn integrity(checks: &Checks, made: usize) -> Vec<Claim> {
    vec![
        Claim::new(
            "migrate.lost",
            "failed moves, errors of the guest",
            checks.lost as f64,
            "errors",
            checks.asked,
        )
        .at_most(0.0),
        Claim::new(
            "migrate.corrupt",
            "wrong blocks and sums in it",
            checks.wrong as f64,
            "blocks",
            checks.checked,
        )
        .at_most(0.0),
        Claim::new("migrate.sums", "sums of 4 MiB that it made", checks.sums as f64, "sums", made),
    ]
}

/// Claims of the reservation after arrivals, and of killed migrations.
fn contracts(data: &MigrateData) -> [Claim; 2] {
    let arrivals: Vec<&Contract> = data.moves.iter().filter_map(|m| m.contract.as_ref()).collect();
    let unverified = arrivals.iter().filter(|c| ***c != Contract::InForce).count();
    let unexpected = data.kills.iter().filter(|kill| !kill.is_as_expected()).count();
    [
        Claim::new(
            "migrate.unverified",
            "arrivals without the contract",
            unverified as f64,
            "moves",
            arrivals.len(),
        )
        .at_most(0.0),
        Claim::new(
            "migrate.kills.unexpected",
            "killed migrations with another outcome than expected",
            unexpected as f64,
            "kills",
            data.kills.len(),
        ),
    ]
}

/// Claims of moves that a target without room refuses.
fn refused(refusals: &[Refusal]) -> [Claim; 3] {
    let without_stop = refusals.iter().filter(|refusal| refusal.is_without_stop()).count();
    let longest = |of: fn(&Refusal) -> Window| {
        refusals.iter().map(of).map(|window| window.longest_ns).max().unwrap_or(0) as f64 / 1e6
    };
    let n = refusals.len();
    let claim = |id: &str, what: &str, value, unit| Claim::new(id, what, value, unit, n);
    [
        claim(
            "migrate.refused_without_stop",
            "moves to a target without room that it refused, while the guest went on",
            without_stop as f64,
            "moves",
        ),
        claim("migrate.refused.longest_ms", "longest request around a refusal", longest(|r| r.during), "ms"),
        claim("migrate.refused.longest_ms.before", "longest before one", longest(|r| r.before), "ms"),
    ]
}

/// Claims of flows to a guest that moves.
fn flows(cards: &[CardMove]) -> [Claim; 4] {
    let seen: Vec<&CardMove> = cards.iter().filter(|card| card.is_seen()).collect();
    let lost: u64 = seen.iter().map(|card| card.lost).sum();
    let gaps: Vec<f64> = seen.iter().map(|card| card.gap_ns as f64 / 1e6).collect();
    let (most, n) = (gaps.iter().copied().fold(0.0, f64::max), gaps.len());
    [
        Claim::new(
            "migrate.frames_unseen",
            "moves with a network card that failed, or that the flow did not outlast",
            (cards.len() - n) as f64,
            "moves",
            cards.len(),
        ),
        Claim::new("migrate.frames_lost", "frames lost in moves, one each 5 ms", lost as f64, "frames", n),
        Claim::new("migrate.frame_gap_ms", "longest gap of a move, median", median(gaps), "ms", n),
        Claim::new("migrate.frame_gap_ms.most", "longest gap of all moves", most, "ms", n),
    ]
}

fn downtimes(ours: &Summary, peer: &Summary) -> Vec<Claim> {
    let is_known = peer.downtime_ms > 0.0;
    let (ratio, n) =
        if is_known { (ours.downtime_ms / peer.downtime_ms, ours.n.min(peer.n)) } else { (0.0, 0) };
    let mut claims = vec![
        Claim::new("migrate.downtime_ratio", "downtime over that on QEMU's own disk", ratio, "times", n)
            .at_most(DOWNTIME_RATIO),
    ];
    let both = [("", "a guest on the I/O domain", ours), (".qemu", "one on QEMU's own disk", peer)];
    for (suffix, of, all) in both {
        let ms = |name: &str, what: String, value| {
            Claim::new(format!("migrate.{name}{suffix}"), what, value, "ms", all.n)
        };
        claims.extend([
            ms("downtime_ms", format!("median downtime of {of}"), all.downtime_ms),
            ms("downtime_ms.most", format!("longest downtime of {of}"), all.longest_downtime_ms),
            ms("total_ms", format!("median duration of a migration of {of}"), all.total_ms),
            ms("total_ms.most", format!("longest migration of {of}"), all.longest_ms),
        ]);
    }
    claims
}

fn log_costs(rounds: &[LogRound]) -> Vec<Claim> {
    let n = rounds.len();
    let of = |value: fn(&LogRound) -> f64| median(rounds.iter().map(value).collect());
    vec![
        Claim::new(
            "migrate.log_cost",
            "requests/s lost while logging",
            of(|r| 1.0 - r.logging / r.ready),
            "share",
            n,
        )
        .at_most(LOG_COST),
        Claim::new(
            "migrate.log_cost_off",
            "requests/s lost by `migrate`, no log",
            of(|r| 1.0 - r.ready / r.fixed),
            "share",
            n,
        )
        .at_most(LOG_COST_OFF),
        Claim::new("migrate.iops.logging", "requests/s with a log, median", of(|r| r.logging), "1/s", n),
        Claim::new("migrate.iops.ready", "requests/s without, median", of(|r| r.ready), "1/s", n),
        Claim::new("migrate.iops.fixed", "requests/s without `migrate`, median", of(|r| r.fixed), "1/s", n),
    ]
}
