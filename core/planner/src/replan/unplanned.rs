//! Devices that a plan leaves out, so that one of them does not block the others.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// First delay after a plan that could not be made or applied, in ms; doubled with each failure.
const FIRST_WAIT: u64 = 10_000;
/// Longest such delay, in ms.
pub(super) const LONGEST_WAIT: u64 = 600_000;

/// Delay after `before` earlier failures, in ms.
pub(super) fn backoff(before: u32) -> u64 {
    FIRST_WAIT.saturating_mul(1 << before.min(16)).min(LONGEST_WAIT)
}

/// Reason why a device is not planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unplanned {
    /// Reason, as shown to users.
    pub why: String,
    /// Command that solves the problem, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Reason why no plan was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoPlan {
    /// No plan is possible, with or without single devices.
    Whole(String),
    /// These devices, by their paths, prevent a plan; the others are planned without them.
    Devices(BTreeMap<String, Unplanned>),
}

#[derive(Clone, Debug)]
struct Failing {
    of: Unplanned,
    times: u32,
    retry: u64,
}

/// The devices that are left out, by path.
#[derive(Clone, Debug, Default)]
pub(super) struct LeftOut {
    /// Devices that cannot be planned by observation, before a plan is tried.
    lacking: BTreeMap<String, Unplanned>,
    /// Devices that made a plan fail.
    failing: BTreeMap<String, Failing>,
}

impl LeftOut {
    /// Sets the devices that cannot be planned; returns whether they are others than before.
    pub fn observe(&mut self, lacking: BTreeMap<String, Unplanned>) -> bool {
        let is_other = !self.lacking.keys().eq(lacking.keys());
        self.lacking = lacking;
        is_other
    }

    /// Records devices that made a plan fail: each is tried again later.
    pub fn fail(&mut self, now: u64, devices: BTreeMap<String, Unplanned>) {
        for (device, of) in devices {
            let times = self.failing.get(&device).map_or(0, |before| before.times);
            let retry = now.saturating_add(backoff(times));
            self.failing.insert(device, Failing { of, times: times.saturating_add(1), retry });
        }
    }

    /// Lets failed devices be tried again now. They stay unplanned until a plan succeeds.
    pub fn retry(&mut self, now: u64) {
        self.failing.values_mut().for_each(|one| one.retry = one.retry.min(now));
    }

    /// Clears the failures of all devices but those that a finished plan is without.
    pub fn planned(&mut self, without: &BTreeSet<String>) {
        self.failing.retain(|device, _| without.contains(device));
    }

    /// Devices that the next plan leaves out.
    pub fn at(&self, now: u64) -> BTreeSet<String> {
        let failing = self.failing.iter().filter(|(_, one)| now < one.retry).map(|(device, _)| device);
        failing.chain(self.lacking.keys()).cloned().collect()
    }

    /// All unplanned devices with the reasons, including those being tried again.
    pub fn all(&self) -> BTreeMap<String, Unplanned> {
        let mut all: BTreeMap<String, Unplanned> =
            self.failing.iter().map(|(device, one)| (device.clone(), one.of.clone())).collect();
        all.extend(self.lacking.clone());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(device: &str, why: &str) -> BTreeMap<String, Unplanned> {
        [(device.to_owned(), Unplanned { why: why.to_owned(), remedy: None })].into()
    }

    #[test]
    fn what_fails_is_left_out_for_longer_each_time_and_unplanned_until_it_succeeds() {
        let mut out = LeftOut::default();
        let mut now = 0;
        for wait in [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT] {
            out.fail(now, one("/dev/a", "it is gone"));
            assert_eq!(out.at(now + wait - 1).len(), 1);
            now += wait;
            assert!(out.at(now).is_empty() && out.all().len() == 1);
        }
        out.fail(now, one("/dev/a", "it is gone"));
        out.retry(now);
        assert!(out.at(now).is_empty() && out.all().len() == 1);
        out.planned(&BTreeSet::new());
        assert!(out.all().is_empty());
        assert_eq!(backoff(u32::MAX), LONGEST_WAIT);
    }

    #[test]
    fn what_is_observed_is_left_out_as_long_as_it_is_so() {
        let mut out = LeftOut::default();
        assert!(out.observe(one("/dev/a", "no profile")) && !out.observe(one("/dev/a", "another one's")));
        out.planned(&out.at(0));
        assert_eq!((out.at(u64::MAX).len(), out.all()["/dev/a"].why.as_str()), (1, "another one's"));
        assert!(out.observe(BTreeMap::new()) && out.all().is_empty());
    }
}
