//! Causes of missed targets, by the facts of those intervals of a window in which they were missed.

use std::path::Path;

use rtvirtio_blame::{DeviceUse, Facts, Faults, Limit, Load, Stops, causes};
use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::StallTotal;
use rtvirtio_measure::verdict::allowed;
use rtvirtio_spec::{Target, Task};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::disk_stats::{Counters, DiskStats, Histogram};
use rtvirtio_workflow::group_limits::{GroupLimit, Member};
use rtvirtio_workflow::vm_counters::{Dimension, below, device_use, directions};

use super::TargetObservation;
use super::facts::{DeviceMember, IntervalFacts, IntervalLimit};
use super::window::{DiskSample, DiskWindow, above, between};
use crate::linux::RunningVm;

/// Interval between two samples of a window.
struct Interval<'a> {
    then: &'a DiskStats,
    now: &'a DiskSample,
    seconds: f64,
    /// Latencies of the task's directions.
    histogram: Histogram,
    late: u64,
    /// More requests were late than the target allows.
    is_missed: bool,
}

/// Names the causes of each missed target of a VM with one disk.
pub(super) fn explain(vm: &RunningVm, window: &DiskWindow, targets: &mut [TargetObservation]) {
    for target in targets.iter_mut().filter(|target| target.verdict == Verdict::Missed) {
        let Some(task) = vm.contract.vm.tasks.iter().find(|task| task.name == target.task) else { continue };
        let of = Target { percentile: target.percentile, latency: target.latency_ns };
        let facts = facts_of(vm, task, of, window);
        target.causes = Some(causes(&facts));
        target.causes_unread = facts.unread();
    }
}

/// Intervals of a window; none where the latencies of one are not known.
fn intervals<'a>(window: &'a DiskWindow, task: &Task, target: Target) -> Vec<Interval<'a>> {
    let samples = window.samples();
    let pairs = samples.clone().zip(samples.skip(1));
    let one = |(then, now): (&'a DiskSample, &'a DiskSample)| {
        let mut all: Option<Histogram> = None;
        for of in directions(task.op) {
            let one = between(of(&then.stats), of(&now.stats))?;
            all = Some(match all {
                None => one,
                Some(sum) => sum.and(&one)?,
            });
        }
        let histogram = all?;
        let late = above(&histogram, target.latency.0);
        let seconds = now.at.duration_since(then.at).as_secs_f64();
        let is_missed = late > allowed(histogram.count(), target.percentile);
        Some(Interval { then: &then.stats, now, seconds, histogram, late, is_missed })
    };
    let all: Option<Vec<Interval<'a>>> = pairs.map(one).collect();
    all.unwrap_or_default()
}

/// Requests per second in the intervals that count, and in the one before each: what waits at the
/// end of one comes in the next, and is no load above the declaration there.
fn sent(all: &[Interval<'_>], counts: &dyn Fn(&Interval<'_>) -> bool) -> f64 {
    let next = all.iter().skip(1).map(Some).chain([None]);
    let of = all.iter().zip(next).filter(|(one, next)| counts(one) || next.is_some_and(counts));
    let (n, seconds) =
        of.fold((0, 0.0), |sum, (one, _)| (sum.0 + one.histogram.count(), sum.1 + one.seconds));
    n as f64 / seconds.max(f64::MIN_POSITIVE)
}

