//! Migrations of which one part is killed: each with a guest and two I/O domains of its own.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_workflow::Progress;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::evidence::Evidence;
use super::measure::{MovingGuest, Place, answer, config, control, served, sides};
use super::{Contract, Findings, contract};
use crate::backend::Backend;

/// Longest time until a phase is reached, or a killed migration has ended.
const TIME_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);

/// Part that is killed with SIGKILL. A killed I/O domain is started again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    /// QEMU that the guest leaves.
    SourceQemu,
    /// QEMU that the guest comes to.
    TargetQemu,
    /// I/O domain of the first.
    SourceDomain,
    /// I/O domain of the second.
    TargetDomain,
}

impl Victim {
    const ALL: [Self; 4] = [Self::TargetQemu, Self::SourceQemu, Self::SourceDomain, Self::TargetDomain];

    /// Name in messages and tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SourceQemu => "source QEMU",
            Self::TargetQemu => "target QEMU",
            Self::SourceDomain => "source I/O domain",
            Self::TargetDomain => "target I/O domain",
        }
    }
}

/// Phase of the migration at the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Right after `migrate`: `setup`, or the first moments of `active`.
    Begun,
    /// Memory is copied again.
    Active,
    /// The guest stands still: `pre-switchover`.
    Stopped,
    /// The guest runs on the target.
    Completed,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Active, Self::Stopped, Self::Completed, Self::Begun];

    /// Name in messages and tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Active => "active",
            Self::Stopped => "stopped",
            Self::Completed => "completed",
        }
    }
}

/// Sides on which a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// None: the guest has ended with its QEMU.
    Nowhere,
    /// The source alone.
    Source,
    /// The target alone.
    Target,
    Both,
}

impl Outcome {
    /// Name in messages and tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Nowhere => "nowhere",
            Self::Source => "source",
            Self::Target => "target",
            Self::Both => "both",
        }
    }

    fn of_running(source: bool, target: bool) -> Self {
        match (source, target) {
            (false, false) => Self::Nowhere,
            (true, false) => Self::Source,
            (false, true) => Self::Target,
            (true, true) => Self::Both,
        }
    }
}

/// Outcomes that are right. A QEMU that has the guest takes it along; one that has it not yet, or
/// no more, does not. An I/O domain that is killed ends no guest.
pub(super) fn expected(victim: Victim, phase: Phase) -> &'static [Outcome] {
    match (victim, phase) {
        (Victim::SourceQemu, Phase::Completed) => &[Outcome::Target],
        (Victim::TargetQemu, Phase::Completed) | (Victim::SourceQemu, _) => &[Outcome::Nowhere],
        (Victim::TargetQemu, _) => &[Outcome::Source],
        (Victim::SourceDomain | Victim::TargetDomain, Phase::Completed) => &[Outcome::Target],
        (Victim::SourceDomain | Victim::TargetDomain, _) => &[Outcome::Source, Outcome::Target],
    }
}

/// A killed migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kill {
    /// Part that was killed.
    pub victim: Victim,
    /// Phase of the migration.
    pub phase: Phase,
    /// Sides on which the guest ran afterwards; `None` where that was not seen.
    pub outcome: Option<Outcome>,
    /// Reservation of the disk where the guest ran.
    pub contract: Option<Contract>,
    /// Findings of the guest that ran.
    pub findings: Option<Findings>,
    /// Reason why the rest was not seen.
    pub failed: Option<String>,
}

impl Kill {
    /// Whether the guest ran where it should, with its reservation and its data.
    #[must_use]
    pub fn is_as_expected(&self) -> bool {
        let is_right = self.outcome.is_some_and(|o| expected(self.victim, self.phase).contains(&o));
        let is_kept = self.outcome == Some(Outcome::Nowhere)
            || self.contract == Some(Contract::InForce) && self.findings.is_some_and(|f| f.is_clean());
        self.failed.is_none() && is_right && is_kept
    }
}

/// Parts and phases of the first `n` kills, all combinations in turn.
pub(super) fn order(n: usize) -> impl Iterator<Item = (Victim, Phase)> {
    let all = Phase::ALL.into_iter().flat_map(|phase| Victim::ALL.map(|victim| (victim, phase)));
    all.collect::<Vec<_>>().into_iter().cycle().take(n)
}

/// Migrates a guest of its own, and kills a part. What fails is in the result; the state of all
/// parts goes with an outcome that is not as expected.
///
/// # Errors
/// Cancellation, and a guest or I/O domains that do not start.
pub(super) fn kill_one(
    place: &Place,
    dir: &Path,
    (victim, phase): (Victim, Phase),
    progress: &dyn Progress,
) -> anyhow::Result<(Kill, Option<Evidence>)> {
    progress.check_cancelled()?;
    // The guest is dropped before its I/O domains.
    let (mut domains, mut guest) = place.boot(dir, false)?;
    let mut kill = Kill { victim, phase, outcome: None, contract: None, findings: None, failed: None };
    if let Err(e) = run(&mut kill, &mut guest, &mut domains, dir, progress) {
        progress.check_cancelled()?;
        kill.failed = Some(format!("{e:#}"));
    }
    let what = format!("kill of the {}, {}, in migration", victim.as_str(), phase.as_str());
    let evidence = (!kill.is_as_expected()).then(|| guest.evidence(&what));
    Ok((kill, evidence))
}

