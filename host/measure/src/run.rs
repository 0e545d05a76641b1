//! Results of one VM: from its job and fio's output to judged numbers.
//!
//! # What counts
//!
//! A request counts when its intended start lies in the measured part (after the warm-up). The rate
//! is counted at the end of the measured part: requests completed by then, over those that were due
//! some time before (at least a period or the median service time). When the end falls into a wait
//! that the target allows, it is counted just before that wait (at most the target's latency and a
//! tenth of the run earlier): otherwise one late request at the last moment would fail a task of
//! low rate. All requests completed within the measured part were served at some rate too, also
//! requests of the warm-up that a limit had delayed: the rate is at least that. Requests that fio
//! never made although they were due, and that had already waited for longer than the target, count
//! as exceedances, and in the percentiles with the time waited so far (not in `n`, which counts
//! completed ones). Without a target those count that had waited for longer than any that
//! completed.

use std::time::Duration;

use rtvirtio_spec::{Arrival, Target, Task};
use rtvirtio_stats::Latencies;
use rtvirtio_stats::pot::can_carry;
use rtvirtio_units::{Iops, Nanos, Percentile};

use crate::fio::{
    Direction, FioOutput, FioRate, JobFile, JobStats, LogClock, Section, parse_json, parse_log,
};
use crate::intended::{Timed, from_intended_start, job_start_ms};
use crate::stalls::Stalls;
use crate::tail::estimate;
use crate::verdict::{Evidence, judge};
use crate::{MeasureError, TaskResult};

/// Shift of the stalls for the placebo, which shows the effect of the subtraction by itself: longer
/// than a stall and the queue behind it.
pub const PLACEBO_NS: u64 = 1_000_000_000;

/// Results of all tasks of a VM, in the job's order: one for each target of a task, and one for a
/// task without. `predicted` has the prediction of a plan, in the same order; a missing entry means
/// none.
///
/// # Errors
/// Any defect of fio's output ([`MeasureError::Json`], [`MeasureError::Log`],
/// [`MeasureError::LogIncomplete`]), or an error that fio reported ([`MeasureError::Task`]).
pub fn task_results(
    job: &JobFile,
    output: &FioOutput,
    predicted: &[Option<Nanos>],
) -> Result<Vec<TaskResult>, MeasureError> {
    Ok(task_measurements(job, output, predicted)?.into_iter().map(|m| m.result).collect())
}

/// Result of a task against one of its targets, with all latencies.
#[derive(Clone, Debug)]
pub struct TaskMeasurement {
    /// Result, judged against the target.
    pub result: TaskResult,
    /// Histogram of all latencies.
    pub latencies: Latencies,
    /// Intended start in ns since the job's start, and latency in ns, of each completed request in
    /// the order of the starts. Empty for a task without a rate, of which only the histogram is
    /// known.
    pub series: Vec<(u64, u64)>,
    /// Intended start and completion in ns of the machine's CLOCK_MONOTONIC, known to 1 ms: of each
    /// completed request, and of requests never made the wait so far. Empty where the job's logs do
    /// not use that clock, and for a task without a rate.
    pub spans: Vec<(u64, u64)>,
}

impl TaskMeasurement {
    /// Latencies less the time in which a CPU of the host stalled; `None` where the times of some
    /// requests are unknown: those may be the worst, as in a stream that completed none.
    #[must_use]
    pub fn latencies_less(&self, stalls: &Stalls) -> Option<Latencies> {
        let less = |(from, to): &(u64, u64)| Nanos(to - from - stalls.within(*from, *to));
        let all = !self.spans.is_empty() && self.spans.len() as u64 == self.latencies.n();
        all.then(|| self.spans.iter().map(less).collect())
    }

