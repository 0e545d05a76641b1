//! Threads under SCHED_DEADLINE that never run again: another program, or a killed one, has taken
//! them out of a reservation while they were throttled, and they slept when they got the next one.

use std::collections::BTreeMap;
use std::time::Instant;

use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::Throttled;
use rtvirtio_vmm::Thread;

use crate::pieces::{Key, key};

/// Threads that have used up their runtime.
#[derive(Default)]
pub(super) struct ThrottledThreads(BTreeMap<Key, ThrottledThread>);

struct ThrottledThread {
    state: Throttled,
    since: Instant,
    is_told: bool,
}

impl ThrottledThreads {
    /// Looks at the threads, and returns a line on one whose state has been the same for so long
    /// that it is probably never refilled; once for each. The kernel refills any other with a later
    /// deadline. Nothing is changed: a healthy one may look so under steal.
    pub(super) fn poll(&mut self, root: &Root, threads: &[Thread], now: Instant) -> Option<String> {
        let mut before = std::mem::take(&mut self.0);
        let mut stuck = None;
        for thread in threads {
            let Some(held) = thread.reservation else { continue };
            let Some(state) = Throttled::from_proc(root, thread.pid, thread.tid) else { continue };
            let known = before.remove(&key(thread)).filter(|seen| seen.state == state);
            let mut seen = known.unwrap_or(ThrottledThread { state, since: now, is_told: false });
            let for_time = now.saturating_duration_since(seen.since);
            if stuck.is_none() && !seen.is_told && state.is_for_good(held, for_time) {
                seen.is_told = true;
                stuck = Some(format!(
                    "thread {} ({}) wants to run, and the kernel has given it no runtime for {:.1} s: it may be throttled for good since \
                     an earlier reservation; where the VM stands still, put its contract back and apply it again",
                    thread.tid,
                    thread.role,
                    for_time.as_secs_f64()
                ));
            }
            self.0.insert(key(thread), seen);
        }
        stuck
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rtvirtio_kernel::sched::Reservation;
    use rtvirtio_vmm::VmHandle;
    use rtvirtio_vmm::threads::discover;

    use super::*;

    #[test]
    fn only_a_thread_that_is_never_refilled_is_stuck() {
        let (_dir, root) = crate::fixtures::root();
        let put = |file: &str, text: &str| crate::fixtures::put(&root, format!("/proc/7/{file}"), text);
        let sched = |runtime: i64, deadline: u64, ran: u64| {
            put("task/7/sched", &format!("dl.runtime  :  {runtime}\ndl.deadline :  {deadline}\n"));
            put("task/7/schedstat", &format!("{ran} 0 1\n"));
        };
        let stat = |state: char| put("task/7/stat", &format!("7 (qemu) {state} 1 {}\n", "0 ".repeat(60)));
        put("comm", "qemu\n");
        put("status", "Tgid:\t7\n");
        put("task/7/status", "Cpus_allowed_list:\t0-1\n");
        put("task/7/cgroup", "0::/\n");
        stat('R');
        let mut threads = discover(&root, &VmHandle::of_pid(7)).unwrap();
        let held = Reservation { runtime: 1_000_000, deadline: 20_000_000, period: 20_000_000 };
        threads[0].reservation = Some(held);
        let (mut looked, begin) = (ThrottledThreads::default(), Instant::now());
        let mut stuck = |ms: u64, threads: &[Thread]| {
            looked.poll(&root, threads, begin + Duration::from_millis(ms)).is_some()
        };
        sched(-200_000, 500, 70);
        // A refill may have to make up for a tick of 10 ms.
        assert_eq!([0, 100, 240, 300, 400].map(|ms| stuck(ms, &threads)), [false, false, false, true, false]);
        sched(1, 500, 70);
        assert!(!stuck(500, &threads));
        // Refilled, run meanwhile, asleep, and with runtime left.
        let (r, s) = ('R', 'S');
        for now in [(-200_000, 501, 70, r), (-200_000, 500, 71, r), (-200_000, 500, 70, s), (1, 500, 70, r)] {
            sched(-200_000, 500, 70);
            stat('R');
            assert_eq!([0, 1_000].map(|ms| stuck(ms, &threads)), [false, true]);
            sched(now.0, now.1, now.2);
            stat(now.3);
            assert!(!stuck(2_000, &threads), "{now:?}");
        }
        sched(-200_000, 500, 70);
        stat('R');
        assert_eq!([3_000, 4_000].map(|ms| stuck(ms, &threads)), [false, true]);
        threads[0].reservation = None;
        assert!(!stuck(5_000, &threads));
    }
}
