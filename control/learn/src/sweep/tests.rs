//! Sweeps with synthetic runs, so that no device is needed.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::workload::WorkloadError;
use rtvirtio_spec::Device;
use rtvirtio_stats::Random;

use super::*;
use crate::dataset::Point;
use crate::run::Job;
use crate::stage::StageError;
use crate::synthetic::{follow, host, profile, synthetic_runs};

#[derive(Default)]
struct Shown {
    steps: Mutex<Vec<String>>,
    warnings: Mutex<Vec<String>>,
    cancel: AtomicBool,
}

impl Progress for Shown {
    fn step(&self, text: &str) {
        self.steps.lock().unwrap().push(text.to_owned());
    }
    fn warn(&self, text: &str) {
        self.warnings.lock().unwrap().push(text.to_owned());
    }
    fn cancel_flag(&self) -> &AtomicBool {
        &self.cancel
    }
}

/// Synthetic runs; each takes `length`, and after `until` of them the user cancels.
struct ByLaw<'a> {
    made: &'a Cell<usize>,
    until: usize,
    stall: Nanos,
}

impl Measurer for ByLaw<'_> {
    fn measure(&self, job: &Job<'_>, cancel: &AtomicBool) -> Result<Point, StageError> {
        if self.made.get() >= self.until {
            cancel.store(true, Ordering::Relaxed);
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(WorkloadError::Cancelled.into());
        }
        self.made.set(self.made.get() + 1);
        let mut point = Point {
            id: job.id.clone(),
            device: job.device.to_owned(),
            scheme: job.scheme.to_owned(),
            seed: job.seed,
            seconds: job.length.as_secs_f64(),
            knobs: Knobs::from_config(&job.treatment.config),
            vms: job.vms.to_vec(),
            noise: Noise { max_ns: self.stall, ..Noise::default() },
            ..synthetic_runs(1, 0.0, 1).remove(0)
        };
        follow(&mut point, 0.3, &mut Random::new(job.seed));
        Ok(point)
    }
}

fn device() -> MeasuredDevice {
    let spec = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
    MeasuredDevice { name: "qlc-nvme".to_owned(), spec }
}

fn allowed() -> Allowed {
    Allowed { elevators: vec![Elevator::Bfq, Elevator::None], writes: false, cost: None }
}

fn file(path: &Path) -> RunsFile<'_> {
    RunsFile {
        path,
        command: "sweep".to_owned(),
        generated: "today".to_owned(),
        host: host("sda"),
        profile: profile(),
        model: None,
        other: OtherHost::Refused,
    }
}

const DESIGN: Design = Design { points: 8, seed: 1, again: 2, paper: 3, guests: None };

/// Runs a design with a measurer that is cancelled after `until` runs; returns the output and the
/// number of runs.
fn design(
    path: &Path,
    design: &Design,
    (until, stall): (usize, Nanos),
) -> (Result<Vec<Point>, SweepError>, Shown, usize) {
    let (device, shown, made) = (device(), Shown::default(), Cell::new(0));
    let sweep = || -> Result<Vec<Point>, SweepError> {
        let law = ByLaw { made: &made, until, stall };
        let runs = Runs::begin(&device, law, file(path), Nanos(8_000_000_000), &shown)?;
        let mut sweep = Sweep::new(&device, allowed(), runs, &shown);
        sweep.design(design)?;
        Ok(sweep.runs().points.clone())
    };
    let done = sweep();
    (done, shown, made.get())
}

