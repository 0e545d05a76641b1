//! Moves to an I/O domain without room, whose admission refuses them before they begin.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_domain_protocol::Command;
use rtvirtio_domain_protocol::histograms::{DirectionHistogram, DiskHistograms, Histograms};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::{client as iod, live};
use serde::{Deserialize, Serialize};

use super::MigrateData;
use super::contract::{Contract, DEADLINE_NS};
use super::measure::{DEVICE, DISK, DISK_NAME, MovingGuest, control, disk_table, served};
use crate::backend::Backend;
use crate::report::write;

/// Reservation of the disk that the target has: with that of the disk that moves it is too much.
const TAKEN: &str = r#"{ share = "90%", burst = "100ms", deadline = "1s" }"#;
/// Words by which admission says that a device has no room.
const NO_ROOM: &str = "of the device are reserved, and it can give";
/// Time in which the guest's requests are counted, at least.
const WINDOW: Duration = Duration::from_secs(2);

/// Answer of the target's I/O domain to the disk that is to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Admission refused the reservation, in these words, and the disk is not there.
    Refused(String),
    /// The disk was taken.
    Admitted,
    /// Errors of other kinds, and a status that could not be read.
    Failed(String),
}

/// Requests of the guest that completed in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Number of these requests.
    pub requests: u64,
    /// The longest of them, from fetch to completion, rounded up by less than 1 %.
    pub longest_ns: u64,
}

/// A move that is asked for at a target without room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// Answer of the target.
    pub answer: Answer,
    /// Window from the request for the move until the reservation is seen in force after it.
    pub during: Window,
    pub before: Window,
    /// Reservation where the guest runs, afterwards.
    pub contract: Contract,
}

impl Refusal {
    /// Whether admission refused the move, and the guest kept its reservation and went on: requests
    /// completed, none later than the reservation's deadline.
    #[must_use]
    pub fn is_without_stop(&self) -> bool {
        let goes_on = self.during.requests > 0 && self.during.longest_ns <= DEADLINE_NS;
        matches!(self.answer, Answer::Refused(_)) && self.contract == Contract::InForce && goes_on
    }
}

/// Asks for moves to an I/O domain without room, and writes the data after each.
///
/// # Errors
/// An I/O domain that does not start or answer, and cancellation.
pub(super) fn measure(
    numbers: Range<usize>,
    guest: &MovingGuest,
    dir: &Path,
    (path, data): (&Path, &mut MigrateData),
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    if numbers.is_empty() {
        return Ok(());
    }
    let target = dir.join("full");
    std::fs::create_dir(&target)?;
    std::fs::File::create(other(&target))?.set_len(DISK.0)?;
    let _domain = Backend::start_logged(&target, &config(&target))?;
    let n = numbers.end;
    for i in numbers {
        progress.check_cancelled()?;
        let refusal = refuse(guest, &target, &served(dir), progress)?;
        let went_on = if refusal.is_without_stop() { "the guest went on" } else { "not as expected" };
        progress.step(&format!("refused move {} of {n}: {went_on}", i + 1));
        data.refusals.push(refusal);
        write(path, data)?;
    }
    Ok(())
}

fn refuse(
    guest: &MovingGuest,
    target: &Path,
    disk: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<Refusal> {
    let source = control(guest.domain().context("the guest is on no I/O domain")?);
    let ((), before) = window(&source, || Ok(progress.pause(WINDOW)?))?;
    let ((answer, contract), during) = window(&source, || {
        let answer = ask(target, disk);
        progress.pause(WINDOW)?;
        // A request completes meanwhile: one that a stop has delayed is in the window.
        let contract = guest.contract().context("the guest is on no I/O domain")?;
        Ok((answer, contract))
    })?;
    Ok(Refusal { answer, during, before, contract })
}

/// Asks the target for a place for the disk. Nothing of the move begins before it has one.
fn ask(target: &Path, disk: &Path) -> Answer {
    let control = control(target);
    let why = match live::attach(&control, &arrival(target, disk)) {
        Ok(_) => return Answer::Admitted,
        Err(e) => format!("{e:#}"),
    };
    match iod::ask(&control) {
        _ if !why.contains(NO_ROOM) => Answer::Failed(why),
        Ok(status) if status.vms.iter().any(|vm| vm.name == DISK_NAME) => Answer::Admitted,
        Ok(_) => Answer::Refused(why),
        Err(e) => Answer::Failed(format!("{e:#}")),
    }
}

/// Counts the requests of the first disk while something is done.
fn window<T>(control: &Path, act: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Window)> {
    let begin = histograms(control)?;
    let done = act()?;
    let end = histograms(control)?;
    let [read, write] = [between(&begin.read, &end.read), between(&begin.write, &end.write)];
    let requests = read.requests + write.requests;
    Ok((done, Window { requests, longest_ns: read.longest_ns.max(write.longest_ns) }))
}

fn histograms(control: &Path) -> anyhow::Result<DiskHistograms> {
    let all: Histograms = iod::send_command(control, &Command::Histograms)?;
    all.disks.into_iter().next().context("the I/O domain has no disk")
}

/// Requests that came in between.
pub(super) fn between(begin: &DirectionHistogram, end: &DirectionHistogram) -> Window {
    let before = |ns: u64| begin.latencies.iter().find(|(at, _)| *at == ns).map_or(0, |(_, n)| *n);
    let longest = end.latencies.iter().rev().find(|(ns, n)| *n > before(*ns));
    Window {
        requests: end.requests.saturating_sub(begin.requests),
        longest_ns: longest.map_or(0, |(ns, _)| *ns),
    }
}

/// Path of the disk that the target has.
fn other(target: &Path) -> PathBuf {
    target.join("other")
}

/// Configuration of the target.
pub(super) fn config(target: &Path) -> String {
    format!(
        "control = {:?}\n{DEVICE}[[device.disk]]\nname = \"other\"\nsocket = {:?}\npath = {:?}\n\
         reserve = {TAKEN}\n",
        control(target).display().to_string(),
        target.join("other.sock").display().to_string(),
        other(target).display().to_string(),
    )
}

/// Tables of the disk that is to come.
pub(super) fn arrival(target: &Path, disk: &Path) -> String {
    format!("[[device]]\nname = \"file\"\n{}", disk_table(target, disk))
}
