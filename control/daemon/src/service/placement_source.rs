//! Access of the publisher of inventories to the service.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::config::Mode;
use crate::linux::RunningVm;
use crate::lock::lock;
use crate::placement::Source;
use crate::shared::{Command, Shared};
use crate::snapshot::Snapshot;

/// Shared state, as the publisher's source.
pub(super) struct PlacementSource(pub(super) Arc<Shared>);

impl Source for PlacementSource {
    fn snapshot(&self) -> Arc<Snapshot> {
        self.0.snapshot()
    }

    fn running(&self) -> Vec<Arc<RunningVm>> {
        lock(&self.0.running).clone()
    }

    fn only_observes(&self) -> bool {
        self.0.config().mode == Mode::Observe
    }

    fn has_looked(&self) -> bool {
        self.0.counters.passes.load(Ordering::Relaxed) > 0
    }

    fn wake(&self) {
        // The loop may have ended: then nothing waits for it.
        let _ = self.0.send(Command::Wake);
    }
}
