//! Sliding windows over counters that only rise.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::{LateCauses, LateInterval, StallTotal, causes};
use rtvirtio_measure::observe::{Observed, of_qemu};
use rtvirtio_measure::verdict::{Evidence, RATE_KEPT, allowed, judge};
use rtvirtio_spec::{Op, Task, Vm};
use rtvirtio_units::Iops;
use rtvirtio_vmm::disk_stats::{Counters, DiskStats, Histogram};
use rtvirtio_workflow::vm_counters::directions;

use super::facts::IntervalFacts;
use super::{HistogramObservation, TargetObservation};

const WINDOW: Duration = Duration::from_secs(300);
/// A VM that its quota stops for this share of the time, or more, may send less because of it.
const STOPPED: f64 = 0.01;
/// A VM whose threads were ready without a CPU for this long per second, or longer, may send less
/// because of it.
const WAITED: f64 = 0.5;

/// Stalls of host and disk in the interval that a sample ends; `None` where nothing watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoodStill {
    pub host: Option<StallTotal>,
    /// The disk below, without the host's stalls.
    pub disk: Option<StallTotal>,
}

/// Sample of a disk's counters.
#[derive(Clone, Debug)]
pub(super) struct DiskSample {
    pub at: Instant,
    pub stats: DiskStats,
    /// Stalls in the interval that this sample ends.
    pub stood: StoodStill,
    /// Further counters of the same interval.
    pub facts: Option<Arc<IntervalFacts>>,
}

/// The counters of one disk over a window that slides.
#[derive(Debug, Default)]
pub struct DiskWindow {
    /// The oldest first; the first is at most [`WINDOW`] and one interval old.
    looks: VecDeque<DiskSample>,
}

impl DiskWindow {
    /// Adds a sample. Counters that began anew begin a new window.
    pub fn add(&mut self, now: Instant, stats: DiskStats, stood: StoodStill) {
        self.add_with(now, stats, stood, None);
    }

    /// Adds a sample with further counters of the interval that it ends.
    pub(super) fn add_with(
        &mut self,
        now: Instant,
        stats: DiskStats,
        stood: StoodStill,
        facts: Option<Arc<IntervalFacts>>,
    ) {
        if let Some(DiskSample { at, stats: last, .. }) = self.looks.back() {
            let same = of_qemu(last, &stats, now.duration_since(*at)).is_some()
                && has_histogram(last) == has_histogram(&stats)
                && boundaries(last) == boundaries(&stats);
            if !same {
                self.looks.clear();
            }
        }
        self.looks.push_back(DiskSample { at: now, stats, stood, facts });
        while self.looks.get(1).is_some_and(|look| now.duration_since(look.at) >= WINDOW) {
            self.looks.pop_front();
        }
    }

    /// All samples, the oldest first.
    pub(super) fn samples(&self) -> impl Iterator<Item = &DiskSample> + Clone {
        self.looks.iter()
    }

    /// First and last sample of the window, and the time between; `None` before the second sample.
    fn ends(&self) -> Option<(&DiskStats, &DiskStats, Duration)> {
        let (first, last) = (self.looks.front()?, self.looks.back()?);
        (last.at > first.at).then(|| (&first.stats, &last.stats, last.at.duration_since(first.at)))
    }

    /// Rates, sizes and tails in the window.
    #[must_use]
    pub fn observed(&self) -> Option<(Vec<Observed>, Duration)> {
        let (first, last, time) = self.ends()?;
        Some((of_qemu(first, last, time)?, time))
    }

    /// The file of the disk on the host.
    #[must_use]
    pub fn file(&self) -> Option<String> {
        self.latest()?.file.clone()
    }

    /// Counters of the last sample.
    #[must_use]
    pub fn latest(&self) -> Option<&DiskStats> {
        self.looks.back().map(|look| &look.stats)
    }

    /// Reads and writes completed between the last two samples.
    #[must_use]
    pub fn ops_since_last(&self) -> u64 {
        let count = |look: &DiskSample| look.stats.read.ops + look.stats.write.ops;
        let mut newest = self.looks.iter().rev().map(count);
        newest.next().zip(newest.next()).map_or(0, |(now, then)| now.saturating_sub(then))
    }

