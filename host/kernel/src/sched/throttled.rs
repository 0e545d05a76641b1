//! Threads that SCHED_DEADLINE holds back, and how they leave it.
//!
//! A thread that has used up its runtime is marked (`dl_throttled`) until a timer refills it at its
//! deadline. Where it leaves the class meanwhile, the timer finds it ordinary and leaves the mark.
//! The mark goes when the kernel forgets the reservation, at the 0-lag time (`task_non_contending()`
//! in `kernel/sched/deadline.c`): the deadline, and for each ns that it ran too long a period over
//! runtime more. Under a new reservation before that it never runs again, and cannot be killed:
//! seen on Linux 6.18.

use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use super::{Attr, Reservation, set_raw};
use crate::{Root, task};

/// Longest tick of the kernel: how long a thread runs beyond its runtime where it is not known.
const TICK: u64 = 10_000_000;
/// Longest wait for a 0-lag time.
const LONGEST: Duration = Duration::from_secs(2);
/// Time for timers to run.
const SLACK: Duration = Duration::from_millis(5);

/// Runtime that is left, negative beyond it, and deadline, ns (`/proc/PID/sched`, for DEADLINE
/// threads only); `None` where the kernel does not tell (no `CONFIG_SCHED_DEBUG`).
fn left(tid: u32) -> Option<(i64, i64)> {
    let text = fs::read_to_string(format!("/proc/{tid}/sched")).ok()?;
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches([' ', ':']).trim().parse().ok()
    };
    Some((of("dl.runtime")?, of("dl.deadline")?))
}

/// Whether a thread wants to run. One that is throttled does.
fn is_ready(tid: u32) -> bool {
    task::stat(&Root::default(), tid, tid).is_ok_and(|stat| stat.state == 'R')
}

/// Time after which the kernel has forgotten the reservation of a thread that leaves it now; `None`
/// where it is not throttled.
fn lag(tid: u32, held: Reservation) -> Option<Duration> {
    if !is_ready(tid) {
        return None;
    }
    let beyond = match left(tid) {
        Some((runtime, _)) if runtime > 0 => return None,
        Some((runtime, _)) => runtime.unsigned_abs(),
        None => TICK,
    };
    let periods = 1.0 + beyond as f64 / held.runtime.max(1) as f64;
    Some((Duration::from_nanos(held.period).mul_f64(periods) + SLACK).min(LONGEST))
}

/// Takes a thread that is throttled out of its reservation, with that reservation, so that the
/// kernel forgets it soon, and waits for that if `waits`. False where it is not throttled: then
/// nothing is done.
pub(super) fn leave(tid: u32, held: Reservation, attr: &Attr, waits: bool) -> io::Result<bool> {
    let Some(lag) = lag(tid, held) else { return Ok(false) };
    set_raw(tid, attr)?;
    if waits {
        thread::sleep(lag);
    }
    Ok(true)
}

/// Whether a thread under this reservation is throttled for good.
fn is_stuck(tid: u32, held: Reservation) -> bool {
    let throttled = || left(tid).filter(|(runtime, _)| *runtime <= 0 && is_ready(tid));
    let Some(first) = throttled() else { return false };
    thread::sleep((2 * Duration::from_nanos(held.period) + SLACK).min(LONGEST));
    throttled() == Some(first)
}

/// Gives a thread with other attributes (`before`) a reservation, under which it runs even where
/// another program has taken it out of one while it was throttled.
pub(super) fn enter(tid: u32, held: Reservation, attr: &Attr, before: &Attr) -> io::Result<()> {
    set_raw(tid, attr)?;
    if !is_stuck(tid, held) {
        return Ok(());
    }
    leave(tid, held, &Attr { slice: 0, ..*before }, true)?;
    set_raw(tid, attr)
}