fn facts_of(vm: &RunningVm, task: &Task, target: Target, window: &DiskWindow) -> Facts {
    let mut intervals = intervals(window, task, target);
    // A target that is missed in none by itself is missed in all.
    let is_missed_in_all = !intervals.iter().any(|one| one.is_missed);
    let counts = |one: &Interval<'_>| is_missed_in_all || one.is_missed;
    let sent = sent(&intervals, &counts);
    intervals.retain(counts);
    let seconds: f64 = intervals.iter().map(|one| one.seconds).sum();
    let (n, late) =
        intervals.iter().fold((0, 0), |sum, one| (sum.0 + one.histogram.count(), sum.1 + one.late));
    let rate = n as f64 / seconds.max(f64::MIN_POSITIVE);
    let facts: Option<Vec<&IntervalFacts>> = intervals.iter().map(|one| one.now.facts.as_deref()).collect();
    let facts = facts.filter(|facts| !facts.is_empty()).unwrap_or_default();
    Facts {
        vm: vm.contract.vm.name.clone(),
        seconds,
        rate,
        load: task.rate.map(|declared| Load { sent, declared: declared.0, bytes: false }),
        n,
        late,
        target: target.latency,
        median: median(&intervals),
        depth: None,
        limits: limits((vm, task), &intervals, &facts, seconds),
        has_throttling: true,
        quota: sum_of(facts.iter().map(|one| one.quota)),
        ready: ready(&facts),
        stolen: mean(&facts, |one| one.stolen),
        cpus: cpus(&facts),
        own_cpus: mean(&facts, |one| one.own_cpus),
        host: sum_of(intervals.iter().map(|one| one.now.stood.host.map(stops))),
        disk: sum_of(intervals.iter().map(|one| one.now.stood.disk.map(stops))),
        device: device(&facts),
        // Not watched here: files of a disk's queue hang with it.
        held: None,
        below: below(task.op, false, intervals.iter().map(|one| (one.then, &one.now.stats))),
        faults: faults(&facts),
        // Between two samples only its sum would be known.
        memory: None,
    }
}

fn stops(of: StallTotal) -> Stops {
    Stops { count: of.count, total: of.total }
}

/// Sum of the stops of all intervals; `None` where they are not known of one, or there is none.
fn sum_of(all: impl Iterator<Item = Option<Stops>>) -> Option<Stops> {
    let mut sum: Option<Stops> = None;
    for one in all {
        let one = one?;
        let (count, total) = sum.map_or((0, 0), |sum| (sum.count, sum.total.0));
        sum = Some(Stops {
            count: count.saturating_add(one.count),
            total: Nanos(total.saturating_add(one.total.0)),
        });
    }
    sum
}