    /// Sets the result's tail less the time in which a CPU of the host stalled, and the placebo:
    /// the part that the method itself subtracts.
    pub fn subtract_host_stalls(&mut self, stalls: &Stalls) {
        let tail = |stalls: &Stalls| {
            Some(self.latencies_less(stalls)?.at(Percentile::P9999).min(self.result.p9999_ns))
        };
        let (awake, placebo) = (tail(stalls), tail(&stalls.shifted(PLACEBO_NS)));
        self.result.p9999_excl_host_stalls_ns = awake;
        self.result.p9999_placebo_ns = placebo;
    }

    /// Result, with an estimate of the tail where the percentile itself is not known.
    #[must_use]
    pub fn with_tail(mut self) -> TaskResult {
        let percentile = self.result.percentile;
        // Requests that were never made are in the histogram only; an estimate without them would
        // be too low.
        let all_made = self.latencies.n() == self.series.len() as u64;
        if all_made && !can_carry(self.series.len(), percentile.0 / 100.0) {
            let latencies: Vec<u64> = self.series.iter().map(|(_, latency)| *latency).collect();
            // Without an estimate the result's `p9999_ns` is the largest sample, as documented
            // there.
            self.result.tail = estimate(&latencies, percentile).ok();
        }
        self.result
    }
}

/// Results as of [`task_results`], with the latencies themselves.
pub fn task_measurements(
    job: &JobFile,
    output: &FioOutput,
    predicted: &[Option<Nanos>],
) -> Result<Vec<TaskMeasurement>, MeasureError> {
    let stats = parse_json(&output.json)?;
    if stats.len() != job.sections().len() {
        return Err(MeasureError::Json {
            reason: format!("{} sections instead of {}", stats.len(), job.sections().len()),
        });
    }
    for (section, stats) in job.sections().iter().zip(&stats) {
        check_section(job, section, stats)?;
    }
    let mut results = Vec::with_capacity(job.tasks().len());
    for (i, task) in job.tasks().iter().enumerate() {
        let mut streams = Vec::new();
        let mut unpaced = None;
        for (k, section) in job.sections().iter().enumerate().filter(|(_, s)| s.task == i) {
            match &section.pace {
                Some(pace) => {
                    let log = output.logs.get(k).and_then(Option::as_deref);
                    streams.push(stream(task, pace, &stats[k], log, job.options().clock)?);
                }
                None => unpaced = Some(&stats[k]),
            }
        }
        let of_task = job.sections().iter().zip(&stats).filter(|(section, _)| section.task == i);
        let fio_cpus = of_task.map(|(_, stats)| (stats.usr_cpu + stats.sys_cpu) / 100.0).sum();
        for target in task.goals() {
            let measured = match unpaced {
                Some(stats) => self::unpaced(task, target, stats, job.options().runtime)?,
                None => paced(task, target, &streams, job.options().warmup, job.duration()),
            };
            let predicted = predicted.get(results.len()).copied().flatten();
            let result = measured.judged(job.vm(), task, target, predicted, fio_cpus);
            let Measured { latencies, series, spans, .. } = measured;
            results.push(TaskMeasurement { result, latencies, series, spans });
        }
    }
    Ok(results)
}

/// Measurement of one task, before it is judged.
struct Measured {
    /// Number of completed requests.
    n: u64,
    /// Latencies, and the waits of the overdue requests so far.
    latencies: Latencies,
    max: Nanos,
    fio_p9999: Nanos,
    achieved: Iops,
    /// Number of requests above the target, overdue ones included; zero without a target.
    exceedances: u64,
    /// Same content as [`TaskMeasurement::series`].
    series: Vec<(u64, u64)>,
    /// Same content as [`TaskMeasurement::spans`].
    spans: Vec<(u64, u64)>,
}

