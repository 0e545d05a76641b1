//! Migrations of two guests in turn, those that are killed, and then the cost of the log.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::qemu::{Accel, DiskRegion, GuestDisk, Migration, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::agent::Process;
use rtvirtio_workflow::{Progress, generated};

use super::{Contract, DiskKind, Findings, MigrateData, Move, contract, guest_load, kills, log_cost};
use crate::backend::Backend;
use crate::experiment::from_one;
use crate::guest;
use crate::interleave::Counter;
use crate::report::{save, write};
use crate::saved::Saved as _;

/// Size of each guest's disk.
const DISK: Bytes = Bytes(64 << 20);
/// Longest migration.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of a script that writes or reads half of the disk.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(180);
/// Tries to reach the guest's agent after a migration, each of 10 s.
const ANSWER_TRIES: usize = 3;

/// Options of the experiment.
#[derive(Args, Clone, Copy, Debug)]
pub struct MigrateOptions {
    /// Migrations of each guest, there and back in turn.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = from_one())]
    pub migrations: usize,
    /// Rounds of requests/s with the log and without it.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = from_one())]
    pub pairs: usize,
    /// Migrations of which source, target or an I/O domain is killed; 16 are all parts in all
    /// phases.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub kills: usize,
}

/// Measures, and writes the result into a file after each migration and each round. A failed
/// migration of the guest on the I/O domain ends the migrations: the guests are asked what they
/// found, and the log is measured.
///
/// # Errors
/// Guests or I/O domains that do not start, and cancellation. What was measured is in the file
/// then, once a guest has moved.
pub fn measure(
    options: &MigrateOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-migrate-").tempdir()?;
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    let place = Place { image, accel };
    let mut data = migrate(options, &place, dir.path(), path, progress)?;
    for (i, (victim, phase)) in kills::order(options.kills).enumerate() {
        let kill_dir = dir.path().join(format!("k{i}"));
        std::fs::create_dir(&kill_dir)?;
        let kill = kills::kill_one(&place, &kill_dir, (victim, phase), progress)?;
        let verdict = if kill.is_as_expected() { "as expected" } else { "not as expected" };
        progress.step(&format!("kill of the {}, {}: {verdict}", victim.as_str(), phase.as_str()));
        data.kills.push(kill);
        write(path, &data)?;
    }
    let log_dir = dir.path().join("log");
    std::fs::create_dir(&log_dir)?;
    let ram = log_cost::ram_disk()?;
    let runs = options.pairs * log_cost::RUNS.len();
    let mut counter = Counter::new(progress, "requests/s with and without the log", runs);
    for round in 0..options.pairs {
        data.rounds.push(log_cost::round(&ram, &log_dir, round, &mut counter, progress)?);
        write(path, &data)?;
    }
    drop(counter);
    save(path, &data, progress)
}

