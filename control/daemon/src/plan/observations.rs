//! Observations of VMs, reduced to what plans depend on.

use std::collections::BTreeMap;

use rtvirtio_measure::Verdict;
use rtvirtio_measure::verdict::{Evidence, judge};
use rtvirtio_planner::replan::{Observations, SLOW_STEP, load_key};
use rtvirtio_spec::{Target, Vm};
use rtvirtio_vmm::disk_stats::Direction;

use crate::desired::Desired;
use crate::observe::{Observation, TargetObservation, VmObservation};

/// Shortest window that a load is derived from, in seconds.
const SHORTEST_S: f64 = 30.0;

/// Observations that plans depend on, as far as they can be attributed: the load of VMs with one
/// disk whose tasks all declare a rate, and targets of tasks whose requests are told from other
/// tasks'.
#[must_use]
pub fn sight_of(seen: &Observation, desired: &Desired) -> Observations {
    let mut sight = Observations { slow: seen.host.slow.clone(), ..Observations::default() };
    for (device, of) in &seen.host.ageing {
        let Some(factor) = of.to_plan_for() else { continue };
        // A level is planned for that is no lower, without the tolerance for what is in no profile.
        let slow = sight.slow.entry(device.clone()).or_default();
        *slow = slow.max(factor * SLOW_STEP);
    }
    for (name, of) in &seen.vms {
        let Some(contract) = desired.contract_of(name) else { continue };
        loads(&contract.vm, of, &mut sight.loads);
        for target in &of.targets {
            if let Some(missed) = is_missed(target) {
                let key = format!("{name}/{}", target.task);
                *sight.missed.entry(key).or_default() |= missed;
            }
        }
    }
    sight
}

fn loads(vm: &Vm, of: &VmObservation, out: &mut BTreeMap<String, f64>) {
    let [disk] = of.disks.as_slice() else { return };
    if disk.seconds < SHORTEST_S {
        return;
    }
    for writes in [false, true] {
        let share = |task: &rtvirtio_spec::Task| {
            let of_writes = task.op.write_share();
            if writes { of_writes } else { 1.0 - of_writes }
        };
        let here = || vm.tasks.iter().filter(|task| share(task) > 0.0);
        let declared: Option<f64> = here().map(|task| Some(task.rate?.0 * share(task))).sum();
        let Some(declared) = declared.filter(|rate| *rate > 0.0) else { continue };
        let direction = if writes { Direction::Write } else { Direction::Read };
        // A direction at rest is left out of what was observed.
        let found =
            disk.directions.iter().find(|one| one.direction == direction).map_or(0.0, |one| one.rate.0);
        out.insert(load_key(&vm.name, writes), found / declared);
    }
}

