//! Progress reports without a terminal: warnings, kept for the history.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rtvirtio_workflow::Progress;

use crate::lock::lock;

/// Most warnings that are kept; the number of further ones is.
const MAX_WARNINGS: usize = 16;

/// Keeps warnings, each once, and discards the rest. Never cancelled: a step is short, and is
/// finished.
#[derive(Debug, Default)]
pub struct Warnings {
    never: AtomicBool,
    lines: Mutex<Vec<String>>,
}

impl Warnings {
    /// The warnings in their order, and last how many more there were.
    #[must_use]
    pub fn into_lines(self) -> Vec<String> {
        let mut lines = std::mem::take(&mut *lock(&self.lines));
        let more = lines.len().saturating_sub(MAX_WARNINGS);
        lines.truncate(MAX_WARNINGS);
        lines.extend((more > 0).then(|| format!("and {more} more warnings")));
        lines
    }
}

impl Progress for Warnings {
    fn warn(&self, text: &str) {
        let mut lines = lock(&self.lines);
        if !lines.iter().any(|line| line == text) {
            lines.push(text.to_owned());
        }
    }

    fn cancel_flag(&self) -> &AtomicBool {
        &self.never
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_kept_once_each_and_their_number_is_bounded() {
        let warnings = Warnings::default();
        warnings.step("a step");
        for _ in 0..3 {
            warnings.warn("no BFQ");
        }
        assert_eq!(warnings.into_lines(), ["no BFQ"]);
        let warnings = Warnings::default();
        (0..MAX_WARNINGS + 2).for_each(|i| warnings.warn(&i.to_string()));
        let lines = warnings.into_lines();
        assert_eq!((lines.len(), lines[MAX_WARNINGS].as_str()), (MAX_WARNINGS + 1, "and 2 more warnings"));
    }
}