/// Boots both guests, migrates them in turn, and asks what they found.
fn migrate(
    options: &MigrateOptions,
    place: &Place,
    dir: &Path,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<MigrateData> {
    let own = dir.join("own");
    std::fs::File::create(&own)?.set_len(DISK.0)?;
    progress.step("booting two guests, on the I/O domain and on QEMU's own disk");
    // The guest is dropped before the I/O domains.
    let (domains, ours) = place.boot(dir)?;
    let region = DiskRegion { path: own, offset: Bytes(0), size: DISK };
    let peer = sides(dir).map(|side| place.qemu(GuestDisk::Region(region.clone()), &side));
    let mut guests = [ours, MovingGuest::boot(DiskKind::Qemu, peer)?];
    let mut data = MigrateData {
        schema: MigrateData::SCHEMA.to_owned(),
        host: guest::facts(&mut guests[0].here, place.accel, format!("file of {DISK}"))?,
        command: format!(
            "rtvirtio-bench iod-migrate --migrations {} --pairs {} --kills {}",
            options.migrations, options.pairs, options.kills
        ),
        generated: generated(),
        moves: Vec::new(),
        findings: Vec::new(),
        kills: Vec::new(),
        rounds: Vec::new(),
    };
    move_in_turn(&mut guests, options.migrations, &mut data, path, progress)?;
    progress.step("asking the guests what they found");
    for guest in guests {
        data.findings.push(guest.into_findings(progress)?);
        write(path, &data)?;
    }
    drop(domains);
    Ok(data)
}

/// Image and accelerator of the guests.
pub(super) struct Place {
    image: GuestImage,
    accel: Accel,
}

impl Place {
    /// Starts an I/O domain on each side of a directory, and a guest with its load on the first.
    pub(super) fn boot(&self, dir: &Path) -> anyhow::Result<([Option<Backend>; 2], MovingGuest)> {
        std::fs::File::create(served(dir))?.set_len(DISK.0)?;
        let mut domains = [None, None];
        let sides = sides(dir);
        for (side, domain) in sides.iter().zip(&mut domains) {
            std::fs::create_dir(side)?;
            *domain = Some(Backend::start_domain(side, &config(side, &served(dir)))?);
        }
        let on = sides
            .map(|side| self.qemu(GuestDisk::VhostUser { socket: socket(&side), queues: Some(1) }, &side));
        let guest = MovingGuest::boot(DiskKind::Domain, on)?;
        Ok((domains, guest))
    }

    fn qemu(&self, disk: GuestDisk, side: &Path) -> QemuConfig {
        let config = QemuConfig::new("vm", self.image.clone(), disk, &side.join("run"));
        QemuConfig { accel: self.accel, ..config }.migrating()
    }
}

/// Directories of both sides.
pub(super) fn sides(dir: &Path) -> [PathBuf; 2] {
    ["0", "1"].map(|side| dir.join(side))
}

/// Path of the image that both I/O domains serve.
pub(super) fn served(dir: &Path) -> PathBuf {
    dir.join("served")
}

/// Path of the control socket of an I/O domain.
pub(super) fn control(side: &Path) -> PathBuf {
    side.join("control")
}

/// Path of the disk's socket of an I/O domain.
fn socket(side: &Path) -> PathBuf {
    side.join("vm.sock")
}

/// Configuration of the I/O domain of a side.
pub(super) fn config(side: &Path, disk: &Path) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"file\"\nwindow = 8\n[[device.disk]]\nname = \"vm\"\n\
         serial = \"moves\"\nsocket = {:?}\npath = {:?}\nmigrate = true\nreserve = {}\n",
        control(side).display().to_string(),
        socket(side).display().to_string(),
        disk.display().to_string(),
        contract::RESERVE,
    )
}

/// Migrates the guests in turn, and writes the data after each migration. The one on QEMU's own
/// disk is left out once it has failed.
fn move_in_turn(
    guests: &mut [MovingGuest; 2],
    n: usize,
    data: &mut MigrateData,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut has_failed = [false; 2];
    for i in 0..n {
        let mut said = Vec::new();
        // The first one alternates.
        for which in [i % 2, 1 - i % 2] {
            if has_failed[which] {
                continue;
            }
            progress.check_cancelled()?;
            let guest = &mut guests[which];
            let moved = guest.move_on();
            said.push(match &moved.failed {
                Some(why) => format!("{} failed: {why}", moved.disk.as_str()),
                None => format!("{} {} ms of {} ms", moved.disk.as_str(), moved.downtime_ms, moved.total_ms),
            });
            has_failed[which] = moved.failed.is_some();
            data.moves.push(moved);
            write(path, data)?;
        }
        progress.step(&format!("migration {} of {n}, downtime: {}", i + 1, said.join(", ")));
        match has_failed {
            [false, false] => {}
            [false, true] => progress.warn("the guest on QEMU's own disk migrates no more"),
            [true, _] => {
                progress.warn("a migration has failed: no more are made");
                return Ok(());
            }
        }
    }
    Ok(())
}

/// A guest with its load, and the QEMU that it runs in.
pub(super) struct MovingGuest {
    disk: DiskKind,
    /// Configuration on each side.
    sides: [QemuConfig; 2],
    pub(super) here: QemuGuest,
    /// Migrations that were begun.
    begun: usize,
    writer: Process,
    reader: Process,
    expected: Vec<String>,
}

impl MovingGuest {
    /// Boots the guest on the first side, and starts its load.
    fn boot(disk: DiskKind, sides: [QemuConfig; 2]) -> anyhow::Result<Self> {
        let first = QemuConfig { name: name(disk, 0), ..sides[0].clone() };
        let mut here = QemuGuest::start(&first)?;
        let [fill, writer, reader] = [guest_load::fill(), guest_load::writer(), guest_load::reader()];
        let printed = guest::run_command_within(&mut here, &["sh", "-c", &fill], SCRIPT_TIMEOUT)?;
        let expected = guest_load::expected(&printed)?;
        let writer = here.spawn(&["sh", "-c", &writer])?;
        let reader = here.spawn(&["sh", "-c", &reader])?;
        Ok(Self { disk, sides, here, begun: 0, writer, reader, expected })
    }

