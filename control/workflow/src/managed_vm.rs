//! A VM's contract in force, and the writes that extend it to new threads.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_cpu::{
    Ask, Backend, Level, Probe, Settings, domain_of, has_part, release_ending, resplit, take_in, with_levels,
};
use rtvirtio_kernel::{HostError, Root};
use rtvirtio_vmm::threads::{discover, discover_among};
use rtvirtio_vmm::{Role, Thread, VmHandle, Watcher};

use crate::contracts::{InForce, give_cpus};
use crate::error::Result;
use crate::pieces::{Key, first_of, key};
use hotplugged::HotpluggedVcpus;
use stuck::ThrottledThreads;

mod hotplugged;
mod stuck;

/// QEMU names a thread, and reports a vCPU to its monitor, some time after it was started: a thread
/// of unknown role is looked up again this many times.
const LOOKUPS: u32 = 10;
/// libvirt puts a thread that it has hot-plugged into a cgroup of its own, where the kernel takes
/// no real-time thread: until that has happened such a thread is left as it was born.
const LIBVIRT_SETTLES: Duration = Duration::from_millis(500);
/// Time for which ending threads are looked for after one has ended.
const ENDING: Duration = Duration::from_secs(10);
/// Time for which CPU use is observed before a budget is split by it.
const OBSERVED: Duration = Duration::from_secs(1);

/// A VM whose contract is kept.
pub struct ManagedVm {
    of: InForce,
    handle: VmHandle,
    watcher: Watcher,
    /// New threads without settings, by number and start.
    pending: BTreeMap<Key, Pending>,
    /// Threads that are taken in at once.
    piece: usize,
    /// Threads with their CPU time at the last split, or at the start.
    split: Vec<Thread>,
    split_at: Instant,
    split_every: Duration,
    /// Threads at the last scan that are to have a part of the budget and had none.
    unreserved: usize,
    /// vCPUs that were plugged in and for which no CPU was left.
    hotplugged: HotpluggedVcpus,
    /// Time at which a poll last missed a thread.
    thread_ended: Option<Instant>,
    throttled: ThrottledThreads,
}

/// A thread without settings.
#[derive(Clone, Copy)]
struct Pending {
    /// Number of lookups so far.
    lookups: u32,
    /// Earliest time at which it may get settings.
    from: Instant,
    /// Whether it was there at the first poll, or is to get settings again.
    is_known: bool,
}

/// Writes that extend a contract to new threads.
pub struct TakeIn {
    /// The writes, and notes on the contract.
    pub settings: Settings,
    /// Threads to which the writes apply; all threads where a budget is split over them.
    threads: Vec<Thread>,
    /// New threads among these.
    taken: BTreeSet<Key>,
    /// Result of [`ManagedVm::place_hotplugged`]; `None` where no vCPU lacks a CPU.
    placed: Option<hotplugged::Placed>,
    /// Line on a thread that may be throttled for good.
    pub stuck: Option<String>,
    at: Instant,
}

impl ManagedVm {
    /// Starts to keep a contract in force; CPU time counts from now.
    #[must_use]
    pub fn start(of: InForce, handle: VmHandle, root: &Root, split_every: Duration) -> Self {
        // Where the group has the budget, nothing is split.
        let is_split = of.backend == Backend::Deadline;
        let split = if is_split { discover(root, &handle).unwrap_or_default() } else { Vec::new() };
        let watcher = Watcher::new(handle.clone());
        Self { split, ..Self::new(of, handle, watcher, Instant::now(), split_every) }
    }

    /// A VM of which no thread is known to lack settings.
    fn new(
        of: InForce,
        handle: VmHandle,
        watcher: Watcher,
        split_at: Instant,
        split_every: Duration,
    ) -> Self {
        Self {
            of,
            handle,
            watcher,
            pending: BTreeMap::new(),
            piece: usize::MAX,
            split: Vec::new(),
            split_at,
            split_every,
            unreserved: 0,
            hotplugged: HotpluggedVcpus::default(),
            thread_ended: None,
            throttled: ThrottledThreads::default(),
        }
    }

