//! Divides a budget over several threads, for SCHED_DEADLINE, which knows only single threads.

use std::time::Duration;

/// Part of a VM's budget for one thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Thread id in `/proc`.
    pub tid: u32,
    /// Budget in each period, in nanoseconds.
    pub runtime: u64,
}

/// Least runtime of a thread, in nanoseconds: an idle I/O thread must be able to answer. The
/// kernel's own minimum is 1024 ns (`DL_SCALE`).
const LEAST: u64 = 50_000;
/// Divisor of the budget: one such part of it is divided evenly. A thread that serves a vCPU has
/// used next to nothing before its guest's first request, and an I/O thread or vhost with 50 us in
/// 20 ms then takes half a second for a few packets (seen under an emulated KVM: 470 ms round trip,
/// 5 ms at real-time priorities).
pub(crate) const EVEN: u64 = 8;
/// Part of the way that a new split moves from the old one towards the measured use. A VM's load
/// shifts between threads within seconds; moving all the way each time would starve a thread that
/// just woke up.
const GAIN: f64 = 0.25;

/// Splits `budget` (nanoseconds of each period on each of `cpus` CPUs) over threads by the CPU time
/// that each used in the last interval.
///
/// None gets more than `most`: a thread runs on one CPU at a time, and should leave some of it to
/// others. With `before`, the split moves a quarter of the way from there, so that it follows the
/// load slowly, and a thread that is not in it counts with at least an even part: it has hardly run
/// yet, and may hold locks that all others wait for. Every thread gets the same part of an eighth
/// of the budget whatever it used, and at least 50 us; the sum never exceeds the budget.
///
/// Returns `None` when the budget does not give every thread its least.
#[must_use]
pub fn split(
    budget: u64,
    cpus: u32,
    most: u64,
    used: &[(u32, Duration)],
    before: Option<&[Share]>,
) -> Option<Vec<Share>> {
    let total = budget.checked_mul(u64::from(cpus))?;
    let threads = u64::try_from(used.len()).ok()?;
    let least = LEAST.max(total / EVEN / threads.max(1));
    let spare = total.checked_sub(least.checked_mul(threads)?)?;
    let sum: f64 = used.iter().map(|u| u.1.as_secs_f64()).sum();
    let even = 1.0 / used.len().max(1) as f64;
    // Part of the spare budget that each thread has earned by its use.
    let due: Vec<f64> = used.iter().map(|u| if sum > 0.0 { u.1.as_secs_f64() / sum } else { even }).collect();
    let old = |tid: u32| {
        let share = before?.iter().find(|s| s.tid == tid)?;
        Some(share.runtime.saturating_sub(least) as f64 / spare.max(1) as f64)
    };
    let first = |due: f64| if before.is_some() { due.max(even) } else { due };
    let mut parts: Vec<f64> = due
        .iter()
        .zip(used)
        .map(|(due, (tid, _))| old(*tid).map_or_else(|| first(*due), |old| old + GAIN * (due - old)))
        .collect();
    let sum: f64 = parts.iter().sum();
    // Threads that came or went leave the sum off by their part.
    if sum > 1.0 {
        parts.iter_mut().for_each(|p| *p /= sum);
    }
    let runtime = |part: f64| (least + (part * spare as f64) as u64).min(most.max(LEAST));
    Some(used.iter().zip(parts).map(|((tid, _), part)| Share { tid: *tid, runtime: runtime(part) }).collect())
}
