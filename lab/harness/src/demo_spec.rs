//! The demo's spec, adapted to the CPU time that this machine has free, and to what the length of
//! a run can prove.

use rtvirtio_measure::verdict::samples_needed;
use rtvirtio_planner::CpuRoom;
use rtvirtio_spec::{Spec, Task};
use rtvirtio_units::{Iops, Percentile};

/// Part of the free CPU time that the requests may need: the rest is for what comes and goes.
const SHARE: f64 = 0.8;
/// Rates that are left at least, over the declared ones: with less, no disk is shown.
const LEAST: f64 = 0.1;
/// Part of the declared requests that a run sends, at least.
const SENT: f64 = 0.95;
/// Requests beyond those that a proof needs.
const SPARE: f64 = 1.25;
/// Percentiles to which a target may be lowered.
const PERCENTILES: [f64; 4] = [99.99, 99.9, 99.0, 90.0];

/// A spec with lower rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled {
    /// The spec.
    pub spec: Spec,
    /// Rates over those of the original, above 0 and below 1.
    pub factor: f64,
}

/// Lowers all rates by the same factor until the requests need no more than a part of the free CPU
/// time, and to a tenth at most. `None` where they do not need more.
#[must_use]
pub fn scale_rates(spec: &Spec, room: &CpuRoom) -> Option<Scaled> {
    let fits = room.free * SHARE;
    if room.needed <= fits {
        return None;
    }
    let factor = (fits / room.needed).max(LEAST);
    let mut spec = spec.clone();
    for task in spec.vms.iter_mut().flat_map(|vm| &mut vm.tasks) {
        task.rate = task.rate.map(|rate| Iops((rate.0 * factor).floor().max(1.0)));
    }
    Some(Scaled { spec, factor })
}

/// Lowers the percentile of each target that a run of `seconds` cannot prove, to the highest one
/// that it can. Returns the targets that changed, as `vm/task p99.99 -> p99.9`.
pub fn lower_percentiles(spec: &mut Spec, seconds: f64) -> Vec<String> {
    let mut changed = Vec::new();
    for vm in &mut spec.vms {
        for task in &mut vm.tasks {
            let Some(highest) = provable(task, seconds) else { continue };
            for target in task.targets.iter_mut().filter(|target| target.percentile > highest) {
                changed.push(format!("{}/{} {} -> {highest}", vm.name, task.name, target.percentile));
                target.percentile = highest;
            }
            // Two targets may have become one: the stricter stays.
            task.targets.dedup_by_key(|target| target.percentile);
        }
    }
    changed
}

/// The highest percentile that a run can prove for a task; `None` for a task without a rate, and
/// where it can prove none of [`PERCENTILES`].
fn provable(task: &Task, seconds: f64) -> Option<Percentile> {
    let requests = task.rate?.0 * seconds * SENT;
    let is_enough = |percentile: &Percentile| {
        samples_needed(0, *percentile).is_some_and(|n| n as f64 * SPARE <= requests)
    };
    PERCENTILES.into_iter().map(Percentile).find(is_enough)
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::Verdict;
    use rtvirtio_measure::verdict::{Evidence, judge};
    use rtvirtio_units::Nanos;

    use super::*;

    const SPEC: &str = include_str!("../../../examples/fig7.toml");

    fn spec() -> Spec {
        rtvirtio_spec::parse("fig7", SPEC).unwrap()
    }

    fn room(free: f64) -> CpuRoom {
        CpuRoom { cpus: 2, needed: 1.0, free, rate: 1_800.0, each_ns: Nanos(555_556) }
    }

    fn rates(spec: &Spec) -> Vec<f64> {
        spec.vms.iter().flat_map(|vm| &vm.tasks).filter_map(|task| task.rate).map(|rate| rate.0).collect()
    }

    #[test]
    fn rates_fall_to_what_is_free() {
        assert_eq!(scale_rates(&spec(), &room(1.3)), None);
        let scaled = scale_rates(&spec(), &room(0.5)).unwrap();
        assert!((scaled.factor - 0.4).abs() < 1e-9);
        assert_eq!(rates(&scaled.spec), [40.0, 200.0, 40.0, 200.0, 40.0, 200.0]);
        // Nothing is free.
        let scaled = scale_rates(&spec(), &room(0.0)).unwrap();
        assert_eq!(rates(&scaled.spec), [10.0, 50.0, 10.0, 50.0, 10.0, 50.0]);
    }

    #[test]
    fn percentiles_fall_to_what_the_run_proves() {
        let mut spec = spec();
        let changed = lower_percentiles(&mut spec, 40.0);
        assert_eq!(changed[..2], ["vm0/light p99.99 -> p99.9", "vm0/medium p99.99 -> p99.9"]);
        assert_eq!(changed.len(), 6);
        assert!(lower_percentiles(&mut spec, 40.0).is_empty());
        // A run whose requests are all in time proves them.
        for task in spec.vms.iter().flat_map(|vm| &vm.tasks) {
            let rate = task.rate.unwrap();
            let evidence =
                Evidence { n: (rate.0 * 40.0 * SENT) as u64, exceedances: 0, declared: None, achieved: rate };
            assert_eq!(judge(task.targets[0], &evidence).verdict, Verdict::Met, "{}", task.name);
        }
        // A long run proves what is declared.
        assert!(lower_percentiles(&mut self::spec(), 3_600.0).is_empty());
    }
}