    /// A contract that was just put in force for these threads; those of `later` are not in it yet.
    #[must_use]
    pub fn of_threads(
        of: InForce,
        handle: VmHandle,
        threads: &[Thread],
        later: &BTreeSet<Key>,
        split_every: Duration,
    ) -> Self {
        let now = Instant::now();
        let pending = |t: &Thread| {
            let is_later = later.contains(&key(t));
            // One without a role has what no role asks for, and may get a role.
            let pending = Pending { lookups: u32::from(!is_later), from: now, is_known: true };
            (is_later || t.role == Role::Other).then(|| (key(t), pending))
        };
        let watcher = Watcher::knowing(handle.clone(), threads, now);
        let pending = threads.iter().filter_map(pending).collect();
        Self { pending, ..Self::new(of, handle, watcher, now, split_every) }
    }

    /// Takes at most so many threads in at once. A budget that is split over threads is split over
    /// all.
    #[must_use]
    pub fn in_pieces(self, piece: usize) -> Self {
        Self { piece: piece.max(1), ..self }
    }

    /// Threads that could be in the contract and are not yet; `None` before they were looked at.
    /// Those that have just come count from when they may be taken in, and those without a part of
    /// a budget that is split over threads until a scan finds that they have it.
    #[must_use]
    pub fn outside(&self) -> Option<usize> {
        let now = Instant::now();
        let is_outside = |p: &&Pending| p.lookups == 0 && (p.is_known || now >= p.from);
        let new = || self.pending.values().filter(is_outside).count();
        self.watcher.has_polled().then(|| new().max(self.unreserved))
    }

    /// Whether a thread had no part of the budget at the last scan: the kernel may refuse it one
    /// for as long as it sleeps after its CPUs became a partition.
    #[must_use]
    pub fn lacks_parts(&self) -> bool {
        self.unreserved > 0
    }

    /// Whether a new thread may get settings now.
    #[must_use]
    pub fn has_next(&self) -> bool {
        let now = Instant::now();
        self.hotplugged.is_due(now) || self.pending.values().any(|p| p.lookups == 0 && now >= p.from)
    }

    /// Contract in force, with its current level.
    #[must_use]
    pub fn contract(&self) -> &InForce {
        &self.of
    }

    /// Whether a thread of it was there at the last scan; true until one has succeeded.
    #[must_use]
    pub fn runs(&self) -> bool {
        !self.watcher.has_polled() || self.watcher.threads().next().is_some()
    }

    /// Threads of the VM at the last scan.
    #[must_use]
    pub fn threads(&self) -> Vec<Thread> {
        self.watcher.threads().cloned().collect()
    }

    /// Threads whose settings are not written yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Changes the VM's level among those of its order. All its threads get settings again.
    pub fn set_level(&mut self, level: Level) {
        self.of.level = level;
        let now = Pending { lookups: 0, from: Instant::now(), is_known: true };
        let all: Vec<_> = self.watcher.threads().map(|t| (key(t), now)).collect();
        self.pending.extend(all);
    }

