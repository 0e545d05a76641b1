//! What the loop remembers between two passes: failures that are not to be repeated at once, and
//! settings that another program sets again and again. It need not survive the service.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::host::{Millis, Outcome};
use crate::reconcile::{Action, Step};

/// After a failure, so long until the next try; doubled with each.
const FIRST_WAIT_MS: u64 = 1_000;
/// At most so long.
const LONGEST_WAIT_MS: u64 = 60_000;
/// A setting that had to be restored so often ...
const MOST_RESTORES: usize = 3;
/// ... within this time is another program's, which sets it too: a contest helps nobody.
const RESTORES_WITHIN_MS: u64 = 3_600_000;

/// A wait for the lock that is not tried any more for so long is over.
const FORGOTTEN_AFTER_MS: u64 = 30_000;
/// `apply` holds the lock for less.
const NOTABLE_WAIT_MS: u64 = 2_000;

#[derive(Clone, Debug)]
struct Failure {
    /// The step that failed.
    step: Step,
    why: String,
    times: u32,
    next: Millis,
}

/// Failures and restored settings.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    failures: BTreeMap<String, Failure>,
    restores: BTreeMap<(String, String), VecDeque<Millis>>,
    /// Since when steps find the state directory's lock taken, and when one did last.
    busy: Option<(Millis, Millis)>,
    /// Contracts that were accepted, as `VM ID`.
    accepted: BTreeSet<String>,
}

impl Memory {
    /// Notes what became of a step.
    pub fn note(&mut self, step: &Step, outcome: &Outcome, now: Millis) {
        match outcome {
            Outcome::Busy => {
                let since = self.busy.filter(|(_, last)| now.since(*last) < FORGOTTEN_AFTER_MS);
                self.busy = Some((since.map_or(now, |(first, _)| first), now));
            }
            Outcome::Done { .. } => {
                self.busy = None;
                self.failures.remove(&step.vm);
                if let Action::Restore { paths } = &step.action {
                    for path in paths {
                        let times = self.restores.entry((step.vm.clone(), path.clone())).or_default();
                        times.push_back(now);
                        while times.len() > MOST_RESTORES {
                            times.pop_front();
                        }
                    }
                }
            }
            Outcome::Failed(why) => {
                let before = self.failures.get(&step.vm).filter(|f| f.step.action == step.action);
                let times = before.map_or(0, |f| f.times).saturating_add(1);
                let wait = FIRST_WAIT_MS.saturating_mul(1 << (times - 1).min(16)).min(LONGEST_WAIT_MS);
                let next = Millis(now.0.saturating_add(wait));
                self.failures
                    .insert(step.vm.clone(), Failure { step: step.clone(), why: why.clone(), times, next });
            }
        }
    }

    /// Whether a step failed a short time ago: it waits.
    #[must_use]
    pub fn waits(&self, step: &Step, now: Millis) -> bool {
        self.failures.get(&step.vm).is_some_and(|f| f.step.action == step.action && now < f.next)
    }

    /// Whether steps wait for the lock of the state directory, for longer than a command takes that
    /// sets something.
    #[must_use]
    pub fn waits_for_lock(&self, now: Millis) -> bool {
        self.busy.is_some_and(|(first, last)| {
            now.since(last) < FORGOTTEN_AFTER_MS && last.since(first) >= NOTABLE_WAIT_MS
        })
    }

    /// Whether any step waits to be tried again.
    #[must_use]
    pub fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Why the last step for a VM failed.
    #[must_use]
    pub fn failure(&self, vm: &str) -> Option<&str> {
        self.failures.get(vm).map(|f| f.why.as_str())
    }

    /// Forgets a VM's failure: what it was about has changed.
    pub fn forget(&mut self, vm: &str) {
        self.failures.remove(vm);
    }

    /// Whether a setting was restored so often of late that another program must set it too.
    #[must_use]
    pub fn is_contested(&self, vm: &str, path: &str, now: Millis) -> bool {
        let times = self.restores.get(&(vm.to_owned(), path.to_owned()));
        times.is_some_and(|times| {
            let recent = times.iter().filter(|at| now.since(**at) < RESTORES_WITHIN_MS);
            recent.count() >= MOST_RESTORES
        })
    }

    /// Accepts a contract.
    pub fn accept(&mut self, vm: &str, contract: &str) {
        self.accepted.insert(format!("{vm} {contract}"));
    }

    /// Whether a contract was accepted.
    #[must_use]
    pub fn is_accepted(&self, vm: &str, contract: &str) -> bool {
        self.accepted.contains(&format!("{vm} {contract}"))
    }

    /// The accepted contracts, to be saved.
    #[must_use]
    pub fn accepted(&self) -> &BTreeSet<String> {
        &self.accepted
    }

    /// Those that were accepted by an earlier process.
    pub fn set_accepted(&mut self, accepted: BTreeSet<String>) {
        self.accepted = accepted;
    }
}
