//! Progress of applying and putting back.

/// A point that was passed. Everything before it has happened, nothing after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Old values are captured; nothing is on disk.
    Captured,
    /// The journal is on disk; nothing is written.
    Journaled,
    /// A knob was written and compared.
    Wrote {
        /// Which, from 1.
        index: usize,
        /// Of how many.
        of: usize,
    },
    /// All knobs were compared again and the journal records it.
    Completed,
    /// Putting back begins.
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
}

/// Watches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn step(&mut self, _: Step) {
        // Of no effect but in a test of a program that runs as it is.
        crate::points::pass_in_process();
    }
}
