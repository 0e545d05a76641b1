//! State of one VM between two looks.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_apply::KnownJournal;
use rtvirtio_cpu::{Backend, Probe};
use rtvirtio_kernel::{HostError, ProcessId, Root, task};
use rtvirtio_workflow::managed_vm::ManagedVm;
use rtvirtio_workflow::pieces::PIECE;
use rtvirtio_workflow::scope_files;

use super::found::{FoundVm, start_lives};
use crate::observed::{Drift, KnobClass, LOOKED_FOR, ObservedVm, Outside, Presence, ScopeState, ScopeView};

/// Delay of the next look at threads whose role is not known, doubled up to [`ROLE_LATER`]: QEMU
/// reports most to its monitor a moment after their start.
const ROLE_FIRST: Duration = Duration::from_millis(25);
const ROLE_LATER: Duration = Duration::from_millis(200);
/// Interval of comparisons of a VM while its threads are taken in; shorter than the default of all.
const COMPARED: Duration = Duration::from_secs(4);
/// Interval of splits of a budget over threads, where the mechanism knows single threads only.
pub(super) const SPLIT_EVERY: Duration = Duration::from_secs(2);

/// State of one VM between two looks.
#[derive(Default)]
pub(super) struct Tracked {
    pub(super) found: Option<FoundVm>,
    /// Presence while it is not found, with the reason.
    pub(super) lack: Option<Presence>,
    pub(super) next_lookup: Option<Instant>,
    /// The contract that takes in new threads.
    pub(super) kept: Option<ManagedVm>,
    /// Journal of the VM, while its threads are taken in piece by piece.
    pub(super) journal: KnownJournal,
    pub(super) taken_in: Option<Instant>,
    pub(super) threads_changed: bool,
    /// Threads with settings in its journal, as last read.
    pub(super) journaled: BTreeSet<u32>,
    /// Looks for thread roles since the threads changed.
    pub(super) role_looks: u32,
    pub(super) scope: Option<ScopeView>,
    pub(super) saved: Option<scope_files::VmInForce>,
    /// Whether `scope` has to be read anew.
    pub(super) stale: bool,
    /// Time at which `scope` was read.
    pub(super) read: Option<Instant>,
    /// Processes that have ended under a contract, of which threads may be there still.
    pub(super) ending: BTreeSet<u32>,
}

impl Tracked {
    /// Whether what is in force is read with a comparison: each setting of thousands of threads is
    /// not, while these are taken in, unless that takes long.
    pub(super) fn is_compared(&self, now: Instant) -> bool {
        let is_partial = self.kept.as_ref().is_some_and(ManagedVm::has_next);
        !is_partial || self.read.is_none_or(|at| now.duration_since(at) >= COMPARED)
    }

    /// Time of the next look for the roles of new threads; `None` where all are known.
    pub(super) fn role_due(&self) -> Option<Instant> {
        let waits = self.kept.as_ref().is_some_and(|kept| kept.pending() > 0);
        let at = self.taken_in.filter(|_| waits)?;
        Some(at + ROLE_FIRST.saturating_mul(1 << self.role_looks.min(8)).min(ROLE_LATER))
    }

    /// Whether threads are to be taken into the contract.
    pub(super) fn takes_in(&self, now: Instant) -> bool {
        let again = self.role_due().is_some_and(|at| now >= at);
        self.kept.as_ref().is_some_and(|kept| self.threads_changed || again || kept.has_next())
    }

    /// Whether the budget, where it is split over threads, is to be split anew.
    pub(super) fn splits(&self, now: Instant) -> bool {
        let is_due = self.taken_in.is_none_or(|at| now.duration_since(at) >= SPLIT_EVERY);
        is_due && self.kept.as_ref().is_some_and(|kept| kept.contract().backend == Backend::Deadline)
    }

    /// Resumes a contract that an earlier process has put in force.
    pub(super) fn take_up(&mut self, root: &Root) {
        if let Some(scope) = &mut self.scope {
            // The start of a VM that was just seen need not be checked again.
            let runs = |p: &ProcessId| self.found.as_ref().is_some_and(|f| f.lasting.contains(p));
            scope.start_alive =
                scope.start.is_empty() || scope.start.iter().any(runs) || start_lives(root, &scope.start);
        }
        let whole = self.scope.as_ref().is_some_and(|s| s.state == ScopeState::Whole && s.start_alive);
        if let (true, None, Some(found), Some(cpu)) =
            (whole, &self.kept, &self.found, self.saved.as_ref().and_then(|saved| saved.cpu.clone()))
        {
            let kept = ManagedVm::start(cpu, found.handle.clone(), root, SPLIT_EVERY);
            self.kept = Some(kept.in_pieces(PIECE));
            self.threads_changed = true;
        }
    }

    /// Forgets a VM whose process has ended.
    pub(super) fn forget(&mut self) {
        if let (Some(found), Some(_)) = (&self.found, &self.kept) {
            // A helper may still be there.
            self.ending.extend(found.processes.iter().filter(|of| !of.is_alive()).map(|of| of.pid));
        }
        (self.found, self.kept, self.next_lookup) = (None, None, None);
        self.lack = Some(Presence::Off("its process has ended".to_owned()));
    }

