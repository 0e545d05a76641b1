//! Exponential backoff for a source of events that failed.

use crate::host::Millis;

/// First delay, in ms; doubled with each further failure.
const FIRST: u64 = 1_000;
/// Longest delay, in ms. An attempt that lasted as long is retried with the first delay.
const MAX_DELAY: u64 = 60_000;

/// Exponential backoff between attempts.
#[derive(Debug, Default)]
pub(super) struct Retry {
    failures: u32,
    next: Option<Millis>,
    began: Millis,
}

impl Retry {
    /// Whether an attempt is due.
    pub fn is_due(&self, now: Millis) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Records the start of an attempt.
    pub fn begins(&mut self, now: Millis) {
        self.began = now;
    }

    /// Records a failure, at once or after a while, and schedules the next attempt.
    pub fn failed(&mut self, now: Millis) {
        if now.since(self.began) >= MAX_DELAY {
            self.failures = 0;
        }
        let wait = FIRST.saturating_mul(1 << self.failures.min(16)).min(MAX_DELAY);
        self.next = Some(Millis(now.0.saturating_add(wait)));
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_minute_and_what_lasted_begins_anew() {
        let mut retry = Retry::default();
        let mut now = Millis(1_000);
        assert!(retry.is_due(now));
        for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
            retry.begins(now);
            retry.failed(now);
            let next = Millis(now.0 + wait * 1_000);
            assert!(!retry.is_due(Millis(next.0 - 1)) && retry.is_due(next), "{wait} s");
            now = next;
        }
        // It worked for a minute: a restart of the daemon is found again within seconds.
        retry.begins(now);
        let ended = Millis(now.0 + MAX_DELAY);
        retry.failed(ended);
        assert!(retry.is_due(Millis(ended.0 + FIRST)));
        for _ in 0..100 {
            retry.begins(ended);
            retry.failed(ended);
        }
        assert!(retry.is_due(Millis(ended.0 + MAX_DELAY)));
    }
}