    /// Each interval with its number of requests above a latency, of some directions.
    fn late(&self, latency_ns: u64, directions: &[fn(&DiskStats) -> &Counters]) -> Vec<LateInterval> {
        let pairs = self.looks.iter().zip(self.looks.iter().skip(1));
        let one = |(then, now): (&DiskSample, &DiskSample)| {
            let seconds = now.at.duration_since(then.at).as_secs_f64().max(f64::MIN_POSITIVE);
            let (mut late, mut n, mut busy) = (0, 0, 0);
            for of in directions {
                let (then, now) = (of(&then.stats), of(&now.stats));
                late += between(then, now).map_or(0, |histogram| above(&histogram, latency_ns));
                n += now.ops.saturating_sub(then.ops);
                busy += now.time_ns.saturating_sub(then.time_ns);
            }
            LateInterval {
                late,
                rate: n as f64 / seconds,
                depth: busy as f64 / 1e9 / seconds,
                host: now.stood.host,
                disk: now.stood.disk,
            }
        };
        pairs.map(one).collect()
    }

    /// Latencies in the window, for a graph; `None` without a histogram.
    #[must_use]
    pub fn histogram(&self) -> Option<HistogramObservation> {
        let (first, last, _) = self.ends()?;
        let reads = between(&first.read, &last.read)?;
        let writes = between(&first.write, &last.write)?;
        (reads.boundaries == writes.boundaries).then(|| HistogramObservation {
            limits_ns: reads.boundaries.clone(),
            reads: reads.bins,
            writes: writes.bins,
        })
    }
}

fn has_histogram(stats: &DiskStats) -> bool {
    stats.read.histogram.is_some()
}

fn boundaries(stats: &DiskStats) -> Option<&[u64]> {
    stats.read.histogram.as_ref().map(|h| h.boundaries.as_slice())
}

pub(super) fn between(before: &Counters, after: &Counters) -> Option<Histogram> {
    after.histogram.as_ref()?.since(before.histogram.as_ref()?)
}

/// The verdicts of a task's targets from the window of the disk that it uses.
///
/// QEMU counts a request from when the device model fetches it: its wait in the guest before that
/// is not included, so that `met` concerns the host's part only. Where other tasks send requests of
/// the same direction to the same disk, late requests are not attributed to one task: the verdict
/// is `unproven`.
///
/// A task that sends less than it declares is judged by the requests that came: what is declared is
/// the most that it asks for, and a guest at rest misses nothing. Where it may have sent less only
/// because it waited for late requests, those may hide a missed target: `unproven` too.
#[must_use]
pub fn judge_task(vm: &Vm, task: &Task, window: &DiskWindow) -> Vec<TargetObservation> {
    let Some((first, last, time)) = window.ends() else { return Vec::new() };
    let directions = directions(task.op);
    let seconds = time.as_secs_f64();
    let n: u64 = directions.iter().map(|of| of(last).ops.saturating_sub(of(first).ops)).sum();
    let rate = Iops(n as f64 / seconds.max(f64::MIN_POSITIVE));
    let shared: Vec<&str> = vm
        .tasks
        .iter()
        .filter(|t| t.name != task.name && overlaps(t.op, task.op))
        .map(|t| t.name.as_str())
        .collect();
    let one = |target: rtvirtio_spec::Target| {
        let counted = directions.iter().map(|of| {
            let histogram = between(of(first), of(last))?;
            Some((histogram.count(), above(&histogram, target.latency.0)))
        });
        let counted: Option<Vec<(u64, u64)>> = counted.collect();
        let (seen, exceedances) =
            counted.iter().flatten().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let evidence = Evidence { n: seen, exceedances, declared: None, achieved: rate };
        let judgement = judge(target, &evidence);
        let held_back = task.rate.map_or(0, |declared| {
            let missing = (declared.0 * seconds) as u64;
            let waited = directions.iter().map(|of| waited_ns(of(first), of(last), target.latency.0));
            let while_waiting = declared.0 * waited.sum::<u64>() as f64 / 1e9;
            missing.saturating_sub(n).min(while_waiting as u64)
        });
        let is_hidden = judgement.verdict != Verdict::Missed
            && exceedances + held_back > allowed(seen + held_back, target.percentile);
        let (verdict, why) = if !shared.is_empty() {
            let why = format!("its requests cannot be told from those of {}", shared.join(", "));
            (Verdict::Unproven, why)
        } else if counted.is_none() {
            (Verdict::Unproven, "nothing keeps a histogram of its latencies".to_owned())
        } else if n == 0 {
            (Verdict::Unproven, "it sends no requests".to_owned())
        } else if is_hidden {
            let why = format!(
                "{}; while the late ones waited up to {held_back} more would have come, and may have been late too",
                judgement.why
            );
            (Verdict::Unproven, why)
        } else {
            (judgement.verdict, judgement.why)
        };

        let causes = causes(&window.late(target.latency.0, directions));
        // Without late requests there is nothing to attribute.
        let is_told = exceedances == 0 || causes.told > 0;
        let why = match verdict {
            Verdict::Missed if causes.told > 0 => format!("{why}; {}", causes_text(&causes)),
            _ => why,
        };
        let why = match task.rate {
            Some(declared) if n > 0 && !is_kept(rate, declared) => {
                format!("{why}; it sends {rate}, declared are {declared}")
            }
            _ => why,
        };
        let late_unseen = if causes.told >= exceedances {
            None
        } else if causes.told == 0 {
            Some("the host was not monitored while they arrived".to_owned())
        } else {
            Some(format!("the host was monitored while {} of {exceedances} arrived", causes.told))
        };
        TargetObservation {
            task: task.name.clone(),
            percentile: target.percentile,
            latency_ns: target.latency,
            verdict,
            why,
            n: seen,
            exceedances,
            rate,
            seconds,
            late: is_told.then_some(causes),
            late_unseen,
            causes: None,
            causes_unread: Vec::new(),
        }
    };
    task.goals().flatten().map(one).collect()
}

