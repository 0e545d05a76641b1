//! Lookups of steps in threads of their own: a monitor or a libvirt that does not answer delays only
//! the step that needs it, and no lock is held meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::lookup::Waker;

/// Age up to which a result is used: another rtvirtio may hold the lock when it arrives.
const FRESH: Duration = Duration::from_secs(10);

/// Results for steps, each found once at a time.
pub(super) struct Prepared<T> {
    waker: Waker,
    fresh: Duration,
    /// By the name that the step is for.
    jobs: BTreeMap<String, Job<T>>,
}

struct Job<T> {
    receiver: Receiver<(Instant, T)>,
    /// With the time at which it was found.
    result: Option<(Instant, T)>,
}

impl<T: Send + 'static> Prepared<T> {
    pub fn new(waker: Waker) -> Self {
        Self { waker, fresh: FRESH, jobs: BTreeMap::new() }
    }

    /// Whether the result for a name is there. Without one, what `begin` returns is run in a
    /// thread, unless one is under way; the waker is called at its end.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn is_ready<F>(&mut self, name: &str, begin: impl FnOnce() -> F) -> io::Result<bool>
    where
        F: FnOnce() -> T + Send + 'static,
    {
        let (now, fresh) = (Instant::now(), self.fresh);
        self.jobs.retain(|_, job| job.take_result(now, fresh));
        if let Some(job) = self.jobs.get(name) {
            return Ok(job.result.is_some());
        }
        let (sender, receiver) = channel();
        let (run, waker) = (begin(), Arc::clone(&self.waker));
        std::thread::Builder::new().name("step".to_owned()).spawn(move || {
            let result = run();
            // The service, and with it the receiver, may be gone.
            let _ = sender.send((Instant::now(), result));
            drop(sender);
            waker();
        })?;
        self.jobs.insert(name.to_owned(), Job { receiver, result: None });
        Ok(false)
    }

    /// Takes the result for a name; the next step begins anew.
    pub fn take(&mut self, name: &str) -> Option<T> {
        self.jobs.get_mut(name)?.result.take().map(|(_, result)| result)
    }
}

impl<T> Job<T> {
    /// Takes the result where it has come; false for a job that is of no more use, whose result was
    /// taken or is old.
    fn take_result(&mut self, now: Instant, fresh: Duration) -> bool {
        if self.result.is_none() {
            match self.receiver.try_recv() {
                Ok(result) => self.result = Some(result),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        self.result.as_ref().is_some_and(|(at, _)| now.saturating_duration_since(*at) < fresh)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Sender;

    use rtvirtio_testkit::HANG;

    use super::*;

    /// Results with the news of their arrival.
    fn prepared() -> (Prepared<u32>, Receiver<()>) {
        let (sender, woken) = channel();
        let sender = std::sync::Mutex::new(sender);
        let waker: Waker = Arc::new(move || sender.lock().unwrap().send(()).unwrap());
        // The test may stand still for longer than any result is used for.
        (Prepared { fresh: Duration::MAX, ..Prepared::new(waker) }, woken)
    }

    /// A lookup that answers when it is told to.
    fn slow() -> (Sender<u32>, impl FnOnce() -> u32 + Send + 'static) {
        let (answer, asked) = channel();
        (answer, move || asked.recv().unwrap())
    }

    #[test]
    fn a_lookup_that_hangs_holds_up_no_other() {
        let (mut all, woken) = prepared();
        let (answer, hangs) = slow();
        assert!(!all.is_ready("plc", || hangs).unwrap());
        assert!(!all.is_ready("hist", || || 2).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("hist", || || 0).unwrap());
        assert_eq!((all.take("hist"), all.take("hist")), (Some(2), None));
        // The first is under way still, and no second one is started.
        for _ in 0..2 {
            assert!(!all.is_ready("plc", || || 0).unwrap());
        }
        assert_eq!(all.take("plc"), None);
        answer.send(1).unwrap();
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("plc", || || 0).unwrap(), "kept until it is taken");
        assert_eq!(all.take("plc"), Some(1));
        // Anew for the next step.
        assert!(!all.is_ready("plc", || || 3).unwrap());
        woken.recv_timeout(HANG).unwrap();
        assert!(all.is_ready("plc", || || 0).unwrap());
        assert_eq!((all.take("plc"), woken.try_recv().is_err()), (Some(3), true));
    }

    #[test]
    fn an_old_result_is_of_no_use() {
        let (sender, receiver) = channel();
        let mut job = Job { receiver, result: None };
        let now = Instant::now();
        assert!(job.take_result(now, FRESH), "under way");
        sender.send((now, 1)).unwrap();
        assert!(job.take_result(now, FRESH) && job.result.is_some());
        assert!(!job.take_result(now + FRESH, FRESH));
        job.result = None;
        drop(sender);
        assert!(!job.take_result(now, FRESH), "it has panicked, or was taken");
    }
}
