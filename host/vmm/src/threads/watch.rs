//! Changes of a VM's threads: QEMU's workers live for seconds, vhost tasks start with the guest's
//! driver, vCPUs are hot-plugged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{HostError, Root, process, unless_gone};

use super::{Thread, VmHandle, kernel_thread, process_threads};

/// Polls a VM's threads and reports changes.
///
/// Polling `/proc` needs no privileges; the kernel's process connector would report at once, but
/// requires `CAP_NET_ADMIN` and reports every process of the machine. So a new thread is detected
/// at most one interval late, which [`Appeared::late`] states, and a thread that ends before the
/// next poll is not detected. Its rights are therefore set before: it inherits cgroup and policy
/// from the thread that starts it, and reset-on-fork makes it an ordinary one.
#[derive(Debug)]
pub struct Watcher {
    vm: VmHandle,
    known: BTreeMap<(u32, u64), Thread>,
    /// Processes of no VM: not opened again at every poll.
    strangers: BTreeSet<u32>,
    last: Option<Instant>,
}

/// Thread that did not exist at the last poll.
#[derive(Clone, Debug, PartialEq)]
pub struct Appeared {
    /// State of the new thread.
    pub thread: Thread,
    /// Largest possible age of the thread: the time since the last poll that did not fail. Zero at
    /// the first.
    pub late: Duration,
}

/// Changes between two polls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Threads that are new.
    pub appeared: Vec<Appeared>,
    /// Threads that ended, as last read.
    pub gone: Vec<Thread>,
}

impl Watcher {
    /// Watches a VM; the first poll reports all its threads as new.
    #[must_use]
    pub fn new(vm: VmHandle) -> Self {
        Self { vm, known: BTreeMap::new(), strangers: BTreeSet::new(), last: None }
    }

    /// Watches a VM whose threads were just looked at: the first poll reports those that came
    /// since.
    #[must_use]
    pub fn knowing(vm: VmHandle, threads: &[Thread], looked: Instant) -> Self {
        let known = threads.iter().map(|t| ((t.tid, t.start), t.clone())).collect();
        Self { known, last: Some(looked), ..Self::new(vm) }
    }

    /// Whether a poll has succeeded: before that, no known thread does not mean that the VM has
    /// ended.
    #[must_use]
    pub fn has_polled(&self) -> bool {
        self.last.is_some()
    }

    /// Watched VM with its processes.
    #[must_use]
    pub fn vm(&self) -> &VmHandle {
        &self.vm
    }

    /// Threads at the last poll.
    pub fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.known.values()
    }

    /// Reads the threads again. `now` is the time of this poll.
    ///
    /// # Errors
    /// When `/proc` cannot be read. A VM that has ended is no error: its threads are gone.
    pub fn poll(&mut self, root: &Root, now: Instant) -> Result<Changes, HostError> {
        let processes = process::pids(root)?.into_iter().collect();
        self.poll_among(root, &processes, now)
    }

    /// Polls as [`Watcher::poll`], with kernel threads searched only among these processes.
    pub fn poll_among(
        &mut self,
        root: &Root,
        processes: &BTreeSet<u32>,
        now: Instant,
    ) -> Result<Changes, HostError> {
        let late = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        let mut seen = BTreeMap::new();
        for &pid in &self.vm.pids {
            for thread in unless_gone(process_threads(root, pid, &self.vm))?.unwrap_or_default() {
                seen.insert((thread.tid, thread.start), thread);
            }
        }
        let tids: BTreeSet<u32> = seen.keys().map(|key| key.0).collect();
        let pids: BTreeSet<u32> = processes.difference(&self.vm.pids).copied().collect();
        self.strangers.retain(|pid| pids.contains(pid));
        for &pid in pids.difference(&self.strangers.clone()) {
            match kernel_thread(root, pid, &self.vm, &tids)? {
                Some(thread) => {
                    seen.insert((pid, thread.start), thread);
                }
                None => {
                    self.strangers.insert(pid);
                }
            }
        }
        let appeared = seen.iter().filter(|(key, _)| !self.known.contains_key(key));
        let appeared = appeared.map(|(_, t)| Appeared { thread: t.clone(), late }).collect();
        let before = std::mem::replace(&mut self.known, seen);
        // Only now: after a poll that has failed a thread may exist since the one before.
        self.last = Some(now);
        let gone = before.into_iter().filter(|(key, _)| !self.known.contains_key(key)).map(|(_, t)| t);
        Ok(Changes { appeared, gone: gone.collect() })
    }
}
