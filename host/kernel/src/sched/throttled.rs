//! Threads that SCHED_DEADLINE holds back, and how they leave it.
//!
//! A thread that has used up its runtime is marked (`dl_throttled`) until a timer refills it at its
//! deadline, also where it sleeps by then. Where it leaves the class meanwhile, the timer finds it
//! ordinary and leaves the mark. The mark goes when the kernel forgets the reservation, at the
//! 0-lag time (`task_non_contending()` in `kernel/sched/deadline.c`): the deadline, and for each ns
//! that it ran too long a period over runtime more. Under a new reservation before that it never
//! runs again, and cannot be killed: seen on Linux 6.18.
//!
//! A thread that leaves in [`leave`] has no mark, or the next [`enter`] of this program waits until
//! it is gone. One that another program has left marked is mended by `enter` where it wants to run.
//! One that sleeps at that moment shows by its [`Throttled`] state when it has woken up.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Attr, Reservation, set_raw};
use crate::{Root, task};

/// Longest tick of the kernel: how long a thread runs beyond its runtime where it is not known, ns.
const TICK: i64 = 10_000_000;
/// Runtime, ns, with which a thread is not throttled within a few system calls.
const ENOUGH: i64 = 1_000_000;
/// Longest wait for a 0-lag time.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time for timers to run.
const SLACK: Duration = Duration::from_millis(5);

/// Threads that have left, each with the time at which the kernel has forgotten its reservation.
static LEAVING: Mutex<BTreeMap<u32, Instant>> = Mutex::new(BTreeMap::new());

/// Waits until the kernel has forgotten the reservations that threads have left in this program,
/// 10 s at most: a program that ends before would let the next one begin too early. Threads that
/// leave meanwhile are waited for too.
pub fn settle() {
    let end = Instant::now() + MAX_WAIT;
    loop {
        let all = LEAVING.lock().unwrap_or_else(PoisonError::into_inner).values().max().copied();
        let Some(at) = all.map(|at| at.min(end)).filter(|at| *at > Instant::now()) else { return };
        wait_until(Some(at));
    }
}

fn wait_until(at: Option<Instant>) {
    let left = at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
    thread::sleep(left.min(MAX_WAIT));
}

/// Runtime that is left, negative beyond it, and deadline, ns, as last counted (`/proc/PID/sched`,
/// for DEADLINE threads only); `None` where the kernel does not tell (no `CONFIG_SCHED_DEBUG`).
fn left_of(root: &Root, pid: u32, tid: u32) -> Option<(i64, i64)> {
    let text = root.read(format!("/proc/{pid}/task/{tid}/sched")).ok()?;
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches([' ', ':']).trim().parse().ok()
    };
    Some((of("dl.runtime")?, of("dl.deadline")?))
}

fn left(tid: u32) -> Option<(i64, i64)> {
    left_of(&Root::default(), tid, tid)
}

/// Whether a thread wants to run.
fn is_ready(tid: u32) -> bool {
    task::stat(&Root::default(), tid, tid).is_ok_and(|stat| stat.state == 'R')
}

/// Longest time from the leave of a thread that has so much runtime left until the kernel has
/// forgotten its reservation.
fn lag(held: Reservation, left: i64) -> Duration {
    until_refill(held, left).min(MAX_WAIT)
}

/// Longest time until a thread that has so much runtime left is refilled. Its deadline lies as far
/// ahead as an earlier refill had to make up for (`replenish_dl_entity()`).
fn until_refill(held: Reservation, left: i64) -> Duration {
    let beyond = TICK + ENOUGH + (-left).max(0);
    let periods = 1.0 + beyond as f64 / held.runtime.max(1) as f64;
    Duration::from_nanos(held.period).mul_f64(periods) + SLACK
}

/// State of a thread that wants to run and has used up its runtime, as the kernel has counted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttled {
    /// Runtime that is left, 0 or less, and deadline, ns.
    left: (i64, i64),
    used: Duration,
}

impl Throttled {
    /// Reads it; `None` for any other thread, and where the kernel does not tell.
    #[must_use]
    pub fn from_proc(root: &Root, pid: u32, tid: u32) -> Option<Self> {
        let left = left_of(root, pid, tid).filter(|left| left.0 <= 0)?;
        let is_ready = task::stat(root, pid, tid).ok()?.state == 'R';
        let used = task::cpu_time(root, pid, tid).ok()?;
        is_ready.then_some(Self { left, used })
    }

    /// Whether a thread that has been in this state for so long is probably never refilled: an
    /// earlier refill under another reservation may have put the next one further away.
    #[must_use]
    pub fn is_for_good(&self, held: Reservation, since: Duration) -> bool {
        since >= Duration::from_nanos(held.period) + until_refill(held, self.left.0)
    }
}

