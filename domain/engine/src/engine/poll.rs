//! Time of polling of a loop before it sleeps.
//!
//! A sleep costs the wake-up: some microseconds of latency, and CPU time for the notification. A
//! poll costs CPU time until work comes. As `halt_poll_ns` of KVM does, the time adapts: it grows
//! when work came soon after the loop went to sleep, and shrinks when it did not. The measured time
//! includes the wake-up, which may take longer than the work did: after a sleep of up to [`NEAR`] a
//! poll is tried, and while tries are in vain ever more sleeps lie between them. Polls that ended
//! without work take at most [`WASTED_SHARE`] of a CPU.
//!
//! A poll that pays for itself still takes the CPU from a guest that could run. Preemption by
//! another thread shows in the poll as a gap between two iterations. When such gaps add up to
//! [`TAKEN_SHARE`] of a [`WATCH`], the loop sleeps without polls for [`HOLD`], and longer each time
//! that the next watch ends like that.

use rtvirtio_domain_config::Poll;
use rtvirtio_units::Nanos;

/// Longest poll: about the cost of a sleep and a wake-up to a guest.
const LIMIT: Nanos = Nanos::from_micros(50);
/// First poll after a sleep that was too long.
const FIRST: Nanos = Nanos::from_micros(10);
/// Longest sleep, wake-up included, after which a poll is tried.
const NEAR: Nanos = Nanos::from_micros(200);
/// Largest number of sleeps without a poll between two tries.
const MOST_SKIPPED: u32 = 64;
/// Period in which wasted polls are counted.
const PERIOD: Nanos = Nanos::from_millis(20);
/// Share of a period for polls that end without work, in percent.
const WASTED_SHARE: u64 = 25;
/// Shortest gap between two iterations of a poll that counts as time of other threads.
const TAKEN: Nanos = Nanos::from_micros(100);
/// Period in which the time of other threads is counted.
const WATCH: Nanos = Nanos::from_millis(100);
/// Share of `WATCH` taken by other threads from which on the loop does not poll, in percent. A
/// thread of equal weight takes half; stalls of a host, and short-running programs, stay below.
const TAKEN_SHARE: u64 = 40;
/// First time without polls, and the longest one.
const HOLD: Nanos = Nanos::from_millis(200);
const LONGEST_HOLD: Nanos = Nanos::from_millis(3_200);

/// The state of one loop.
#[derive(Debug)]
pub struct AdaptivePoll {
    mode: Poll,
    /// Current time of polling before a sleep.
    window: Nanos,
    /// Since when there is no work.
    idle_since: Option<Nanos>,
    period: Nanos,
    wasted: u64,
    /// Sleeps until the next try, and how many there were before the last one.
    skip: u32,
    skipped: u32,
    shared: SharedCpu,
}

/// Whether other threads want the CPU on which a loop polls.
#[derive(Debug, Default)]
struct SharedCpu {
    /// Last iteration of a poll that goes on.
    looked: Option<Nanos>,
    watch: Nanos,
    /// Time of other threads since `watch`.
    taken: u64,
    /// End of the time without polls.
    until: Nanos,
    hold: Nanos,
}

impl SharedCpu {
    /// Counts one iteration of a loop; `polls` when the next one follows at once.
    fn count_iteration(&mut self, now: Nanos, polls: bool) {
        let gap = self.looked.map_or(0, |then| now.0.saturating_sub(then.0));
        if gap >= TAKEN.0 {
            self.taken += gap;
        }
        self.looked = polls.then_some(now);
        if self.is_wanted(now) {
            // No gap is measured without a poll.
            (self.watch, self.taken) = (now, 0);
        } else if now.0.saturating_sub(self.watch.0) >= WATCH.0 {
            if self.taken * 100 < WATCH.0 * TAKEN_SHARE {
                self.hold = Nanos(0);
            } else {
                self.hold = Nanos((self.hold.0 * 2).clamp(HOLD.0, LONGEST_HOLD.0));
                self.until = Nanos(now.0 + self.hold.0);
            }
            (self.watch, self.taken) = (now, 0);
        }
    }

    fn is_wanted(&self, now: Nanos) -> bool {
        now < self.until
    }
}

