//! Threads that come and go: QEMU's workers live for seconds, vhost tasks start with the guest's
//! driver, vCPUs are plugged in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{HostError, Root, process, unless_gone};

use super::{Thread, VmHandle, kernel_thread, process_threads};

/// Looks at a VM's threads again and again and reports what changed.
///
/// It asks `/proc` and needs no privileges; the kernel's process connector would report at once,
/// but takes `CAP_NET_ADMIN` and reports every process of the machine. So a new thread is seen at
/// most one interval late, which [`Appeared::late`] states, and one that comes and goes between two
/// polls is not seen. What such a thread may do is therefore settled before: it inherits cgroup and
/// policy from the thread that starts it, and reset-on-fork makes it an ordinary one.
#[derive(Debug)]
pub struct Watcher {
    vm: VmHandle,
    known: BTreeMap<(u32, u64), Thread>,
    /// Processes of no VM: not opened again at every poll.
    strangers: BTreeSet<u32>,
    last: Option<Instant>,
}

/// A thread that was not there at the last poll.
#[derive(Clone, Debug, PartialEq)]
pub struct Appeared {
    /// The thread.
    pub thread: Thread,
    /// It has existed for at most so long: the time since the last poll that did not fail. Zero at
    /// the first.
    pub late: Duration,
}

/// What changed between two polls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// New threads.
    pub appeared: Vec<Appeared>,
    /// Threads that ended, as they were last seen.
    pub gone: Vec<Thread>,
}

impl Watcher {
    /// Watches a VM; the first poll reports all its threads as new.
    #[must_use]
    pub fn new(vm: VmHandle) -> Self {
        Self { vm, known: BTreeMap::new(), strangers: BTreeSet::new(), last: None }
    }

    /// Whether a poll has succeeded: before that, no known thread does not mean that the VM has
    /// ended.
    #[must_use]
    pub fn has_polled(&self) -> bool {
        self.last.is_some()
    }

    /// The VM as it is watched.
    #[must_use]
    pub fn vm(&self) -> &VmHandle {
        &self.vm
    }

    /// The threads at the last poll.
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

    /// As [`Watcher::poll`], with the kernel's threads looked for among these processes alone.
    ///
    /// # Errors
    /// As [`Watcher::poll`].
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
        // Not before: after a poll that has failed a thread may be there since the one before.
        self.last = Some(now);
        let gone = before.into_iter().filter(|(key, _)| !self.known.contains_key(key)).map(|(_, t)| t);
        Ok(Changes { appeared, gone: gone.collect() })
    }
}
