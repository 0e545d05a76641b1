//! A sweep: runs of a design or where a model is least certain, and the model learned from them.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_measure::HostFacts;
use rtvirtio_model::{DepthPoint, Elevator, HostModel, Profile};
use rtvirtio_units::{Bytes, Nanos};

use crate::chooser::least_sure;
use crate::condition::conditions;
use crate::dataset::{Dataset, DatasetError, OtherHost, Point, SWEEP};
use crate::design::{self, Condition, Limits, paper_conditions};
use crate::library::Shard;
use crate::load::Knobs;
use crate::run::{Measurer, disturbed};
use crate::runs::{MeasuredDevice, RunRequest, Runs, RunsError, RunsFile};
use crate::stage::Treatment;
use crate::train::{FEWEST, TrainError, TrainSettings, comparable, fit};
use rtvirtio_workflow::{Kind, Progress};

/// Number of QEMU guests in a sweep in guests: as many as two CPUs carry without KVM.
pub const GUESTS: usize = 3;
/// Total requests per second of these guests.
const GUEST_RATE: f64 = 1200.0;
/// Extra runs of each repeated condition.
const EXTRA_RUNS: usize = 2;
/// Runs between two searches for the least certain conditions.
const BATCH: usize = 12;
/// Length of a run of [`learn`].
const RUN: Nanos = Nanos(8_000_000_000);
/// Time for one such run with warm-up, start and end.
const RUN_AND_OVERHEAD: Duration = Duration::from_secs(10);
/// Share of disturbed runs from which on the sweep is reported as doubtful.
const BUSY: f64 = 0.3;

/// Errors of a sweep.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// A run could not be made.
    #[error(transparent)]
    Runs(#[from] RunsError),
    /// A dataset cannot be used.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
    /// The model cannot be fitted.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A run in the file is of another design.
    #[error(
        "run {id} in {} is of another design, that of another version of rtvirtio: begin a new file elsewhere",
        path.display()
    )]
    OtherDesign {
        /// Name of the run.
        id: String,
        /// Path of the dataset.
        path: PathBuf,
    },
    /// A dataset that cannot be continued cannot be renamed.
    #[error("cannot rename {}: {source}", path.display())]
    Rename {
        /// Path of the dataset.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

impl From<SweepError> for rtvirtio_workflow::Error {
    fn from(e: SweepError) -> Self {
        match e {
            SweepError::Runs(e) => e.into(),
            SweepError::Train(e) => Self::from_source(Kind::NotMeasured, e),
            other => Self::from_source(Kind::File, other),
        }
    }
}

/// Device time of one request, s, by share of writes and block size.
pub type Cost = Box<dyn Fn(f64, Bytes) -> f64>;

/// Permissions and device times of a sweep.
pub struct Allowed {
    /// Elevators that the device offers.
    pub elevators: Vec<Elevator>,
    /// Whether its data may be overwritten.
    pub writes: bool,
    /// Cost of a request; `None` uses the device's profile, [`profile_cost`].
    pub cost: Option<Cost>,
}

/// Cost of a request by a device's profile; its time per byte is not known and is counted in full.
#[must_use]
pub fn profile_cost(profile: &Profile) -> Cost {
    let best = |points: &[DepthPoint]| points.iter().map(|p| p.iops.0).fold(1.0, f64::max);
    let read = 1.0 / best(&profile.read);
    let write = if profile.write.is_empty() { read } else { 1.0 / best(&profile.write) };
    let block = profile.block.0 as f64;
    Box::new(move |writes, size| ((1.0 - writes) * read + writes * write) * (size.0 as f64 / block).max(1.0))
}

/// A fixed number of conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Design {
    /// Conditions of the space-filling design.
    pub points: usize,
    pub seed: u64,
    /// Number of the first conditions that run three times.
    pub again: usize,
    /// Number of conditions like the RT-VirtIO paper's.
    pub paper: usize,
    /// Number of the design's conditions that emulated guests can carry, instead of all; `None` for
    /// process VMs.
    pub guests: Option<usize>,
}

