//! `rtvirtio-lab bench iod-crash`: a real guest on a domain that is killed again and again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_bench::crash::{
    CrashData, Kill, QUEUES, REGION, REGIONS, Round, claims, config, fio, outcome, socket,
};
use rtvirtio_measure::HostFacts;
use rtvirtio_report::{BenchSection, BenchTable};
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use rtvirtio_testbed::qemu::QemuGuest;

use super::arguments;
use super::backend::Backend;
use super::bed::Bed;
use super::found::{Found, read, save};
use super::{guest, page};
use crate::args::BenchIodCrashArgs;
use rtvirtio_console::Global;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_console::{Bar, Ui};
use rtvirtio_workflow::Progress as _;

/// Where the result lies in a directory of results.
pub const FILE: &str = "iod-crash.json";
/// From the moment at which the guest is attached again to the next kill, in s.
const BETWEEN: (f64, f64) = (0.05, 3.0);
/// A round takes some seconds; kills that come one after the other make it longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// `rtvirtio-lab bench iod-crash`.
pub fn run(args: &BenchIodCrashArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        arguments::device(&args.device)?;
        arguments::result(&args.result)?;
        need_root("bench iod-crash")?;
        save(&path, &measure(args, global, ui)?, ui)?;
    }
    found(&path)?.tell("rtvirtio: the I/O domain, killed", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: CrashData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{}: {} kills in {} rounds under a guest ({} under {}); {}.",
        data.host.device,
        data.kills.len(),
        data.rounds.len(),
        data.host.vmm,
        data.host.accelerator,
        data.command
    )];
    Ok(Found {
        text: page::table(&claims),
        sections: vec![section(&data)],
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}

fn section(data: &CrashData) -> BenchSection {
    let head =
        ["round", "region", "seed", "written", "read", "flushes", "lost", "corrupt", "errors", "longest ms"]
            .map(str::to_owned)
            .to_vec();
    let rows = data.rounds.iter().enumerate().map(|(i, r)| {
        let name = if r.again { format!("{} (again)", i + 1) } else { (i + 1).to_string() };
        let numbers = [r.region, r.seed, r.written, r.read, r.flushes, r.lost, r.corrupt, r.io_errors];
        let mut row = vec![name];
        row.extend(numbers.map(|n| n.to_string()));
        row.push(format!("{:.0}", r.longest_ms));
        row
    });
    BenchSection {
        title: "The domain is killed under a guest".to_owned(),
        tables: vec![BenchTable { label: "rounds".to_owned(), head, rows: rows.collect() }],
        ..BenchSection::default()
    }
}

fn measure(args: &BenchIodCrashArgs, global: &Global, ui: &Ui) -> anyhow::Result<CrashData> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-crash-").tempdir()?;
    // Slow enough that requests are under way at any moment.
    let bed = Bed::made(&args.device, 1, LabKind::Process, global, ui)?;
    let (disk, size) = bed.plain()?;
    if size < REGIONS * REGION {
        bail!("the device has {size} bytes; {} are needed", REGIONS * REGION);
    }
    let mut killer = Killer::start(dir.path(), config(&disk, dir.path()), args)?;
    let (mut vm, facts) = guest::boot(&socket(dir.path()), QUEUES, &dir.path().join("run"), global, ui)?;
    killer.begin();
    let mut rounds: Vec<Round> = Vec::new();
    let mut bar = ui.bar("kill -9 under a guest that verifies", args.kills as u64);
    while killer.kills.len() < args.kills {
        let next = rounds.len() as u64;
        let round = Round { region: next % REGIONS, seed: args.seed * 10_000 + next, ..Round::default() };
        rounds.push(play(&mut vm, &round, &mut Some((&mut killer, &mut bar)), ui)?);
    }
    drop(bar);
    // What was acknowledged long ago, and survived every kill since, is read once more.
    ui.step("reading back what the last rounds wrote");
    let last: Vec<Round> = rounds.iter().rev().take(REGIONS as usize).rev().copied().collect();
    for r in last {
        let again = Round { region: r.region, seed: r.seed, again: true, ..Round::default() };
        rounds.push(play(&mut vm, &again, &mut None, ui)?);
    }
    let log = guest::say(&mut vm, &["dmesg"])?;
    vm.stop()?;
    let kills = std::mem::take(&mut killer.kills);
    drop(killer);
    let device = bed.facts().device;
    bed.remove()?;
    Ok(CrashData {
        schema: CrashData::SCHEMA.to_owned(),
        host: HostFacts { device, ..facts },
        command: format!(
            "rtvirtio-lab bench iod-crash {} --kills {} --seed {}",
            args.device, args.kills, args.seed
        ),
        generated: generated(),
        seed: args.seed,
        kills,
        rounds,
        kernel_errors: log.lines().filter(|l| l.contains("I/O error")).count() as u64,
    })
}

