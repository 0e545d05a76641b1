//! State of the loop between two passes: failures that are not to be retried at once, and settings
//! that another program sets again and again. It need not survive the service.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::host::{Millis, Outcome};
use crate::step::{Action, Step};

/// Delay of the first retry after a failure; doubled with each further one.
const FIRST_WAIT_MS: u64 = 1_000;
/// Longest delay of a retry.
const LONGEST_WAIT_MS: u64 = 60_000;
/// Restores of a setting from which on another program is known to set it too, so it is left alone.
const MOST_RESTORES: usize = 3;
/// Time within which these restores are counted.
const RESTORES_WITHIN_MS: u64 = 3_600_000;

/// Time without a failed attempt after which a wait for the lock is over.
const FORGOTTEN_AFTER_MS: u64 = 30_000;
/// Shortest wait for the lock that is reported: `apply` holds it for less.
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
    /// First and last attempt of the present wait for the state directory's lock.
    busy: Option<(Millis, Millis)>,
    /// Contracts that were accepted, as `VM ID`.
    accepted: BTreeSet<String>,
}

impl Memory {
    /// Records the outcome of a step.
    pub fn note(&mut self, step: &Step, outcome: &Outcome, now: Millis) {
        match outcome {
            Outcome::Busy => {
                let since = self.busy.filter(|(_, last)| now.since(*last) < FORGOTTEN_AFTER_MS);
                self.busy = Some((since.map_or(now, |(first, _)| first), now));
            }
            Outcome::NotYet => {}
            Outcome::Done { .. } => {
                self.busy = None;
                self.failures.remove(&step.vm);
                // Others may have waited for what is free now.
                if matches!(step.action, Action::PutBack { .. }) {
                    self.failures.values_mut().for_each(|failure| failure.next = now);
                }
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

    /// Whether a step that failed still waits for its retry.
    #[must_use]
    pub fn waits(&self, step: &Step, now: Millis) -> bool {
        self.failures.get(&step.vm).is_some_and(|f| f.step.action == step.action && now < f.next)
    }

    /// Whether steps have waited for the state directory's lock for longer than a command that sets
    /// something holds it.
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

    /// Error of the last step for a VM; `None` if it did not fail.
    #[must_use]
    pub fn failure(&self, vm: &str) -> Option<&str> {
        self.failures.get(vm).map(|f| f.why.as_str())
    }

    /// Forgets a VM's failure: what it was about has changed.
    pub fn forget(&mut self, vm: &str) {
        self.failures.remove(vm);
    }

    /// Forgets the failures of VMs and plans that are not known any more, and restores that no
    /// longer count.
    pub fn prune(&mut self, is_known: impl Fn(&str) -> bool, now: Millis) {
        self.failures.retain(|vm, _| is_known(vm));
        let counts = |at: &Millis| now.since(*at) < RESTORES_WITHIN_MS;
        self.restores.retain(|_, times| times.back().is_some_and(counts));
    }

    /// Whether a setting was restored so often within an hour that another program must set it too.
    #[must_use]
    pub fn is_contested(&self, vm: &str, path: &str, now: Millis) -> bool {
        let times = self.restores.get(&(vm.to_owned(), path.to_owned()));
        times.is_some_and(|times| {
            let recent = times.iter().filter(|at| now.since(**at) < RESTORES_WITHIN_MS);
            recent.count() >= MOST_RESTORES
        })
    }

    /// Records that a contract or plan was accepted, by its identifier.
    pub fn accept(&mut self, vm: &str, contract: &str) {
        self.accepted.insert(format!("{vm} {contract}"));
    }

    #[must_use]
    pub fn is_accepted(&self, vm: &str, contract: &str) -> bool {
        self.accepted.contains(&format!("{vm} {contract}"))
    }

    /// The accepted contracts, to be saved.
    #[must_use]
    pub fn accepted(&self) -> &BTreeSet<String> {
        &self.accepted
    }

    /// Sets the contracts that an earlier process accepted.
    pub fn set_accepted(&mut self, accepted: BTreeSet<String>) {
        self.accepted = accepted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_longer_counts_is_forgotten() {
        let mut memory = Memory::default();
        let step = |vm: &str, action: Action| Step { vm: vm.to_owned(), action, reason: String::new() };
        for vm in ["plc", "gone"] {
            memory.note(&step(vm, Action::Apply), &Outcome::Failed("no".to_owned()), Millis(0));
        }
        memory.prune(|vm| vm == "plc", Millis(1));
        assert_eq!((memory.failure("plc"), memory.failure("gone")), (Some("no"), None));
        let done = Outcome::Done { changes: Vec::new(), notes: Vec::new() };
        for i in 0..10_u64 {
            let paths = vec![format!("/proc/7/task/{i}/sched")];
            memory.note(&step("plc", Action::Restore { paths }), &done, Millis(i));
        }
        memory.prune(|_| true, Millis(RESTORES_WITHIN_MS + 4));
        assert_eq!(memory.restores.len(), 5);
    }
}