/// Device, data and time for learning a host model.
pub struct Learning<'a> {
    pub device: &'a MeasuredDevice,
    /// Permissions on the device.
    pub allowed: Allowed,
    /// Profile of the device.
    pub profile: &'a Profile,
    /// Facts about this host.
    pub host: HostFacts,
    /// Path of the dataset, which an earlier sweep may have begun.
    pub data: &'a Path,
    /// Time limit of the sweep.
    pub time: Duration,
    /// Time of the start, as text.
    pub generated: String,
}

/// Learns a host model in the given time. The dataset is kept, so that a later call adds to it.
///
/// # Errors
/// [`SweepError`], such as too few runs for a model; the runs are kept.
pub fn learn(
    learning: Learning<'_>,
    measurer: impl Measurer,
    progress: &dyn Progress,
) -> Result<HostModel, SweepError> {
    let (time, generated) = (learning.time, learning.generated.clone());
    let mut sweep = begin(learning, "rtvirtio profile --sweep".to_owned(), measurer, progress)?;
    sweep.foresee(time);
    sweep.adaptive(time)?;
    sweep.doubt();
    Ok(fit(&comparable(&sweep.runs.points), &sweep.runs.profile, &generated, &TrainSettings::default())?)
}

/// Measures one part of a sweep that several hosts share, in the given time; returns all runs of
/// this part so far. The dataset is kept, so that a later call adds to it.
///
/// # Errors
/// [`SweepError`]; the runs are kept.
pub fn measure_shard(
    learning: Learning<'_>,
    shard: Shard,
    measurer: impl Measurer,
    progress: &dyn Progress,
) -> Result<Vec<Point>, SweepError> {
    let time = learning.time;
    let mut sweep = begin(learning, format!("rtvirtio profile --sweep --shard {shard}"), measurer, progress)?;
    sweep.shard(time, shard)?;
    sweep.doubt();
    Ok(sweep.runs.points)
}

fn begin<'a>(
    learning: Learning<'a>,
    command: String,
    measurer: impl Measurer + 'a,
    progress: &'a dyn Progress,
) -> Result<Sweep<'a>, SweepError> {
    let Learning { device, allowed, profile, host, data, time: _, generated } = learning;
    set_aside(data, &device.name, &host, profile, progress)?;
    let (other, profile) = (OtherHost::Refused, profile.clone());
    let file = RunsFile { path: data, command, generated, host, profile, model: None, other };
    let runs = Runs::begin(device, measurer, file, RUN, progress)?;
    Ok(Sweep { device, allowed, runs, progress })
}

/// Renames a dataset that cannot be continued here: of another kernel, another number of CPUs,
/// another disk or another version of the file's form. A new one is begun.
pub fn set_aside(
    data: &Path,
    device: &str,
    here: &HostFacts,
    profile: &Profile,
    progress: &dyn Progress,
) -> Result<(), SweepError> {
    // Only a file known to be absent counts: otherwise reading it reports the error.
    if matches!(data.try_exists(), Ok(false)) {
        return Ok(());
    }
    let why = match Dataset::header(data) {
        Ok(header) => {
            let then = header.profiles.get(device).and_then(|p| p.identity.as_ref());
            match then.zip(profile.identity.as_ref()).filter(|(then, this)| then != this) {
                Some((then, this)) => format!("it is of the disk {then}, this is {this}"),
                None if header.host == *here => return Ok(()),
                None => {
                    let of = |host: &HostFacts| {
                        format!("{} on Linux {} with {} CPUs", host.device, host.kernel, host.cpus)
                    };
                    format!("it is of {}, this is {}", of(&header.host), of(here))
                }
            }
        }
        Err(DatasetError::Line { reason, .. }) => reason,
        Err(e) => return Err(e.into()),
    };
    let failed = |source| SweepError::Rename { path: data.to_owned(), source };
    let mut n = 1;
    let aside = loop {
        let aside = data.with_extension(format!("{n}.jsonl"));
        if !aside.try_exists().map_err(failed)? {
            break aside;
        }
        n += 1;
    };
    std::fs::rename(data, &aside).map_err(failed)?;
    progress.warn(&format!(
        "the earlier sweep cannot go on here ({why}): it is {} from here on, and a new one begins",
        aside.display()
    ));
    Ok(())
}

