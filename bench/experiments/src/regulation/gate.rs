//! Threads of a load that work while a gate is open.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

/// Gate of a load, which is closed at first.
#[derive(Debug, Default)]
pub(super) struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    stop: AtomicBool,
    moved: AtomicU64,
}

impl Gate {
    /// Opens or closes it.
    pub(super) fn set(&self, is_open: bool) {
        if let Ok(mut open) = self.open.lock() {
            *open = is_open;
        }
        self.changed.notify_all();
    }

    /// Ends the threads.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.set(true);
    }

    /// Waits until it is open; `false` when the thread is to end.
    pub(super) fn pass(&self) -> bool {
        let Ok(open) = self.open.lock() else { return false };
        let is_open = self.changed.wait_while(open, |open| !*open).is_ok();
        is_open && !self.stop.load(Ordering::Relaxed)
    }

    /// Whether a thread that has passed goes on.
    pub(super) fn is_open(&self) -> bool {
        self.open.lock().is_ok_and(|open| *open) && !self.stop.load(Ordering::Relaxed)
    }

    /// Counts bytes.
    pub(super) fn count(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that the threads have moved so far.
    pub(super) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }
}

/// Returns when a load that was switched off moves nothing any more: a step under way is finished
/// first.
#[cfg(test)]
pub(super) fn wait_for_rest(moved: impl Fn() -> u64) {
    let mut before = moved();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let now = moved();
        if now == before {
            return;
        }
        before = now;
    }
}