impl Measured {
    fn judged(
        &self,
        vm: &str,
        task: &Task,
        target: Option<Target>,
        predicted: Option<Nanos>,
        fio_cpus: f64,
    ) -> TaskResult {
        let at = |p: f64| self.latencies.at(Percentile(p)).min(self.max);
        let judgement = target.map(|target| {
            judge(
                target,
                &Evidence {
                    n: self.latencies.n(),
                    exceedances: self.exceedances,
                    declared: task.rate,
                    achieved: self.achieved,
                },
            )
        });
        let (verdict, why) = match judgement {
            Some(j) => (Some(j.verdict), j.why),
            None => (None, "no target".to_owned()),
        };
        TaskResult {
            vm: vm.to_owned(),
            task: task.name.clone(),
            percentile: target.map_or(Percentile::P9999, |t| t.percentile),
            target_ns: target.map(|t| t.latency),
            at_target_ns: target.map(|t| at(t.percentile.0)),
            declared_rate: task.rate,
            achieved_rate: self.achieved,
            n: self.n,
            p50_ns: at(50.0),
            p99_ns: at(99.0),
            p9999_ns: at(99.99),
            p9999_excl_host_stalls_ns: None,
            p9999_placebo_ns: None,
            max_ns: self.max,
            fio_p9999_ns: self.fio_p9999,
            fio_cpus,
            tail: None,
            predicted_ns: predicted,
            causes: None,
            causes_unread: Vec::new(),
            exceedances: self.exceedances,
            flow: None,
            verdict,
            why,
        }
    }
}

fn check_section(job: &JobFile, section: &Section, stats: &JobStats) -> Result<(), MeasureError> {
    let task = || job.tasks()[section.task].name.clone();
    if stats.jobname != section.name {
        return Err(MeasureError::Json {
            reason: format!("section {:?} where {:?} was expected", stats.jobname, section.name),
        });
    }
    if stats.error != 0 {
        let reason = std::io::Error::from_raw_os_error(stats.error).to_string();
        return Err(MeasureError::Task { task: task(), reason });
    }
    // A run that was cut short must not count as a whole one. fio's own rounding and start-up are
    // well below 10 %.
    let asked = section.pace.map_or(job.options().runtime, |_| job.duration());
    if (stats.job_runtime as f64) < asked.as_secs_f64() * 1e3 * 0.9 {
        return Err(MeasureError::Task {
            task: task(),
            reason: format!("it ran for {} ms instead of {} ms", stats.job_runtime, asked.as_millis()),
        });
    }
    Ok(())
}

/// The requests of one paced section.
struct Stream {
    pace: FioRate,
    timed: Vec<Timed>,
    /// Start of the job in ns of CLOCK_MONOTONIC, where the log has it.
    start_ns: Option<u64>,
}

/// Requests of one section from its log, checked against fio's own count.
fn stream(
    task: &Task,
    pace: &FioRate,
    stats: &JobStats,
    log: Option<&[u8]>,
    clock: LogClock,
) -> Result<Stream, MeasureError> {
    let log = log.ok_or_else(|| MeasureError::Log {
        task: task.name.clone(),
        line: 0,
        reason: "the log is missing".to_owned(),
    })?;
    // Each stream of an open loop has one request in flight.
    let depth = if task.arrival == Arrival::Open { 1 } else { task.depth };
    let mut samples = parse_log(&task.name, log, clock)?;
    let mut start_ms = None;
    if clock == LogClock::Monotonic {
        start_ms = job_start_ms(&samples, pace, depth);
        for s in &mut samples {
            s.time_ms = s.time_ms.saturating_sub(start_ms.unwrap_or(0));
        }
    }
    let timed = from_intended_start(&samples, pace, depth);
    let (logged, completed) = (timed.len() as u64, stats.total_ios());
    if logged.abs_diff(completed) > u64::from(depth) {
        return Err(MeasureError::LogIncomplete { task: task.name.clone(), logged, completed });
    }
    // fio's own start is rounded down to 1 ms too: assuming the middle, the error is at most half
    // of that.
    let start_ns = start_ms.map(|ms| ms * 1_000_000 + 500_000);
    Ok(Stream { pace: *pace, timed, start_ns })
}

