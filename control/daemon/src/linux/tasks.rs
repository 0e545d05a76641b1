//! Processes and threads, listed only where one may have been created.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_kernel::process;
use rtvirtio_vmm::threads::kernel_threads;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::{FoundVm, LinuxHost, Tracked};
use crate::host::ScanDepth;

/// Interval of listings where no task was created at all; each comparison lists too.
const LIST_ANYWAY: Duration = Duration::from_secs(10);

/// State of the last listing of processes and threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    /// PID of the task that was created last by then.
    last: u32,
    at: Instant,
    /// Whether the listing before had the same one.
    twice: bool,
}

impl LinuxHost {
    /// Whether a process or thread may have come since the last sample, by `/proc/loadavg`.
    pub(super) fn may_have_new_tasks(&mut self, now: Instant) -> bool {
        // Read before they are listed: what comes meanwhile is found at the next look.
        let last = process::last_created(&self.root).ok();
        let is_known = self.are_listed(last, now);
        if !is_known {
            // A PID is allocated a moment before its task is listed: so list once more.
            let twice = self.listed.is_some_and(|listed| Some(listed.last) == last);
            self.listed = last.map(|last| Listed { last, at: now, twice });
        }
        !is_known
    }

    fn are_listed(&self, last: Option<u32>, now: Instant) -> bool {
        let is_fresh = |listed: Listed| now.duration_since(listed.at) < LIST_ANYWAY;
        self.listed.is_some_and(|listed| Some(listed.last) == last && listed.twice && is_fresh(listed))
    }

    /// Whether nothing can have changed since the last sample: no task was created, no process of a
    /// VM is gone, nothing was found or is due. A zombie of a VM is seen by an event, or with the
    /// next comparison.
    pub(super) fn is_at_rest(&self, now: Instant) -> bool {
        self.are_listed(process::last_created(&self.root).ok(), now)
            && !self.contracts_changed
            && !self.plan.has_news()
            && !self.lookups.are_under_way()
            && self.tracked.values().all(|tracked| tracked.is_at_rest(now))
    }

    /// Looks among new processes for VMs that have started, and for kernel threads of VMs.
    pub(super) fn new_processes(&mut self, look: ScanDepth) {
        let pids: BTreeSet<u32> = match process::pids(&self.root) {
            Ok(pids) => pids.into_iter().collect(),
            Err(e) => return self.problem(e.to_string()),
        };
        let new: Vec<u32> = pids.difference(&self.pids).copied().collect();
        let first = self.pids.is_empty();
        // A PID may have been reused between two looks: a comparison reads all names anew.
        let unread = if look == ScanDepth::Compare { pids.iter().copied().collect() } else { new.clone() };
        self.kernel_threads.extend(kernel_threads(&self.root, unread.into_iter()));
        self.kernel_threads.retain(|pid| pids.contains(pid));
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

impl Tracked {
    fn is_at_rest(&self, now: Instant) -> bool {
        let lives = |found: &FoundVm| found.processes.iter().all(|process| is_there(process.pid));
        let is_due = match &self.found {
            Some(found) => !lives(found) || self.takes_in(now) || self.splits(now),
            None => self.next_lookup.is_none_or(|at| now >= at),
        };
        !is_due && !self.stale && self.ending.is_empty()
    }
}

/// Whether a process has this PID. A file in `/proc` says whether it is the same one, and costs
/// fifty times as much: a reused PID is a new task.
fn is_there(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}
