//! `rtvirtio-lab bench sweep` and `rtvirtio profile --sweep`: measured runs of chosen loads and settings.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rtvirtio_bench::chooser::least_sure;
use rtvirtio_bench::dataset::{Dataset, DatasetError, OtherHost, SWEEP};
use rtvirtio_bench::design::{Condition, Limits, MAX_VMS, conditions, paper_conditions};
use rtvirtio_bench::load::Knobs;
use rtvirtio_bench::run::disturbed;
use rtvirtio_bench::stage::Treatment;
use rtvirtio_bench::train::{FEWEST, TrainSettings, comparable, fit};
use rtvirtio_measure::HostFacts;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;

use super::bed::{Bed, device_name};
use super::runs::{Runs, Wanted};
use crate::args::BenchSweepArgs;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;

/// Ending of the name of a dataset of runs in QEMU guests.
pub const IN_GUESTS: &str = "-qemu";
/// Further runs of a condition that runs again.
const AGAIN: usize = 2;
/// QEMU guests of a sweep in guests: what a machine of two CPUs carries without KVM.
const GUESTS: usize = 3;
/// Requests per second that they carry beside the rest, in all.
const GUEST_RATE: f64 = 1200.0;
/// Runs between two looks at where the model is least sure.
const BATCH: usize = 12;
/// Length of a run of `profile --sweep`.
const RUN: Nanos = Nanos(8_000_000_000);
/// The same with warm-up, start and end.
const RUN_AND_OVERHEAD: Duration = Duration::from_secs(10);
/// Share of disturbed runs above which the whole sweep is doubted.
const BUSY: f64 = 0.3;

