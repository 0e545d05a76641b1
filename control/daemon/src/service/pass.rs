//! One pass of the loop in steps.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{SHOWN_AGAIN, Service, ServiceEvent};
use crate::history::EventKind;

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
