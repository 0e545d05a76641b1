//! Start of the tasks of all VMs at once.

use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

/// Start of all VMs' tasks, once each has prepared them.
pub struct Start {
    barrier: Barrier,
    at: OnceLock<Instant>,
}

impl Start {
    /// Start of so many VMs.
    pub fn new(vms: usize) -> Self {
        Self { barrier: Barrier::new(vms), at: OnceLock::new() }
    }

    /// Waits for the other VMs.
    pub fn wait(&self) {
        self.barrier.wait();
        self.at.get_or_init(Instant::now);
    }

    /// Whether the tasks started at least so long ago.
    pub fn is_past(&self, time: Duration) -> bool {
        self.at.get().is_some_and(|at| at.elapsed() >= time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_from_the_moment_at_which_all_are_ready() {
        let start = Start::new(2);
        assert!(!start.is_past(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| start.wait());
            start.wait();
        });
        assert!(start.is_past(Duration::ZERO) && !start.is_past(Duration::from_secs(3_600)));
    }
}