fn paced(
    task: &Task,
    target: Option<Target>,
    streams: &[Stream],
    warmup: Duration,
    end: Duration,
) -> Measured {
    let (warmup, end) = (nanos(warmup), nanos(end));
    // Requests that fio drained from its schedule beyond the end are not part of the run.
    let counted: Vec<&Timed> =
        streams.iter().flat_map(|s| &s.timed).filter(|t| (warmup..end).contains(&t.intended_ns)).collect();
    let mut latencies: Latencies = counted.iter().map(|t| Nanos(t.latency_ns)).collect();
    let mut max = counted.iter().map(|t| t.latency_ns).max().unwrap_or(0);
    let fio: Latencies = counted.iter().map(|t| Nanos(t.fio_ns)).collect();
    let fio_max = Nanos(counted.iter().map(|t| t.fio_ns).max().unwrap_or(0));
    let mut exceedances = 0;
    if let Some(target) = target {
        exceedances = counted.iter().filter(|t| t.latency_ns > target.latency.0).count() as u64;
    }
    // Without a target, a wait so far is relevant only when it is longer than all known latencies.
    // A starved task has no others.
    let limit = target.map_or(max, |t| t.latency.0);
    let mut spans = Vec::new();
    for stream in streams {
        if let Some(start) = stream.start_ns {
            let of_run = stream.timed.iter().filter(|t| (warmup..end).contains(&t.intended_ns));
            // Latencies of a log add up without a bound: a guest may report a month for each.
            let from = |t: &Timed| start.saturating_add(t.intended_ns);
            spans.extend(of_run.map(|t| (from(t), from(t).saturating_add(t.latency_ns))));
        }
        never_made(stream, warmup, end, limit, &mut |waited| {
            spans.extend(stream.start_ns.map(|start| (start + end - waited, start + end)));
            latencies.record(Nanos(waited), 1);
            max = max.max(waited);
            exceedances += u64::from(target.is_some());
        });
    }
    let mut series: Vec<(u64, u64)> = counted.iter().map(|t| (t.intended_ns, t.latency_ns)).collect();
    series.sort_unstable();
    Measured {
        series,
        spans,
        n: counted.len() as u64,
        max: Nanos(max),
        fio_p9999: fio.at(Percentile::P9999).min(fio_max),
        achieved: kept_rate((task, target), streams, &counted, fio.at(Percentile(50.0)), warmup, end),
        exceedances,
        latencies,
    }
}

/// Calls `each` with the time waited so far, in ns, for every request that was never made although
/// its intended start was more than `limit` before the end.
fn never_made(stream: &Stream, warmup: u64, end: u64, limit: u64, each: &mut dyn FnMut(u64)) {
    for write in [false, true] {
        let of = stream.timed.iter().filter(|t| t.write == write);
        let mut before: u128 = of.map(|t| u128::from(t.bytes)).sum();
        let due = end.saturating_sub(limit);
        while let Some(intended) = stream.pace.intended_after(write, before).filter(|t| *t < due) {
            if intended >= warmup {
                each(end - intended);
            }
            before += u128::from(stream.pace.mean_bytes());
        }
    }
}

