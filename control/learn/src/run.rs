//! Measures one condition as a point; repeated when the host itself stalled.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_measure::{Run, TaskResult};
use rtvirtio_spec::Device;
use rtvirtio_units::{Nanos, Percentile};

use crate::condition::lab_kind;
use crate::dataset::{Outcome, Point};
use crate::load::{Knobs, Stream, spec, vm_name};
use crate::stage::{RunPlan, Stage, StageError, Treatment};

/// Stalls of the host up to this length never cause another try: a stock kernel alone has such.
const QUIET: Nanos = Nanos(5_000_000);
/// A longer stall does when it exceeds this share of the tightest target; without targets when it
/// exceeds [`LOUD`].
const SHARE: f64 = 0.25;
/// Limit of a stall for a load without targets, see [`SHARE`].
const LOUD: Nanos = Nanos(20_000_000);

/// A run to be measured.
pub struct Job<'a> {
    /// Unique name of the point.
    pub id: String,
    /// Name of the device in the dataset.
    pub device: &'a str,
    /// The device as a spec names it.
    pub spec_device: &'a Device,
    /// Scheme that chose the treatment.
    pub scheme: &'a str,
    /// Settings of the host.
    pub treatment: Treatment,
    /// Streams of the VMs.
    pub vms: &'a [Vec<Stream>],
    /// Length of the measured part.
    pub length: Duration,
    /// Seed of the addresses.
    pub seed: u64,
    /// Limit of tries while the host stalls too long.
    pub tries: u32,
}

/// Measures jobs: a [`Stage`], or a substitute in tests.
pub trait Measurer {
    /// Measures a job. Of several tries the one with the shortest host stall counts.
    fn measure(&self, job: &Job<'_>, cancel: &AtomicBool) -> Result<Point, StageError>;
}

impl Measurer for Stage<'_> {
    fn measure(&self, job: &Job<'_>, cancel: &AtomicBool) -> Result<Point, StageError> {
        let spec = spec(job.vms, job.spec_device.clone(), lab_kind(self.kind()));
        let mut best: Option<Point> = None;
        for _ in 0..job.tries.max(1) {
            let plan = RunPlan { length: job.length, seed: job.seed, cancel };
            let observed = self.run(&spec, &job.treatment, plan)?;
            let point = Point {
                id: job.id.clone(),
                device: job.device.to_owned(),
                kind: self.kind(),
                scheme: job.scheme.to_owned(),
                seed: job.seed,
                seconds: job.length.as_secs_f64(),
                knobs: Knobs::from_config(&job.treatment.config),
                classes: job.treatment.classes.clone(),
                vms: job.vms.to_vec(),
                noise: observed.noise.unwrap_or_default(),
                disk: observed.disk,
                results: observed.tasks.iter().map(Outcome::from_measurement).collect(),
            };
            let quiet = !disturbed(&point);
            if best.as_ref().is_none_or(|b| point.noise.max_ns < b.noise.max_ns) {
                best = Some(point);
            }
            if quiet {
                break;
            }
        }
        // The loop ran at least once.
        best.ok_or(StageError::NotReverted)
    }
}

/// Whether the host stalled for so long that the run says little about its settings. Latencies of
/// the run itself are not considered, or schemes with short tails would be measured on a quieter
/// host than others.
#[must_use]
pub fn disturbed(point: &Point) -> bool {
    let tightest = point.vms.iter().flatten().filter_map(|s| s.target).min();
    let limit = tightest.map_or(LOUD, |t| Nanos((t.0 as f64 * SHARE) as u64).max(QUIET));
    point.noise.max_ns > limit
}

/// Converts a point to a result; without a verdict, which needs several runs.
#[must_use]
pub fn as_result(point: &Point) -> Run {
    let tasks = point.tasks().enumerate().map(|(i, (vm, stream, outcome))| TaskResult {
        vm: vm_name(vm),
        task: format!("t{i}"),
        percentile: Percentile::P9999,
        target_ns: stream.target,
        declared_rate: stream.rate,
        achieved_rate: outcome.rate,
        n: outcome.n,
        p50_ns: outcome.p50,
        p99_ns: outcome.p99,
        p9999_ns: outcome.p9999,
        p9999_excl_host_stalls_ns: outcome.p9999_awake,
        p9999_placebo_ns: outcome.p9999_placebo,
        max_ns: outcome.max,
        // Absent in older data.
        fio_p9999_ns: outcome.p9999_fio.unwrap_or(outcome.p9999),
        at_target_ns: None,
        fio_cpus: 0.0,
        tail: None,
        predicted_ns: None,
        causes: None,
        causes_unread: Vec::new(),
        exceedances: 0,
        flow: None,
        verdict: None,
        why: point.id.clone(),
    });
    Run {
        scheme: point.scheme.clone(),
        kind: point.kind,
        seconds: point.seconds,
        noise: Some(point.noise),
        disk: point.disk,
        tasks: tasks.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::synthetic_runs;

    /// A run of one task with a target, with a host stall of this length.
    fn run(target: Option<Nanos>, stall: Nanos) -> Point {
        let mut point = synthetic_runs(1, 0.0, 1).remove(0);
        point.vms = vec![vec![Stream { target, ..Stream::paced(100.0) }]];
        point.results.truncate(1);
        point.noise.max_ns = stall;
        point
    }

    #[test]
    fn a_run_is_disturbed_by_a_quarter_of_its_tightest_target() {
        let target = Some(Nanos::from_millis(400));
        let mut late = run(target, Nanos::from_millis(100));
        late.results[0].p9999 = Nanos::from_millis(3_000);
        assert!(!disturbed(&late), "what the run itself took does not enter");
        let mut early = run(target, Nanos::from_millis(101));
        early.results[0].p9999 = Nanos::from_millis(1);
        assert!(disturbed(&early));
        let tight = |stall| run(Some(Nanos::from_millis(1)), stall);
        assert!(!disturbed(&tight(Nanos::from_millis(5))), "5 ms is within a stock kernel's own");
        assert!(disturbed(&tight(Nanos(5_000_001))));
        assert!(!disturbed(&run(None, Nanos::from_millis(20))));
        assert!(disturbed(&run(None, Nanos(20_000_001))));
    }
}
