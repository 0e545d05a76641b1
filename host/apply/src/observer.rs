//! Progress of applying and putting back.

/// Point that was passed. Everything before it has happened, nothing after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Old values are captured; nothing is on disk.
    Captured,
    /// The journal is on disk; nothing is written.
    Journaled,
    /// A knob was written and compared.
    Wrote {
        /// Position of the write, from 1.
        index: usize,
        of: usize,
    },
    /// All knobs were compared again and the journal records it.
    Completed,
    /// A revert begins; nothing is restored yet.
    Reverting,
    /// A knob is as it was.
    Restored,
    /// All is back; the journal is about to be removed.
    AllBack,
}

/// Watches progress, and may ask to stop.
pub trait Observer {
    /// Called after each step.
    fn step(&mut self, step: Step);

    /// Whether applying should stop and put everything back, for instance after Ctrl-C. Putting
    /// back itself is never stopped.
    fn stop(&mut self) -> bool {
        false
    }

    /// Waits a moment for threads that sleep since their CPUs changed, which the kernel refuses a
    /// reservation meanwhile; `false` without a wait where the refusal is to count.
    fn wait_for_sleepers(&mut self) -> bool {
        false
    }
}

/// Observer that ignores every step and never stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn step(&mut self, _: Step) {
        // Has an effect only in a debug build with `KILL_AT` set.
        crate::points::pass_in_process();
    }
}