/// Rate that was kept: declared rate times completed over due, see the module's text. `usual` is
/// the usual service time of a request: requests that were due within it are not owed yet.
fn kept_rate(
    (task, target): (&Task, Option<Target>),
    streams: &[Stream],
    counted: &[&Timed],
    usual: Nanos,
    warmup: u64,
    end: u64,
) -> Iops {
    let Some(declared) = task.rate else { return Iops(0.0) };
    let grace = target.map_or(0, |t| t.latency.0.min((end - warmup) / 10));
    // At least one period, so that a request that is just due is not owed at once.
    let recent = usual.max(declared.period().unwrap_or_default()).0;
    // In bytes: with a single request size the same as in requests.
    let mut done: Vec<(u64, u64)> =
        counted.iter().map(|t| (t.done_ns, t.bytes)).filter(|(t, _)| *t <= end).collect();
    done.sort_unstable();
    let mut completed = 0u64;
    for (_, bytes) in &mut done {
        completed = completed.saturating_add(*bytes);
        *bytes = completed;
    }
    let owed = |t: u64| -> u64 {
        let by = t.saturating_sub(recent).saturating_add(1);
        let of = |pace: &FioRate, write| {
            let n = pace.due_before(write, by).saturating_sub(pace.due_before(write, warmup));
            n.saturating_mul(pace.mean_bytes()).saturating_sub(pace.slack_bytes())
        };
        streams.iter().map(|s| of(&s.pace, false) + of(&s.pace, true)).sum()
    };
    let kept = |completed: u64, t: u64| match owed(t) {
        0 => 1.0,
        owed => completed as f64 / owed as f64,
    };
    let mut best = kept(completed, end);
    for (t, completed) in done.iter().rev().take_while(|(t, _)| end - *t <= grace) {
        best = best.max(kept(*completed, *t));
        if best >= 1.0 {
            break;
        }
    }
    // A stream that is limited below its rate first serves the backlog of the warm-up; these
    // requests count for no latency, and yet were served.
    let served = streams.iter().flat_map(|s| &s.timed).filter(|t| (warmup..end).contains(&t.done_ns)).count();
    let served = served as f64 / (end - warmup).max(1) as f64 * 1e9;
    Iops((declared.0 * best.min(1.0)).max(served.min(declared.0)))
}

fn unpaced(
    task: &Task,
    target: Option<Target>,
    stats: &JobStats,
    runtime: Duration,
) -> Result<Measured, MeasureError> {
    let mut latencies = Latencies::new();
    let mut exceedances = 0u64;
    for direction in [&stats.read, &stats.write] {
        let (n, above) = add_bins(&mut latencies, direction, target.map(|t| t.latency))?;
        // Requests in flight when the ramp or the run ends may be in one count and not in the
        // other.
        if n.abs_diff(direction.total_ios) > u64::from(task.depth) {
            return Err(MeasureError::Json {
                reason: format!(
                    "histogram of task {} holds {n} of {} requests",
                    task.name, direction.total_ios
                ),
            });
        }
        exceedances = exceedances.saturating_add(above);
    }
    let max = stats.read.max().max(stats.write.max());
    // fio counts requests in flight at the end: its own duration includes them.
    let seconds = stats.read.runtime.max(stats.write.runtime).max(1) as f64 / 1e3;
    Ok(Measured {
        series: Vec::new(),
        spans: Vec::new(),
        n: latencies.n(),
        max,
        fio_p9999: latencies.at(Percentile::P9999).min(max),
        achieved: Iops(stats.total_ios() as f64 / seconds.max(runtime.as_secs_f64())),
        exceedances,
        latencies,
    })
}

/// Adds fio's bins of one direction; returns the number of requests, and of those that may be above
/// `limit`.
pub(crate) fn add_bins(
    into: &mut Latencies,
    direction: &Direction,
    limit: Option<Nanos>,
) -> Result<(u64, u64), MeasureError> {
    let (mut n, mut above) = (0u64, 0u64);
    for (value, count) in direction.bins()? {
        // A whole bin is judged by its upper edge: never in the target's favour.
        let top = Nanos(bin_top(value.0)).min(direction.max());
        into.record(value.min(direction.max()), count);
        n = n.saturating_add(count);
        if limit.is_some_and(|limit| top > limit) {
            above = above.saturating_add(count);
        }
    }
    Ok((n, above))
}

/// Upper edge of the bin of fio's histogram with this middle: 64 bins per power of two
/// (`plat_idx_to_val` in fio's stat.c).
fn bin_top(middle: u64) -> u64 {
    let error_bits = (63 - (middle | 1).leading_zeros()).saturating_sub(6);
    middle.saturating_add((1u64 << error_bits) / 2)
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
