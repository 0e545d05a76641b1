//! Which processes and threads there are, listed only where one may have come.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_kernel::{ProcessId, Root, process, task};

use super::LinuxHost;

/// Where no task was created at all, threads are listed again after so long.
const LIST_ANYWAY: Duration = Duration::from_secs(2);

impl LinuxHost {
    /// Whether a process or thread may have come since the last look: one number tells for all.
    pub(super) fn may_have_new_tasks(&mut self, now: Instant) -> bool {
        // Read before they are listed: what comes meanwhile is found at the next look.
        let last = process::last_created(&self.root).ok();
        let is_known = self
            .listed
            .is_some_and(|(before, at)| Some(before) == last && now.duration_since(at) < LIST_ANYWAY);
        if !is_known {
            self.listed = last.map(|last| (last, now));
        }
        !is_known
    }

    /// New processes may be VMs that have started, or threads of the kernel for one.
    pub(super) fn new_processes(&mut self) {
        let pids: BTreeSet<u32> = match process::pids(&self.root) {
            Ok(pids) => pids.into_iter().collect(),
            Err(e) => return self.problem(e.to_string()),
        };
        let new: Vec<u32> = pids.difference(&self.pids).copied().collect();
        let first = self.pids.is_empty();
        self.pids = pids;
        if first || new.is_empty() {
            return;
        }
        let names: Vec<String> = new.iter().filter_map(|pid| process::name(&self.root, *pid).ok()).collect();
        let of_kernel = names.iter().any(|n| n.starts_with("vhost-") || n.starts_with("kvm-"));
        let vmm = names.iter().any(|n| n.starts_with("qemu") || n == "kvm" || n.starts_with("CPU "));
        if vmm {
            self.contracts.ask_now();
        }
        for tracked in self.tracked.values_mut() {
            tracked.threads_changed |= of_kernel;
            if vmm && tracked.found.is_none() {
                tracked.next_lookup = None;
            }
        }
    }
}

/// The threads of these processes.
pub(super) fn tids(root: &Root, processes: &[ProcessId]) -> BTreeSet<u32> {
    processes.iter().flat_map(|p| task::tids(root, p.pid).unwrap_or_default()).collect()
}
