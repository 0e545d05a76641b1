//! `rtvirtio bench sweep` and `rtvirtio profile --sweep`: measured runs of chosen loads and settings.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_bench::chooser::least_sure;
use rtvirtio_bench::dataset::{Point, Recorder};
use rtvirtio_bench::design::{Condition, Limits, MAX_VMS, conditions};
use rtvirtio_bench::run::{self, Job, disturbed};
use rtvirtio_bench::stage::{Stage, Treatment};
use rtvirtio_bench::train::{FEWEST, TrainSettings, fit};
use rtvirtio_model::{HostModel, Profile};

use super::bed::{Bed, twin_name};
use crate::args::{BenchSweepArgs, Global};
use crate::cmd::need_root;
use crate::cmd::verify::generated;
use crate::site;
use crate::ui::{Cancelled, Ui};

/// Tries per point when the host is not quiet.
const TRIES: u32 = 2;
/// Runs between two looks at where the model is least sure.
const BATCH: usize = 12;
/// Length of a run of `profile --sweep`.
const RUN: Duration = Duration::from_secs(8);
/// Share of disturbed runs above which the whole sweep is doubted.
const BUSY: f64 = 0.3;

/// `rtvirtio bench sweep`.
pub fn run(args: &BenchSweepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("bench sweep")?;
    let _lock = site::lock(global)?;
    let profile = args.profile.as_deref().map(rtvirtio_measure::profile::load).transpose()?;
    for device in &args.devices {
        let device = twin_name(device);
        let bed = Bed::twin(device, MAX_VMS + 1, global, ui)?;
        let path = args.out.join(format!("{device}.jsonl"));
        let command =
            format!("rtvirtio bench sweep twin:{device} --points {} --seed {}", args.points, args.seed);
        let swept =
            Sweep::begin(&bed, &path, &command, Duration::from_nanos(args.length.0), profile.as_ref(), ui)
                .and_then(|mut sweep| sweep.design(args.points, args.seed));
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
    let mut sweep = Sweep::begin(bed, data, "rtvirtio profile --sweep", RUN, Some(profile), ui)?;
    sweep.adaptive(time)?;
    sweep.doubt();
    Ok(fit(&sweep.points, &sweep.profile, &generated(), &TrainSettings::default())?)
}

/// A sweep under way.
struct Sweep<'a> {
    bed: &'a Bed<'a>,
    stage: Stage<'a>,
    profile: Profile,
    recorder: Recorder,
    points: Vec<Point>,
    length: Duration,
    ui: &'a Ui,
}

impl<'a> Sweep<'a> {
    fn begin(
        bed: &'a Bed<'a>,
        path: &Path,
        command: &str,
        length: Duration,
        profile: Option<&Profile>,
        ui: &'a Ui,
    ) -> anyhow::Result<Self> {
        let (profile, recorder, points) = bed.record(path, command.to_owned(), profile.cloned())?;
        if !points.is_empty() {
            ui.step(&format!("going on with {} runs in {}", points.len(), path.display()));
        }
        Ok(Self { bed, stage: bed.stage()?, profile, recorder, points, length, ui })
    }

    /// A fixed number of conditions.
    fn design(&mut self, n: usize, seed: u64) -> anyhow::Result<()> {
        let all = self.conditions(n, seed)?;
        let mut bar = self.ui.bar(&format!("{}: {n} runs", self.bed.device), n as u64);
        for (i, condition) in all.iter().enumerate() {
            bar.set(i as u64);
            let id = format!("{}/{seed}/{i}", self.bed.device);
            if !self.points.iter().any(|p| p.id == id) {
                self.measure(id, condition, seed.wrapping_mul(1_000_003).wrapping_add(i as u64))?;
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
            let n = self.points.len();
            if waiting.is_empty() {
                waiting = if n < FEWEST {
                    // The part of the design that an earlier sweep has not measured.
                    self.conditions(FEWEST, 1)?.split_off(n)
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

    fn conditions(&self, n: usize, seed: u64) -> anyhow::Result<Vec<Condition>> {
        let (elevators, cost) = (self.bed.elevators()?, self.bed.cost(&self.profile)?);
        let limits = Limits { elevators: &elevators, writes: self.bed.may_write(), cost: &*cost };
        Ok(conditions(n, &limits, seed))
    }

    fn least_sure(&self, seed: u64) -> anyhow::Result<Vec<Condition>> {
        let (elevators, cost) = (self.bed.elevators()?, self.bed.cost(&self.profile)?);
        let limits = Limits { elevators: &elevators, writes: self.bed.may_write(), cost: &*cost };
        Ok(least_sure(&self.points, &self.profile, &self.bed.spec_device, &limits, BATCH, seed)?)
    }

    fn measure(&mut self, id: String, condition: &Condition, seed: u64) -> anyhow::Result<()> {
        let job = Job {
            id,
            device: &self.bed.device,
            spec_device: &self.bed.spec_device,
            scheme: "sweep",
            treatment: Treatment::knobs(condition.knobs.config()),
            vms: &condition.vms,
            length: self.length,
            seed,
            tries: TRIES,
        };
        match run::measure(&job, &self.stage, self.ui.cancel_flag(), &mut |_| {}) {
            Ok(point) => {
                self.recorder.add(&point)?;
                self.points.push(point);
                Ok(())
            }
            Err(e) if e.is_cancelled() => {
                self.ui.step(&format!("{} runs are kept; the same command goes on", self.points.len()));
                Err(Cancelled.into())
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Says when the host was too busy for the numbers to be trusted.
    fn doubt(&self) {
        let noisy = self.points.iter().filter(|p| disturbed(p)).count();
        if noisy as f64 > BUSY * self.points.len() as f64 {
            self.ui.warn(&format!(
                "in {noisy} of {} runs the host itself stood still for more than 20 ms: bounds will be wide. Stop \
                 other work on this machine, or look at steal time if it is a VM itself, and sweep again",
                self.points.len()
            ));
        }
    }
}
