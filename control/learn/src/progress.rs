//! What a caller shows while a sweep goes on, and how it stops one.

use std::sync::atomic::AtomicBool;

/// Where progress goes.
pub trait Progress {
    /// One line of progress.
    fn step(&self, text: &str);

    /// One line that is shown even when the caller is quiet.
    fn warn(&self, text: &str);

    /// A bar from 0 to `total` seconds or runs.
    fn bar(&self, label: &str, total: u64) -> Box<dyn Bar + '_>;

    /// Set to stop.
    fn cancel_flag(&self) -> &AtomicBool;
}

/// A progress bar, removed on drop.
pub trait Bar {
    /// How far it is.
    fn set(&mut self, done: u64);

    /// What is done at this moment.
    fn say(&mut self, text: &str);
}
