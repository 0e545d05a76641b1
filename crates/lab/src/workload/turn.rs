//! Starting several fio processes one after another, so that none spoils another's sleep calibration.
//!
//! fio waits for a request's time with `nanosleep`, and spins for the last part of the wait. How long that part is it
//! measures once at its start: the *longest* of ten sleeps of a microsecond (`fio_time_init` in fio's time.c). When
//! several guests start fio at once on a busy host, that can be more than the time between two requests; fio then
//! never sleeps, keeps its processor busy all the run, and the latencies are of its own making. See `docs/measure.md`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time given to each process to start and calibrate: an emulated guest on two busy cores took 0.3 to 0.6 s.
const SLOT: Duration = Duration::from_secs(1);
/// All slots together take at most this long.
const ALL_SLOTS: Duration = Duration::from_secs(15);
/// How often a waiting thread looks whether it should give up.
const TICK: Duration = Duration::from_millis(50);
/// A process that has not calibrated by then no longer holds up the others.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// The turns of `n` processes, of which all should begin their work at the same time.
pub(super) struct Turns {
    start: Instant,
    slot: Duration,
    n: usize,
    next: Mutex<usize>,
    moved: Condvar,
}

/// One process's turn; the next one's begins when it is dropped.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Turns for `n` processes, beginning now.
    pub(super) fn new(n: usize) -> Self {
        let slot = SLOT.min(ALL_SLOTS / u32::try_from(n).unwrap_or(u32::MAX).max(1));
        Self { start: Instant::now(), slot, n, next: Mutex::new(0), moved: Condvar::new() }
    }

    /// How long process `i` waits between its start and its work, so that all begin together.
    pub(super) fn delay(&self, i: usize) -> Duration {
        let after = self.n.saturating_sub(i + 1);
        self.slot * u32::try_from(after).unwrap_or(u32::MAX)
    }

    /// Waits until it is process `i`'s turn. Every `i` must come here once, in any order. After `stop` turns come at once.
    pub(super) fn wait(&self, i: usize, stop: &AtomicBool) -> Turn<'_> {
        let due = self.slot * u32::try_from(i).unwrap_or(u32::MAX);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        while *next != i || (self.start.elapsed() < due && !stop.load(Ordering::Relaxed)) {
            next = self.moved.wait_timeout(next, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.next.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.moved.notify_all();
    }
}

/// Whether a process with this `/proc/PID/status` has calibrated: fio starts its helper thread right after that.
/// A process that is gone has nothing to wait for.
pub(super) fn calibrated(status: Option<&str>) -> bool {
    let Some(status) = status else { return true };
    let threads = status.lines().find_map(|l| l.strip_prefix("Threads:"));
    threads.and_then(|n| n.trim().parse::<u32>().ok()).is_none_or(|n| n >= 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_order_and_all_begin_together() {
        let turns = Turns::new(3);
        let order = Mutex::new(Vec::new());
        let stop = AtomicBool::new(true);
        std::thread::scope(|scope| {
            for i in [2, 0, 1] {
                let (turns, order, stop) = (&turns, &order, &stop);
                scope.spawn(move || {
                    let _turn = turns.wait(i, stop);
                    order.lock().unwrap().push(i);
                });
            }
        });
        assert_eq!(order.into_inner().unwrap(), [0, 1, 2]);
        for i in 0..3u32 {
            assert_eq!(turns.slot * i + turns.delay(i as usize), turns.slot * 2);
        }
        assert_eq!(Turns::new(1).delay(0), Duration::ZERO);
        assert!(Turns::new(1000).delay(0) < ALL_SLOTS);
    }

    #[test]
    fn a_slot_is_waited_for_unless_the_run_is_stopped() {
        let turns = Turns { start: Instant::now(), slot: Duration::from_millis(60), ..Turns::new(2) };
        drop(turns.wait(0, &AtomicBool::new(false)));
        drop(turns.wait(1, &AtomicBool::new(false)));
        assert!(turns.start.elapsed() >= turns.slot);
    }

    #[test]
    fn fio_has_calibrated_once_it_has_a_second_thread() {
        assert!(!calibrated(Some("Name:\tfio\nThreads:\t1\n")));
        assert!(calibrated(Some("Name:\tfio\nThreads:\t2\n")));
        assert!(calibrated(None));
    }
}