impl AdaptivePoll {
    pub fn new(mode: Poll) -> Self {
        let window = match mode {
            Poll::Fixed(window) => window,
            Poll::Adaptive => Nanos(0),
        };
        Self {
            mode,
            window,
            idle_since: None,
            period: Nanos(0),
            wasted: 0,
            skip: 0,
            skipped: 0,
            shared: SharedCpu::default(),
        }
    }

    /// Whether the loop sleeps now; it polls otherwise. `busy` when it has work.
    pub fn sleeps(&mut self, now: Nanos, busy: bool) -> bool {
        let sleeps = self.ends_poll(now, busy);
        if self.mode == Poll::Adaptive {
            self.shared.count_iteration(now, !busy && !sleeps);
        }
        sleeps
    }

    fn ends_poll(&mut self, now: Nanos, busy: bool) -> bool {
        if busy {
            if self.idle_since.take().is_some() {
                // A poll that paid.
                (self.skip, self.skipped) = (0, 0);
            }
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        let polled = now.0.saturating_sub(since.0);
        if polled < self.window.0 && !self.shared.is_wanted(now) {
            return false;
        }
        if now.0.saturating_sub(self.period.0) > PERIOD.0 {
            (self.period, self.wasted) = (now, 0);
        }
        if self.window.0 > 0 {
            self.skipped = (self.skipped * 2).clamp(1, MOST_SKIPPED);
            self.skip = self.skipped;
        }
        // The time beyond the window was another thread's: this one did not run.
        self.wasted += polled.min(self.window.0);
        true
    }

    /// The loop wakes up.
    pub fn woke(&mut self, now: Nanos) {
        let idle = self.idle_since.take().map_or(0, |since| now.0.saturating_sub(since.0));
        if self.mode != Poll::Adaptive {
            return;
        }
        let affordable = self.wasted * 100 < PERIOD.0 * WASTED_SHARE;
        self.window = if !affordable || self.shared.is_wanted(now) {
            Nanos(0)
        } else if idle <= LIMIT.0 {
            Nanos((self.window.0 * 2).clamp(FIRST.0, LIMIT.0))
        } else if idle <= NEAR.0 && self.skip == 0 {
            LIMIT
        } else {
            self.skip = self.skip.saturating_sub(1);
            Nanos(if self.window.0 > FIRST.0 { self.window.0 / 2 } else { 0 })
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs through gaps between work; returns how long the loop polled in vain and how often it
    /// slept. A sleep adds `wake` to the gap.
    fn run(poll: &mut AdaptivePoll, gaps: impl Iterator<Item = u64>, wake: u64) -> (u64, u32, u64) {
        let (mut now, mut wasted, mut sleeps) = (1_000_000_000u64, 0, 0);
        for gap in gaps {
            let begin = now;
            assert!(!poll.sleeps(Nanos(now), true));
            loop {
                if now - begin >= gap {
                    break;
                }
                if poll.sleeps(Nanos(now), false) {
                    wasted += now - begin;
                    sleeps += 1;
                    now = begin + gap + wake;
                    poll.woke(Nanos(now));
                    break;
                }
                now += 500;
            }
        }
        (wasted, sleeps, now - 1_000_000_000)
    }

    #[test]
    fn short_gaps_are_polled_through() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let (wasted, sleeps, _) = run(&mut poll, std::iter::repeat_n(8_000, 1_000), 5_000);
        assert!(sleeps <= 3 && wasted < 50_000, "{sleeps} sleeps, {wasted} ns");
    }

    /// The wake-up takes longer than the work takes to come.
    #[test]
    fn short_gaps_are_found_behind_slow_wake_ups() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let (wasted, sleeps, _) = run(&mut poll, std::iter::repeat_n(8_000, 1_000), 90_000);
        assert!(sleeps <= 3 && wasted < 50_000, "{sleeps} sleeps, {wasted} ns");
    }

    #[test]
    fn tries_in_vain_become_rare() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let (wasted, sleeps, total) = run(&mut poll, std::iter::repeat_n(120_000, 10_000), 5_000);
        assert!(sleeps == 10_000 && wasted * 50 < total, "{sleeps} sleeps, {wasted} of {total} ns");
        let (_, sleeps, _) = run(&mut poll, std::iter::repeat_n(8_000, 1_000), 90_000);
        assert!(sleeps <= MOST_SKIPPED + 3, "{sleeps} sleeps");
    }

