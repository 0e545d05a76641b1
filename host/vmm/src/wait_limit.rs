//! Common end of the waits of one call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// Longest wait after the end: a peer that works answers sooner.
const LEAST: Duration = Duration::from_millis(500);

thread_local! {
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Common end of all waits of this thread for monitors, guest agents and libvirt, until it is
/// dropped: for a call that has a time limit of its own, whatever asks them on its behalf. A wait
/// that begins after the end lasts half a second at most.
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
        let (before, end) = (UNTIL.get(), Instant::now() + time);
        UNTIL.set(Some(before.map_or(end, |before| before.min(end))));
        Self { before, thread: PhantomData }
    }

    /// Time until this thread's waits end, at most `most`; `most` where they have no common end.
    #[must_use]
    pub fn left(most: Duration) -> Duration {
        UNTIL.get().map_or(most, |until| until.saturating_duration_since(Instant::now()).min(most))
    }

    /// Length of a wait that begins now and would last `most`.
    pub(crate) fn wait(most: Duration) -> Duration {
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
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::{GuestAgent, Qmp};

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

    #[test]
    fn silent_monitors_and_agents_are_waited_for_until_the_end() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("socket");
        // Connections are taken, and nothing is answered.
        let _listener = UnixListener::bind(&path).unwrap();
        let _limit = WaitLimit::lasting(Duration::ZERO);
        let monitor = Qmp::connect(&path, HOUR).err().unwrap().to_string();
        let agent = GuestAgent::connect(&path, HOUR).err().unwrap().to_string();
        for e in [monitor, agent] {
            assert!(e.contains("no answer within 500 ms"), "{e}");
        }
    }
}
