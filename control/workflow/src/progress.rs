//! Progress of work, and its cancellation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Interval of checks for cancellation during a pause.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Receiver of progress reports: a terminal, a log, a page.
pub trait Progress: Sync {
    /// Reports a line of progress. Discards it by default.
    fn step(&self, _text: &str) {}

    /// Reports a line that is always shown.
    fn warn(&self, text: &str);

    /// A bar from 0 to `total` seconds or points; it ends when it is dropped. By default there is
    /// none to be seen.
    fn bar(&self, _label: &str, _total: u64) -> Box<dyn Bar> {
        Box::new(NoBar)
    }

    /// Set when the work is to stop: everything made or changed is put back then.
    fn cancel_flag(&self) -> &AtomicBool;

    /// Whether the work is to stop.
    fn is_cancelled(&self) -> bool {
        self.cancel_flag().load(Ordering::Relaxed)
    }

    /// An error when the work is to stop.
    ///
    /// # Errors
    /// [`Kind::Cancelled`](crate::Kind::Cancelled).
    fn check_cancelled(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::cancelled()) } else { Ok(()) }
    }

    /// Waits, unless the work is to stop.
    ///
    /// # Errors
    /// [`Kind::Cancelled`](crate::Kind::Cancelled).
    fn pause(&self, length: Duration) -> Result<()> {
        let begin = Instant::now();
        while let Some(left) = length.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
            self.check_cancelled()?;
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
        Ok(())
    }
}

/// Progress bar of a piece of work.
pub trait Bar {
    /// Sets the amount that is done.
    fn set(&mut self, done: u64);

    /// Shows the current step as text.
    fn set_message(&mut self, text: &str);
}

struct NoBar;

impl Bar for NoBar {
    fn set(&mut self, _: u64) {}
    fn set_message(&mut self, _: &str) {}
}

/// Discards progress; cancelled only by its flag.
#[derive(Debug, Default)]
pub struct Quiet(pub AtomicBool);

impl Progress for Quiet {
    fn warn(&self, _: &str) {}
    fn cancel_flag(&self) -> &AtomicBool {
        &self.0
    }
}
