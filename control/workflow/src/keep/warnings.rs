//! Limits warnings: each reason once, at a rate that no guest can raise.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest time between two different reasons of one VM: what a guest does may be named in them,
/// and it may do something else all the time.
const QUIET: Duration = Duration::from_secs(60);

/// Subject of a warning about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum About {
    /// Reports of the guest, and its vCPUs.
    Vm,
    /// Urgent requests of the VM in the I/O domain.
    Completions,
}

/// Last warning of each subject: its time, and its reason while that persists.
#[derive(Default)]
pub(super) struct Warnings(BTreeMap<(String, About), (Instant, Option<String>)>);

impl Warnings {
    /// Whether to warn of this reason.
    pub fn is_new(&mut self, (vm, about): (&str, About), why: &str, now: Instant) -> bool {
        let key = (vm.to_owned(), about);
        if let Some((at, last)) = self.0.get(&key) {
            if last.as_deref() == Some(why) || now.saturating_duration_since(*at) < QUIET {
                return false;
            }
        }
        self.0.insert(key, (now, Some(why.to_owned())));
        true
    }

    /// Notes that the reason has gone, so that the same one counts as new again.
    pub fn forget(&mut self, (vm, about): (&str, About)) {
        if let Some((_, last)) = self.0.get_mut(&(vm.to_owned(), about)) {
            *last = None;
        }
    }
}

/// Pause after a VM's scan has failed, shortest and longest. It doubles each time.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Least pause as a multiple of the failed scan's duration, since all other VMs wait for a scan.
const PAUSE_FACTOR: u32 = 20;

/// VMs whose last scan has failed: that ends no other VM's contract.
#[derive(Default)]
pub(super) struct Failures(BTreeMap<String, Failure>);

struct Failure {
    why: String,
    pause: Duration,
    due: Instant,
}

impl Failures {
    /// Whether a VM is to be scanned.
    pub fn is_due(&self, vm: &str, now: Instant) -> bool {
        self.0.get(vm).is_none_or(|failure| now >= failure.due)
    }

    /// Notes a failed scan and its duration; returns whether the reason is another than before.
    pub fn add(&mut self, vm: &str, why: String, took: Duration, now: Instant) -> bool {
        let before = self.0.get(vm);
        let is_new = before.is_none_or(|failure| failure.why != why);
        let pause = before.map_or(MIN_PAUSE, |failure| (2 * failure.pause).min(MAX_PAUSE));
        let due = now + pause.max(PAUSE_FACTOR * took);
        self.0.insert(vm.to_owned(), Failure { why, pause, due });
        is_new
    }

    /// Notes that a scan has succeeded.
    pub fn forget(&mut self, vm: &str) {
        self.0.remove(vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_does_something_else_each_second_is_warned_of_once_a_minute() {
        let (mut warnings, begin) = (Warnings::default(), Instant::now());
        let about = ("plc", About::Vm);
        let at = |s| begin + Duration::from_secs(s);
        let new: Vec<u64> =
            (0..180).filter(|s| warnings.is_new(about, &format!("address {s}"), at(*s))).collect();
        assert_eq!(new, [0, 60, 120]);
        assert_eq!(warnings.0.len(), 1, "nothing grows");
        assert!(warnings.is_new(("plc", About::Completions), "no domain", at(180)));
        // The same reason once, and again when it had gone.
        assert!(warnings.is_new(about, "address 7", at(180)));
        assert!(!warnings.is_new(about, "address 7", at(1_000)));
        warnings.forget(about);
        assert!(warnings.is_new(about, "address 7", at(1_001)));
    }

    #[test]
    fn what_fails_is_looked_at_later_and_later_and_the_longer_it_takes() {
        let (mut failures, mut now) = (Failures::default(), Instant::now());
        assert!(failures.is_due("plc", now));
        for (pause_ms, is_new) in [(200, true), (400, false), (800, false)] {
            assert_eq!(failures.add("plc", "full".to_owned(), Duration::ZERO, now), is_new);
            let due = now + Duration::from_millis(pause_ms);
            assert!(!failures.is_due("plc", due - Duration::from_millis(1)) && failures.is_due("plc", due));
            now = due;
        }
        assert!(failures.add("plc", "no answer".to_owned(), Duration::from_secs(5), now));
        assert!(!failures.is_due("plc", now + Duration::from_secs(99)));
        assert!(failures.is_due("plc", now + Duration::from_secs(100)));
        assert!(failures.is_due("hmi", now));
        failures.forget("plc");
        assert!(failures.is_due("plc", now));
    }
}
