//! Pieces of a measurement: runs of the program that add to one file.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::image::find_program;
use rtvirtio_testbed::qemu::Accel;
use rtvirtio_vmm::probe::QEMU;
use rtvirtio_workflow::{cpus, generated, kernel_release};
use serde::{Deserialize, Serialize};

use super::{Findings, MigrateData, Move};
use crate::saved::Saved as _;

/// Conditions of a run of the program, and the index of its first entry of each kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Host, and version of QEMU.
    pub host: HostFacts,
    /// Command line.
    pub command: String,
    /// Date, and version of the program.
    pub generated: String,
    /// Commit of the source from which the program was built, as it was checked out at the
    /// measurement; `None` where that is not known.
    pub commit: Option<String>,
    /// Index of its first migration.
    pub moves: usize,
    /// Index of its first findings.
    pub findings: usize,
    /// Index of its first kill.
    pub kills: usize,
    /// Index of its first refused move.
    pub refusals: usize,
    /// Index of its first migration with a network card.
    pub cards: usize,
    /// Index of its first round.
    pub rounds: usize,
}

/// Host of a measurement, with the version of QEMU that its guests will have.
///
/// # Errors
/// A QEMU that is missing or does not say its version.
pub(super) fn facts(accel: Accel, device: String) -> anyhow::Result<HostFacts> {
    let program = find_program(QEMU).with_context(|| format!("{QEMU} is not installed"))?;
    let said = Command::new(&program).arg("--version").stdin(Stdio::null()).output();
    let said = said.with_context(|| program.display().to_string())?.stdout;
    let said = String::from_utf8_lossy(&said);
    let version = version(&said).with_context(|| format!("no version of QEMU: {said:.200}"))?;
    Ok(HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: format!("QEMU {version}"),
        accelerator: accel.as_str().to_owned(),
        device,
    })
}

/// Version in QEMU's answer to `--version`.
pub(super) fn version(said: &str) -> Option<&str> {
    said.split_whitespace().skip_while(|word| *word != "version").nth(1)
}

/// Commit that is checked out, with `-dirty` where files differ from it.
fn commit() -> Option<String> {
    let describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let mut git = Command::new("git");
    git.args(["-C", env!("CARGO_MANIFEST_DIR")]).args(describe).stdin(Stdio::null());
    let said = git.stderr(Stdio::null()).output().ok().filter(|out| out.status.success())?;
    Some(String::from_utf8_lossy(&said.stdout).trim().to_owned()).filter(|commit| !commit.is_empty())
}

/// Begins a measurement, or a piece of the one in the file.
///
/// # Errors
/// A file of another host.
pub(super) fn begin(
    before: Option<MigrateData>,
    host: HostFacts,
    command: String,
) -> anyhow::Result<MigrateData> {
    let mut data = before.unwrap_or_else(|| MigrateData {
        schema: MigrateData::SCHEMA.to_owned(),
        host: host.clone(),
        command: command.clone(),
        generated: generated(),
        pieces: Vec::new(),
        moves: Vec::new(),
        findings: Vec::new(),
        kills: Vec::new(),
        refusals: Vec::new(),
        cards: Vec::new(),
        rounds: Vec::new(),
        evidence: Vec::new(),
    });
    let of = |host: &HostFacts| (host.cpus, host.accelerator.clone(), host.device.clone());
    ensure!(
        of(&data.host) == of(&host),
        "the file is of another host ({} CPUs, {}): give another --out, or move the file away",
        data.host.cpus,
        data.host.accelerator
    );
    let (moves, findings) = (data.moves.len(), data.findings.len());
    let (kills, refusals) = (data.kills.len(), data.refusals.len());
    let (cards, rounds) = (data.cards.len(), data.rounds.len());
    if data.pieces.is_empty() && moves + findings + kills + rounds > 0 {
        // A file without pieces is one.
        data.pieces.push(Piece {
            host: data.host.clone(),
            command: data.command.clone(),
            generated: data.generated.clone(),
            ..Piece::default()
        });
    }
    data.pieces.push(Piece {
        host,
        command,
        generated: generated(),
        commit: commit(),
        moves,
        findings,
        kills,
        refusals,
        cards,
        rounds,
    });
    Ok(data)
}

/// Migrations and findings of each piece.
pub(super) fn parts(data: &MigrateData) -> Vec<(&[Move], &[Findings])> {
    let mut begins: Vec<(usize, usize)> = data.pieces.iter().map(|p| (p.moves, p.findings)).collect();
    if begins.is_empty() {
        begins.push((0, 0));
    }
    let ends = begins.iter().copied().skip(1).chain([(data.moves.len(), data.findings.len())]);
    let parts = begins.iter().zip(ends).map(|(&(moves, findings), (moves_end, findings_end))| {
        (
            data.moves.get(moves..moves_end).unwrap_or_default(),
            data.findings.get(findings..findings_end).unwrap_or_default(),
        )
    });
    parts.collect()
}
