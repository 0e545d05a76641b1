//! Contracts in force hold for threads that appear later too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rtvirtio_apply::{Amended, ApplyError, JOURNAL_FILE, Machine, NoGuests, Session, Silent};
use rtvirtio_cpu::{Ask, Backend, Probe, domain_of, has_part, probe, resplit, take_in, with_levels};
use rtvirtio_kernel::Root;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle, Watcher};

use crate::contracts::{self, InForce};
use crate::dirs::{Dirs, is_there};
use crate::error::{Result, bail};
use crate::find;
use crate::in_force;
use crate::progress::Progress;
use urgency::{Follower, Wanted};

mod urgency;

pub use rtvirtio_urgency_host::Server;
pub use urgency::{STATUS_FILE, UrgencyStatus};

/// Shortest time between two scans: more of them would themselves be a load.
const SHORTEST_SCAN: Duration = Duration::from_millis(10);
/// QEMU names a thread, and reports a vCPU to its monitor, some time after it was started: a thread
/// of unknown role is looked up again this many times.
const LOOKUPS: u32 = 10;
/// How long CPU use is observed before a budget is split by it.
const OBSERVED: Duration = Duration::from_secs(1);

/// How contracts are kept.
#[derive(Clone, Copy, Debug)]
pub struct KeepOptions {
    /// Time between two scans for new threads.
    pub every: Duration,
    /// Time between two splits of a budget over the threads, where the mechanism knows only single
    /// threads (SCHED_DEADLINE).
    pub split_every: Duration,
}

/// Why keeping ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The user stopped it; what is in force stays.
    Cancelled,
    /// The contracts were put back.
    PutBack,
    /// Every thread of every VM has ended.
    VmsEnded,
}

/// Changed settings of one VM's threads.
pub struct Amendment<'a> {
    /// The VM.
    pub vm: &'a str,
    /// Settings that were written, belong to another program by now, or failed.
    pub amended: &'a Amended,
    /// Limits of the contract.
    pub notes: &'a [String],
}

/// A VM whose contract is kept.
struct Kept {
    of: InForce,
    handle: VmHandle,
    watcher: Watcher,
    /// New threads without settings, by number and start, and how often they were looked up.
    pending: BTreeMap<(u32, u64), u32>,
    /// Threads with their CPU time at the last split, or at the start.
    split: Vec<Thread>,
    split_at: Instant,
    split_every: Duration,
}

/// The constant parts of every scan.
struct Keeper<'a> {
    root: Root,
    probe: Probe,
    /// The process that applied the contracts.
    by: u32,
    /// The VMs of the spec file.
    vms: &'a [Vm],
    dirs: &'a Dirs,
    progress: &'a dyn Progress,
}

