//! Runs of every case under every mode.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rtvirtio_apply::ApplyError;
use rtvirtio_domain_client::load::{Plan, Stream, StreamResult, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_learn::load::Stream as Load;
use rtvirtio_learn::stage::{RunPlan, Stage, StageError, Treatment};
use rtvirtio_measure::run::TaskMeasurement;
use rtvirtio_model::Elevator;
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Error, Progress, generated};

use super::modes::{AT_ONCE, BURST_PERIOD, Basis, Case, Mode, VMS, settings};
use super::{IsolationData, IsolationOptions, IsolationRun, Skipped, VmOutcome, vm_kind};
use crate::backend::Backend;
use crate::blame::set_throttle;
use crate::iod::socket;
use crate::report::{read, write};
use crate::saved::Saved as _;

/// From the start of the I/O domain's load to its first counted request.
const WARM_UP: Duration = Duration::from_secs(1);
/// Share of the device that the I/O domain reserves for the VM that has priority, in percent, by
/// strength.
const SHARES: [u64; 3] = [20, 40, 60];

/// Runs what a file lacks; it is written after each run.
///
/// # Errors
/// A file of another command, a device that cannot be made, requests that fail, and cancellation.
pub fn measure(
    options: &IsolationOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let command = options.command();
    let saved = if path.try_exists()? { Some(read::<IsolationData>(path)?) } else { None };
    ensure!(
        saved.as_ref().is_none_or(|data| data.command == command),
        "{} is of another command: choose another --out",
        path.display()
    );
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let _lock = labs.dirs.lock_vms()?;
    let bed = TestBed::make(&options.device, VMS, options.vm, labs, progress)?;
    let measured = begin(&bed, saved, command).and_then(|data| rounds(options, &bed, data, path, progress));
    bed.remove()?;
    measured
}

/// The saved data, or new data with a profile of the device.
fn begin(bed: &TestBed<'_>, saved: Option<IsolationData>, command: String) -> anyhow::Result<IsolationData> {
    if let Some(data) = saved {
        return Ok(data);
    }
    Ok(IsolationData {
        schema: IsolationData::SCHEMA.to_owned(),
        host: bed.facts(),
        command,
        generated: generated(),
        profile: bed.profile()?,
        runs: Vec::new(),
        skipped: Vec::new(),
    })
}

fn rounds(
    options: &IsolationOptions,
    bed: &TestBed<'_>,
    mut data: IsolationData,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let (elevators, profile) = (bed.elevators()?, data.profile.clone());
    if elevators.contains(&Elevator::Bfq) {
        // As after the profile, which a run that goes on does not measure.
        bed.renew_elevator(Elevator::Bfq.name())?;
    }
    let baseline = bed.baseline()?;
    let device = &bed.device.spec;
    let basis =
        Basis { profile: &profile, baseline: &baseline, device, kind: options.vm, elevators: &elevators };
    // null_blk's device keeps no data either: each run begins with a new elevator.
    let stage = bed.stage()?.fresh(true);
    let runner = Runner { options, bed, stage, basis, progress };
    let of_round = |round| options.cases().into_iter().map(move |case| (round, case));
    let all: Vec<(usize, Case)> = (0..options.rounds).flat_map(of_round).collect();
    let mut bar = progress.bar("cases under all modes", all.len() as u64);
    for (done, (round, case)) in all.into_iter().enumerate() {
        bar.set(done as u64);
        let mut modes = options.modes();
        // Comparable runs lie next to each other, in another order each time.
        Random::new(1_000 * round as u64 + case as u64 + 1).shuffle(&mut modes);
        for mode in modes {
            let is_done = data.runs.iter().any(|r| (r.round, r.case, r.mode) == (round, case, mode));
            if is_done || data.skipped.iter().any(|s| (s.case, s.mode) == (case, mode)) {
                continue;
            }
            progress.check_cancelled()?;
            match runner.run(mode, case, round)? {
                Ok(run) => data.runs.push(run),
                Err(why) => {
                    if !data.skipped.iter().any(|s| s.mode == mode && s.why == why) {
                        progress.warn(&format!("{} is left out: {why}", mode.name()));
                    }
                    data.skipped.push(Skipped { mode, case, why });
                }
            }
            data.generated = generated();
            write(path, &data)?;
        }
    }
    Ok(())
}