/// One run of fio in the guest.
fn play(
    vm: &mut QemuGuest,
    round: &Round,
    killer: &mut Option<(&mut Killer, &mut Bar)>,
    ui: &Ui,
) -> anyhow::Result<Round> {
    let args = fio(round.region, round.seed, round.again);
    let process = vm.spawn(&args.iter().map(String::as_str).collect::<Vec<_>>())?;
    let output = guest::finish(vm, process, PATIENCE, ui, &mut || match killer {
        Some((killer, bar)) => {
            killer.tick()?;
            bar.set(killer.kills.len() as u64);
            Ok(())
        }
        None => Ok(()),
    })?;
    let (json, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let round = outcome(round, &json, &said).map_err(anyhow::Error::msg)?;
    if round.lost + round.corrupt + round.io_errors > 0 {
        ui.warn(&format!("fio in the guest: {said:.2000}"));
    }
    Ok(round)
}

/// Kills the domain at moments of chance, and starts it again at once.
struct Killer {
    dir: PathBuf,
    config: String,
    domain: Option<Backend>,
    random: Random,
    wanted: usize,
    begin: Instant,
    next: Next,
    kills: Vec<Kill>,
}

/// What comes next.
enum Next {
    Kill(Instant),
    /// The guest is attached again since that kill.
    Attached(Instant),
    Nothing,
}

impl Killer {
    fn start(dir: &Path, config: String, args: &BenchIodCrashArgs) -> anyhow::Result<Self> {
        Ok(Self {
            dir: dir.to_owned(),
            domain: Some(Backend::ours(dir, &config)?),
            config,
            random: Random::new(args.seed),
            wanted: args.kills,
            begin: Instant::now(),
            next: Next::Nothing,
            kills: Vec::new(),
        })
    }

    fn begin(&mut self) {
        self.begin = Instant::now();
        self.plan();
    }

    fn plan(&mut self) {
        let (least, most) = BETWEEN;
        let wait = Duration::from_secs_f64(least + (most - least) * self.random.unit());
        let more = self.kills.len() < self.wanted;
        self.next = if more { Next::Kill(Instant::now() + wait) } else { Next::Nothing };
    }

    fn tick(&mut self) -> anyhow::Result<()> {
        let control = self.dir.join("control");
        match self.next {
            Next::Kill(due) if Instant::now() >= due => {
                let outstanding = guest::vm(&control)?["outstanding"].as_u64().unwrap_or(0);
                let killed = Instant::now();
                self.domain.take().context("no domain to kill")?.kill()?;
                self.domain = Some(Backend::ours(&self.dir, &self.config)?);
                self.kills.push(Kill { at: self.begin.elapsed().as_secs_f64(), outstanding, away_ms: 0.0 });
                self.next = Next::Attached(killed);
            }
            Next::Attached(killed) if guest::is_attached(&control)? => {
                if let Some(kill) = self.kills.last_mut() {
                    kill.away_ms = killed.elapsed().as_secs_f64() * 1e3;
                }
                self.plan();
            }
            _ => {}
        }
        Ok(())
    }
}
