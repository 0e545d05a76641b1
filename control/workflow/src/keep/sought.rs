//! VMs with a contract that are not found yet: their contracts are not kept meanwhile, and they are
//! looked for until they are found.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rtvirtio_kernel::HostError;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::VmHandle;

use super::search::{Search, SearchResult};
use super::warnings::Failures;
use crate::contracts::InForce;
use crate::error::{Error, Kind, Result};
use crate::find::HostVm;

/// Time for which a VM must be seen not to run: a single look may err.
const ABSENT_FOR: Duration = Duration::from_secs(10);

/// VM that was found, with its contract.
type FoundVm = (InForce, HostVm, VmHandle);

struct Wanted<'a> {
    of: InForce,
    vm: &'a Vm,
    /// First of the looks without a break that did not see it run.
    absent_since: Option<Instant>,
}

/// VMs that are looked for, by name.
#[derive(Default)]
pub(super) struct Sought<'a> {
    vms: BTreeMap<String, Wanted<'a>>,
    failures: Failures,
}

impl<'a> Sought<'a> {
    /// Adds a VM with its contract.
    pub fn add(&mut self, of: InForce, vm: &'a Vm) {
        self.vms.insert(of.vm.clone(), Wanted { of, vm, absent_since: None });
    }

    /// Whether the contract of a VM of these matches.
    pub fn any(&self, matches: impl Fn(&InForce) -> bool) -> bool {
        self.vms.values().any(|wanted| matches(&wanted.of))
    }

    /// Whether a VM is being looked for now.
    pub fn is_searching(&self, now: Instant) -> bool {
        self.vms.keys().any(|vm| self.failures.is_due(vm, now))
    }

    /// Whether no VM is left, or each has been seen not to run for a while.
    pub fn has_ended(&self, now: Instant) -> bool {
        let is_absent = |wanted: &Wanted<'_>| {
            wanted.absent_since.is_some_and(|since| now.saturating_duration_since(since) >= ABSENT_FOR)
        };
        self.vms.values().all(is_absent)
    }

    /// Looks for the VMs, and returns those that were found. `warn` gets a line for each new reason
    /// why a VM is not kept.
    pub fn poll(&mut self, search: &mut Search, now: Instant, warn: &dyn Fn(&str)) -> Vec<FoundVm> {
        let names: Vec<String> = self.vms.keys().cloned().collect();
        let mut found = Vec::new();
        for name in names {
            let Some(wanted) = self.vms.get(&name) else { continue };
            if !self.failures.is_due(&name, now) {
                continue;
            }
            let result = match search.start(wanted.vm) {
                Ok(()) => search.wait_for(&name, Duration::ZERO),
                Err(e) => Some(SearchResult { found: Err(e), warnings: Vec::new() }),
            };
            let Some(SearchResult { found: result, warnings }) = result else { continue };
            warnings.iter().for_each(|line| warn(line));
            found.extend(self.take(&name, result, now, warn));
        }
        found
    }

    /// Takes the result of a search.
    fn take(
        &mut self,
        name: &str,
        result: Result<(HostVm, VmHandle)>,
        now: Instant,
        warn: &dyn Fn(&str),
    ) -> Option<FoundVm> {
        let e = match result {
            Ok((vm, handle)) => {
                self.failures.forget(name);
                return self.vms.remove(name).map(|wanted| (wanted.of, vm, handle));
            }
            Err(e) => e,
        };
        let wanted = self.vms.get_mut(name)?;
        wanted.absent_since = is_absence(&e).then(|| wanted.absent_since.unwrap_or(now));
        let why = format!("{e:#}");
        // No other VM waits for a search.
        if self.failures.add(name, why.clone(), Duration::ZERO, now) {
            warn(&format!("the contract of {name} is not kept until it is found: {why}; looked for again"));
        }
        None
    }
}

/// Whether a search has not seen the VM run; after another error it may.
fn is_absence(error: &Error) -> bool {
    error.kind() == Kind::NotRunning || error.cause::<HostError>().is_some_and(HostError::is_gone)
}

#[cfg(test)]
mod tests;
