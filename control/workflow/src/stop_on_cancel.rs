//! Observer of `rtvirtio apply`.

use rtvirtio_apply::{Observer, Pauses, Step};

use crate::progress::Progress;

/// Ctrl-C between two writes puts everything back. Threads that sleep are waited for: no other VM
/// is served meanwhile.
pub(crate) struct StopOnCancel<'a> {
    progress: &'a dyn Progress,
    pauses: Pauses,
}

impl<'a> StopOnCancel<'a> {
    pub(crate) fn new(progress: &'a dyn Progress) -> Self {
        Self { progress, pauses: Pauses::default() }
    }
}

impl Observer for StopOnCancel<'_> {
    fn step(&mut self, _: Step) {}

    fn stop(&mut self) -> bool {
        self.progress.is_cancelled()
    }

    fn wait_for_sleepers(&mut self) -> bool {
        self.pauses.pause()
    }
}
