//! Calls that may hang, in the kernel or in another program, each in a detached thread: the caller
//! waits for the result as long as it likes, and joins no thread.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::WaitLimit;

/// Detached thread and the results that it sends. Dropping this drops later results, and the thread
/// ends by itself.
#[derive(Debug)]
pub struct Detached<T> {
    results: Receiver<T>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Detached<T> {
    /// Starts a thread. Its waits end with those of the calling thread ([`WaitLimit`]). Sending
    /// fails once nothing waits for a result.
    pub fn start(name: &str, run: impl FnOnce(&Sender<T>) + Send + 'static) -> io::Result<Self> {
        let ((sender, results), end) = (channel(), WaitLimit::end());
        let run = move || {
            let _limit = end.map(WaitLimit::until);
            run(&sender);
        };
        let thread = Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self { results, thread })
    }

    /// Starts a thread that makes one call.
    pub fn call(name: &str, call: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        Self::start(name, move |results| {
            // Fails where the caller waits no longer.
            let _ = results.send(call());
        })
    }

    /// Next result, once; `None` without one after `limit`. An error where none will come: the
    /// thread has ended, or panicked.
    pub fn wait(&self, limit: Duration) -> Option<io::Result<T>> {
        match self.results.recv_timeout(limit) {
            Ok(result) => Some(Ok(result)),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(io::Error::other("its thread has ended without a result")))
            }
        }
    }
}

/// Threads of calls that did not return in time, at most one for each subject.
#[derive(Debug)]
pub struct Hung<K>(Mutex<BTreeMap<K, JoinHandle<()>>>);

impl<K: Ord> Hung<K> {
    /// No thread.
    #[must_use]
    pub const fn none() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Whether no thread hangs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.threads().is_empty()
    }

    /// Result of a call about a subject, waited for at most `limit`; a later one is dropped. While
    /// the thread of an earlier call about it hangs, none is made.
    ///
    /// # Errors
    /// Kind `TimedOut` without a result in time. When no thread can be started, or it panicked.
    pub fn call<T: Send + 'static>(
        &self,
        name: &str,
        subject: K,
        limit: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        if self.threads().contains_key(&subject) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let detached = Detached::call(name, call)?;
        detached.wait(limit).unwrap_or_else(|| {
            self.threads().insert(subject, detached.thread);
            Err(io::ErrorKind::TimedOut.into())
        })
    }

    /// Threads that hang still.
    fn threads(&self) -> MutexGuard<'_, BTreeMap<K, JoinHandle<()>>> {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|_, thread| !thread.is_finished());
        threads
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::HANG;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    /// Call that hangs until the sender is dropped.
    fn hangs() -> (Sender<()>, impl FnOnce() -> u32 + Send + 'static) {
        let (release, held) = channel();
        (release, move || held.recv().map_or(1, |()| 0))
    }

    #[test]
    fn a_call_that_hangs_is_not_waited_for_and_its_result_comes_late() {
        let (release, call) = hangs();
        let detached = Detached::call("test", call).unwrap();
        for limit in [Duration::ZERO, SOON] {
            assert!(detached.wait(limit).is_none());
        }
        drop(release);
        assert_eq!(detached.wait(HANG).unwrap().unwrap(), 1);
        assert!(detached.wait(HANG).unwrap().is_err(), "once");
    }

    #[test]
    fn a_call_that_panics_has_no_result_and_does_not_count_as_hung() {
        let panics = || -> u32 { panic!("as a call might") };
        let detached = Detached::call("test", panics).unwrap();
        assert!(detached.wait(HANG).unwrap().is_err());
        let hung = Hung::none();
        assert_eq!(hung.call("test", 7, HANG, panics).unwrap_err().kind(), io::ErrorKind::Other);
        assert!(hung.is_empty());
        assert_eq!(hung.call("test", 7, HANG, || 2).unwrap(), 2);
    }

    #[test]
    fn a_subject_whose_call_hangs_is_asked_again_once_its_thread_is_back() {
        let hung = Hung::none();
        let (release, call) = hangs();
        let late = |result: io::Result<u32>| result.unwrap_err().kind() == io::ErrorKind::TimedOut;
        assert!(late(hung.call("test", 7, SOON, call)));
        assert!(late(hung.call("test", 7, HANG, || panic!("a second thread"))));
        assert_eq!(hung.call("test", 8, HANG, || 2).unwrap(), 2);
        assert_eq!(hung.threads().len(), 1);
        drop(release);
        rtvirtio_testkit::site::wait_for("its thread", || hung.is_empty());
        assert_eq!(hung.call("test", 7, HANG, || 2).unwrap(), 2, "the late result is dropped");
    }

    #[test]
    fn the_waits_of_the_thread_end_with_those_of_its_caller() {
        let left = || Detached::call("test", || WaitLimit::left(HANG)).unwrap().wait(HANG).unwrap().unwrap();
        assert_eq!(left(), HANG);
        let _limit = WaitLimit::lasting(Duration::ZERO);
        assert_eq!(left(), Duration::ZERO);
    }

    #[test]
    fn a_thread_ends_at_the_next_result_that_nothing_waits_for() {
        let (go, more) = channel();
        let detached = Detached::start("test", move |results| {
            let _ = more.iter().try_for_each(|n: u32| results.send(n));
        });
        let detached = detached.unwrap();
        go.send(1).unwrap();
        assert_eq!(detached.wait(HANG).unwrap().unwrap(), 1);
        drop(detached);
        rtvirtio_testkit::site::wait_for("its end", || go.send(2).is_err());
    }
}