/// Takes a thread out of its reservation, whose bandwidth it gives back.
pub(super) fn leave(tid: u32, held: Reservation, attr: &Attr, before: &Attr) -> io::Result<()> {
    // A sleeper that is throttled is refilled at its deadline; one that has never run has zeros.
    if !is_ready(tid) && left(tid).is_some_and(|of| of.0 <= 0 && of != (0, 0)) {
        thread::sleep((Duration::from_nanos(held.period) + SLACK).min(MAX_WAIT));
    }
    let (first, begin) = (left(tid).filter(|of| *of != (0, 0)), Instant::now());
    // The kernel counts what has been used with each change. Refused where
    // `sched_deadline_period_max_us` is lower than usual: then a sleeper's bandwidth is lost, and
    // the policy is still right.
    if let Some(released) = before.released() {
        let _ = set_raw(tid, &released);
    }
    let rest = left(tid);
    let is_marked = rest.map_or(-TICK, |of| of.0) < ENOUGH && is_ready(tid);
    if is_marked {
        return leave_marked(tid, held, attr, before, first);
    }
    change(tid, attr, before)?;
    // Held up meanwhile, this program does not know whether the thread has used up the rest. A
    // sleeper's bandwidth would be lost.
    match rest {
        Some((runtime, _)) if begin.elapsed() >= nanos(runtime) && is_ready(tid) => {
            leave_marked(tid, held, attr, before, first)
        }
        _ => Ok(()),
    }
}

fn nanos(of: i64) -> Duration {
    Duration::from_nanos(of.max(0).unsigned_abs())
}

/// Takes a thread that may be throttled out of its own reservation: with the released one the
/// kernel would forget it in hours. `first` is what was left before any change.
fn leave_marked(
    tid: u32,
    held: Reservation,
    attr: &Attr,
    before: &Attr,
    first: Option<(i64, i64)>,
) -> io::Result<()> {
    let _ = set_raw(tid, before);
    let rest = left(tid);
    change(tid, attr, before)?;
    // A change of a thread whose deadline has passed gives it a new one, 2 s away under the
    // released reservation.
    let pushed = first.zip(rest).map_or(0, |(first, now)| now.1.saturating_sub(first.1));
    let lag = lag(held, rest.map_or(-TICK, |of| of.0)) + nanos(pushed);
    let now = Instant::now();
    let mut leaving = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
    leaving.retain(|_, at| *at > now);
    leaving.insert(tid, now + lag.min(MAX_WAIT));
    Ok(())
}

/// Gives a thread of a reservation other attributes.
fn change(tid: u32, attr: &Attr, before: &Attr) -> io::Result<()> {
    set_raw(tid, attr).inspect_err(|_| {
        // The thread held it a moment ago, so there is bandwidth for it; and the first error is the
        // one to report.
        let _ = set_raw(tid, before);
    })
}

/// Whether a thread under this reservation is throttled for good, as far as 10 s show it.
fn is_stuck(tid: u32, held: Reservation) -> bool {
    let state = || Throttled::from_proc(&Root::default(), tid, tid);
    let Some(first) = state() else { return false };
    let begin = Instant::now();
    while !first.is_for_good(held, begin.elapsed()) && begin.elapsed() < MAX_WAIT {
        thread::sleep((Duration::from_nanos(held.period) + SLACK).min(MAX_WAIT));
        if state() != Some(first) {
            return false;
        }
    }
    true
}

/// Gives a thread with other attributes (`before`) a reservation. One that wants to run then runs
/// under it, also where another program has taken it out of a reservation while it was throttled.
pub(super) fn enter(tid: u32, held: Reservation, attr: &Attr, before: &Attr) -> io::Result<()> {
    let of = start(tid);
    let known = LEAVING.lock().unwrap_or_else(PoisonError::into_inner).get(&tid).copied();
    wait_until(known);
    if known.is_some() && start(tid) != of {
        return Err(Errno::SRCH.into());
    }
    set_raw(tid, attr)?;
    match of {
        Some(of) if is_stuck(tid, held) => enter_again(tid, held, attr, before, of),
        _ => Ok(()),
    }
}

fn start(tid: u32) -> Option<u64> {
    task::stat(&Root::default(), tid, tid).ok().map(|stat| stat.start)
}

/// Takes a thread that is throttled for good out of its reservation, and gives it the same one when
/// the kernel has forgotten it.
fn enter_again(tid: u32, held: Reservation, attr: &Attr, before: &Attr, of: u64) -> io::Result<()> {
    let (before, rest) = (Attr { slice: 0, ..*before }, left(tid).map_or(-TICK, |of| of.0));
    set_raw(tid, &before)?;
    thread::sleep(lag(held, rest));
    if start(tid) != Some(of) {
        return Err(Errno::SRCH.into());
    }
    set_raw(tid, attr)?;
    if is_stuck(tid, held) {
        set_raw(tid, &before)?;
        return Err(io::Error::other("the kernel keeps it throttled since an earlier reservation"));
    }
    Ok(())
}
