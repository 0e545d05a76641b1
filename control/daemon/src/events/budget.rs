//! Rate limit for the wake-ups of the loop by events.

use crate::host::Millis;

/// Most wake-ups that may follow each other at once.
const BURST: u32 = 4;
/// Interval of comparisons of every setting that events ask for, in ms: a guest that resets itself
/// all the time, or a busy manager, makes the loop do no more than this.
const COMPARE_EVERY: u64 = 1_000;
/// Delay after the first event, in ms, to collect those that belong to it: a file is written in
/// pieces, and a VM starts with many cgroups.
const QUIET: u64 = 10;

/// Request to the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Look for VMs and threads.
    ScanDepth,
    /// Compare every setting, and where `contracts` is set read those of libvirt's domains.
    Compare { contracts: bool },
}

/// Merges many events into few requests.
#[derive(Debug)]
pub(super) struct Asks {
    wakes: WakeBudget,
    compares: WakeBudget,
    /// Whether an event of the pending comparison may be about contracts.
    contracts: bool,
}

impl Asks {
    /// Allows one more wake-up every `every` ms.
    pub fn new(every: u64, now: Millis) -> Self {
        let compares = WakeBudget::new(1, COMPARE_EVERY, now);
        Self { wakes: WakeBudget::new(BURST, every, now), compares, contracts: false }
    }

    /// Records a change on the host, which asks for a look.
    pub fn came(&mut self, now: Millis) {
        self.wakes.event(now);
    }

    /// Records events of a VM or its manager, perhaps about contracts.
    pub fn reported(&mut self, contracts: bool, now: Millis) {
        self.wakes.event(now);
        self.compares.event(now);
        self.contracts |= contracts;
    }

    /// Time of the next look; `None` without an event.
    pub fn look_due(&self) -> Option<Millis> {
        self.wakes.due()
    }

    /// Time of the next comparison; `None` without a reported event.
    pub fn compare_due(&self) -> Option<Millis> {
        self.compares.due()
    }

    /// Takes the request that is due now, if any.
    pub fn take(&mut self, now: Millis) -> Option<Ask> {
        let looks = self.wakes.take(now);
        if self.compares.take(now) {
            return Some(Ask::Compare { contracts: std::mem::take(&mut self.contracts) });
        }
        looks.then_some(Ask::ScanDepth)
    }
}

/// Token bucket of wake-ups: a burst, then one in each interval, however many events there are. No
/// event is lost: the loop is woken after the last one.
#[derive(Debug)]
struct WakeBudget {
    burst: u32,
    every: u64,
    tokens: u32,
    /// Time at which the last token was added.
    filled: Millis,
    /// Time of the first event since the last wake-up.
    pending: Option<Millis>,
}

impl WakeBudget {
    /// A full bucket of `burst` tokens; one more every `every` ms.
    fn new(burst: u32, every: u64, now: Millis) -> Self {
        Self { burst, every: every.max(1), tokens: burst, filled: now, pending: None }
    }

    /// Records an event until the next wake-up.
    fn event(&mut self, now: Millis) {
        self.pending.get_or_insert(now);
    }

    /// Time of the next wake-up; `None` without an event.
    fn due(&self) -> Option<Millis> {
        let quiet = self.pending?.0.saturating_add(QUIET);
        let token = if self.tokens > 0 { 0 } else { self.filled.0.saturating_add(self.every) };
        Some(Millis(quiet.max(token)))
    }

    /// Takes a wake-up that is due now; returns whether there is one.
    fn take(&mut self, now: Millis) -> bool {
        let new = now.since(self.filled) / self.every;
        self.filled = Millis(self.filled.0.saturating_add(new.saturating_mul(self.every)));
        self.tokens = self.tokens.saturating_add(u32::try_from(new).unwrap_or(self.burst)).min(self.burst);
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
        let mut budget = WakeBudget::new(BURST, 200, Millis(0));
        assert_eq!((budget.due(), budget.take(Millis(1_000))), (None, false));
        budget.event(Millis(1_000));
        budget.event(Millis(1_009));
        assert_eq!(budget.due(), Some(Millis(1_000 + QUIET)));
        assert!(!budget.take(Millis(1_009)) && budget.take(Millis(1_010)) && !budget.take(Millis(1_011)));
    }

    #[test]
    fn a_storm_is_bounded_and_its_last_event_is_not_lost() {
        let mut budget = WakeBudget::new(BURST, 200, Millis(0));
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

    /// Storm of ten seconds: every ms a VM reports, and files change.
    #[test]
    fn a_storm_of_reports_makes_few_comparisons_and_its_last_one_is_not_lost() {
        let mut asks = Asks::new(200, Millis(0));
        assert_eq!((asks.look_due(), asks.compare_due(), asks.take(Millis(9_000))), (None, None, None));
        let (mut looks, mut compares) = (0, 0);
        for now in 10_000..20_000 {
            asks.came(Millis(now));
            asks.reported(false, Millis(now));
            match asks.take(Millis(now)) {
                Some(Ask::Compare { contracts }) => {
                    assert!(!contracts);
                    compares += 1;
                }
                Some(Ask::ScanDepth) => looks += 1,
                None => {}
            }
        }
        assert!((10..=11).contains(&compares), "{compares}");
        assert!((48..=54).contains(&(looks + compares)), "{looks} and {compares}");
        // The last report is about contracts, and nothing follows it.
        asks.reported(true, Millis(20_000));
        let mut now = Millis(20_000);
        while let Some(due) = [asks.look_due(), asks.compare_due()].into_iter().flatten().min() {
            now = now.max(due);
            match asks.take(now) {
                Some(Ask::Compare { contracts }) => assert!(contracts),
                look => assert_eq!(look, Some(Ask::ScanDepth)),
            }
        }
        assert!(now.0 <= 21_010, "{now:?}");
        assert_eq!(asks.take(Millis(30_000)), None);
    }

    #[test]
    fn a_report_is_compared_soon_and_what_came_is_only_looked_at() {
        let mut asks = Asks::new(200, Millis(0));
        asks.came(Millis(5_000));
        assert_eq!((asks.compare_due(), asks.take(Millis(5_000 + QUIET))), (None, Some(Ask::ScanDepth)));
        asks.reported(true, Millis(6_000));
        assert_eq!(asks.compare_due(), Some(Millis(6_000 + QUIET)));
        assert_eq!(asks.take(Millis(6_000 + QUIET)), Some(Ask::Compare { contracts: true }));
        assert_eq!((asks.look_due(), asks.compare_due()), (None, None), "one pass for both");
    }
}
