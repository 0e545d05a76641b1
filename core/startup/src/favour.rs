//! Time budget for which a VM may be favoured.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::StartMessage;

/// Largest number of open starts of one VM; a guest that announces more gains nothing by it.
const MOST_OPEN: usize = 32;
/// A start is refused with less than 1 / `LEAST_PART` of the budget left.
const LEAST_PART: u64 = 10;

/// Limits of one VM. Times are positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FavourLimits {
    /// Time that a VM which was not favoured before may be favoured without a break.
    pub budget: Nanos,
    /// In this time a used-up budget is full again: `budget / within` is the VM's share of the
    /// time in the long run.
    pub within: Nanos,
    /// A start is over after this time, whatever the guest announced.
    pub longest: Nanos,
}

impl Default for FavourLimits {
    /// 10 s per minute; one start at most 30 s, half of the paper's limit of 60 s.
    fn default() -> Self {
        let s = 1_000_000_000;
        Self { budget: Nanos(10 * s), within: Nanos(60 * s), longest: Nanos(30 * s) }
    }
}

/// Counters of a VM's starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FavourCounters {
    /// Starts that the guest announced.
    pub starts: u64,
    /// Starts refused for less than a tenth of the budget left, or for too many open starts.
    pub refused: u64,
    /// Times that the budget ended while something was starting.
    pub cut: u64,
    /// Total time during which the VM was favoured.
    pub favoured: Nanos,
}

/// Whether a VM is favoured now. The clock is an argument of each call and may not run backwards;
/// a step back counts as no time.
///
/// The budget is a bucket of time: it fills at `budget / within` while the VM is not favoured and
/// empties at rate 1 while it is. Over any span of length `t` the VM is therefore favoured for at
/// most `budget + t * budget / within`.
#[derive(Clone, Debug)]
pub struct Favour {
    limits: FavourLimits,
    now: Nanos,
    left: Nanos,
    /// Id and end of each open start.
    open: Vec<(u32, Nanos)>,
    counters: FavourCounters,
}

impl Favour {
    /// A VM with a full budget.
    #[must_use]
    pub fn new(limits: FavourLimits, now: Nanos) -> Self {
        let limits = FavourLimits {
            budget: limits.budget.max(Nanos(1)),
            within: limits.within.max(limits.budget).max(Nanos(1)),
            longest: limits.longest.max(Nanos(1)),
        };
        let (left, counters) = (limits.budget, FavourCounters::default());
        Self { limits, now, left, open: Vec::new(), counters }
    }

    /// Handles a message of the guest.
    pub fn hear(&mut self, word: StartMessage, now: Nanos) {
        self.advance(now);
        match word {
            StartMessage::End { id } => self.open.retain(|(open, _)| *open != id),
            StartMessage::Start { id, wanted } => {
                self.counters.starts += 1;
                // A repeated announcement of an open start changes nothing.
                if self.open.iter().any(|(open, _)| *open == id) {
                    return;
                }
                if self.open.len() >= MOST_OPEN || self.left.0 < self.least() {
                    self.counters.refused += 1;
                    return;
                }
                let end = self.now.0.saturating_add(wanted.min(self.limits.longest).0);
                self.open.push((id, Nanos(end)));
            }
        }
    }

    /// Ends all starts: the guest is gone, or its port closed.
    pub fn forget(&mut self, now: Nanos) {
        self.advance(now);
        self.open.clear();
    }

    /// Whether the VM is favoured from `now` on.
    pub fn is_favoured(&mut self, now: Nanos) -> bool {
        self.advance(now);
        self.favoured()
    }

    /// End of [`Favour::is_favoured`] without further messages; `None` while it is false.
    #[must_use]
    pub fn until(&self) -> Option<Nanos> {
        if !self.favoured() {
            return None;
        }
        let last = self.open.iter().map(|(_, end)| end.0).max()?;
        Some(Nanos(last.min(self.now.0.saturating_add(self.left.0))))
    }

    /// Counters since the VM was added.
    #[must_use]
    pub fn counters(&self) -> FavourCounters {
        self.counters
    }

    fn favoured(&self) -> bool {
        !self.open.is_empty()
    }

    /// Least budget left that a start needs, ns: less is of no use to it, and a guest that
    /// announces starts without end would switch the weight all the time.
    fn least(&self) -> u64 {
        self.limits.budget.0 / LEAST_PART
    }