/// Takes `met` back from a task that sends less than it declares while its VM's quota throttles it,
/// or its threads wait for CPUs: it may send less because of that, and requests that wait in the
/// guest are in no histogram of QEMU. `held_back` is the share of time throttled, and the time per
/// second ready without a CPU, each `None` where it is not counted.
pub fn doubt_where_held_back(
    targets: &mut [TargetObservation],
    tasks: &[Task],
    held_back: (Option<f64>, Option<f64>),
) {
    let why = match held_back {
        (Some(stopped), _) if stopped >= STOPPED => "its quota stopped the VM",
        (_, Some(waited)) if waited >= WAITED => "its threads waited for CPUs",
        _ => return,
    };
    for target in targets.iter_mut().filter(|target| target.verdict == Verdict::Met) {
        let declared = tasks.iter().find(|task| task.name == target.task).and_then(|task| task.rate);
        if declared.is_some_and(|declared| target.rate.0 < declared.0 * RATE_KEPT) {
            target.verdict = Verdict::Unproven;
            target.why = format!("{}; {why}, so whether it asked for less is not known", target.why);
        }
    }
}

/// Whether a task sends its declared rate, within `1 - RATE_KEPT`.
fn is_kept(rate: Iops, declared: Iops) -> bool {
    (declared.0 * RATE_KEPT..=declared.0 * (2.0 - RATE_KEPT)).contains(&rate.0)
}

/// Lower bound of the time that all requests above a latency waited, in ns. The last bin has no
/// upper limit, so one request may take most of a window: time that the others cannot have taken is
/// counted to it.
fn waited_ns(first: &Counters, last: &Counters, latency_ns: u64) -> u64 {
    let Some(histogram) = between(first, last) else { return 0 };
    let late = histogram.boundaries.partition_point(|limit| *limit <= latency_ns);
    let sum = |bins: &[u64], limits: &mut dyn Iterator<Item = u64>| -> u64 {
        bins.iter().zip(limits).map(|(n, limit)| n.saturating_mul(limit)).sum()
    };
    let (in_time, above) = histogram.bins.split_at(late.min(histogram.bins.len()));
    let limits = &histogram.boundaries;
    let at_most = sum(in_time, &mut limits.iter().copied());
    let at_least = match late {
        0 => 0,
        late => sum(above, &mut limits[late - 1..].iter().copied()),
    };
    if above.iter().all(|n| *n == 0) {
        return 0;
    }
    at_least.max(last.time_ns.saturating_sub(first.time_ns).saturating_sub(at_most))
}

