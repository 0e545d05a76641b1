//! Backoff of a VM whose wake-ups lead to no work: kicks without requests, frames that are refused.
//!
//! Each wake-up and each poll of a VM costs thread time, and so the other VMs. A VM has a credit of
//! [`CREDIT`]; useful work adds two to it, fruitless work takes one. (A Linux guest kicks at most
//! once for each frame, and a kick may come after its frame was found: that never drains the
//! credit.) Without credit the VM is not polled for a delay that doubles from [`FIRST`] to
//! [`LONGEST_BACKOFF`]; useful work, or [`FORGET`] without any work, resets it.

use rtvirtio_units::Nanos;

/// Fruitless polls in a row before the first delay.
const CREDIT: u32 = 64;
/// Delay after the credit is used up.
const FIRST: Nanos = Nanos::from_micros(50);
/// Limit of the doubled delay.
pub const LONGEST_BACKOFF: Nanos = Nanos::from_millis(1);
/// Time without any work after which credit and delay are reset.
const FORGET: Nanos = Nanos::from_millis(100);

/// Credit and delay of one VM.
#[derive(Clone, Debug)]
pub struct Backoff {
    credit: u32,
    delay: Nanos,
    /// Time of the last work, useful or fruitless.
    last: Nanos,
    delays: u64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { credit: CREDIT, delay: FIRST, last: Nanos(0), delays: 0 }
    }
}

impl Backoff {
    /// Records the result of a poll. Returns the end of the delay, where the VM must wait.
    pub fn record(&mut self, now: Nanos, useful: u32, fruitless: u32) -> Option<Nanos> {
        if now.0.saturating_sub(self.last.0) > FORGET.0 {
            (self.credit, self.delay) = (CREDIT, FIRST);
        }
        self.last = now;
        let credit = self.credit.saturating_add(useful.saturating_mul(2)).min(CREDIT);
        self.credit = credit.saturating_sub(fruitless);
        if self.credit > 0 {
            if useful > 0 {
                self.delay = FIRST;
            }
            return None;
        }
        let until = Nanos(now.0.saturating_add(self.delay.0));
        self.delay = Nanos(self.delay.0.saturating_mul(2).min(LONGEST_BACKOFF.0));
        self.delays += 1;
        Some(until)
    }

    /// Number of delays so far.
    #[must_use]
    pub fn delays(&self) -> u64 {
        self.delays
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn kicks_in_vain_become_rare() {
        let mut backoff = Backoff::default();
        let (mut now, mut looks) = (Nanos(0), 0);
        while now < Nanos::from_millis(50) {
            looks += 1;
            now = backoff.record(now, 0, 1).unwrap_or(Nanos(now.0 + 2_000)).max(Nanos(now.0 + 2_000));
        }
        // The credit, five shorter delays, then one poll each millisecond.
        assert!((CREDIT..CREDIT + 60).contains(&looks), "{looks}");
        assert_eq!(backoff.delays(), u64::from(looks - CREDIT + 1));
        // A single frame ends the delays.
        assert_eq!(backoff.record(now, 1, 0), None);
        assert_eq!(backoff.record(now, 0, 1), None);
    }

    #[test]
    fn quiet_time_is_forgiven() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.record(Nanos(0), 0, CREDIT), Some(FIRST));
        assert_eq!(backoff.record(Nanos(9), 0, 1), Some(Nanos(9 + 2 * FIRST.0)));
        assert_eq!(backoff.record(Nanos(10 + FORGET.0), 0, 1), None);
    }

    proptest! {
        /// A kick for each frame, in any order within a batch: never a delay.
        #[test]
        fn a_guest_that_works_never_waits(batches in prop::collection::vec((1u32..32, 0u32..32), 1..200)) {
            let mut backoff = Backoff::default();
            for (i, (frames, kicks)) in batches.into_iter().enumerate() {
                let now = Nanos(i as u64 * 1_000);
                prop_assert_eq!(backoff.record(now, frames, kicks.min(2 * frames)), None);
            }
        }

        /// No delay is longer than the longest.
        #[test]
        fn a_delay_is_bounded(steps in prop::collection::vec((0u64..2_000_000, 0u32..3, 0u32..100), 1..200)) {
            let (mut backoff, mut now) = (Backoff::default(), Nanos(0));
            for (pause, useful, fruitless) in steps {
                now.0 += pause;
                if let Some(until) = backoff.record(now, useful, fruitless) {
                    prop_assert!(until > now && until.0 - now.0 <= LONGEST_BACKOFF.0);
                }
            }
        }
    }
}
