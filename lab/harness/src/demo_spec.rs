//! The demo's spec, adapted to the CPU time that this machine has free, and to what the length of
//! a run can prove.

use std::collections::BTreeSet;

use rtvirtio_measure::Run;
use rtvirtio_measure::verdict::samples_needed;
use rtvirtio_planner::CpuRoom;
use rtvirtio_spec::{Spec, Target};
use rtvirtio_units::{Iops, Percentile};

/// Part of the free CPU time that the requests may need with their margin: the rest is for what
/// comes and goes.
const SHARE: f64 = 0.85;
/// Rates that are left at least, over the declared ones: with less, no disk is shown.
const LEAST: f64 = 0.1;
/// Lowest rate of a spec, 1/s.
const LEAST_RATE: f64 = 1.0 / 60.0;
/// Part of the declared requests that a run sends, at least.
const SENT: f64 = 0.95;
/// Requests beyond those that a proof needs.
const SPARE: f64 = 1.25;
/// Percentiles to which a target may be lowered.
const PERCENTILES: [f64; 4] = [99.99, 99.9, 99.0, 90.0];

/// A spec with lower rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled {
    pub spec: Spec,
    /// Rates over those of the original, above 0 and below 1.
    pub factor: f64,
}

/// Lowers all rates by the same factor until the requests need no more than a part of the free CPU
/// time, and to a tenth at most. `None` where they do not need more.
#[must_use]
pub fn scale_rates(spec: &Spec, room: &CpuRoom) -> Option<Scaled> {
    let fits = room.free * SHARE / room.margin;
    if room.needed <= fits {
        return None;
    }
    let factor = (fits / room.needed).max(LEAST);
    let mut spec = spec.clone();
    // The time of a VM with a CPU contract is its own.
    let competing = spec.vms.iter_mut().filter(|vm| vm.cpu.need.is_none());
    for task in competing.flat_map(|vm| &mut vm.tasks) {
        task.rate = task.rate.map(|rate| Iops(lowered(rate.0, factor)));
    }
    Some(Scaled { spec, factor })
}

/// A rate times a factor, a whole number where it is above 1/s.
fn lowered(rate: f64, factor: f64) -> f64 {
    let exact = rate * factor;
    if exact >= 1.0 { exact.floor() } else { exact.max(LEAST_RATE.min(rate)) }
}

/// Part of the declared rates that a run kept, all tasks of disks together; 1 without a declared
/// rate.
#[must_use]
pub fn rates_kept(run: &Run) -> f64 {
    // A task has an entry for each of its targets.
    let mut seen = BTreeSet::new();
    let tasks = run.tasks.iter().filter(|task| task.flow.is_none() && seen.insert((&task.vm, &task.task)));
    kept(tasks.filter_map(|task| Some((task.declared_rate?.0, task.achieved_rate.0))))
}

/// Part kept of declared rates, each with the achieved one: more of one task is nothing of another.
fn kept(rates: impl Iterator<Item = (f64, f64)>) -> f64 {
    let add = |sum: (f64, f64), (declared, achieved): (f64, f64)| {
        (sum.0 + declared, sum.1 + achieved.min(declared))
    };
    let (declared, kept) = rates.fold((0.0, 0.0), add);
    if declared > 0.0 { kept / declared } else { 1.0 }
}

/// Lowers the percentile of each target that a run of `seconds` cannot prove, to the highest one
/// that it can. Returns the targets that changed, as `vm/task p99.99 -> p99.9`.
pub fn lower_percentiles(spec: &mut Spec, seconds: f64) -> Vec<String> {
    let mut changed = Vec::new();
    for vm in &mut spec.vms {
        for task in &mut vm.tasks {
            let Some(rate) = task.rate else { continue };
            let is_provable = |percentile: &Percentile| {
                let requests = rate.0 * seconds * SENT;
                samples_needed(0, *percentile).is_some_and(|n| n as f64 * SPARE <= requests)
            };
            let Some(highest) = PERCENTILES.into_iter().map(Percentile).find(is_provable) else { continue };
            let is_changed =
                |target: &&mut Target| target.percentile > highest && !is_provable(&target.percentile);
            for target in task.targets.iter_mut().filter(is_changed) {
                changed.push(format!("{}/{} {} -> {highest}", vm.name, task.name, target.percentile));
                target.percentile = highest;
            }
            // Two targets may have become one: the stricter stays.
            task.targets.dedup_by_key(|target| target.percentile);
        }
    }
    changed
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
        CpuRoom { cpus: 2, needed: 1.0, free, rate: 1_800.0, each_ns: Nanos(555_556), margin: 1.8 }
    }

    fn rates(spec: &Spec) -> Vec<f64> {
        spec.vms.iter().flat_map(|vm| &vm.tasks).filter_map(|task| task.rate).map(|rate| rate.0).collect()
    }

    #[test]
    fn rates_fall_to_what_is_free() {
        assert_eq!(scale_rates(&spec(), &room(2.2)), None);
        let scaled = scale_rates(&spec(), &room(0.8471)).unwrap();
        assert!((scaled.factor - 0.4).abs() < 1e-3);
        assert_eq!(rates(&scaled.spec), [40.0, 200.0, 40.0, 200.0, 40.0, 200.0]);
        // Nothing is free.
        let scaled = scale_rates(&spec(), &room(0.0)).unwrap();
        assert_eq!(rates(&scaled.spec), [10.0, 50.0, 10.0, 50.0, 10.0, 50.0]);
        // No rate rises.
        assert_eq!([lowered(0.5, 0.4), lowered(0.02, 0.1), lowered(7.0, 0.5)], [0.2, LEAST_RATE, 3.0]);
    }

    #[test]
    fn what_one_task_sends_more_is_nothing_of_another() {
        assert_eq!(kept([(100.0, 150.0), (100.0, 50.0)].into_iter()), 0.75);
        assert_eq!(kept([(20.0, 20.0)].into_iter()), 1.0);
        assert_eq!(kept(std::iter::empty()), 1.0);
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
        // A run of seven minutes proves what is declared.
        assert!(lower_percentiles(&mut self::spec(), 420.0).is_empty());
        // A percentile between those of the list stays where the run proves it.
        let mut spec = self::spec();
        let task = &mut spec.vms[0].tasks[0];
        (task.rate, task.targets[0].percentile) = (Some(Iops(3.0)), Percentile(95.0));
        assert_eq!(lower_percentiles(&mut spec, 40.0).len(), 5);
        assert_eq!(spec.vms[0].tasks[0].targets[0].percentile, Percentile(95.0));
    }
}