/// `rtvirtio-lab bench sweep`.
pub fn run(args: &BenchSweepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("bench sweep")?;
    let _lock = global.dirs().lock_vms()?;
    let profile = args.profile.as_deref().map(rtvirtio_measure::profile::load).transpose()?;
    for device in &args.devices {
        let (vms, kind, suffix) = match args.qemu {
            0 => (MAX_VMS + 1, LabKind::Process, ""),
            _ => (GUESTS, LabKind::Qemu, IN_GUESTS),
        };
        let bed = Bed::made(device, vms, kind, global, ui)?;
        let path = args.out.join(format!("{}{suffix}.jsonl", device_name(device)));
        let mut command = format!(
            "rtvirtio-lab bench sweep {device} --points {} --seed {} --for {}",
            args.points, args.seed, args.length
        );
        if args.qemu > 0 {
            command.push_str(" --qemu");
        }
        // A bed that is dropped is removed.
        profile.as_ref().map_or(Ok(()), |p| bed.owns(p))?;
        let basis = (profile.clone(), None);
        let swept = Runs::begin(&bed, &path, command, args.length, basis, OtherHost::Refused, ui)
            .and_then(|runs| Sweep { bed: &bed, runs, ui }.design(args));
        bed.remove()?;
        swept?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Learns a host model in the given time. The dataset stays beside it, so that more time later adds to it.
pub fn learn(
    bed: &Bed<'_>,
    profile: &Profile,
    data: &Path,
    time: Duration,
    ui: &Ui,
) -> anyhow::Result<HostModel> {
    set_aside(data, bed, profile, ui)?;
    let command = "rtvirtio profile --sweep".to_owned();
    let runs = Runs::begin(bed, data, command, RUN, (Some(profile.clone()), None), OtherHost::Refused, ui)?;
    let mut sweep = Sweep { bed, runs, ui };
    sweep.foresee(time);
    sweep.adaptive(time)?;
    sweep.doubt();
    Ok(fit(&comparable(&sweep.runs.points), &sweep.runs.profile, &generated(), &TrainSettings::default())?)
}

/// Renames a sweep that another kernel, another number of CPUs, another disk or another version of the file's form stands in the way of: nothing is lost,
/// and a new one begins.
fn set_aside(data: &Path, bed: &Bed<'_>, profile: &Profile, ui: &Ui) -> anyhow::Result<()> {
    if !data.exists() {
        return Ok(());
    }
    let (here, now) = (bed.facts(), profile.identity.as_ref());
    let why = match Dataset::header(data) {
        Ok(header) => {
            let then = header.profiles.get(&bed.device).and_then(|p| p.identity.as_ref());
            let other = then.zip(now).filter(|(then, now)| then != now);
            match other {
                Some((then, now)) => format!("it is of the disk {then}, this is {now}"),
                None if header.host == here => return Ok(()),
                None => {
                    let of = |host: &HostFacts| {
                        format!("{} on Linux {} with {} CPUs", host.device, host.kernel, host.cpus)
                    };
                    format!("it is of {}, this is {}", of(&header.host), of(&here))
                }
            }
        }
        Err(DatasetError::Line { reason, .. }) => reason,
        Err(e) => return Err(e.into()),
    };
    let free = |n: &usize| !data.with_extension(format!("{n}.jsonl")).exists();
    let aside = (1..).find(free).map(|n| data.with_extension(format!("{n}.jsonl"))).unwrap_or_default();
    std::fs::rename(data, &aside).with_context(|| format!("cannot rename {}", data.display()))?;
    ui.warn(&format!(
        "the earlier sweep cannot go on here ({why}): it is now {}, and a new one begins",
        aside.display()
    ));
    Ok(())
}

/// Whether emulated guests on two CPUs can carry it: otherwise their CPUs would be measured, not the device's scheduler.
fn light(condition: &Condition) -> bool {
    let rates = condition.vms.iter().flatten().filter_map(|s| s.rate);
    condition.vms.len() <= GUESTS && rates.map(|r| r.0).sum::<f64>() <= GUEST_RATE
}

/// A sweep under way.
struct Sweep<'a> {
    bed: &'a Bed<'a>,
    runs: Runs<'a>,
    ui: &'a Ui,
}

impl<'a> Sweep<'a> {
    /// A fixed number of conditions, and the first of them again: the design's order is of chance, so they are a fair sample. Or those of
    /// them that guests can carry, in guests. Then conditions of the paper's own kind.
    fn design(&mut self, args: &BenchSweepArgs) -> anyhow::Result<()> {
        let (n, seed) = (args.points, args.seed);
        let all = self.conditions(n, seed)?;
        let todo: Vec<(usize, usize)> = if args.qemu > 0 {
            (0..n).filter(|i| light(&all[*i])).take(args.qemu).map(|i| (i, 0)).collect()
        } else {
            let again = (1..=AGAIN).flat_map(|round| (0..args.again.min(n)).map(move |i| (i, round)));
            (0..n).map(|i| (i, 0)).chain(again).collect()
        };
        let base = format!("{}/{seed}", self.bed.device);
        let ours = todo.into_iter().map(|(i, round)| {
            let id = if round == 0 { format!("{base}/{i}") } else { format!("{base}/{i}/again{round}") };
            (id, &all[i], seed.wrapping_mul(1_000_003).wrapping_add((round * n + i) as u64))
        });
        let paper = self.with_limits(|limits| paper_conditions(args.paper, limits, seed))?;
        let papers = paper.iter().enumerate().map(|(i, condition)| {
            let seed = seed.wrapping_mul(2_000_003).wrapping_add(i as u64);
            (format!("{base}/paper/{i}"), condition, seed)
        });
        let todo: Vec<(String, &Condition, u64)> = ours.chain(papers).collect();
        let mut bar = self.ui.bar(&format!("{}: {} runs", self.bed.device, todo.len()), todo.len() as u64);
        for (done, (id, condition, seed)) in todo.into_iter().enumerate() {
            bar.set(done as u64);
            match self.runs.find(&id) {
                None => self.measure(id, condition, seed)?,
                Some(run) => ensure!(
                    run.vms == condition.vms && run.knobs == Knobs::of(&condition.knobs.config()),
                    "run {id} in {} is of another design, that of another version of rtvirtio: begin a new file elsewhere (--out DIR)",
                    args.out.display()
                ),
            }
        }
        drop(bar);
        self.doubt();
        Ok(())
    }

    /// As many conditions as the time allows: a space-filling design first, then where the model is least sure.
    fn adaptive(&mut self, time: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut bar = self.ui.bar(&format!("learning {}", self.bed.device), time.as_secs());
        let mut waiting: Vec<Condition> = Vec::new();
        while start.elapsed() < time {
            let n = self.runs.points.len();
            if waiting.is_empty() {
                let missing = self.missing();
                waiting = if missing > 0 {
                    // The part of the design that an earlier sweep has not measured; where runs of it say nothing, some of another one.
                    let mut design = self.conditions(FEWEST, 1 + (n / FEWEST) as u64)?.split_off(n % FEWEST);
                    design.truncate(missing);
                    design
                } else {
                    bar.say(&format!("learning {}: where is the model least sure?", self.bed.device));
                    self.least_sure(n as u64)?
                };
                waiting.reverse();
            }
            let Some(condition) = waiting.pop() else { break };
            bar.say(&format!("learning {}: run {}", self.bed.device, n + 1));
            bar.set(start.elapsed().as_secs());
            self.measure(format!("{}/sweep/{n}", self.bed.device), &condition, n as u64)?;
        }
        Ok(())
    }

    /// Conditions that a model still needs. Runs in which the host stood still too long do not count.
    fn missing(&self) -> usize {
        FEWEST.saturating_sub(rtvirtio_bench::repeat::conditions(&comparable(&self.runs.points)).len())
    }

    /// Says before it starts that the time will not do.
    fn foresee(&self, time: Duration) {
        let missing = self.missing();
        let needed = RUN_AND_OVERHEAD * missing as u32;
        if needed > time {
            let minutes = |d: Duration| d.as_secs().div_ceil(60);
            self.ui.warn(&format!(
                "a model needs {FEWEST} runs, {} more, about {} min: after {} min there will be none yet. The runs are kept, and the same command goes on",
                missing,
                minutes(needed),
                minutes(time)
            ));
        }
    }

    /// Asks a design with what the device allows.
    fn with_limits<T>(&self, ask: impl FnOnce(&Limits<'_>) -> T) -> anyhow::Result<T> {
        let (elevators, cost) = (self.bed.elevators()?, self.bed.cost(&self.runs.profile)?);
        Ok(ask(&Limits { elevators: &elevators, writes: self.bed.may_write(), cost: &*cost }))
    }

    fn conditions(&self, n: usize, seed: u64) -> anyhow::Result<Vec<Condition>> {
        self.with_limits(|limits| conditions(n, limits, seed))
    }

    fn least_sure(&self, seed: u64) -> anyhow::Result<Vec<Condition>> {
        let (points, profile, device) = (&self.runs.points, &self.runs.profile, &self.bed.spec_device);
        Ok(self.with_limits(|limits| least_sure(points, profile, device, limits, BATCH, seed))??)
    }

    fn measure(&mut self, id: String, condition: &Condition, seed: u64) -> anyhow::Result<()> {
        let treatment = Treatment::knobs(condition.knobs.config());
        let wanted =
            Wanted { id, scheme: SWEEP, treatment, vms: &condition.vms, seed, forecasts: Vec::new() };
        self.runs.measure(wanted).map(drop)
    }

    /// Says when the host was too busy for the numbers to be trusted.
    fn doubt(&self) {
        let noisy = self.runs.points.iter().filter(|p| disturbed(p)).count();
        if noisy as f64 > BUSY * self.runs.points.len() as f64 {
            self.ui.warn(&format!(
                "in {noisy} of {} runs the host itself stood still for more than 20 ms: bounds will be wide. Stop \
                 other work on this machine, or look at steal time if it is a VM itself, and sweep again",
                self.runs.points.len()
            ));
        }
    }
}