    /// Charges the time since the last call, one expiry after the other.
    fn advance(&mut self, now: Nanos) {
        while let Some(change) = self.until().filter(|change| *change <= now) {
            self.pass(change);
            self.open.retain(|(_, end)| *end > change);
            if self.left.0 == 0 && !self.open.is_empty() {
                // A start that outlives the budget gets no more of it.
                self.counters.cut += 1;
                self.open.clear();
            }
        }
        self.pass(now);
        self.open.retain(|(_, end)| *end > self.now);
    }

    fn pass(&mut self, to: Nanos) {
        let time = to.0.saturating_sub(self.now.0);
        self.now = self.now.max(to);
        if self.favoured() {
            self.left = Nanos(self.left.0.saturating_sub(time));
            self.counters.favoured = Nanos(self.counters.favoured.0.saturating_add(time));
        } else {
            // Below 2^64 * 2^64; rounded down, so that the budget never refills too fast.
            let back = u128::from(time) * u128::from(self.limits.budget.0) / u128::from(self.limits.within.0);
            let room = self.limits.budget.0 - self.left.0;
            self.left = Nanos(self.left.0 + u64::try_from(back).unwrap_or(u64::MAX).min(room));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    fn limits() -> FavourLimits {
        FavourLimits { budget: Nanos(10 * S), within: Nanos(60 * S), longest: Nanos(8 * S) }
    }

    fn start(id: u32, seconds: u64) -> StartMessage {
        StartMessage::Start { id, wanted: Nanos(seconds * S) }
    }

    #[test]
    fn a_start_is_favoured_until_its_end() {
        let mut favour = Favour::new(limits(), Nanos(0));
        assert!(!favour.is_favoured(Nanos(S)) && favour.until().is_none());
        favour.hear(start(1, 5), Nanos(S));
        assert!(favour.is_favoured(Nanos(S)));
        assert_eq!(favour.until(), Some(Nanos(6 * S)));
        favour.hear(StartMessage::End { id: 2 }, Nanos(2 * S));
        assert!(favour.is_favoured(Nanos(2 * S)), "another start's end");
        favour.hear(StartMessage::End { id: 1 }, Nanos(3 * S));
        assert!(!favour.is_favoured(Nanos(3 * S)));
        assert_eq!(
            favour.counters(),
            FavourCounters { starts: 1, favoured: Nanos(2 * S), ..FavourCounters::default() }
        );
    }

    #[test]
    fn a_start_that_never_ends_is_over_by_itself() {
        let mut favour = Favour::new(limits(), Nanos(0));
        favour.hear(start(1, 3_600), Nanos(0));
        assert_eq!(favour.until(), Some(Nanos(8 * S)), "the host's limit");
        assert!(favour.is_favoured(Nanos(8 * S - 1)) && !favour.is_favoured(Nanos(8 * S)));
        favour.hear(start(2, 3_600), Nanos(8 * S));
        assert_eq!(favour.until(), Some(Nanos(10 * S)), "what is left of the budget");
        assert!(!favour.is_favoured(Nanos(11 * S)));
        assert_eq!(favour.counters().cut, 1);
    }

    #[test]
    fn the_port_closes() {
        let mut favour = Favour::new(limits(), Nanos(0));
        favour.hear(start(1, 5), Nanos(0));
        favour.forget(Nanos(S));
        assert!(!favour.is_favoured(Nanos(S)));
    }

    #[test]
    fn more_starts_at_once_than_are_held_are_refused() {
        let mut favour = Favour::new(limits(), Nanos(0));
        for id in 0..100 {
            favour.hear(start(id, 1), Nanos(0));
        }
        assert_eq!((favour.counters().starts, favour.counters().refused), (100, 100 - MOST_OPEN as u64));
    }

    proptest! {
        /// With any messages, a guest is favoured for at most `budget + t * budget / within`.
        #[test]
        fn nobody_is_favoured_beyond_the_budget(
            words in proptest::collection::vec((any::<bool>(), 0u32..4, 0u64..20 * S, 0u64..9 * S), 1..200)
        ) {
            let limits = limits();
            let (mut favour, mut now) = (Favour::new(limits, Nanos(0)), 0);
            for (is_start, id, wanted, pause) in words {
                now += pause;
                let word = if is_start { StartMessage::Start { id, wanted: Nanos(wanted) } } else { StartMessage::End { id } };
                favour.hear(word, Nanos(now));
                let most = limits.budget.0 + now / (limits.within.0 / limits.budget.0);
                prop_assert!(favour.counters().favoured.0 <= most);
                prop_assert!(favour.left <= limits.budget);
                if let Some(until) = favour.until() {
                    prop_assert!(until.0 > now);
                }
            }
        }
    }
}
