//! vCPUs that were plugged into a VM with `cores`: each gets a CPU of its own where one is left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_cpu::Probe;
use rtvirtio_kernel::Root;
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_vmm::Thread;

use super::{ManagedVm, TakeIn};
use crate::contracts::{InForce, give_cpus, with_hotplugged_vcpus};
use crate::error::Result;
use crate::pieces::{Key, key};

/// Interval at which CPUs are looked for again where none was left: other VMs end or are put back.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A contract in force with the CPUs that were chosen for vCPUs that were plugged in.
pub(super) struct Placed {
    pub(super) of: InForce,
    /// Threads for which no CPU is left, each with the reason.
    pub(super) without: BTreeMap<Key, String>,
}

/// Threads of vCPUs for which no CPU was left.
#[derive(Default)]
pub(super) struct HotpluggedVcpus {
    without: BTreeMap<Key, String>,
    again_at: Option<Instant>,
}

impl HotpluggedVcpus {
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.without.is_empty() && self.again_at.is_some_and(|at| now >= at)
    }

    /// The threads for which CPUs are to be looked for again now.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Key> {
        if !self.is_due(now) {
            return Vec::new();
        }
        self.again_at = Some(now + RETRY_INTERVAL);
        self.without.keys().copied().collect()
    }

    /// Replaces the threads for which no CPU is left.
    pub(super) fn note(&mut self, without: BTreeMap<Key, String>, now: Instant) {
        self.without = without;
        self.again_at = Some(now + RETRY_INTERVAL);
    }

    pub(super) fn retain(&mut self, there: &BTreeSet<Key>) {
        self.without.retain(|key, _| there.contains(key));
    }
}

impl TakeIn {
    /// Contract to be saved before these writes are made: it has CPUs for vCPUs that were plugged
    /// in. `None` where none were chosen.
    #[must_use]
    pub fn changed(&self, before: &InForce) -> Option<&InForce> {
        self.placed.as_ref().map(|placed| &placed.of).filter(|of| *of != before)
    }
}

impl ManagedVm {
    /// Whether one of these threads runs a vCPU that is to have a CPU of its own and has none:
    /// [`ManagedVm::place_hotplugged`] is to be called before the writes are made.
    #[must_use]
    pub fn lacks_cpus(&self, new: &TakeIn) -> bool {
        let cores = self.of.cores.as_ref();
        cores.is_some_and(|cores| new.threads.iter().any(|thread| cores.lacking(thread).is_some()))
    }

    /// Chooses a CPU for each vCPU among these threads that was plugged in after CPUs were chosen,
    /// next to those of `others`, the contracts in force, and adds the writes. Threads for which
    /// none is left stay where they are; returned are the reasons that were not there before. The
    /// caller holds the lock under which CPUs are chosen.
    ///
    /// # Errors
    /// When it is not known what is taken.
    pub fn place_hotplugged(
        &self,
        new: &mut TakeIn,
        root: &Root,
        probe: &Probe,
        others: &[(InForce, Vec<u32>)],
    ) -> Result<Vec<String>> {
        let Some(had) = &self.of.cores else { return Ok(Vec::new()) };
        let (own, of) = (self.handle.pids.clone(), (had, self.of.backend));
        let (cores, without) = with_hotplugged_vcpus(root, probe, of, &new.threads, own, others)?;
        let is_given = |t: &&Thread| had.lacking(t).is_some() && cores.lacking(t).is_none();
        let given: Vec<Thread> = new.threads.iter().filter(is_given).cloned().collect();
        let lacked: BTreeSet<u32> =
            new.threads.iter().filter(|t| had.lacking(t).is_some()).map(|t| t.tid).collect();
        let settings = &mut new.settings;
        settings.outside.retain(|(tid, _)| !lacked.contains(tid));
        give_cpus(&cores, &self.of.vm, &given, settings);
        // Those of other pieces of the VM's threads stay without one.
        let tried: BTreeSet<Key> = new.threads.iter().map(key).collect();
        let mut all = self.hotplugged.without.clone();
        all.retain(|key, _| !tried.contains(key));
        let mut reasons = Vec::new();
        for (of, why) in without {
            let thread = new.threads.iter().find(|t| key(t) == of);
            let Some(thread) = thread else { continue };
            let why = format!(
                "{} was plugged in later and gets no CPU of its own: {why}; it has those of the other threads, {}, until one is free",
                thread.role,
                cpu_ranges(&cores.service())
            );
            if self.hotplugged.without.get(&of) != Some(&why) {
                reasons.push(why.clone());
            }
            all.insert(of, why);
        }
        new.placed = Some(Placed { of: InForce { cores: Some(cores), ..self.of.clone() }, without: all });
        Ok(reasons)
    }

    /// Reason why a vCPU that was plugged in has no CPU of its own; `None` where all have one.
    #[must_use]
    pub fn without_cpu(&self) -> Option<&str> {
        self.hotplugged.without.values().next().map(String::as_str)
    }
}
