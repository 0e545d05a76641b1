//! Lookups of steps in threads of their own: a monitor or a libvirt that does not answer delays
//! only the step that needs it, and no lock is held meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::detached::Detached;
use rtvirtio_workflow::scopes::Scopes;
use rtvirtio_workflow::{Dirs, Error, Kind};

use super::lookup::Waker;

/// Age up to which a result is used: another rtvirtio may hold the lock when it comes.
const FRESH: Duration = Duration::from_secs(10);

/// Results for steps, each found once at a time, for a state `K` of what the step is about. What
/// was found for another state is not used, and an error then is not reported.
pub(super) struct Prepared<K, T> {
    dirs: Dirs,
    waker: Waker,
    fresh: Duration,
    /// By the name that the step is for.
    jobs: BTreeMap<String, Job<K, T>>,
}

/// Settings for VMs that were started again, by the processes of that start.
pub(super) type Renewals<T> = Prepared<Vec<ProcessId>, Result<T, Error>>;

struct Job<K, T> {
    of: K,
    thread: Detached<(Instant, T)>,
    /// With the time at which it was found.
    result: Option<(Instant, T)>,
}

impl<K: PartialEq, T: Send + 'static> Prepared<K, T> {
    pub fn new(dirs: Dirs, waker: Waker) -> Self {
        Self { dirs, waker, fresh: FRESH, jobs: BTreeMap::new() }
    }

    /// Whether the result for a name is there. Without one, what `begin` returns is run in a
    /// thread, unless one is under way; the waker is called at its end.
    ///
    /// # Errors
    /// While another rtvirtio holds the lock of the state directory, where a result would be old
    /// before it could be written; when no thread can be started, or the last one has ended without
    /// a result.
    pub fn is_ready<F>(&mut self, name: &str, of: K, begin: impl FnOnce() -> F) -> Result<bool, Error>
    where
        F: FnOnce() -> T + Send + 'static,
    {
        let (now, fresh) = (Instant::now(), self.fresh);
        // Results for which no step has come since are dropped.
        self.jobs.retain(|other, job| other == name || job.is_under_way() || job.is_fresh(now, fresh));
        if let Some(job) = self.jobs.get_mut(name) {
            if job.is_under_way() {
                return Ok(false);
            }
            if job.of == of && job.is_fresh(now, fresh) {
                return Ok(true);
            }
            let is_lost = job.result.is_none();
            self.jobs.remove(name);
            if is_lost {
                return Err(Error::new(Kind::System, "its lookup has ended without a result"));
            }
        }
        drop(Scopes::lock(&self.dirs)?);
        let (run, waker) = (begin(), Arc::clone(&self.waker));
        let thread = Detached::start("step", move |results| {
            let result = run();
            // The service, and with it the receiver, may be gone.
            let _ = results.send((Instant::now(), result));
            waker();
        })?;
        self.jobs.insert(name.to_owned(), Job { of, thread, result: None });
        Ok(false)
    }

    /// Takes the result for a name; the next step begins anew.
    pub fn take(&mut self, name: &str) -> Option<T> {
        self.jobs.get(name).filter(|job| job.result.is_some())?;
        self.jobs.remove(name)?.result.map(|(_, result)| result)
    }
}

impl<K, T: Send + 'static> Job<K, T> {
    /// Takes the result where it has come. Without one, false means that the thread has panicked.
    fn is_under_way(&mut self) -> bool {
        if self.result.is_some() {
            return false;
        }
        let received = self.thread.wait(Duration::ZERO);
        let is_under_way = received.is_none();
        self.result = received.and_then(Result::ok);
        is_under_way
    }

    fn is_fresh(&self, now: Instant, fresh: Duration) -> bool {
        self.result.as_ref().is_some_and(|(at, _)| now.saturating_duration_since(*at) < fresh)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use rtvirtio_testkit::HANG;

    use super::*;

    /// Results with the news of their arrival.
    fn prepared(dir: &Path) -> (Prepared<u32, u32>, Receiver<()>) {
        let dirs = Dirs { state: dir.join("state"), run: dir.join("run") };
        let (sender, woken) = channel();
        let sender = std::sync::Mutex::new(sender);
        let waker: Waker = Arc::new(move || sender.lock().unwrap().send(()).unwrap());
        // The test may stand still for longer than any result is used for.
        (Prepared { fresh: Duration::MAX, ..Prepared::new(dirs, waker) }, woken)
    }

    fn panics() -> u32 {
        panic!("as a lookup might")
    }

    /// A lookup that answers once the sender has its answer.
    fn slow() -> (Sender<u32>, impl FnOnce() -> u32 + Send + 'static) {
        let (answer, asked) = channel();
        (answer, move || asked.recv().unwrap())
    }

    #[test]
    fn a_lookup_that_hangs_holds_up_no_other() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let (mut all, woken) = prepared(dir.path());
        let (answer, hangs) = slow();
        assert!(!all.is_ready("plc", 1, || hangs).unwrap());
        assert!(!all.is_ready("hist", 1, || || 2).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("hist", 1, || || 0).unwrap());
        assert_eq!((all.take("hist"), all.take("hist")), (Some(2), None));
        // The first is under way still, and no second one is started.
        for of in [1, 2] {
            assert!(!all.is_ready("plc", of, || || 0).unwrap());
        }
        assert_eq!(all.take("plc"), None);
        answer.send(1).unwrap();
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("plc", 1, || || 0).unwrap(), "kept until it is taken");
        assert_eq!(all.take("plc"), Some(1));
        // Anew for the next step.
        assert!(!all.is_ready("plc", 1, || || 3).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("plc", 1, || || 0).unwrap());
        assert_eq!((all.take("plc"), woken.try_recv().is_err()), (Some(3), true));
    }

    #[test]
    fn what_was_found_for_another_start_is_looked_up_anew() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let (mut all, woken) = prepared(dir.path());
        assert!(!all.is_ready("plc", 1, || || 1).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(!all.is_ready("plc", 2, || || 2).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("plc", 2, || || 0).unwrap());
        assert_eq!(all.take("plc"), Some(2));
    }

    #[test]
    fn nothing_is_looked_up_while_another_program_holds_the_lock() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let (mut all, woken) = prepared(dir.path());
        let dirs = all.dirs.clone();
        let lock = Scopes::lock(&dirs).unwrap();
        let refused = all.is_ready("plc", 1, || || 1).unwrap_err();
        assert_eq!((refused.kind(), all.jobs.len()), (Kind::InForce, 0), "{refused}");
        drop(lock);
        assert!(!all.is_ready("plc", 1, || || 1).unwrap());
        woken.recv_timeout(HANG).unwrap();
    }

    #[test]
    fn a_result_that_is_old_or_will_not_come_is_not_waited_for() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let (mut all, woken) = prepared(dir.path());
        all.fresh = Duration::ZERO;
        for _ in 0..2 {
            assert!(!all.is_ready("plc", 1, || || 1).unwrap(), "old");
            woken.recv_timeout(HANG).unwrap();
        }
        // No step has come for it.
        assert!(!all.is_ready("hist", 1, || || 1).unwrap());
        assert!(!all.jobs.contains_key("plc"));
        woken.recv_timeout(HANG).unwrap();
        let lost = loop {
            match all.is_ready("hist", 1, || panics) {
                Ok(false) => std::thread::yield_now(),
                ended => break ended,
            }
        };
        assert!(lost.is_err());
        assert!(!all.is_ready("hist", 1, || || 1).unwrap(), "anew");
        woken.recv_timeout(HANG).unwrap();
    }
}