/// Causes of late requests, in words.
fn causes_text(causes: &LateCauses) -> String {
    let share = |n: u64| 100.0 * n as f64 / causes.told.max(1) as f64;
    let disk = causes.disk.map_or_else(
        || "whether the disk stalled is not known".to_owned(),
        |n| format!("{:.0} % in stalls of the disk", share(n)),
    );
    format!("of the late ones about {:.0} % in stalls of the host, {disk}", share(causes.host))
}

fn overlaps(a: Op, b: Op) -> bool {
    !matches!((a, b), (Op::Read, Op::Write) | (Op::Write, Op::Read))
}

/// Requests in bins that reach above a latency: exact where it is a limit between two bins.
pub(super) fn above(histogram: &Histogram, latency_ns: u64) -> u64 {
    let first = histogram.boundaries.partition_point(|limit| *limit <= latency_ns);
    histogram.bins.iter().skip(first).sum()
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::HostSpec;

    use super::*;

    const MS: u64 = 1_000_000;

    fn stats(ops: u64, bins: [u64; 4]) -> DiskStats {
        let histogram = Histogram { boundaries: vec![MS, 10 * MS, 100 * MS], bins: bins.to_vec() };
        let counters = |ops, histogram| Counters { ops, bytes: ops * 4096, time_ns: ops * MS, histogram };
        let empty = Histogram { boundaries: vec![MS, 10 * MS, 100 * MS], bins: vec![0; 4] };
        DiskStats {
            id: "d".to_owned(),
            file: Some("/d".to_owned()),
            format: None,
            read_only: false,
            read: counters(ops, Some(histogram)),
            write: counters(0, Some(empty)),
            flush: Counters::default(),
        }
    }

    fn vm(more: &str) -> Vm {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
             rate = \"100/s\"\ntarget = {{ percentile = \"p99\", latency = \"10ms\" }}\n{more}"
        );
        HostSpec::parse("x.toml", &text).unwrap().vms()[0].clone()
    }

    #[test]
    fn a_window_slides_and_begins_anew_with_its_counters() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let mut window = DiskWindow::default();
        window.add(at(0), stats(0, [0; 4]), StoodStill::default());
        assert!(window.observed().is_none());
        for i in 1..=40 {
            window.add(at(10 * i), stats(100 * i, [100 * i, 0, 0, 0]), StoodStill::default());
        }
        let (observed, time) = window.observed().unwrap();
        assert_eq!((time, observed[0].n), (WINDOW, 3_000));
        assert_eq!(window.histogram().unwrap().reads, [3_000, 0, 0, 0]);
        window.add(at(410), stats(5, [5, 0, 0, 0]), StoodStill::default());
        assert!(window.observed().is_none(), "QEMU was restarted");
    }

    #[test]
    fn verdicts_of_a_window() {
        let begin = Instant::now();
        let judged = |vm: &Vm, seconds: u64, bins: [u64; 4]| {
            let mut window = DiskWindow::default();
            window.add(begin, stats(0, [0; 4]), StoodStill::default());
            let end = begin + Duration::from_secs(seconds);
            window.add(end, stats(bins.iter().sum(), bins), StoodStill::default());
            judge_task(vm, &vm.tasks[0], &window).remove(0)
        };
        let one = judged(&vm(""), 10, [995, 5, 0, 0]);
        assert_eq!((one.verdict, one.n, one.exceedances), (Verdict::Met, 1_000, 0));
        // A request of exactly the limit is in the bin above it.
        assert_eq!(judged(&vm(""), 10, [900, 50, 50, 0]).verdict, Verdict::Missed);
        assert_eq!(judged(&vm(""), 1, [100, 0, 0, 0]).verdict, Verdict::Unproven);
        // What is declared is the most that a task asks for: a guest that rests misses nothing.
        for (seconds, bins) in [(100, [1_000, 0, 0, 0]), (36, [1_094, 0, 6, 0])] {
            let idle = judged(&vm(""), seconds, bins);
            assert_ne!(idle.verdict, Verdict::Missed, "{idle:?}");
            assert!(idle.why.contains("it sends") && idle.why.contains("declared are 100/s"), "{idle:?}");
        }
        let rests = judged(&vm(""), 100, [1_000, 0, 0, 0]);
        assert_eq!(rests.verdict, Verdict::Met);
        // Unless something else than the guest may have held it back.
        let doubted = |targets: &TargetObservation, held_back| {
            let mut all = [targets.clone()];
            doubt_where_held_back(&mut all, &vm("").tasks, held_back);
            all[0].verdict
        };
        assert_eq!(doubted(&rests, (Some(0.0), Some(0.1))), Verdict::Met);
        assert_eq!(doubted(&rests, (None, None)), Verdict::Met);
        assert_eq!(doubted(&rests, (Some(0.2), None)), Verdict::Unproven);
        assert_eq!(doubted(&rests, (None, Some(0.9))), Verdict::Unproven);
        assert_eq!(doubted(&one, (Some(0.2), Some(0.9))), Verdict::Met, "its rate is kept");
        // Too many late ones are a miss at any rate, and a rate is laid to no stall.
        let late = judged(&vm(""), 100, [900, 50, 50, 0]);
        assert!(late.verdict == Verdict::Missed && late.why.starts_with("50 of 1000 above"), "{late:?}");
        assert!(!judged(&vm(""), 10, [995, 5, 0, 0]).why.contains("it sends"));
        let other = vm("[[vm.task]]\nname = \"bulk\"\nop = \"read\"\nblock = \"64KiB\"\n");
        let shared = judged(&other, 10, [900, 50, 50, 0]);
        assert!(shared.verdict == Verdict::Unproven && shared.why.contains("bulk"), "{shared:?}");
        let writes = vm("[[vm.task]]\nname = \"log\"\nop = \"write\"\nblock = \"64KiB\"\n");
        assert_eq!(judged(&writes, 10, [1_000, 0, 0, 0]).verdict, Verdict::Met);
    }

    /// A task that waits for its answer sends less while it waits, and so hides what is late.
    #[test]
    fn a_request_that_waited_for_half_the_window_is_not_met() {
        let begin = Instant::now();
        let mut window = DiskWindow::default();
        window.add(begin, stats(0, [0; 4]), StoodStill::default());
        let mut last = stats(15_000, [14_999, 0, 0, 1]);
        last.read.time_ns = 14_999 * MS / 2 + 150_000 * MS;
        window.add(begin + WINDOW, last, StoodStill::default());
        let vm = vm("");
        let judged = judge_task(&vm, &vm.tasks[0], &window).remove(0);
        assert!(
            judged.verdict == Verdict::Unproven && judged.why.contains("more would have come"),
            "{judged:?}"
        );
    }

    #[test]
    fn late_requests_are_laid_to_the_stalls_of_their_interval() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let stood = |ms: u64| {
            Some(StallTotal { total: rtvirtio_units::Nanos::from_millis(ms), count: u64::from(ms > 0) })
        };
        let still = |host, disk| StoodStill { host, disk };
        let vm = vm("");
        let mut window = DiskWindow::default();
        window.add(at(0), stats(0, [0; 4]), StoodStill::default());
        // 100/s: a stall of 200 ms touches 20 and those in flight.
        window.add(at(10), stats(1_000, [970, 0, 30, 0]), still(stood(200), stood(0)));
        window.add(at(20), stats(2_000, [1_950, 0, 50, 0]), still(stood(0), stood(100)));
        let judged = judge_task(&vm, &vm.tasks[0], &window).remove(0);
        let late = judged.late.unwrap();
        assert_eq!(
            (judged.verdict, late.told, late.host, late.disk, late.other),
            (Verdict::Missed, 50, 21, Some(11), 18)
        );
        assert!(
            judged.why.contains("of the late ones about 42 % in stalls of the host, 22 % in stalls"),
            "{}",
            judged.why
        );
        assert_eq!(judged.late_unseen, None);
        // An interval that nothing watched is said, and laid to nothing.
        window.add(at(30), stats(3_000, [2_900, 0, 100, 0]), StoodStill::default());
        let judged = judge_task(&vm, &vm.tasks[0], &window).remove(0);
        assert_eq!(judged.late.unwrap().told, 50);
        assert!(judged.late_unseen.unwrap().contains("50 of 100"));
    }
}
