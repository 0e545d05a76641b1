//! Counts and selections that tables and plots share.

use std::collections::{HashMap, HashSet};

use rtvirtio_measure::noise::MOST_STALLED;
use rtvirtio_measure::{ResultFile, Run, TaskResult, Verdict};
use rtvirtio_units::Nanos;

/// Number of targets of a run by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Targets shown to hold at 95 %.
    pub met: usize,
    /// Targets shown not to hold, or whose rate was not kept.
    pub missed: usize,
    /// Targets that nothing contradicts, with too few samples for a claim.
    pub unproven: usize,
}

impl Tally {
    /// All tasks that have a target.
    #[must_use]
    pub fn targets(self) -> usize {
        self.met + self.missed + self.unproven
    }

    /// Adds another run's counts.
    #[must_use]
    pub fn plus(self, o: Self) -> Self {
        Self { met: self.met + o.met, missed: self.missed + o.missed, unproven: self.unproven + o.unproven }
    }

    /// Sentence such as `4 of 6 targets missed, 2 met`; zero counts are omitted except that of
    /// missed targets.
    #[must_use]
    pub fn sentence(self) -> String {
        match self.targets() {
            0 => "no targets declared".to_owned(),
            n => format!("{} of {n} target{} missed{}", self.missed, if n == 1 { "" } else { "s" }, {
                let mut reasons = String::new();
                if self.met > 0 {
                    reasons.push_str(&format!(", {} met", self.met));
                }
                if self.unproven > 0 {
                    reasons.push_str(&format!(", {} unproven", self.unproven));
                }
                reasons
            }),
        }
    }
}

/// Counts the verdicts of a run.
#[must_use]
pub fn tally(run: &Run) -> Tally {
    let count = |v| run.tasks.iter().filter(|t| t.verdict == Some(v)).count();
    Tally { met: count(Verdict::Met), missed: count(Verdict::Missed), unproven: count(Verdict::Unproven) }
}

/// CPU use of a load generator, in processors, from which on it affects the latencies that it
/// measures: requests of one task wait while another has the processor. At one half, a random
/// arrival waits as long as it runs (M/M/1).
const BUSY: f64 = 0.5;

/// Stalls of the host, and standstills of the disk, of at least this share of the tightest target
/// are reported.
const STALLED: f64 = 0.25;

/// Share of stolen CPU time from which on it is reported. On an emulated eMMC four of four runs of
/// 8 s in guests had tails above their bounds from 12 % on, none of three below 2.5 %
/// (docs/results/accuracy.md, In guests).
const STOLEN: f64 = 0.025;

/// Sentences about latency that settings cannot change: caused by the load generator, the host, or
/// the disk.
pub(crate) fn doubts(run: &Run) -> Vec<String> {
    let of_others = [host_stalls(run), stolen_time(run), disk_standstills(run)];
    busy_generators(run).into_iter().chain(of_others.into_iter().flatten()).collect()
}

/// Sentence when this machine is a guest and its hypervisor withheld CPU time from its work.
fn stolen_time(run: &Run) -> Option<String> {
    let share = run.noise?.stolen.filter(|&share| share >= STOLEN)?;
    Some(format!(
        "this machine is a guest itself, and its hypervisor gave {:.0} % of its CPU time to others (steal in /proc/stat): what runs on it was stalled meanwhile, emulated \
         guests most of all; measure again in a quieter hour",
        100.0 * share
    ))
}

/// Whether a pause is at least `STALLED` of the tightest target.
fn matters(run: &Run, pause: Nanos) -> bool {
    let tightest = run.tasks.iter().filter_map(|t| t.target_ns).min();
    tightest.is_some_and(|target| pause.0 as f64 >= STALLED * target.0 as f64)
}