/// Median latency, rounded up to the limit of its bin.
fn median(intervals: &[Interval<'_>]) -> Nanos {
    let sum = intervals.iter().try_fold(None, |sum: Option<Histogram>, one| match sum {
        None => Some(Some(one.histogram.clone())),
        Some(sum) => sum.and(&one.histogram).map(Some),
    });
    let sum = sum.flatten();
    let median = sum.as_ref().and_then(|sum| sum.quantile(0.5).or_else(|| sum.boundaries.last().copied()));
    Nanos(median.unwrap_or_default())
}

/// Time per second that the thread with the longest wait was ready without a CPU.
fn ready(facts: &[&IntervalFacts]) -> Option<f64> {
    let mut all = std::collections::BTreeMap::new();
    for one in facts {
        for (thread, ns) in one.ready.as_ref()? {
            *all.entry(*thread).or_insert(0_u64) += ns;
        }
    }
    let seconds: f64 = facts.iter().map(|one| one.seconds).sum();
    let longest = *all.values().max()?;
    Some(longest as f64 / 1e9 / seconds.max(f64::MIN_POSITIVE))
}

/// Mean of a fact over the time of all intervals; `None` where it is not known of one.
fn mean(facts: &[&IntervalFacts], of: impl Fn(&IntervalFacts) -> Option<f64>) -> Option<f64> {
    let seconds: f64 = facts.iter().map(|one| one.seconds).sum();
    let sum: Option<f64> = facts.iter().map(|one| Some(of(one)? * one.seconds)).sum();
    sum.filter(|_| seconds > 0.0).map(|sum| sum / seconds)
}

/// CPUs of the host, the most of all intervals.
fn cpus(facts: &[&IntervalFacts]) -> Option<u32> {
    let all: Option<Vec<u32>> = facts.iter().map(|one| one.cpus).collect();
    all?.into_iter().max()
}

fn faults(facts: &[&IntervalFacts]) -> Option<Faults> {
    let all: Option<Vec<Faults>> = facts.iter().map(|one| one.faults).collect();
    let add = |a: Faults, b: Faults| Faults {
        own: a.own + b.own,
        host: a.host + b.host,
        may_be_compressed: a.may_be_compressed || b.may_be_compressed,
    };
    all?.into_iter().reduce(add)
}

/// Limits that act on a task's requests, with what was completed of what they count: by the VM, or
/// by all below a cgroup. `None` where that is not known, or limits were changed meanwhile.
fn limits(
    (vm, task): (&RunningVm, &Task),
    intervals: &[Interval<'_>],
    facts: &[&IntervalFacts],
    seconds: f64,
) -> Option<Vec<Limit>> {
    let set = facts.first()?.limits.as_ref()?;
    if facts.iter().any(|one| one.limits.as_ref() != Some(set)) {
        return None;
    }
    let completed = |dimension: Dimension| -> f64 {
        let amount = |(then, now): (&Counters, &Counters)| {
            let count = |of: &Counters| if dimension.bytes { of.bytes } else { of.ops };
            count(now).saturating_sub(count(then)) as f64
        };
        let of = |one: &Interval<'_>| {
            let now = &one.now.stats;
            let reads = if dimension.reads { amount((&one.then.read, &now.read)) } else { 0.0 };
            reads + if dimension.writes { amount((&one.then.write, &now.write)) } else { 0.0 }
        };
        intervals.iter().map(of).sum::<f64>() / seconds.max(f64::MIN_POSITIVE)
    };
    let (name, tasks) = (&vm.contract.vm.name, &vm.contract.vm.tasks);
    let one = |of: &IntervalLimit| {
        let Some(cgroup) = &of.cgroup else {
            let amounts = (completed(of.dimension), of.dimension.asked(tasks));
            return Some(of.dimension.fact(of.by, of.name.clone(), of.value, amounts));
        };
        let users = users(facts)?;
        let group = &users.iter().find(|user| user.name == *name)?.group;
        let vm = Member { group, tasks, completed: Some(completed(of.dimension)) };
        let others = users.iter().filter(|user| user.name != *name);
        let others: Vec<Member<'_>> =
            others.map(|user| Member { group: &user.group, tasks: &user.tasks, completed: None }).collect();
        let limit = GroupLimit { cgroup, name: of.name.clone(), value: of.value, dimension: of.dimension };
        limit.fact(&vm, &others, &|group| moved_by(group, of.dimension, facts))
    };
    // The kernel and QEMU hold back each direction by itself.
    set.iter().filter(|of| of.dimension.of_task(task) > 0.0).map(one).collect()
}

/// VMs of the device in all intervals; `None` where they changed, or are not known of one.
fn users<'a>(facts: &[&'a IntervalFacts]) -> Option<&'a [DeviceMember]> {
    let of = |one: &'a IntervalFacts| one.device.as_ref().map(|device| device.members.as_slice());
    let first = of(facts.first()?)?;
    facts.iter().all(|one| of(one) == Some(first)).then_some(first)
}

/// Amount per second that a cgroup moved; `None` where that is not counted in some interval.
fn moved_by(group: &Path, dimension: Dimension, facts: &[&IntervalFacts]) -> Option<f64> {
    let (mut sum, mut seconds) = (0.0, 0.0);
    for one in facts {
        let device = one.device.as_ref()?;
        sum += dimension.of_counters(device.groups.get(group)?);
        seconds += device.seconds;
    }
    (seconds > 0.0).then(|| sum / seconds)
}

/// Use of the VM's device; no shares where the requests of some VM on it are not counted.
fn device(facts: &[&IntervalFacts]) -> Option<DeviceUse> {
    let mut io = DeviceIo::default();
    let mut moved: std::collections::BTreeMap<&str, Option<f64>> = std::collections::BTreeMap::new();
    for one in facts {
        let device = one.device.as_ref()?;
        let of = &device.io;
        io.reads += of.reads;
        io.writes += of.writes;
        io.read_bytes = io.read_bytes.saturating_add(of.read_bytes);
        io.write_bytes = io.write_bytes.saturating_add(of.write_bytes);
        io.read_time += of.read_time;
        io.write_time += of.write_time;
        for (name, bytes) in &device.moved {
            let sum = moved.entry(name).or_insert(Some(0.0));
            *sum = sum.zip(bytes.filter(|_| one.has_shares)).map(|(sum, bytes)| sum + bytes);
        }
    }
    (!facts.is_empty()).then(|| device_use(&io, moved.into_iter()))
}

#[cfg(test)]
mod real_tests;
#[cfg(test)]
mod tests;