    /// Lets threads of ended processes give back their memory outside of the contract.
    pub(super) fn release_ending(&mut self, root: &Root) -> Result<(), HostError> {
        let mut fault = Ok(());
        self.ending.retain(|pid| {
            if let Err(e) = rtvirtio_cpu::release_ending(root, *pid) {
                fault = Err(e);
            }
            // The first thread stays as a zombie until it is waited for.
            task::tids(root, *pid).is_ok_and(|tids| tids.len() > 1)
        });
        fault
    }

    /// Looks for threads outside of a contract without taking them in.
    pub(super) fn look_for_threads(
        &mut self,
        root: &Root,
        probe: &Probe,
        processes: &BTreeSet<u32>,
    ) -> rtvirtio_workflow::Result<()> {
        let Some(kept) = self.kept.as_mut().filter(|kept| self.threads_changed || kept.outside().is_none())
        else {
            return Ok(());
        };
        kept.find_new(root, probe, processes, &self.journaled)?;
        self.threads_changed = false;
        Ok(())
    }

    pub(super) fn observed(&mut self, root: &Root, now: Instant) -> ObservedVm {
        self.take_up(root);
        let presence = match (&self.found, &self.lack) {
            (Some(found), _) => Presence::Running(found.lasting.clone()),
            (None, Some(lack)) => lack.clone(),
            (None, None) => Presence::Unknown(LOOKED_FOR.to_owned()),
        };
        let (new_threads, splits) = (self.takes_in(now), self.splits(now));
        let mut scope = self.scope.clone();
        // A reservation that the kernel still refuses was changed by no program.
        if self.kept.as_ref().is_some_and(ManagedVm::lacks_parts) {
            let is_refused = |d: &Drift| d.class == KnobClass::Thread && d.wanted.starts_with("deadline ");
            scope.iter_mut().for_each(|scope| scope.drift.retain(|d| !is_refused(d)));
        }
        let outside = match self.kept.as_ref().map(ManagedVm::outside) {
            None | Some(Some(0)) => Outside::None,
            Some(Some(n)) => Outside::Threads(n),
            Some(None) => Outside::NotLookedFor,
        };
        let without_cpu = self.kept.as_ref().and_then(|kept| kept.without_cpu().map(str::to_owned));
        ObservedVm { presence, scope, new_threads, splits, outside, without_cpu, ..ObservedVm::off("") }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rtvirtio_cpu::{Contract, Grant, KernelMechanism, Level, Order};
    use rtvirtio_units::{Nanos, Ratio};
    use rtvirtio_vmm::VmHandle;
    use rtvirtio_workflow::contracts::InForce;

    use super::*;

    /// A VM whose only thread has no reservation, with a journal that differs in two settings.
    fn reserving(root: &Root) -> Tracked {
        let put = |path: &str, text: &str| {
            let path = root.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        put("/sys/devices/system/cpu/online", "0-3\n");
        put("/proc/100/task/100/stat", &format!("100 (qemu-system-x86) S 1 {}\n", "0 ".repeat(60)));
        put("/proc/100/task/100/status", "Cpus_allowed_list:\t0-3\n");
        put("/proc/100/task/100/cgroup", "0::/plc.scope\n");
        let of = InForce {
            vm: "plc".to_owned(),
            contract: Contract::new(Nanos::from_millis(10), Nanos::from_millis(20)).unwrap(),
            order: Order::Contract,
            level: Level::ALONE,
            backend: Backend::Deadline,
            group: None,
            urgency: None,
            cores: None,
            partition: None,
        };
        let drift = |path: &str, wanted: &str| Drift {
            knob: path.to_owned(),
            path: path.to_owned(),
            class: KnobClass::of_path(path),
            wanted: wanted.to_owned(),
            found: String::new(),
        };
        let scope = ScopeView {
            contract: String::new(),
            start: Vec::new(),
            start_alive: true,
            state: ScopeState::Whole,
            level: None,
            cpu: Some(Backend::Deadline),
            drift: vec![
                drift("/proc/100/task/100/sched", "deadline 1000000/20000000/20000000"),
                drift("/sys/fs/cgroup/plc.scope/cpuset.cpus.partition", "root"),
            ],
            lost: Vec::new(),
        };
        let kept = ManagedVm::start(of, VmHandle::of_pid(100), root, SPLIT_EVERY);
        Tracked { kept: Some(kept), scope: Some(scope), ..Tracked::default() }
    }

    #[test]
    fn a_reservation_that_the_kernel_still_refuses_is_outside_and_no_drift() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let mut tracked = reserving(&root);
        let drift = |vm: &ObservedVm| vm.scope.as_ref().unwrap().drift.len();
        let before = tracked.observed(&root, Instant::now());
        assert_eq!((before.outside, drift(&before)), (Outside::NotLookedFor, 2));
        let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.0), taken: Vec::new() };
        let found = vec![KernelMechanism { backend: Backend::Deadline, grant }];
        let probe = Probe { found, missing: Vec::new(), cpus: 4, cgroups: None };
        let kept = tracked.kept.as_mut().unwrap();
        kept.scan(&root, &probe, &BTreeSet::new(), &mut || None).unwrap();
        let now = tracked.observed(&root, Instant::now());
        assert_eq!((now.outside, drift(&now)), (Outside::Threads(1), 1));
    }
}