/// Sentence when the host itself stalled for a large part of what a target allows, or for so much
/// of the time that tails without the stalls are not given.
fn host_stalls(run: &Run) -> Option<String> {
    let noise = run.noise.filter(|n| n.realtime)?;
    let much = noise.stood_still.filter(|share| *share > MOST_STALLED);
    (matters(run, noise.max_ns) || much.is_some()).then(|| {
        let much = much.map_or_else(String::new, |share| {
            format!(
                "; a CPU was stalled for {:.0} % of the time, too much for tails without that to be given",
                100.0 * share
            )
        });
        format!(
            "the host itself stalled for up to {}, {} times for more than 1ms (seen by probes under SCHED_FIFO): latencies hold that, \
             and no I/O setting changes it{much}",
            noise.max_ns, noise.stalls
        )
    })
}

/// Sentence when the disk itself completed nothing for a good part of what a target allows.
fn disk_standstills(run: &Run) -> Option<String> {
    let disk = run.disk?;
    matters(run, disk.longest_ns).then(|| {
        format!(
            "the disk itself completed nothing for up to {} with requests in it ({} for more than 5ms, {} in all; seen in inflight and stat of sysfs): no \
             order of requests changes that; a lighter load, of writes above all, or another disk may",
            disk.longest_ns,
            times(disk.count),
            disk.total_ns
        )
    })
}

/// Count in words: `once`, `2 times`.
fn times(n: u64) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

/// Sentence for every VM whose paced tasks used a large part of a processor. Tasks without a rate
/// may: they run as fast as they can.
fn busy_generators(run: &Run) -> Vec<String> {
    let mut vms: Vec<(&str, f64)> = Vec::new();
    let mut seen = HashSet::new();
    // A task with several targets has one entry for each.
    let tasks = run.tasks.iter().filter(|t| seen.insert((&t.vm, &t.task)));
    for t in tasks.filter(|t| t.declared_rate.is_some()) {
        match vms.iter_mut().find(|(vm, _)| *vm == t.vm) {
            Some((_, cpus)) => *cpus += t.fio_cpus,
            None => vms.push((&t.vm, t.fio_cpus)),
        }
    }
    vms.iter()
        .filter(|(_, cpus)| *cpus >= BUSY)
        .map(|(vm, cpus)| {
            format!(
                "{vm}: fio kept {cpus:.2} of a processor busy, so a part of these latencies is its own \
                 (docs/explanation/measuring.md: fio's waits)"
            )
        })
        .collect()
}

/// Schemes of a result in order of first appearance. The index selects the scheme's colour and
/// mark.
pub(crate) fn schemes(result: &ResultFile) -> Vec<&str> {
    let mut seen: Vec<&str> = Vec::new();
    for run in &result.runs {
        if !seen.contains(&run.scheme.as_str()) {
            seen.push(&run.scheme);
        }
    }
    seen
}

/// Identity of a row of a table or plot: a task, and one of its targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key<'a> {
    pub(crate) vm: &'a str,
    pub(crate) task: &'a str,
    /// Position of the target among those of the task.
    pub(crate) target: usize,
}

impl Key<'_> {
    /// Name of the task as `vm/task`.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.vm, self.task)
    }
}

pub(crate) fn keyed(run: &Run) -> impl Iterator<Item = (Key<'_>, &TaskResult)> {
    let mut before = HashMap::new();
    run.tasks.iter().map(move |t| {
        let (vm, task) = (t.vm.as_str(), t.task.as_str());
        let target: &mut usize = before.entry((vm, task)).or_default();
        *target += 1;
        (Key { vm, task, target: *target - 1 }, t)
    })
}

/// Keys of all runs in order of first appearance.
pub(crate) fn target_keys(runs: &[Run]) -> Vec<Key<'_>> {
    let mut seen = HashSet::new();
    runs.iter().flat_map(keyed).map(|(key, _)| key).filter(|key| seen.insert(*key)).collect()
}

/// Keys of the first targets of all tasks, in order of first appearance.
pub(crate) fn task_keys(runs: &[Run]) -> Vec<Key<'_>> {
    target_keys(runs).into_iter().filter(|key| key.target == 0).collect()
}

