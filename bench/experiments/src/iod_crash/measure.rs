//! Writes and verifies in a guest while the I/O domain is killed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{CrashData, Kill, QUEUES, REGION, REGIONS, Round, config, fio, outcome, socket};
use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use rtvirtio_testbed::qemu::QemuGuest;

use crate::backend::Backend;
use crate::guest;
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_testbed::LabHost;
use rtvirtio_workflow::{Bar, Progress, generated};

/// Shortest and longest time from the guest's reconnection to the next kill, s.
const BETWEEN: (f64, f64) = (0.05, 3.0);
/// Time limit of a round: some seconds, and those of every kill in it.
const ROUND_TIMEOUT: Duration = Duration::from_secs(300);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct CrashOptions {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards.
    #[arg(value_name = "twin:NAME", default_value = "twin:emmc")]
    pub device: String,
    /// Number of kills of the domain.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub kills: usize,
    /// Seed of the moments.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Kills the I/O domain, and reads back the data of the last rounds.
///
/// # Errors
/// A device that is too small or cannot be made, a guest that hangs, and cancellation.
pub fn measure(options: &CrashOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<CrashData> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-crash-").tempdir()?;
    // Slow enough that requests are under way at any moment.
    let bed = TestBed::make(&options.device, 1, LabKind::Process, labs, progress)?;
    let (disk, size) = bed.without_elevator()?;
    if size < REGIONS * REGION {
        bail!("the device has {size} bytes; {} are needed", REGIONS * REGION);
    }
    let mut killer = Killer::start(dir.path(), config(&disk, dir.path()), options)?;
    let (mut vm, facts) = guest::boot(&socket(dir.path()), QUEUES, &dir.path().join("run"), labs, progress)?;
    killer.begin();
    let mut rounds: Vec<Round> = Vec::new();
    let mut bar = progress.bar("kill -9 under a guest that verifies", options.kills as u64);
    while killer.kills.len() < options.kills {
        let next = rounds.len() as u64;
        let round = Round { region: next % REGIONS, seed: options.seed * 10_000 + next, ..Round::default() };
        rounds.push(run_round(&mut vm, &round, Some((&mut killer, &mut *bar)), progress)?);
    }
    drop(bar);
    // Old acknowledged writes must have survived every later kill.
    progress.step("reading back what the last rounds wrote");
    let last: Vec<Round> = rounds.iter().rev().take(REGIONS as usize).rev().copied().collect();
    for r in last {
        let again = Round { region: r.region, seed: r.seed, again: true, ..Round::default() };
        rounds.push(run_round(&mut vm, &again, None, progress)?);
    }
    let log = guest::run_command(&mut vm, &["dmesg"])?;
    vm.stop()?;
    let kills = std::mem::take(&mut killer.kills);
    drop(killer);
    let device = bed.facts().device;
    bed.remove()?;
    Ok(CrashData {
        schema: CrashData::SCHEMA.to_owned(),
        host: HostFacts { device, ..facts },
        command: format!(
            "rtvirtio-bench iod-crash {} --kills {} --seed {}",
            options.device, options.kills, options.seed
        ),
        generated: generated(),
        seed: options.seed,
        kills,
        rounds,
        kernel_errors: log.lines().filter(|l| l.contains("I/O error")).count() as u64,
    })
}

/// Runs fio once in the guest, with kills where there is a killer.
fn run_round(
    vm: &mut QemuGuest,
    round: &Round,
    mut killer: Option<(&mut Killer, &mut dyn Bar)>,
    progress: &dyn Progress,
) -> anyhow::Result<Round> {
    let argv = fio(round.region, round.seed, round.again);
    let process = vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
    let output = guest::wait_for_exit(vm, process, ROUND_TIMEOUT, progress, &mut || match &mut killer {
        Some((killer, bar)) => {
            killer.tick()?;
            bar.set(killer.kills.len() as u64);
            Ok(())
        }
        None => Ok(()),
    })?;
    let (json, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let round = outcome(round, &json, &stderr).map_err(anyhow::Error::msg)?;
    if round.lost + round.corrupt + round.io_errors > 0 {
        progress.warn(&format!("fio in the guest: {stderr:.2000}"));
    }
    Ok(round)
}

/// Kills the I/O domain at random moments, and restarts it at once.
struct Killer {
    dir: PathBuf,
    config: String,
    domain: Option<Backend>,
    random: Random,
    planned: usize,
    begin: Instant,
    next: Next,
    kills: Vec<Kill>,
}

/// Next action of a [`Killer`].
enum Next {
    Kill(Instant),
    /// Waits for the guest to reconnect after the kill at this time.
    Reconnect(Instant),
    Nothing,
}

impl Killer {
    fn start(dir: &Path, config: String, options: &CrashOptions) -> anyhow::Result<Self> {
        Ok(Self {
            dir: dir.to_owned(),
            domain: Some(Backend::start_domain(dir, &config)?),
            config,
            random: Random::new(options.seed),
            planned: options.kills,
            begin: Instant::now(),
            next: Next::Nothing,
            kills: Vec::new(),
        })
    }

    fn begin(&mut self) {
        self.begin = Instant::now();
        self.schedule();
    }

    fn schedule(&mut self) {
        let (least, most) = BETWEEN;
        let wait = Duration::from_secs_f64(least + (most - least) * self.random.unit());
        let more = self.kills.len() < self.planned;
        self.next = if more { Next::Kill(Instant::now() + wait) } else { Next::Nothing };
    }

    fn tick(&mut self) -> anyhow::Result<()> {
        let control = self.dir.join("control");
        match self.next {
            Next::Kill(due) if Instant::now() >= due => {
                let outstanding = guest::vm_status(&control)?.outstanding;
                let outstanding = outstanding.context("the domain counts no outstanding requests")?;
                let killed = Instant::now();
                self.domain.take().context("no domain to kill")?.kill()?;
                self.domain = Some(Backend::start_domain(&self.dir, &self.config)?);
                self.kills.push(Kill { at: self.begin.elapsed().as_secs_f64(), outstanding, away_ms: 0.0 });
                self.next = Next::Reconnect(killed);
            }
            Next::Reconnect(killed) if guest::is_attached(&control)? => {
                if let Some(kill) = self.kills.last_mut() {
                    kill.away_ms = killed.elapsed().as_secs_f64() * 1e3;
                }
                self.schedule();
            }
            _ => {}
        }
        Ok(())
    }
}