/// Device and VMs on which cases are run.
struct Runner<'a> {
    options: &'a IsolationOptions,
    bed: &'a TestBed<'a>,
    stage: Stage<'a>,
    basis: Basis<'a>,
    progress: &'a dyn Progress,
}

/// A run, or the reason why the mode cannot be had here.
type Outcome = Result<IsolationRun, String>;

impl Runner<'_> {
    fn run(&self, mode: Mode, case: Case, round: usize) -> anyhow::Result<Outcome> {
        let is_guest = self.options.vm == LabKind::Qemu;
        if mode == Mode::QemuThrottle && !is_guest {
            return Ok(Err("the VMs are processes without QEMU; --vm qemu".to_owned()));
        }
        if mode == Mode::IoDomain && is_guest {
            let why = "the guests have disks of QEMU's own; --vm process runs its clients without a VM";
            return Ok(Err(why.to_owned()));
        }
        if let Some(elevator) = mode.elevator().filter(|e| !self.basis.elevators.contains(e)) {
            return Ok(Err(format!("the kernel does not offer the elevator {}", elevator.name())));
        }
        let seed = 1 + round as u64;
        let found = if mode == Mode::IoDomain {
            self.in_domain(case, seed)?
        } else {
            self.in_kernel(mode, case, seed)?
        };
        let of = |(vms, bursts_ns)| IsolationRun { round, case, mode, vms, bursts_ns };
        Ok(found.map(of))
    }

    /// A run under settings of the kernel, or of QEMU.
    fn in_kernel(&self, mode: Mode, case: Case, seed: u64) -> anyhow::Result<Result<Figures, String>> {
        let settings = match settings(mode, case, &self.basis) {
            Ok(settings) => settings,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let spec = case.spec(self.bed.device.spec.clone(), self.options.vm);
        // A guest's requests are QEMU's, whose threads have no class.
        let has_classes = mode == Mode::MqDeadline && self.options.vm == LabKind::Process;
        let classes = case.classes().filter(|_| has_classes);
        let treatment = Treatment { config: self.basis.baseline.clone(), classes, regulator: None };
        let length = Duration::from_nanos(self.options.length.0);
        let plan = RunPlan { length, seed, cancel: self.progress.cancel_flag() };
        let limits = if mode == Mode::QemuThrottle { case.limits(self.basis.total()) } else { Vec::new() };
        let limited = self.throttle(&limits, true);
        let measured = limited.map(|()| self.stage.run_settings(&spec, settings, &treatment, plan));
        self.throttle(&limits, false)?;
        let measured = match measured? {
            Ok(measured) => measured,
            Err(StageError::Apply(e @ (ApplyError::CannotAct { .. } | ApplyError::RolledBack { .. }))) => {
                return Ok(Err(e.to_string()));
            }
            Err(e) => return Err(Error::from(e).into()),
        };
        let vms = measured.tasks.iter().zip(case.loads()).map(|(task, load)| of_task(task, &load)).collect();
        let series = measured.tasks.first().filter(|_| case == Case::Bursts).map(|task| &task.series);
        let spans = series.into_iter().flatten().map(|(start, latency)| (*start, start + latency)).collect();
        Ok(Ok((vms, bursts(spans))))
    }

    /// Sets QEMU's limits of the VMs, or takes them away.
    fn throttle(&self, limits: &[Option<u64>], set: bool) -> anyhow::Result<()> {
        for (vm, limit) in limits.iter().enumerate() {
            let Some(limit) = limit else { continue };
            let limit = if set { *limit } else { 0 };
            set_throttle(self.bed.site(), vm, [limit, limit])?;
        }
        Ok(())
    }

    /// A run through the I/O domain, by vhost-user clients without a VM.
    fn in_domain(&self, case: Case, seed: u64) -> anyhow::Result<Result<Figures, String>> {
        let dir = tempfile::Builder::new().prefix("rtvirtio-isolation-").tempdir()?;
        let (device, size) = self.bed.without_elevator()?;
        let part = size / VMS as u64 / 4_096 * 4_096;
        let config = domain_config(case, &device, part, self.basis.single().0, dir.path());
        let domain = match Backend::start_domain(dir.path(), &config) {
            Ok(domain) => domain,
            Err(e) => return Ok(Err(format!("{e:#}"))),
        };
        let loads = case.loads();
        let connect = |vm| Client::connect(&socket(dir.path(), vm), Options::default());
        let mut clients = (0..loads.len()).map(connect).collect::<Result<Vec<_>, _>>()?;
        let streams = streams(case, &loads, part);
        let length = Duration::from_nanos(self.options.length.0);
        let plan = Plan { warm_up: WARM_UP, length, seed, spin: false };
        let results = run_load(&mut clients, &streams, &plan)?;
        drop(clients);
        drop(domain);
        let failed: u64 = results.iter().map(|result| result.errors).sum();
        ensure!(failed == 0, "{failed} requests failed: a run with errors is not counted");
        let vm = |(result, stream): (&StreamResult, &Stream)| VmOutcome {
            rate: result.rate,
            bytes: result.rate * f64::from(stream.block),
            n: result.n,
            p50_ns: result.percentile(50.0),
            p99_ns: result.percentile(99.0),
        };
        let vms = results.iter().zip(&streams).map(vm).collect();
        let spans = results.first().filter(|_| case == Case::Bursts).map(|first| first.spans.clone());
        Ok(Ok((vms, bursts(spans.unwrap_or_default()))))
    }
}

