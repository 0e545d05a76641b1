//! How often events may wake the loop.

use crate::host::Millis;

/// Wakes that may follow each other at once.
const BURST: u32 = 4;
/// After the first event so long is waited for those that belong to it, in ms: a file is written in
/// pieces, and a VM starts with many groups.
const QUIET: u64 = 10;

/// Bounds wakes: some at once, then one in each interval, however many events there are. No event
/// is lost: after the last one the loop is woken.
#[derive(Debug)]
pub(super) struct WakeBudget {
    every: u64,
    tokens: u32,
    /// When the last token came.
    filled: Millis,
    /// When the first event came that the loop has not been woken for.
    pending: Option<Millis>,
}

impl WakeBudget {
    /// One more wake every so many ms.
    pub fn new(every: u64, now: Millis) -> Self {
        Self { every: every.max(1), tokens: BURST, filled: now, pending: None }
    }

    /// Something happened.
    pub fn event(&mut self, now: Millis) {
        self.pending.get_or_insert(now);
    }

    /// When the loop is to be woken; `None` without an event.
    pub fn due(&self) -> Option<Millis> {
        let quiet = self.pending?.0.saturating_add(QUIET);
        let token = if self.tokens > 0 { 0 } else { self.filled.0.saturating_add(self.every) };
        Some(Millis(quiet.max(token)))
    }

    /// Whether the loop is to be woken now; counts as done.
    pub fn take(&mut self, now: Millis) -> bool {
        let new = now.since(self.filled) / self.every;
        self.filled = Millis(self.filled.0.saturating_add(new.saturating_mul(self.every)));
        self.tokens = self.tokens.saturating_add(u32::try_from(new).unwrap_or(BURST)).min(BURST);
        let is_due = self.due().is_some_and(|due| now >= due);
        if is_due {
            self.pending = None;
            self.tokens = self.tokens.saturating_sub(1);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_wakes_soon_and_once() {
        let mut budget = WakeBudget::new(200, Millis(0));
        assert_eq!((budget.due(), budget.take(Millis(1_000))), (None, false));
        budget.event(Millis(1_000));
        budget.event(Millis(1_009));
        assert_eq!(budget.due(), Some(Millis(1_000 + QUIET)));
        assert!(!budget.take(Millis(1_009)) && budget.take(Millis(1_010)) && !budget.take(Millis(1_011)));
    }

    #[test]
    fn a_storm_is_bounded_and_its_last_event_is_not_lost() {
        let mut budget = WakeBudget::new(200, Millis(0));
        let mut wakes = Vec::new();
        for now in 5_000..15_000 {
            budget.event(Millis(now));
            if budget.take(Millis(now)) {
                wakes.push(now);
            }
        }
        assert!(wakes.len() as u64 <= u64::from(BURST) + 10_000 / 200 + 1, "{}", wakes.len());
        assert!(wakes.len() >= 10_000 / 200 - 1, "it is not starved either: {}", wakes.len());
        assert_eq!(wakes[0], 5_000 + QUIET);
        // It ends with an event that nothing followed.
        budget.event(Millis(15_000));
        let due = budget.due().unwrap();
        assert!(due.0 <= 15_200 && budget.take(due));
        // After a while several may come at once again.
        let mut now = 20_000;
        for _ in 0..BURST {
            budget.event(Millis(now));
            now += QUIET;
            assert!(budget.take(Millis(now)));
        }
        budget.event(Millis(now));
        assert!(!budget.take(Millis(now + QUIET)));
    }
}
