use std::cell::Cell;
use std::sync::atomic::AtomicBool;

use rtvirtio_model::{Slice, TailModel};
use rtvirtio_units::Bytes;

use super::*;
use crate::condition::inputs;
use crate::load::Knobs;
use crate::synthetic::{host, profile, synthetic_runs};
use rtvirtio_workflow::Bar;

struct Quiet(AtomicBool);

impl Progress for Quiet {
    fn step(&self, _: &str) {}
    fn warn(&self, _: &str) {}
    fn bar(&self, _: &str, _: u64) -> Box<dyn Bar> {
        unreachable!("one run has no bar")
    }
    fn cancel_flag(&self) -> &AtomicBool {
        &self.0
    }
}

/// Returns always the same results, and records its number of tries.
struct Same<'a>(&'a Cell<u32>);

impl Measurer for Same<'_> {
    fn measure(&self, job: &Job<'_>, _: &AtomicBool) -> Result<Point, StageError> {
        self.0.set(job.tries);
        let like = synthetic_runs(1, 0.0, 1).remove(0);
        let knobs = Knobs::from_config(&job.treatment.config);
        Ok(Point { id: job.id.clone(), scheme: job.scheme.to_owned(), knobs, ..like })
    }
}

fn file(path: &Path, profile: Profile) -> RunsFile<'_> {
    let (command, generated, host) = ("test".to_owned(), "today".to_owned(), host("twin"));
    RunsFile { path, command, generated, host, profile, model: None, other: OtherHost::Refused }
}

#[test]
fn runs_are_kept_with_what_was_predicted_and_under_other_names() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("runs.jsonl");
    let spec = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
    let device = MeasuredDevice { name: "qlc-nvme".to_owned(), spec };
    let (quiet, tries) = (Quiet(AtomicBool::new(false)), Cell::new(0));
    assert_eq!(began_with(&path, &device.name).unwrap(), None);
    let length = Nanos(8_000_000_000);
    let mut runs = Runs::begin(&device, Same(&tries), file(&path, profile()), length, &quiet).unwrap();
    let like = synthetic_runs(1, 0.0, 1).remove(0);
    let (spec, config) = inputs(&like);
    let forecasts = Slice.forecast(&profile(), &spec, &config).unwrap();
    let wanted = |id: &str, tries| RunRequest {
        id: id.to_owned(),
        scheme: "a",
        treatment: Treatment::knobs(config.clone()),
        vms: &like.vms,
        seed: 1,
        forecasts: forecasts.clone(),
        tries,
    };
    let point = runs.measure(wanted("1", None)).unwrap();
    assert_eq!(tries.get(), TRIES);
    for (outcome, forecast) in point.results.iter().zip(&forecasts) {
        assert_eq!((outcome.upper, outcome.promised), (Some(forecast.judged()), Some(forecast.promised())));
    }
    runs.measure(wanted("2", Some(1))).unwrap();
    assert_eq!(tries.get(), 1);
    runs.share(&point, "3".to_owned(), "b").unwrap();
    assert_eq!(runs.find("3").unwrap().scheme, "b");
    assert!(runs.find("4").is_none());
    drop(runs);
    // All of it is in the file, which keeps the profile that it began with.
    let later = Profile { cpus: 64, ..profile() };
    let runs = Runs::begin(&device, Same(&tries), file(&path, later), length, &quiet).unwrap();
    assert_eq!((runs.points.len(), runs.find("1")), (3, Some(&point)));
    assert_eq!(runs.profile, profile());
    assert_eq!(began_with(&path, &device.name).unwrap(), Some(profile()));
    assert_eq!(began_with(&path, "sda").unwrap(), None);
}