/// Outcome of each VM, and the time of each burst.
type Figures = (Vec<VmOutcome>, Vec<Nanos>);

fn of_task(task: &TaskMeasurement, load: &[Load]) -> VmOutcome {
    let result = &task.result;
    let block = load.first().map_or(0, |stream| stream.block.0);
    VmOutcome {
        rate: result.achieved_rate.0,
        bytes: result.achieved_rate.0 * block as f64,
        n: result.n,
        p50_ns: result.p50_ns,
        p99_ns: result.p99_ns,
    }
}

/// Streams of the I/O domain's clients. Its bursts are periods of work with as many requests in
/// flight; those after the first ones of a period are load alone.
fn streams(case: Case, loads: &[Vec<Load>], part: u64) -> Vec<Stream> {
    let of = |(client, load): (usize, &Load)| {
        let is_burst = case == Case::Bursts && client == 0;
        let depth = if is_burst { AT_ONCE } else { load.depth };
        Stream {
            client,
            block: u32::try_from(load.block.0).unwrap_or(4_096),
            writes: load.writes,
            burst: is_burst.then(|| Duration::from_nanos(BURST_PERIOD.0 / 2)),
            ..Stream::reads(&format!("vm{client}"), depth as usize, part)
        }
    };
    loads.iter().flatten().enumerate().map(of).collect()
}

/// Configuration of the I/O domain for a case: weights, and a reservation for a VM with priority.
/// `read` is the time of a single read.
fn domain_config(case: Case, device: &Path, part: u64, read: Nanos, dir: &Path) -> String {
    let cost = format!("base = \"{}ns\", per_mib = \"1ms\"", read.0.saturating_sub(4_000).max(1_000));
    let mut s = format!(
        "control = {:?}\n[[device]]\nname = \"bench\"\npolicy = \"edf\"\nwindow = 8\n\
         cost = {{ read = {{ {cost} }}, write = {{ {cost} }} }}\n",
        dir.join("control").display().to_string(),
    );
    let weights = if case == Case::Weights { case.weights() } else { vec![1; case.loads().len()] };
    for (vm, weight) in weights.into_iter().enumerate() {
        // Cannot fail: writing to a String.
        let _ = write!(
            s,
            "[[device.disk]]\nname = \"vm{vm}\"\nsocket = {:?}\npath = {:?}\noffset = \"{}B\"\n\
             size = \"{part}B\"\nshared = true\nweight = {weight}\n",
            socket(dir, vm).display().to_string(),
            device.display().to_string(),
            part * vm as u64,
        );
        if let Some(share) = case.strength().filter(|_| vm == 0).map(|strength| SHARES[strength]) {
            let requests = if case == Case::Bursts { u64::from(AT_ONCE) + 8 } else { 8 };
            let burst = requests * read.0;
            // Time of a burst at the reserved rate, four times over.
            let deadline = 10_000_000 + 4 * burst * 100 / share;
            let _ = writeln!(
                s,
                "reserve = {{ share = \"{share}%\", burst = \"{burst}ns\", deadline = \"{deadline}ns\" }}"
            );
        }
    }
    s
}