/// Result of this key in a run; `None` if the run lacks it.
pub(crate) fn find<'a>(run: &'a Run, key: Key<'_>) -> Option<&'a TaskResult> {
    run.tasks.iter().filter(|t| t.vm == key.vm && t.task == key.task).nth(key.target)
}

/// Measured value that is compared with target and prediction, and its name. Results of older
/// versions lack some percentiles: p99.99 replaces them, and the flag is then false.
pub(crate) fn judged(t: &TaskResult) -> (Nanos, String, bool) {
    let p = t.percentile.0;
    let is = |q: f64| (p - q).abs() < 1e-9;
    if is(50.0) {
        (t.p50_ns, "p50".to_owned(), true)
    } else if is(99.0) {
        (t.p99_ns, "p99".to_owned(), true)
    } else if is(100.0) {
        (t.max_ns, "max".to_owned(), true)
    } else if let (Some(at), false) = (t.at_target_ns, is(99.99)) {
        (at, t.percentile.to_string(), true)
    } else {
        (t.p9999_ns, "p99.99".to_owned(), is(99.99))
    }
}

/// Whether the stored p99.99 is in fact the maximum.
pub(crate) fn tail_is_max(t: &TaskResult) -> bool {
    t.n < 10_000
}

/// At most `limit` keys, in the given order: those whose worst run is nearest to the target or
/// farthest above it. Tasks without a target rank last.
pub(crate) fn most_critical<'a>(runs: &[Run], keys: &[Key<'a>], limit: usize) -> Vec<Key<'a>> {
    if keys.len() <= limit {
        return keys.to_vec();
    }
    let mut by_key: HashMap<Key<'_>, f64> = HashMap::new();
    for (key, t) in runs.iter().flat_map(keyed) {
        let ratio = match t.target_ns {
            Some(l) => judged(t).0.0 as f64 / l.0.max(1) as f64,
            None => -1.0,
        };
        // A missed rate is as critical as a missed tail, at any latency.
        let ratio = if t.verdict == Some(Verdict::Missed) { ratio.max(1.0) } else { ratio };
        let worst = by_key.entry(key).or_insert(ratio);
        *worst = worst.max(ratio);
    }
    let score = |i: usize| by_key.get(&keys[i]).copied().unwrap_or(-1.0);
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    order.truncate(limit);
    order.sort_unstable();
    order.into_iter().map(|i| keys[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtvirtio_measure::noise::Noise;
    use rtvirtio_measure::standstill::Standstills;
    use rtvirtio_units::Percentile;

    use crate::fixture;

    #[test]
    fn counts_in_words() {
        assert_eq!(Tally { met: 2, missed: 4, unproven: 0 }.sentence(), "4 of 6 targets missed, 2 met");
        assert_eq!(Tally { met: 0, missed: 0, unproven: 1 }.sentence(), "0 of 1 target missed, 1 unproven");
        assert_eq!(Tally::default().sentence(), "no targets declared");
        let r = fixture::result();
        assert_eq!(tally(&r.runs[0]).targets(), 6);
        assert_eq!(tally(&r.runs[1]).missed, 0);
    }

    #[test]
    fn the_most_critical_tasks_keep_their_order() {
        let r = fixture::many();
        let keys = task_keys(&r.runs);
        assert_eq!(keys.len(), 192);
        let top = most_critical(&r.runs, &keys, 10);
        assert_eq!(top.len(), 10);
        let position = |k| keys.iter().position(|x| x == k);
        assert!(top.windows(2).all(|w| position(&w[0]) < position(&w[1])));
        // The worst task must be selected.
        let worst =
            r.runs[0].tasks.iter().max_by_key(|t| t.p9999_ns.0 * 1000 / t.target_ns.map_or(1, |l| l.0));
        let worst = worst.map(|t| (t.vm.as_str(), t.task.as_str()));
        assert!(top.iter().any(|k| Some((k.vm, k.task)) == worst));
    }

    /// The fixture's first run with a second target, p99.9, of its first task.
    fn with_two_targets() -> Run {
        let mut run = fixture::result().runs[0].clone();
        let mut second = run.tasks[0].clone();
        second.percentile = Percentile(99.9);
        second.target_ns = Some(Nanos::from_millis(900));
        second.at_target_ns = Some(Nanos::from_millis(7));
        run.tasks.insert(1, second);
        run
    }

    #[test]
    fn targets_of_one_task_stand_apart() {
        let run = with_two_targets();
        let runs = [run.clone(), fixture::result().runs[1].clone()];
        let (all, tasks) = (target_keys(&runs), task_keys(&runs));
        assert_eq!((all.len(), tasks.len()), (run.tasks.len(), run.tasks.len() - 1));
        for (key, task) in keyed(&run) {
            assert_eq!(find(&run, key), Some(task));
        }
        assert_eq!(all[0].name(), all[1].name());
        // The other run has one target of it only.
        assert!(find(&runs[1], all[0]).is_some() && find(&runs[1], all[1]).is_none());
        assert_eq!(judged(&run.tasks[1]), (Nanos::from_millis(7), "p99.9".to_owned(), true));
        assert_eq!(tally(&run).targets(), 7);
    }

    #[test]
    fn the_load_of_a_task_with_two_targets_counts_once() {
        let mut run = with_two_targets();
        let (vm, task) = (run.tasks[0].vm.clone(), run.tasks[0].task.clone());
        for t in &mut run.tasks {
            t.fio_cpus = if (&t.vm, &t.task) == (&vm, &task) { 0.6 } else { 0.0 };
        }
        let notes = busy_generators(&run);
        assert!(notes.len() == 1 && notes[0].starts_with(&format!("{vm}: fio kept 0.60")), "{notes:?}");
    }

    #[test]
    fn a_busy_load_generator_is_named() {
        let mut run = fixture::result().runs[0].clone();
        assert!(busy_generators(&run).is_empty());
        let vm = run.tasks[0].vm.clone();
        run.tasks.iter_mut().filter(|t| t.vm == vm).for_each(|t| t.fio_cpus = 0.3);
        let notes = busy_generators(&run);
        assert!(notes.len() == 1 && notes[0].starts_with(&format!("{vm}: fio kept 0.60")), "{notes:?}");
        // Stalls of the host are reported when they matter to a target, and when it was really the
        // host.
        let noise =
            |ms, realtime| Noise { max_ns: Nanos::from_millis(ms), stalls: 7, realtime, ..Noise::default() };
        for (ms, realtime, reported) in [(74, true, false), (75, true, true), (500, false, false)] {
            run.noise = Some(noise(ms, realtime));
            assert_eq!(doubts(&run).len(), 1 + usize::from(reported), "{ms}");
        }
        // Many short stalls matter by their sum.
        for (share, reported) in [(0.05, false), (0.08, true)] {
            run.noise = Some(Noise { stood_still: Some(share), ..noise(1, true) });
            let notes = doubts(&run);
            assert_eq!(reported, notes.iter().any(|n| n.contains("8 % of the time")), "{notes:?}");
        }
        for (stolen, reported) in [(0.024, false), (0.1, true)] {
            run.noise = Some(Noise { stolen: Some(stolen), ..Noise::default() });
            let notes = doubts(&run);
            assert_eq!(notes.len(), 1 + usize::from(reported), "{notes:?}");
            assert_eq!(reported, notes.iter().any(|n| n.contains("10 % of its CPU time")), "{notes:?}");
        }
        run.noise = None;
        for (ms, reported) in [(74, false), (75, true)] {
            let longest_ns = Nanos::from_millis(ms);
            run.disk = Some(Standstills { longest_ns, count: 1, total_ns: longest_ns, n: 5_000, held: 0 });
            let notes = doubts(&run);
            assert_eq!(
                reported,
                notes.iter().any(|n| n.contains("up to 75ms") && n.contains("(once ")),
                "{notes:?}"
            );
        }
        run.disk = None;
        // A flood uses all the CPU it can get: that is not reported.
        run.tasks.iter_mut().for_each(|t| t.declared_rate = None);
        assert!(busy_generators(&run).is_empty());
    }
}
