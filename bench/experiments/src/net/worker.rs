//! Threads that repeat their work until they are dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A thread; ended when dropped.
#[derive(Debug)]
pub(super) struct Worker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Worker {
    /// Starts a thread that repeats `work`, and adds up what it returns.
    pub(super) fn start(mut work: impl FnMut() -> u64 + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut sum = 0;
            while !stopped.load(Ordering::Relaxed) {
                sum += work();
            }
            sum
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends the thread; returns the sum.
    pub(super) fn end(&mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or(0)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}