#[test]
fn a_design_that_was_stopped_goes_on_where_it_was() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("deep/d.jsonl");
    let (stopped, shown, made) = design(&path, &DESIGN, (5, Nanos(0)));
    assert!(matches!(stopped, Err(SweepError::Runs(RunsError::Cancelled))) && made == 5);
    assert_eq!(*shown.steps.lock().unwrap(), ["5 runs are kept; the same command continues"]);
    let (done, shown, made) = design(&path, &DESIGN, (99, Nanos(0)));
    let points = done.unwrap();
    // 8 runs, the first two twice more, and 3 like the paper's.
    assert_eq!((points.len(), made), (15, 10));
    assert!(shown.steps.lock().unwrap()[0].starts_with("continuing with 5 runs"));
    let named = |end: &str| points.iter().find(|p| p.id == format!("qlc-nvme/1/{end}")).unwrap();
    assert!(named("0").repeats(named("0/again2")) && named("0").seed != named("0/again2").seed);
    assert!(points.iter().all(|p| p.scheme == SWEEP && p.vms.iter().flatten().all(|s| s.writes == 0.0)));
    // No run is missing; another design under the same names is refused.
    let (done, _, made) = design(&path, &DESIGN, (99, Nanos(0)));
    assert!(done.is_ok() && made == 0);
    let text = std::fs::read_to_string(&path).unwrap();
    let other = text.replacen("\"id\":\"qlc-nvme/1/0\"", "\"id\":\"qlc-nvme/1/x\"", 1);
    let other = other.replacen("\"id\":\"qlc-nvme/1/1\"", "\"id\":\"qlc-nvme/1/0\"", 1);
    std::fs::write(&path, other).unwrap();
    let (done, ..) = design(&path, &DESIGN, (99, Nanos(0)));
    assert!(matches!(done, Err(SweepError::OtherDesign { id, .. }) if id == "qlc-nvme/1/0"));
}

#[test]
fn guests_get_what_they_can_carry() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let in_guests = Design { points: 60, again: 9, paper: 0, guests: Some(4), ..DESIGN };
    let points = design(&dir.path().join("d"), &in_guests, (99, Nanos(0))).0.unwrap();
    assert_eq!(points.len(), 4);
    for p in points {
        let rate: f64 = p.vms.iter().flatten().filter_map(|s| s.rate).map(|r| r.0).sum();
        assert!(p.vms.len() <= GUESTS && rate <= GUEST_RATE, "{p:?}");
    }
}

#[test]
fn a_busy_host_is_a_warning() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (_, shown, _) = design(&dir.path().join("quiet"), &DESIGN, (99, Nanos::from_millis(20)));
    assert!(shown.warnings.lock().unwrap().is_empty());
    let (_, shown, _) = design(&dir.path().join("busy"), &DESIGN, (99, Nanos::from_millis(21)));
    assert!(shown.warnings.lock().unwrap()[0].starts_with("in 15 of 15 runs the host itself stalled"));
}

/// Device of these tests.
fn learning<'l>(
    device: &'l MeasuredDevice,
    profile: &'l Profile,
    data: &'l Path,
    time: Duration,
) -> Learning<'l> {
    let generated = "today".to_owned();
    Learning { device, allowed: allowed(), profile, host: host("sda"), data, time, generated }
}

/// Learns with synthetic runs until the user cancels.
fn learned(
    data: &Path,
    time: Duration,
    until: usize,
    shown: &Shown,
) -> (Result<HostModel, SweepError>, usize) {
    let (device, profile, made) = (device(), profile(), Cell::new(0));
    let model =
        learn(learning(&device, &profile, data, time), ByLaw { made: &made, until, stall: Nanos(0) }, shown);
    (model, made.get())
}

#[test]
fn learning_needs_enough_runs_and_then_asks_the_model() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let data = dir.path().join("sda.jsonl");
    let shown = Shown::default();
    // The runs of the design, and no time for a model of which more could be asked.
    let (stopped, made) = learned(&data, Duration::from_secs(3600), FEWEST, &shown);
    assert!(matches!(stopped, Err(SweepError::Runs(RunsError::Cancelled))) && made == FEWEST);
    assert!(shown.warnings.lock().unwrap().is_empty(), "an hour is enough for 120 runs");
    // Without time nothing is measured; the model is fitted to existing runs, if these are enough.
    let shown = Shown::default();
    let points = Dataset::load(&data).unwrap().points;
    let missing = FEWEST - conditions(&points).len();
    let (model, made) = learned(&data, Duration::ZERO, 99, &shown);
    assert_eq!((made, model.is_ok()), (0, missing == 0));
    assert_eq!(shown.warnings.lock().unwrap().len(), usize::from(missing > 0));
    // With a model, the least certain conditions are measured.
    let shown = Shown::default();
    let (_, made) = learned(&data, Duration::from_secs(3600), missing + BATCH, &shown);
    assert_eq!(made, missing + BATCH);
    let points = Dataset::load(&data).unwrap().points;
    assert!(points.last().unwrap().id.starts_with("qlc-nvme/sweep/"));
}