fn run(
    kill: &mut Kill,
    guest: &mut MovingGuest,
    domains: &mut [Option<Backend>; 2],
    dir: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let target = guest.target()?;
    let there = guest.other.insert(target);
    begin(kill.phase, &mut guest.here, there)?;
    strike(kill.victim, &guest.here, there, domains, dir)?;
    let is_stopped = kill.phase == Phase::Stopped && guest.here.is_alive();
    if is_stopped && guest.here.query_migration()?["status"] == "pre-switchover" {
        guest.here.continue_migration().context("the migration goes on")?;
    }
    let outcome = settle(&mut guest.here, there, progress)?;
    kill.outcome = Some(outcome);
    let side = match outcome {
        Outcome::Source => 0,
        Outcome::Target => {
            guest.arrive()?;
            1
        }
        Outcome::Nowhere | Outcome::Both => return Ok(()),
    };
    answer(&mut guest.here).context("the guest does not answer")?;
    let sides = sides(dir).map(|side| control(&side));
    let qemu = guest.here.handle().process.pid;
    kill.contract = Some(contract::verify(&sides[side], &sides[1 - side], qemu));
    let (findings, asked) = guest.ask(progress);
    kill.findings = Some(findings);
    asked
}

/// Begins a migration, and waits for the phase.
fn begin(phase: Phase, source: &mut QemuGuest, target: &QemuGuest) -> anyhow::Result<()> {
    if phase == Phase::Stopped {
        source.pause_before_switchover()?;
    }
    source.begin_migration(target)?;
    if phase == Phase::Begun {
        return Ok(());
    }
    let begin = Instant::now();
    loop {
        let seen = source.query_migration()?;
        let status = seen["status"].as_str().unwrap_or_default();
        match (phase, status) {
            (_, "failed" | "cancelled") => bail!("it failed before the kill: {seen}"),
            (Phase::Active, "active") if seen["ram"]["dirty-sync-count"].as_u64() >= Some(2) => return Ok(()),
            (Phase::Stopped, "pre-switchover") | (Phase::Completed, "completed") => return Ok(()),
            (_, "completed") => bail!("it completed before the kill"),
            _ if begin.elapsed() > TIME_LIMIT => bail!("phase {} is not reached: {seen}", phase.as_str()),
            _ => thread::sleep(POLL),
        }
    }
}

fn strike(
    victim: Victim,
    source: &QemuGuest,
    target: &QemuGuest,
    domains: &mut [Option<Backend>; 2],
    dir: &Path,
) -> anyhow::Result<()> {
    let side = match victim {
        Victim::SourceQemu => return end(source),
        Victim::TargetQemu => return end(target),
        Victim::SourceDomain => 0,
        Victim::TargetDomain => 1,
    };
    domains[side].take().context("an I/O domain")?.kill()?;
    let side_dir = &sides(dir)[side];
    domains[side] = Some(Backend::start_logged(side_dir, &config(side_dir, &served(dir)))?);
    Ok(())
}

fn end(qemu: &QemuGuest) -> anyhow::Result<()> {
    qemu.handle().process.signal(Signal::KILL);
    let begin = Instant::now();
    while qemu.is_alive() {
        if begin.elapsed() > TIME_LIMIT {
            bail!("a killed QEMU does not end");
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Waits until the migration has ended one way or the other, and says where the guest runs: twice
/// the same, as an incoming QEMU may still be about to start it.
fn settle(
    source: &mut QemuGuest,
    target: &mut QemuGuest,
    progress: &dyn Progress,
) -> anyhow::Result<Outcome> {
    let begin = Instant::now();
    let mut before = None;
    loop {
        progress.check_cancelled()?;
        let has_ended = has_ended(source)?;
        let now = Outcome::of_running(runs(source)?, runs(target)?);
        if has_ended && before == Some(now) {
            return Ok(now);
        }
        if begin.elapsed() > TIME_LIMIT {
            bail!("the migration does not end; the guest runs: {}", now.as_str());
        }
        before = has_ended.then_some(now);
        thread::sleep(Duration::from_secs(1));
    }
}

/// Whether the source migrates no more.
fn has_ended(source: &mut QemuGuest) -> anyhow::Result<bool> {
    if !source.is_alive() {
        return Ok(true);
    }
    let seen = source.query_migration()?;
    Ok(matches!(seen["status"].as_str(), Some("completed" | "failed" | "cancelled")))
}

/// Whether the guest runs in this QEMU. One that ends meanwhile has none.
fn runs(qemu: &mut QemuGuest) -> anyhow::Result<bool> {
    if !qemu.is_alive() {
        return Ok(false);
    }
    let status = qemu.qmp().map_err(anyhow::Error::from).and_then(|mut qmp| Ok(qmp.query_status()?.running));
    match status {
        Err(_) if !qemu.is_alive() => Ok(false),
        status => status,
    }
}