/// Time of each burst, from its start to the end of the last of its first [`AT_ONCE`] requests;
/// bursts with fewer are left out. `spans` are start and end of each request, ns.
pub(super) fn bursts(mut spans: Vec<(u64, u64)>) -> Vec<Nanos> {
    spans.sort_unstable();
    let mut found = Vec::new();
    let mut rest = spans.as_slice();
    while let Some((start, _)) = rest.first() {
        let within = rest.iter().take_while(|(from, _)| from - start < BURST_PERIOD.0 * 3 / 4).count();
        let (burst, later) = rest.split_at(within);
        let first = burst.get(..AT_ONCE as usize).into_iter().flatten();
        found.extend(first.map(|(_, end)| Nanos(end - start)).max());
        rest = later;
    }
    found
}

impl IsolationOptions {
    /// Command line of the measurement.
    fn command(&self) -> String {
        let only: Vec<&str> = self.only.iter().map(|mode| mode.name()).collect();
        let only = if only.is_empty() { String::new() } else { format!(" --only {}", only.join(",")) };
        let questions: Vec<String> = self.questions.iter().map(u8::to_string).collect();
        let questions =
            if questions.is_empty() { String::new() } else { format!(" --question {}", questions.join(",")) };
        format!(
            "rtvirtio-bench isolation {} --vm {} --rounds {} --for {}{only}{questions}",
            self.device,
            vm_kind(self.vm),
            self.rounds,
            self.length
        )
    }

    /// The modes that are named, or all.
    fn modes(&self) -> Vec<Mode> {
        let is_chosen = |mode: &Mode| self.only.is_empty() || self.only.contains(mode);
        Mode::ALL.into_iter().filter(is_chosen).collect()
    }

    /// Cases of the questions that are named, or of all.
    fn cases(&self) -> Vec<Case> {
        let is_chosen = |case: &Case| self.questions.is_empty() || self.questions.contains(&case.question());
        Case::ALL.into_iter().filter(is_chosen).collect()
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_domain_config::File;

    use super::*;

    #[test]
    fn a_burst_ends_with_the_last_of_its_first_requests() {
        let period = BURST_PERIOD.0;
        let burst = |from: u64, last: u64| {
            let one = move |i: u64| (from, from + if i == 7 { last } else { 1_000 });
            (0..u64::from(AT_ONCE)).map(one)
        };
        // Requests after the first ones, and a burst that was cut off.
        let later = (0..5).map(|i| (period + 2_000 + i, 2 * period));
        let cut = (0..3).map(|i| (2 * period, 2 * period + 10 + i));
        let mut spans: Vec<(u64, u64)> = burst(period, 70_000).chain(burst(0, 9_000)).chain(later).collect();
        assert_eq!(bursts(spans.clone()), [Nanos(9_000), Nanos(70_000)]);
        spans.extend(cut);
        assert_eq!(bursts(spans), [Nanos(9_000), Nanos(70_000)]);
        assert!(bursts(Vec::new()).is_empty());
    }

    #[test]
    fn the_io_domain_takes_the_configuration_of_every_case() {
        let dir = Path::new("/run/x");
        for case in Case::ALL {
            let text = domain_config(case, Path::new("/dev/x"), 1 << 28, Nanos(100_000), dir);
            let file = File::parse(Path::new("x"), &text).unwrap_or_else(|e| panic!("{case:?}: {e}\n{text}"));
            let disks = &file.devices[0].disks;
            assert_eq!(disks.len(), case.loads().len());
            assert_eq!(disks[0].reserve.is_some(), case.strength().is_some(), "{case:?}");
            assert!(disks[1..].iter().all(|disk| disk.reserve.is_none()));
        }
    }
}