    /// Finds new threads and returns the writes for them; [`ManagedVm::written`] is to be called
    /// after these. `None` where there is nothing to do. `look_up` finds the VM's processes and
    /// roles again; threads of the kernel for the VM are looked for among `processes`.
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
        self.poll(root, processes)?;
        let found = self.next(root, probe, processes, look_up, true)?;
        self.release_ending(root)?;
        Ok(found)
    }

    /// Takes threads that are ending out of the contract, for some time after one has ended: the
    /// last ones of a VM may be throttled, and begin to end later.
    fn release_ending(&self, root: &Root) -> Result<()> {
        if self.thread_ended.is_none_or(|at| at.elapsed() > ENDING) {
            return Ok(());
        }
        let mut fault = None;
        for pid in &self.handle.pids {
            // One that is refused keeps no other from it.
            fault = release_ending(root, *pid).err().or(fault);
        }
        fault.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Finds threads that have come.
    fn poll(&mut self, root: &Root, processes: &BTreeSet<u32>) -> Result<()> {
        let now = Instant::now();
        let is_first = !self.watcher.has_polled();
        let settles = self.settles();
        let changes = self.watcher.poll_among(root, processes, now)?;
        for new in &changes.appeared {
            let pending = Pending { lookups: 0, from: now + settles, is_known: is_first };
            self.pending.insert(key(&new.thread), pending);
        }
        if !changes.gone.is_empty() {
            self.thread_ended = Some(now);
        }
        Ok(())
    }

    /// Like [`ManagedVm::scan`], without looking for further threads: the writes for the next piece
    /// of those that the last scan has found.
    pub fn take_next(
        &mut self,
        root: &Root,
        probe: &Probe,
        processes: &BTreeSet<u32>,
        look_up: &mut dyn FnMut() -> Option<VmHandle>,
    ) -> Result<Option<TakeIn>> {
        self.next(root, probe, processes, look_up, false)
    }

    /// The next piece; `again` includes threads of unknown role that were looked up before, which
    /// have a limited number of lookups.
    fn next(
        &mut self,
        root: &Root,
        probe: &Probe,
        processes: &BTreeSet<u32>,
        look_up: &mut dyn FnMut() -> Option<VmHandle>,
        again: bool,
    ) -> Result<Option<TakeIn>> {
        let now = Instant::now();
        let is_split = self.of.backend == Backend::Deadline;
        let is_due = |p: &Pending| now >= p.from && (again || p.lookups == 0);
        let tried_again = self.hotplugged.take_due(now);
        let known = Pending { lookups: 0, from: now, is_known: true };
        self.pending.extend(tried_again.into_iter().map(|key| (key, known)));
        let has_new = self.pending.values().any(is_due);
        if !(has_new || is_split && self.is_due(now)) {
            return Ok(None);
        }
        if has_new {
            // A busy monitor or an ending VM only costs the certainty of the roles.
            if let Some(handle) = look_up() {
                self.handle = handle;
            }
        }
        match self.look_again(root, processes) {
            Ok(()) => {}
            Err(e) if e.is_gone() => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        // A VM may have thousands of threads: for a piece of them the others are not copied.
        let threads: Vec<Thread> =
            if is_split { self.watcher.threads().cloned().collect() } else { Vec::new() };
        let domain = if is_split { domain_of(root, &threads)? } else { BTreeSet::new() };
        self.unreserved = threads.iter().filter(|t| self.lacks_part(t, &domain)).count();
        // A partition that is not valid now is made again, or given up: its budget is for its CPUs.
        let is_there = self.of.partition.as_ref().is_none_or(|of| domain.is_subset(&of.cpus));
        if is_split && !(is_there && self.splits(&threads, &domain, now)) {
            let wait = |t: &Thread| self.lacks_part(t, &domain);
            self.pending = still_pending(&self.pending, &threads, now, wait);
            return Ok(None);
        }
        let stuck = self.throttled.poll(root, &threads, now);
        let is_new = |t: &&Thread| self.pending.get(&key(t)).is_some_and(is_due);
        let piece = if is_split { usize::MAX } else { self.piece };
        let new: Vec<Thread> = first_of(self.watcher.threads().filter(is_new).collect(), piece);
        let taken = new.iter().map(key).collect();
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
        if let Some(cores) = &self.of.cores {
            give_cpus(cores, &self.of.vm, &new, &mut settings);
        }
        let threads = if is_split { threads } else { new };
        Ok(Some(TakeIn { settings, threads, taken, placed: None, stuck, at: now }))
    }

    /// Time for which new threads are left alone: a VM in cgroups of its own is one that libvirt
    /// manages, and it moves them first.
    fn settles(&self) -> Duration {
        if self.of.group.is_some() { LIBVIRT_SETTLES } else { Duration::ZERO }
    }

    /// Finds the VM's threads again where they have other roles than when they were polled.
    fn look_again(&mut self, root: &Root, processes: &BTreeSet<u32>) -> std::result::Result<(), HostError> {
        if self.handle == *self.watcher.vm() {
            return Ok(());
        }
        let looked = Instant::now();
        let threads = discover_among(root, &self.handle, processes)?;
        // Those that have come since the poll are new all the same.
        let known: BTreeSet<Key> = self.watcher.threads().map(key).collect();
        let settles = self.settles();
        for t in threads.iter().filter(|t| !known.contains(&key(t))) {
            self.pending.insert(key(t), Pending { lookups: 0, from: looked + settles, is_known: false });
        }
        self.watcher = Watcher::knowing(self.handle.clone(), &threads, looked);
        Ok(())
    }

    /// Looks for threads that are not in the contract, where nothing may be written: `journaled`
    /// are the threads of its journal.
    pub fn find_new(
        &mut self,
        root: &Root,
        probe: &Probe,
        processes: &BTreeSet<u32>,
        journaled: &BTreeSet<u32>,
    ) -> Result<()> {
        self.poll(root, processes)?;
        // Nothing is written, so no thread is too new.
        let now = Instant::now();
        self.pending.values_mut().for_each(|p| p.from = now);
        let piece = std::mem::replace(&mut self.piece, usize::MAX);
        let handle = self.handle.clone();
        let found = self.next(root, probe, processes, &mut || Some(handle.clone()), true);
        self.piece = piece;
        let Some(mut new) = found? else { return Ok(()) };
        let wanted = crate::pieces::threads_of(&new.settings.writes);
        new.taken.retain(|key| !wanted.contains(key) || journaled.contains(&key.0));
        self.took(&new);
        Ok(())
    }

    /// Notes that the writes of [`ManagedVm::scan`] have been made.
    pub fn written(&mut self, mut done: TakeIn) {
        if let Some(placed) = done.placed.take() {
            self.of = placed.of;
            self.hotplugged.note(placed.without, done.at);
        }
        self.took(&done);
        if self.of.backend == Backend::Deadline {
            self.split_at = done.at;
            self.split = done.threads;
        }
    }

    /// Notes that threads were taken in: those of unknown role are looked up again a limited number
    /// of times.
    fn took(&mut self, done: &TakeIn) {
        let there: BTreeSet<Key> = self.watcher.threads().map(key).collect();
        self.pending.retain(|key, _| there.contains(key));
        self.hotplugged.retain(&there);
        for t in done.threads.iter().filter(|t| done.taken.contains(&key(t))) {
            let Some(of) = self.pending.get_mut(&key(t)) else { continue };
            of.lookups += 1;
            if t.role != Role::Other || of.lookups >= LOOKUPS {
                self.pending.remove(&key(t));
            }
        }
    }

    /// Whether the budget is split now: at the set times, and for a thread that has no part yet, as
    /// soon as the others' use has been observed.
    fn splits(&self, threads: &[Thread], domain: &BTreeSet<u32>, now: Instant) -> bool {
        let waits = |t: &Thread| self.pending.contains_key(&key(t)) && self.lacks_part(t, domain);
        self.is_due(now) || (now >= self.split_at + OBSERVED && threads.iter().any(waits))
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.split_at + self.split_every
    }

    fn lacks_part(&self, t: &Thread, domain: &BTreeSet<u32>) -> bool {
        self.of.backend == Backend::Deadline && t.reservation.is_none() && has_part(t, self.of.order, domain)
    }
}

/// New threads to look up again after a look at `now` that has split nothing: those of unknown
/// role, a limited number of times, those that `wait`, and those that were too new.
fn still_pending(
    pending: &BTreeMap<Key, Pending>,
    threads: &[Thread],
    now: Instant,
    wait: impl Fn(&Thread) -> bool,
) -> BTreeMap<Key, Pending> {
    let mut again = BTreeMap::new();
    for t in threads {
        let key = key(t);
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

#[cfg(test)]
mod tests;