    /// Migrates the guest to the other side. The QEMU that it left is ended.
    fn move_on(&mut self) -> Move {
        let moved = Move { disk: self.disk, ..Move::default() };
        match self.try_to_move() {
            Ok(Migration { downtime_ms, total_ms, syncs }) => {
                let contract = self.contract();
                Move { downtime_ms, total_ms, syncs, contract, ..moved }
            }
            Err(e) => Move { failed: Some(format!("{e:#}")), ..moved },
        }
    }

    /// Reservation of the disk where the guest has arrived, for a guest on the I/O domain.
    fn contract(&self) -> Option<Contract> {
        let [here, other] = [self.begun % 2, (self.begun + 1) % 2].map(|i| self.control_of(i));
        let qemu = self.here.handle().process.pid;
        Some(contract::verify(&here?, &other?, qemu))
    }

    /// Control socket of the I/O domain on a side; `None` with QEMU's own disk.
    fn control_of(&self, side: usize) -> Option<PathBuf> {
        match &self.sides[side].disk {
            GuestDisk::VhostUser { socket, .. } => socket.parent().map(control),
            _ => None,
        }
    }

    /// QEMU that waits for the guest on the other side. Dropping it ends it.
    pub(super) fn target(&mut self) -> anyhow::Result<QemuGuest> {
        self.begun += 1;
        let target = QemuConfig {
            name: name(self.disk, self.begun),
            incoming: true,
            ..self.sides[self.begun % 2].clone()
        };
        QemuGuest::start(&target).context("the target")
    }

    fn try_to_move(&mut self) -> anyhow::Result<Migration> {
        // Where the migration fails the target is dropped, which ends it.
        let there = self.target()?;
        let migration = self.here.migrate(&there, MIGRATION_TIMEOUT)?;
        std::mem::replace(&mut self.here, there).stop().context("the source")?;
        answer(&mut self.here).context("the guest does not answer where it arrived")?;
        Ok(migration)
    }

    /// Ends the load and the guest. A guest that does not say what it found has an error.
    fn into_findings(mut self, progress: &dyn Progress) -> anyhow::Result<Findings> {
        let findings = match self.ask(progress) {
            Ok(findings) => findings,
            Err(e) => {
                progress.check_cancelled()?;
                progress.warn(&format!("the guest on {}: {e:#}", self.disk.as_str()));
                Findings { disk: self.disk, errors: 1, ..Findings::default() }
            }
        };
        self.here.stop()?;
        Ok(findings)
    }

    /// Ends the load, and asks the guest what it found.
    pub(super) fn ask(&mut self, progress: &dyn Progress) -> anyhow::Result<Findings> {
        let mut findings = Findings { disk: self.disk, ..Findings::default() };
        let here = &mut self.here;
        guest::run_command(here, &["touch", guest_load::STOP])?;
        let written = guest::wait_for_exit(here, self.writer, SCRIPT_TIMEOUT, progress, &mut || Ok(()))?;
        guest_load::add_writer(&mut findings, &written);
        if findings.bad_blocks + findings.errors > 0 {
            let text = String::from_utf8_lossy(&written.stdout).into_owned();
            progress.warn(&format!("fio on {}: {text:.2000}", self.disk.as_str()));
        }
        guest::wait_for_exit(here, self.reader, SCRIPT_TIMEOUT, progress, &mut || Ok(()))?;
        let sums = guest::run_command(here, &["cat", guest_load::SUMS])?;
        guest_load::add_sums(&mut findings, &sums, &self.expected);
        guest_load::add_kernel(&mut findings, &guest::run_command(here, &["dmesg"])?);
        Ok(findings)
    }
}

/// Name of a guest's QEMU.
fn name(disk: DiskKind, number: usize) -> String {
    let kind = match disk {
        DiskKind::Domain => "domain",
        DiskKind::Qemu => "own",
    };
    format!("{kind}{number}")
}

/// Waits for the agent of a guest that has arrived.
pub(super) fn answer(guest: &mut QemuGuest) -> anyhow::Result<()> {
    for _ in 1..ANSWER_TRIES {
        if guest.agent().is_ok() {
            return Ok(());
        }
    }
    guest.agent()?;
    Ok(())
}
