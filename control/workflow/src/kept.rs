//! One VM's contract in force, and what takes its new threads in.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_cpu::{
    Ask, Backend, Level, Probe, Settings, domain_of, has_part, resplit, take_in, with_levels,
};
use rtvirtio_kernel::{HostError, Root};
use rtvirtio_vmm::threads::{discover, discover_among};
use rtvirtio_vmm::{Role, Thread, VmHandle, Watcher};

use crate::contracts::InForce;
use crate::error::Result;

/// QEMU names a thread, and reports a vCPU to its monitor, some time after it was started: a thread
/// of unknown role is looked up again this many times.
const LOOKUPS: u32 = 10;
/// libvirt puts a thread that it has hot-plugged into a cgroup of its own, where the kernel takes
/// no real-time thread: until that has happened such a thread is left as it was born.
const LIBVIRT_SETTLES: Duration = Duration::from_millis(500);
/// How long CPU use is observed before a budget is split by it.
const OBSERVED: Duration = Duration::from_secs(1);

/// A VM whose contract is kept.
pub struct Kept {
    of: InForce,
    handle: VmHandle,
    watcher: Watcher,
    /// New threads without settings, by number and start.
    pending: BTreeMap<(u32, u64), Pending>,
    /// Threads with their CPU time at the last split, or at the start.
    split: Vec<Thread>,
    split_at: Instant,
    split_every: Duration,
}

/// A thread without settings.
#[derive(Clone, Copy)]
struct Pending {
    /// How often it was looked up.
    lookups: u32,
    /// From when on it may be taken in.
    from: Instant,
}

/// What takes new threads into a contract.
pub struct TakeIn {
    /// The writes, and what is to be known about them.
    pub settings: Settings,
    threads: Vec<Thread>,
    at: Instant,
}

impl Kept {
    /// CPU time counts from here.
    #[must_use]
    pub fn start(of: InForce, handle: VmHandle, root: &Root, split_every: Duration) -> Self {
        Self {
            watcher: Watcher::new(handle.clone()),
            pending: BTreeMap::new(),
            // Where the group has the budget, nothing is split.
            split: if of.backend == Backend::Deadline {
                discover(root, &handle).unwrap_or_default()
            } else {
                Vec::new()
            },
            of,
            split_at: Instant::now(),
            split_every,
            handle,
        }
    }

    /// The contract.
    #[must_use]
    pub fn contract(&self) -> &InForce {
        &self.of
    }

    /// Whether a thread of it was there at the last scan; true until one has succeeded.
    #[must_use]
    pub fn runs(&self) -> bool {
        !self.watcher.has_polled() || self.watcher.threads().next().is_some()
    }

    /// Threads whose settings are not written yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Gives the VM another place among those of its order. All its threads are taken in anew.
    pub fn set_level(&mut self, level: Level) {
        self.of.level = level;
        let now = Pending { lookups: 0, from: Instant::now() };
        let all = self.watcher.threads().map(|t| ((t.tid, t.start), now));
        self.pending.extend(all);
    }