/// Whether emulated guests on two CPUs can carry the condition: otherwise their CPUs would be
/// measured, not the device's scheduler.
fn light(condition: &Condition) -> bool {
    let rates = condition.vms.iter().flatten().filter_map(|s| s.rate);
    condition.vms.len() <= GUESTS && rates.map(|r| r.0).sum::<f64>() <= GUEST_RATE
}

/// A sweep under way.
pub struct Sweep<'a> {
    device: &'a MeasuredDevice,
    allowed: Allowed,
    runs: Runs<'a>,
    progress: &'a dyn Progress,
}

impl<'a> Sweep<'a> {
    /// Sweep of a device that adds to its `runs`.
    #[must_use]
    pub fn new(
        device: &'a MeasuredDevice,
        allowed: Allowed,
        runs: Runs<'a>,
        progress: &'a dyn Progress,
    ) -> Self {
        Self { device, allowed, runs, progress }
    }

    /// Runs so far, with their file.
    #[must_use]
    pub fn runs(&self) -> &Runs<'a> {
        &self.runs
    }

    /// Measures the conditions of a design, and the first of them again: the design's order is
    /// random, so these are a fair sample. With `guests`, measures in guests those that they can
    /// carry. Then conditions like the paper's. Runs in the file are not repeated.
    pub fn design(&mut self, design: &Design) -> Result<(), SweepError> {
        let (n, seed) = (design.points, design.seed);
        let all = self.conditions(n, seed);
        let todo: Vec<(usize, usize)> = if let Some(most) = design.guests {
            (0..n).filter(|i| light(&all[*i])).take(most).map(|i| (i, 0)).collect()
        } else {
            let again = (1..=EXTRA_RUNS).flat_map(|round| (0..design.again.min(n)).map(move |i| (i, round)));
            (0..n).map(|i| (i, 0)).chain(again).collect()
        };
        let base = format!("{}/{seed}", self.device.name);
        let ours = todo.into_iter().map(|(i, round)| {
            let id = if round == 0 { format!("{base}/{i}") } else { format!("{base}/{i}/again{round}") };
            (id, &all[i], seed.wrapping_mul(1_000_003).wrapping_add((round * n + i) as u64))
        });
        let paper = self.with_limits(|limits| paper_conditions(design.paper, limits, seed));
        let papers = paper.iter().enumerate().map(|(i, condition)| {
            let seed = seed.wrapping_mul(2_000_003).wrapping_add(i as u64);
            (format!("{base}/paper/{i}"), condition, seed)
        });
        let todo: Vec<(String, &Condition, u64)> = ours.chain(papers).collect();
        let label = format!("{}: {} runs", self.device.name, todo.len());
        let mut bar = self.progress.bar(&label, todo.len() as u64);
        for (done, (id, condition, seed)) in todo.into_iter().enumerate() {
            bar.set(done as u64);
            match self.runs.find(&id) {
                None => self.measure(id, condition, seed)?,
                Some(run) => {
                    let knobs = Knobs::from_config(&condition.knobs.config());
                    if run.vms != condition.vms || run.knobs != knobs {
                        let path = self.runs.path().to_owned();
                        return Err(SweepError::OtherDesign { id, path });
                    }
                }
            }
        }
        drop(bar);
        self.doubt();
        Ok(())
    }

    /// Measures as many conditions as the time allows: a space-filling design first, then where the
    /// model is least certain.
    pub fn adaptive(&mut self, time: Duration) -> Result<(), SweepError> {
        let start = Instant::now();
        let name = &self.device.name;
        let mut bar = self.progress.bar(&format!("learning {name}"), time.as_secs());
        let mut waiting: Vec<Condition> = Vec::new();
        while start.elapsed() < time {
            let n = self.runs.points.len();
            if waiting.is_empty() {
                let missing = self.missing();
                waiting = if missing > 0 {
                    // Rest of the design of an earlier sweep; where its runs are not usable,
                    // conditions of another design.
                    let mut design = self.conditions(FEWEST, 1 + (n / FEWEST) as u64).split_off(n % FEWEST);
                    design.truncate(missing);
                    design
                } else {
                    bar.set_message(&format!("learning {name}: choosing the next run"));
                    self.least_sure(n as u64)?
                };
                waiting.reverse();
            }
            let Some(condition) = waiting.pop() else { break };
            bar.set_message(&format!("learning {name}: run {}", n + 1));
            bar.set(start.elapsed().as_secs());
            self.measure(format!("{name}/sweep/{n}"), &condition, n as u64)?;
        }
        Ok(())
    }

    /// Measures the shard's conditions of a space-filling design, then of further designs, as many
    /// as the time allows. Runs in the file are not repeated.
    pub fn shard(&mut self, time: Duration, shard: Shard) -> Result<(), SweepError> {
        let start = Instant::now();
        let name = &self.device.name;
        let mut bar = self.progress.bar(&format!("learning {name}, part {shard}"), time.as_secs());
        // Every shard has a condition in every design, so each design makes progress.
        for design in 0.. {
            for (i, condition) in self.conditions(FEWEST, 1 + design).iter().enumerate() {
                let id = format!("{name}/shard/{design}/{i}");
                if !shard.has(i) || self.runs.find(&id).is_some() {
                    continue;
                }
                if start.elapsed() >= time {
                    return Ok(());
                }
                bar.set_message(&format!(
                    "learning {name}, part {shard}: run {}",
                    self.runs.points.len() + 1
                ));
                bar.set(start.elapsed().as_secs());
                self.measure(id, condition, design * FEWEST as u64 + i as u64)?;
            }
        }
        Ok(())
    }

    /// Number of conditions that a model still needs. Runs with too long host stalls do not count.
    #[must_use]
    pub fn missing(&self) -> usize {
        FEWEST.saturating_sub(conditions(&comparable(&self.runs.points)).len())
    }

    /// Warns before the start when the time is too short for a model.
    pub fn foresee(&self, time: Duration) {
        let missing = self.missing();
        let needed = RUN_AND_OVERHEAD * u32::try_from(missing).unwrap_or(u32::MAX);
        if needed > time {
            let minutes = |d: Duration| d.as_secs().div_ceil(60);
            self.progress.warn(&format!(
                "a model needs {FEWEST} runs, {missing} more, about {} min: after {} min there will be none yet. \
                 The runs are kept, and the same command goes on",
                minutes(needed),
                minutes(time)
            ));
        }
    }

    /// Warns when the host was too busy for reliable numbers.
    pub fn doubt(&self) {
        let (noisy, all) = (self.runs.points.iter().filter(|p| disturbed(p)).count(), self.runs.points.len());
        if noisy as f64 > BUSY * all as f64 {
            self.progress.warn(&format!(
                "in {noisy} of {all} runs the host itself stalled for more than 20 ms: bounds will be wide. Stop \
                 other work on this machine, or look at steal time if it is a VM itself, and sweep again"
            ));
        }
    }

    /// Calls `ask` with the limits of the device.
    fn with_limits<T>(&self, ask: impl FnOnce(&Limits<'_>) -> T) -> T {
        let of_profile;
        let cost = match &self.allowed.cost {
            Some(cost) => cost,
            None => {
                of_profile = profile_cost(&self.runs.profile);
                &of_profile
            }
        };
        ask(&Limits { elevators: &self.allowed.elevators, writes: self.allowed.writes, cost: &**cost })
    }

    fn conditions(&self, n: usize, seed: u64) -> Vec<Condition> {
        self.with_limits(|limits| design::conditions(n, limits, seed))
    }

    fn least_sure(&self, seed: u64) -> Result<Vec<Condition>, TrainError> {
        let (points, profile, device) = (&self.runs.points, &self.runs.profile, &self.device.spec);
        self.with_limits(|limits| least_sure(points, profile, device, limits, BATCH, seed))
    }

    fn measure(&mut self, id: String, condition: &Condition, seed: u64) -> Result<(), RunsError> {
        let run_request = RunRequest {
            id,
            scheme: SWEEP,
            treatment: Treatment::knobs(condition.knobs.config()),
            vms: &condition.vms,
            seed,
            forecasts: Vec::new(),
            tries: None,
        };
        self.runs.measure(run_request).map(drop)
    }
}

#[cfg(test)]
mod tests;