/// Whether the tail is too long; `None` where that cannot be told. A task that sends less than it
/// declares is at rest, which is no miss of the plan's.
fn is_missed(target: &TargetObservation) -> Option<bool> {
    let evidence =
        Evidence { n: target.n, exceedances: target.exceedances, declared: None, achieved: target.rate };
    let of = Target { percentile: target.percentile, latency: target.latency_ns };
    let tail = judge(of, &evidence).verdict;
    // Late requests that do not count against the target may be another task's.
    let is_obscured = tail == Verdict::Missed && target.verdict == Verdict::Unproven;
    (target.n > 0 && !is_obscured).then_some(tail == Verdict::Missed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rtvirtio_measure::observe::Observed;
    use rtvirtio_planner::replan::slow_level;
    use rtvirtio_spec::HostSpec;
    use rtvirtio_units::{Iops, Nanos};

    use super::*;
    use crate::desired::Contract;
    use crate::observe::{AgeingObservation, DeviceAge, DiskObservation, DiskSource};

    fn desired(tasks: &str) -> Desired {
        let text = format!("[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n{tasks}");
        let spec = HostSpec::parse("x.toml", &text).unwrap();
        Desired { contracts: Contract::of_spec(&spec, Path::new("x.toml")), ..Desired::default() }
    }

    fn task(name: &str, op: &str, more: &str) -> String {
        format!("[[vm.task]]\nname = \"{name}\"\nop = \"{op}\"\nblock = \"4KiB\"\n{more}\n")
    }

    fn seen(rates: &[(Direction, f64)], targets: Vec<TargetObservation>) -> Observation {
        let one = |(direction, rate): &(Direction, f64)| Observed {
            direction: *direction,
            n: 1_000,
            rate: Iops(*rate),
            mean_size: None,
            mean_ns: None,
            depth: None,
            tails: Vec::new(),
            longest_ns: None,
        };
        let disk = DiskObservation {
            source: DiskSource::Qemu,
            id: "d".to_owned(),
            file: None,
            seconds: 300.0,
            directions: rates.iter().map(one).collect(),
            histogram: None,
        };
        let vm = VmObservation { disks: vec![disk], targets, ..VmObservation::default() };
        Observation { vms: [("plc".to_owned(), vm)].into(), ..Observation::default() }
    }

    fn target(verdict: Verdict, n: u64, exceedances: u64) -> TargetObservation {
        TargetObservation {
            task: "t".to_owned(),
            percentile: "p99".parse().unwrap(),
            latency_ns: Nanos::from_millis(10),
            verdict,
            why: String::new(),
            n,
            exceedances,
            rate: Iops(1.0),
            seconds: 300.0,
            late: None,
            late_unseen: None,
            causes: None,
            causes_unread: Vec::new(),
        }
    }

    #[test]
    fn loads_are_of_what_is_declared_and_left_out_where_nothing_is() {
        let two = task("a", "read", "rate = \"100/s\"") + &task("b", "write", "rate = \"50/s\"");
        let rates = [(Direction::Read, 250.0), (Direction::Flush, 9.0)];
        let sight = sight_of(&seen(&rates, Vec::new()), &desired(&two));
        let expected = [("plc read".to_owned(), 2.5), ("plc write".to_owned(), 0.0)];
        assert_eq!(sight.loads, BTreeMap::from(expected));
        // One without a rate may send as many as it likes.
        let flood = two + &task("c", "read", "");
        let sight = sight_of(&seen(&rates, Vec::new()), &desired(&flood));
        assert_eq!(sight.loads.keys().collect::<Vec<_>>(), ["plc write"]);
    }

    #[test]
    fn a_device_that_is_followed_is_planned_for_at_its_factor_and_another_is_not() {
        let all = desired(&task("t", "read", "rate = \"100/s\""));
        let slow = |is_followed| {
            let mut seen = seen(&[], Vec::new());
            let aged = AgeingObservation {
                state: DeviceAge::Slower,
                factor: 1.25,
                ratios: BTreeMap::new(),
                standstill_ns: None,
                since_s: Some(600.0),
                few: 0,
                waited: 0,
                alarm: Some("slower".to_owned()),
                is_followed,
                vms: vec!["plc".to_owned()],
            };
            seen.host.ageing.insert("/dev/sdz".to_owned(), aged);
            sight_of(&seen, &all).slow.get("/dev/sdz").copied()
        };
        // One level is 1.5 times as slow, which covers the factor.
        assert_eq!(slow(true).map(slow_level), Some(1));
        assert_eq!(slow(false), None);
    }

    #[test]
    fn a_long_tail_is_a_miss_and_a_task_at_rest_is_none() {
        let all = desired(&task("t", "read", "rate = \"100/s\""));
        let missed =
            |one: TargetObservation| sight_of(&seen(&[], vec![one]), &all).missed.get("plc/t").copied();
        assert_eq!(missed(target(Verdict::Missed, 1_000, 500)), Some(true));
        assert_eq!(missed(target(Verdict::Met, 1_000, 0)), Some(false));
        assert_eq!(missed(target(Verdict::Missed, 1_000, 0)), Some(false), "less than declared");
        assert_eq!(missed(target(Verdict::Unproven, 1_000, 500)), None, "perhaps another task's");
        assert_eq!(missed(target(Verdict::Unproven, 0, 0)), None);
    }
}