/// Measures one shard with synthetic runs until the user cancels.
fn part(data: &Path, shard: Shard, time: Duration, until: usize) -> (Result<Vec<Point>, SweepError>, usize) {
    let (device, profile, made, shown) = (device(), profile(), Cell::new(0), Shown::default());
    let runs = measure_shard(
        learning(&device, &profile, data, time),
        shard,
        ByLaw { made: &made, until, stall: Nanos(0) },
        &shown,
    );
    (runs, made.get())
}

#[test]
fn hosts_share_a_sweep() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (hour, shards) =
        (Duration::from_secs(3600), [Shard::new(1, 40).unwrap(), Shard::new(2, 40).unwrap()]);
    let mut all: Vec<Point> = Vec::new();
    for shard in shards {
        let data = dir.path().join(format!("{}.jsonl", shard.index()));
        // Stopped after two runs, and continued for three.
        assert!(matches!(part(&data, shard, hour, 2), (Err(_), 2)));
        assert!(matches!(part(&data, shard, hour, 3), (Err(_), 3)));
        // Without time the existing runs are returned.
        let (runs, made) = part(&data, shard, Duration::ZERO, 9);
        let runs = runs.unwrap();
        // Three conditions of the first design of 120 are each one's, then comes the next one.
        let designs: Vec<&str> = runs.iter().map(|p| p.id.split('/').nth(2).unwrap()).collect();
        assert_eq!((made, designs), (0, vec!["0", "0", "0", "1", "1"]));
        all.extend(runs);
    }
    assert_eq!(conditions(&all).len(), 10, "no condition is measured twice");
    // Another shard cannot continue the file.
    let other = part(&dir.path().join("1.jsonl"), shards[1], hour, 9).0;
    assert!(matches!(other, Err(SweepError::Runs(RunsError::Dataset(_)))));
}

#[test]
fn too_short_a_time_is_a_warning_before_the_first_run() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let shown = Shown::default();
    let (none, _) = learned(&dir.path().join("d"), Duration::from_millis(1), 0, &shown);
    assert!(none.is_err());
    let warned = shown.warnings.lock().unwrap()[0].clone();
    assert!(warned.starts_with("a model needs 120 runs, 120 more, about 20 min"), "{warned}");
}

#[test]
fn a_sweep_of_elsewhere_is_kept_under_another_name() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let data = dir.path().join("sda.jsonl");
    let begin = || drop(design(&data, &Design { points: 1, again: 0, paper: 0, ..DESIGN }, (9, Nanos(0))));
    let aside = |host: &HostFacts, profile: &Profile| {
        let shown = Shown::default();
        set_aside(&data, "qlc-nvme", host, profile, &shown).unwrap();
        std::mem::take(&mut *shown.warnings.lock().unwrap())
    };
    assert!(aside(&host("sda"), &profile()).is_empty(), "there is none");
    begin();
    assert!(aside(&host("sda"), &profile()).is_empty() && data.exists(), "it goes on");
    let updated = HostFacts { kernel: "6.12".to_owned(), ..host("sda") };
    let warned = aside(&updated, &profile());
    assert!(warned[0].contains("sda on Linux 6.1 with 2 CPUs, this is sda on Linux 6.12"), "{warned:?}");
    assert!(!data.exists() && dir.path().join("sda.1.jsonl").exists());
    std::fs::write(&data, "something else\n").unwrap();
    assert!(aside(&host("sda"), &profile())[0].contains("not the header of a dataset"));
    assert!(dir.path().join("sda.2.jsonl").exists());
    begin();
    // A disk without an identity, before or now, may be the same.
    let replaced = Profile { identity: Some("wwid-b".to_owned()), ..profile() };
    assert!(aside(&host("sda"), &replaced).is_empty());
    let text = std::fs::read_to_string(&data).unwrap();
    let of = serde_json::to_string(&Profile { identity: Some("wwid-a".to_owned()), ..profile() }).unwrap();
    let header = text.replace(&serde_json::to_string(&profile()).unwrap(), &of);
    assert_ne!(header, text);
    std::fs::write(&data, header).unwrap();
    assert!(aside(&host("sda"), &replaced)[0].contains("of the disk wwid-a, this is wwid-b"));
}