    /// Finds new threads; what takes them in is to be written, and [`Kept::written`] called then.
    /// `None` where there is nothing to do. `look_up` finds the VM's processes and roles anew;
    /// threads of the kernel for the VM are looked for among `processes`.
    ///
    /// # Errors
    /// When `/proc` cannot be read. A VM that has ended is no error.
    pub fn scan(
        &mut self,
        root: &Root,
        probe: &Probe,
        processes: &BTreeSet<u32>,
        look_up: &mut dyn FnMut() -> Option<VmHandle>,
    ) -> Result<Option<TakeIn>> {
        let now = Instant::now();
        let changes = self.watcher.poll_among(root, processes, now)?;
        // A VM in groups of its own is one that libvirt manages.
        let settles = if self.of.group.is_some() { LIBVIRT_SETTLES } else { Duration::ZERO };
        for new in &changes.appeared {
            let pending = Pending { lookups: 0, from: now + settles };
            self.pending.insert((new.thread.tid, new.thread.start), pending);
        }
        let is_split = self.of.backend == Backend::Deadline;
        let has_new = self.pending.values().any(|p| now >= p.from);
        if !(has_new || is_split && self.is_due(now)) {
            return Ok(None);
        }
        if has_new {
            // A monitor that is taken, or a VM that is ending, only costs the certainty of the
            // roles.
            if let Some(handle) = look_up() {
                self.handle = handle;
            }
        }
        let threads = match self.threads(root, processes) {
            Ok(threads) => threads,
            Err(e) if e.is_gone() => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let domain = if is_split { domain_of(root, &threads)? } else { BTreeSet::new() };
        if is_split && !self.splits(&threads, &domain, now) {
            let wait = |t: &Thread| self.lacks_part(t, &domain);
            self.pending = still_pending(&self.pending, &threads, now, wait);
            return Ok(None);
        }
        let is_new = |t: &&Thread| self.pending.get(&(t.tid, t.start)).is_some_and(|p| now >= p.from);
        let new: Vec<Thread> = threads.iter().filter(is_new).cloned().collect();
        let since = |t: &Thread| {
            let old = self.split.iter().find(|o| (o.tid, o.start) == (t.tid, t.start));
            (t.tid, t.cpu_time.saturating_sub(old.map_or(Duration::ZERO, |o| o.cpu_time)))
        };
        let used: Vec<(u32, Duration)> = threads.iter().map(since).collect();
        let ask = Ask {
            vm: &self.of.vm,
            threads: if is_split { &threads } else { &new },
            contract: self.of.contract,
            order: self.of.order,
            level: self.of.level,
            used: &used,
        };
        let mut settings = if is_split {
            resplit(probe, &domain, &ask)
        } else {
            take_in(probe, self.of.backend, self.of.group.as_deref(), &ask)
        };
        if let Some(range) = &self.of.urgency {
            with_levels(root, &self.of.vm, &new, self.of.backend, range, &mut settings.writes)?;
        }
        Ok(Some(TakeIn { settings, threads, at: now }))
    }

    /// The VM's threads now: as they were just polled, where the roles are still the same.
    fn threads(&self, root: &Root, processes: &BTreeSet<u32>) -> std::result::Result<Vec<Thread>, HostError> {
        if self.handle == *self.watcher.vm() {
            return Ok(self.watcher.threads().cloned().collect());
        }
        discover_among(root, &self.handle, processes)
    }

    /// What [`Kept::scan`] asked for has been written.
    pub fn written(&mut self, done: TakeIn) {
        self.pending = still_pending(&self.pending, &done.threads, done.at, |_| false);
        if self.of.backend == Backend::Deadline {
            self.split_at = done.at;
            self.split = done.threads;
        }
    }

    /// Whether the budget is split now: at the set times, and for a thread that has no part yet, as
    /// soon as the others' use has been observed.
    fn splits(&self, threads: &[Thread], domain: &BTreeSet<u32>, now: Instant) -> bool {
        let waits = |t: &Thread| self.pending.contains_key(&(t.tid, t.start)) && self.lacks_part(t, domain);
        self.is_due(now) || (now >= self.split_at + OBSERVED && threads.iter().any(waits))
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.split_at + self.split_every
    }

    fn lacks_part(&self, t: &Thread, domain: &BTreeSet<u32>) -> bool {
        self.of.backend == Backend::Deadline && t.reservation.is_none() && has_part(t, self.of.order, domain)
    }
}

/// New threads to look up again after a look at `now`: those of unknown role, a limited number of
/// times, those that `wait`, and those that were too new.
fn still_pending(
    pending: &BTreeMap<(u32, u64), Pending>,
    threads: &[Thread],
    now: Instant,
    wait: impl Fn(&Thread) -> bool,
) -> BTreeMap<(u32, u64), Pending> {
    let mut again = BTreeMap::new();
    for t in threads {
        let key = (t.tid, t.start);
        let Some(of) = pending.get(&key) else { continue };
        if now < of.from {
            again.insert(key, *of);
            continue;
        }
        let lookups = of.lookups + 1;
        if (t.role == Role::Other && lookups < LOOKUPS) || wait(t) {
            again.insert(key, Pending { lookups, ..*of });
        }
    }
    again
}
