//! Common end of the waits of one call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// Longest wait after the end: a peer that works answers sooner.
const LEAST: Duration = Duration::from_millis(500);

thread_local! {
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Common end of all waits of this thread for monitors, guest agents, libvirt, systemd, disks and
/// what the kernel refuses for a moment, until it is dropped: for a call that has a time limit of
/// its own, whatever asks them on its behalf, threads that it starts as
/// [`crate::detached::Detached`] included. A wait that begins after the end lasts half a second at
/// most.
#[derive(Debug)]
pub struct WaitLimit {
    before: Option<Instant>,
    /// Bound to the thread whose waits it limits.
    thread: PhantomData<*const ()>,
}

impl WaitLimit {
    /// Ends the waits of this thread this long from now, or at an end that it has already where
    /// that is sooner.
    #[must_use]
    pub fn lasting(time: Duration) -> Self {
        Self::until(Instant::now() + time)
    }

    /// Ends them at this time, as [`Self::lasting`].
    #[must_use]
    pub fn until(end: Instant) -> Self {
        let before = UNTIL.get();
        UNTIL.set(Some(before.map_or(end, |before| before.min(end))));
        Self { before, thread: PhantomData }
    }

    /// Common end of this thread's waits; `None` without one.
    pub(crate) fn end() -> Option<Instant> {
        UNTIL.get()
    }

    /// Time until this thread's waits end, at most `most`; `most` where they have no common end.
    #[must_use]
    pub fn left(most: Duration) -> Duration {
        UNTIL.get().map_or(most, |until| until.saturating_duration_since(Instant::now()).min(most))
    }

    /// Length of a wait that begins now and would last `most`.
    #[must_use]
    pub fn wait(most: Duration) -> Duration {
        Self::left(most).max(LEAST.min(most))
    }
}

impl Drop for WaitLimit {
    fn drop(&mut self) {
        UNTIL.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_sooner_end_counts_and_ends_with_its_owner() {
        let soon = Duration::from_millis(10);
        assert_eq!((WaitLimit::left(HOUR), WaitLimit::wait(HOUR)), (HOUR, HOUR));
        let outer = WaitLimit::lasting(HOUR);
        let inner = WaitLimit::lasting(Duration::ZERO);
        assert_eq!((WaitLimit::left(HOUR), WaitLimit::wait(HOUR)), (Duration::ZERO, LEAST));
        assert_eq!(WaitLimit::wait(soon), soon);
        let later = WaitLimit::lasting(HOUR);
        assert_eq!(WaitLimit::left(HOUR), Duration::ZERO);
        // Waits of other threads are not limited.
        assert_eq!(std::thread::spawn(|| WaitLimit::left(HOUR)).join().unwrap(), HOUR);
        drop((later, inner));
        assert!(WaitLimit::left(2 * HOUR) > HOUR / 2);
        drop(outer);
        assert_eq!(WaitLimit::left(HOUR), HOUR);
    }
}