/// Keeps the contracts in force of a spec file's VMs until it is stopped, they are put back, or the
/// VMs end. `report` gets each amendment.
///
/// # Errors
/// [`Kind::NotInForce`](crate::Kind::NotInForce) without contracts;
/// [`Kind::NotRunning`](crate::Kind::NotRunning) without a VM;
/// [`Kind::InForce`](crate::Kind::InForce) when other contracts are applied meanwhile.
pub fn keep(
    vms: &[Vm],
    options: &KeepOptions,
    dirs: &Dirs,
    progress: &dyn Progress,
    report: &mut dyn FnMut(&Amendment<'_>) -> Result<()>,
) -> Result<Ended> {
    let root = Root::default();
    let by = match in_force::applied_by(dirs)? {
        Some(by) if is_there(&dirs.state.join(contracts::IN_FORCE_FILE))? => by,
        _ => bail!(NotInForce, "no CPU contract is in force: `rtvirtio apply SPEC` first"),
    };
    let keeper = Keeper { probe: probe(&root)?, root, by, vms, dirs, progress };
    let every = options.every.max(SHORTEST_SCAN);
    let split_every = options.split_every.max(every);
    let (mut kept, mut urgent) = (Vec::new(), Vec::new());
    for of in contracts::in_force(&dirs.state)? {
        if !vms.iter().any(|vm| vm.name == of.vm) {
            bail!(Argument, "the contracts in force are of another spec: it has a VM `{}`", of.vm);
        }
        // The others' contracts hold without it.
        let found = find::one_of_host(vms, &of.vm, dirs).and_then(|vm| Ok((vm.handle(progress)?, vm)));
        match found {
            Ok((handle, vm)) => {
                if of.urgency.is_some() {
                    urgent.push(Wanted { of: of.clone(), vm, handle: handle.clone() });
                }
                kept.push(Kept::start(of, handle, &keeper.root, split_every));
            }
            Err(e) => progress.warn(&format!("{} is not kept: {e:#}", of.vm)),
        }
    }
    if kept.is_empty() {
        bail!(NotRunning, "no VM with a CPU contract is there: start it, revert, and `rtvirtio apply SPEC`");
    }
    let mut follower = Follower::start(urgent, dirs, progress)?;
    let mut next = Instant::now();
    while !progress.is_cancelled() {
        if !is_there(&dirs.state.join(JOURNAL_FILE))? {
            return Ok(Ended::PutBack);
        }
        for vm in &mut kept {
            vm.scan(&keeper, report)?;
        }
        if let Some(follower) = &mut follower {
            follower.poll(dirs, progress)?;
        }
        kept.retain(|vm| {
            let runs = vm.watcher.threads().next().is_some();
            if !runs {
                progress.warn(&format!(
                    "{} has ended; a later start of it is not kept: `rtvirtio revert`, start it, and apply again",
                    vm.of.vm
                ));
            }
            runs
        });
        if kept.is_empty() {
            return Ok(Ended::VmsEnded);
        }
        // A scan that took longer is not repeated.
        next = (next + every).max(Instant::now());
        // Cancelling ends the loop and is no error.
        let _ = progress.pause(next.saturating_duration_since(Instant::now()));
    }
    if let Some(follower) = &mut follower {
        follower.finish()?;
    }
    Ok(Ended::Cancelled)
}

impl Kept {
    /// CPU time counts from here.
    fn start(of: InForce, handle: VmHandle, root: &Root, split_every: Duration) -> Self {
        Self {
            of,
            watcher: Watcher::new(handle.clone()),
            pending: BTreeMap::new(),
            split: discover(root, &handle).unwrap_or_default(),
            split_at: Instant::now(),
            split_every,
            handle,
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

    /// Finds new threads, and takes them in.
    fn scan(
        &mut self,
        keeper: &Keeper<'_>,
        report: &mut dyn FnMut(&Amendment<'_>) -> Result<()>,
    ) -> Result<()> {
        let root = &keeper.root;
        let now = Instant::now();
        let changes = self.watcher.poll(root, now)?;
        for new in &changes.appeared {
            self.pending.insert((new.thread.tid, new.thread.start), 0);
        }
        let is_split = self.of.backend == Backend::Deadline;
        if self.pending.is_empty() && !(is_split && self.is_due(now)) {
            return Ok(());
        }
        if !self.pending.is_empty() {
            // A monitor that is taken, or a VM that is ending, only costs the certainty of the
            // roles.
            let vm = find::one_of_host(keeper.vms, &self.of.vm, keeper.dirs);
            if let Ok(handle) = vm.and_then(|vm| vm.handle(keeper.progress)) {
                self.handle = handle;
            }
        }
        let threads = match discover(root, &self.handle) {
            Ok(threads) => threads,
            Err(e) if e.is_gone() => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let domain = if is_split { domain_of(root, &threads)? } else { BTreeSet::new() };
        if is_split && !self.splits(&threads, &domain, now) {
            let wait = |t: &Thread| self.lacks_part(t, &domain);
            self.pending = still_pending(&self.pending, &threads, wait);
            return Ok(());
        }
        let new: Vec<Thread> =
            threads.iter().filter(|t| self.pending.contains_key(&(t.tid, t.start))).cloned().collect();
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
            resplit(&keeper.probe, &domain, &ask)
        } else {
            take_in(&keeper.probe, self.of.backend, self.of.group.as_deref(), &ask)
        };
        if let Some(range) = &self.of.urgency {
            with_levels(&self.of.vm, &new, self.of.backend, range, &mut settings.writes)?;
        }
        let session = match Session::open(&keeper.dirs.state) {
            Ok(session) => session,
            // Another rtvirtio is at work, perhaps a revert: again at the next scan.
            Err(ApplyError::Locked { .. }) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        match session.applied_by()? {
            Some(now) if now == keeper.by => {}
            // The loop sees it.
            None => return Ok(()),
            Some(_) => {
                bail!(InForce, "other contracts have been applied meanwhile: start `rtvirtio keep` again")
            }
        }
        let amended = session.amend(&settings.writes, &Machine::new(root, &NoGuests), &mut Silent)?;
        drop(session);
        report(&Amendment { vm: &self.of.vm, amended: &amended, notes: &settings.notes })?;
        self.pending = still_pending(&self.pending, &threads, |_| false);
        if is_split {
            self.split_at = now;
            self.split = threads;
        }
        Ok(())
    }
}

/// New threads to look up again: those of unknown role, a limited number of times, and those
/// that `wait`.
fn still_pending(
    pending: &BTreeMap<(u32, u64), u32>,
    threads: &[Thread],
    wait: impl Fn(&Thread) -> bool,
) -> BTreeMap<(u32, u64), u32> {
    let mut again = BTreeMap::new();
    for t in threads {
        let key = (t.tid, t.start);
        let Some(lookups) = pending.get(&key).map(|lookups| lookups + 1) else { continue };
        if (t.role == Role::Other && lookups < LOOKUPS) || wait(t) {
            again.insert(key, lookups);
        }
    }
    again
}