    /// A thread that does not run while it polls wastes no CPU time.
    #[test]
    fn time_of_other_threads_is_not_wasted() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let (.., passed) = run(&mut poll, std::iter::repeat_n(8_000, 10), 90_000);
        let mut now = 1_000_000_000 + passed;
        assert!(!poll.sleeps(Nanos(now), true));
        for _ in 0..3 {
            assert!(!poll.sleeps(Nanos(now), false), "it polls");
            now += 4_000_000;
            assert!(poll.sleeps(Nanos(now), false));
            now += 10_000;
            poll.woke(Nanos(now));
            assert!(!poll.sleeps(Nanos(now), true));
        }
        assert!(!poll.sleeps(Nanos(now), false), "and polls on");
    }

    /// Polls for `length`; after each `ran` of it another thread has the CPU for `taken`. Returns
    /// for how long it polled.
    fn share(poll: &mut AdaptivePoll, begin: u64, length: u64, (ran, taken): (u64, u64)) -> u64 {
        let (mut now, mut polled, mut turn) = (begin, 0, begin);
        while now < begin + length {
            // Work comes 40 us after the last.
            assert!(!poll.sleeps(Nanos(now), true));
            let work = now + 40_000;
            while now < work {
                if poll.sleeps(Nanos(now), false) {
                    now = work + 5_000;
                    poll.woke(Nanos(now));
                    break;
                }
                now += 500;
                polled += 500;
                if now - turn > ran {
                    now += taken;
                    turn = now;
                }
            }
        }
        polled
    }

    #[test]
    fn a_cpu_that_guests_want_is_left_to_them() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let begin = 1_000_000_000;
        let alone = share(&mut poll, begin, 1_000_000_000, (u64::MAX, 0));
        assert!(alone > 800_000_000, "{alone} ns");
        // Slices of 3 ms each: most of the time it sleeps.
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let shared = share(&mut poll, begin, 10_000_000_000, (3_000_000, 3_000_000));
        assert!(shared < 1_000_000_000, "{shared} ns of 10 s");
        // Alone again it polls again, after the longest hold at most.
        let again = share(&mut poll, begin + 20_000_000_000, 4_000_000_000, (u64::MAX, 0));
        assert!(again > 500_000_000, "{again} ns of 4 s");
    }

    /// A host that stalls for 5 ms ten times a second is no other thread, and a thread that runs
    /// for a quarter of the time leaves the rest.
    #[test]
    fn stalls_of_a_host_end_no_polls() {
        for (taken, least) in [(5_000_000, 800_000_000), (25_000_000, 600_000_000)] {
            let mut poll = AdaptivePoll::new(Poll::Adaptive);
            let polled = share(&mut poll, 1_000_000_000, 1_000_000_000, (100_000_000 - taken, taken));
            assert!(polled > least, "{polled} ns");
        }
    }

    #[test]
    fn long_gaps_are_slept_through() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let (wasted, sleeps, total) = run(&mut poll, std::iter::repeat_n(250_000, 1_000), 5_000);
        assert!(sleeps == 1_000 && wasted * 1_000 < total, "{sleeps} sleeps, {wasted} of {total} ns");
    }

    /// Gaps that change between short and long waste no more than the limit.
    #[test]
    fn wasted_polls_are_bounded() {
        let mut poll = AdaptivePoll::new(Poll::Adaptive);
        let gaps = (0..20_000).map(|i| if i % 2 == 0 { 45_000 } else { 60_000 });
        let (wasted, _, total) = run(&mut poll, gaps, 1_000);
        assert!(wasted * 100 <= total * (WASTED_SHARE + 1), "{wasted} of {total} ns");
    }

    #[test]
    fn a_fixed_time_stays() {
        let mut poll = AdaptivePoll::new(Poll::Fixed(Nanos(20_000)));
        let (_, sleeps, _) = run(&mut poll, std::iter::repeat_n(19_000, 100), 0);
        assert_eq!(sleeps, 0);
        let (wasted, sleeps, _) = run(&mut poll, std::iter::repeat_n(1_000_000, 100), 0);
        assert_eq!((wasted, sleeps), (2_000_000, 100));
        let (wasted, ..) = run(&mut AdaptivePoll::new(Poll::Fixed(Nanos(0))), [1_000].into_iter(), 0);
        assert_eq!(wasted, 0);
    }
}
