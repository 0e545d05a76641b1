//! One pass in steps, and the age of its data.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{SHOWN_AGAIN, Service, ServiceEvent, Shared};
use crate::history::EventKind;
use crate::lock::lock;
use crate::observe::Observation;
use crate::snapshot::Snapshot;

impl Service {
    /// Runs one pass, or part of it when `stop` is set. Intermediate states are published.
    pub(super) fn pass(&mut self, stop: &AtomicBool, tell: &mut dyn FnMut(ServiceEvent<'_>)) {
        loop {
            let (mut happenings, looks) = (Vec::new(), self.daemon.scan_count());
            let goes_on = self.daemon.advance(&mut happenings);
            if self.daemon.scan_count() != looks {
                self.shared.looked_now();
            }
            for happening in happenings {
                if happening.kind == EventKind::Failed {
                    self.shared.counters.failures.fetch_add(1, Ordering::Relaxed);
                }
                let changes = happening.changes.len() as u64;
                self.shared.counters.changes.fetch_add(changes, Ordering::Relaxed);
                self.event(happening.kind, happening.vm.as_deref(), happening.text, happening.changes, tell);
            }
            tell(ServiceEvent::Alive);
            if !goes_on || stop.load(Ordering::Relaxed) {
                return;
            }
            if self.published.is_none_or(|at| at.elapsed() >= SHOWN_AGAIN) {
                self.publish();
            }
        }
    }
}

impl Shared {
    /// Copy of a state with the age of the last scan.
    #[must_use]
    pub(crate) fn aged(&self, state: &Snapshot) -> Arc<Snapshot> {
        let (age, config) = (lock(&self.looked).map(|at| at.elapsed()), self.config());
        let mut state = state.clone().aged(age, config.stale_after());
        let oldest = self.observation.borrow().oldest(Instant::now());
        if let Some(age) = oldest.filter(|age| *age > config.unobserved_after()) {
            let why = "what is shown of load and targets is old";
            state.problems.push(format!("the VMs have not been observed for {} s: {why}", age.as_secs()));
        }
        Arc::new(state)
    }

    fn looked_now(&self) {
        *lock(&self.looked) = Some(Instant::now());
    }

    /// Copy of an observation with the age of each sample.
    #[must_use]
    pub(crate) fn aged_observation(&self, seen: &Observation) -> Observation {
        let (now, config) = (Instant::now(), self.config());
        let every = Duration::from_nanos(config.observe.0);
        let uncovered = lock(&self.uncovered).clone().aged(now, every);
        Observation { uncovered, ..seen.clone().aged(now, config.unobserved_after()) }
    }
}
