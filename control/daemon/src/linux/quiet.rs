//! Progress reports that are discarded.

use std::sync::atomic::AtomicBool;

use rtvirtio_workflow::{Bar, Progress};

/// Discards progress, and is never cancelled: a step is short, and is finished.
#[derive(Debug, Default)]
pub struct Quiet(AtomicBool);

struct NoBar;

impl Bar for NoBar {
    fn set(&mut self, _: u64) {}
    fn set_message(&mut self, _: &str) {}
}

impl Progress for Quiet {
    fn step(&self, _: &str) {}
    fn warn(&self, _: &str) {}
    fn bar(&self, _: &str, _: u64) -> Box<dyn Bar> {
        Box::new(NoBar)
    }
    fn cancel_flag(&self) -> &AtomicBool {
        &self.0
    }
}
