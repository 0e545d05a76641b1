//! Keeps contracts in force also for threads that appear later.

use std::time::{Duration, Instant};

use rtvirtio_apply::{Amended, ApplyError, JOURNAL_FILE, Machine, NoGuests, Session, Silent};
use rtvirtio_cpu::{Probe, probe};
use rtvirtio_kernel::{Root, process};
use rtvirtio_spec::Vm;

use crate::contracts::{self, InForce};
use crate::dirs::{Dirs, is_there};
use crate::error::{Error, Kind, Result, bail};
use crate::holders;
use crate::in_force;
use crate::managed_vm::ManagedVm;
use crate::progress::Progress;
use host_cpus::HostCpus;
use memory::MemoryGroups;
use partitions::Partitions;
use search::Search;
use sought::Sought;
use urgency::{Follower, Wanted};
use warnings::Failures;

mod host_cpus;
mod memory;
mod partitions;
mod search;
mod signals;
mod sought;
mod urgency;
mod warnings;

pub use rtvirtio_urgency_host::Server;
pub use urgency::{STATUS_FILE, UrgencyStatus};

/// Shortest time between two scans: more of them would themselves be a load.
const SHORTEST_SCAN: Duration = Duration::from_millis(10);
/// Longest interval between two checks for VMs that are being looked for.
const ARRIVALS: Duration = Duration::from_millis(50);
/// Timeout of a monitor in a scan; without its answer the roles of new threads are uncertain.
const LOOK_UP: Duration = Duration::from_millis(200);
/// Options of keeping contracts.
#[derive(Clone, Copy, Debug)]
pub struct KeepOptions {
    /// Time between two scans for new threads.
    pub every: Duration,
    /// Time between two splits of a budget over the threads, where the mechanism knows only single
    /// threads (SCHED_DEADLINE).
    pub split_every: Duration,
}

/// Reason for the end of keeping contracts.
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
    pub vm: &'a str,
    /// Settings that were written, belong to another program by now, or failed.
    pub amended: &'a Amended,
    /// Limits of the contract.
    pub notes: &'a [String],
    /// Reasons why vCPUs that were plugged in have no CPU of their own, each once.
    pub without_cpus: &'a [String],
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
}

impl Keeper<'_> {
    /// The journal; `None` while another rtvirtio is at work, perhaps a revert: to be tried again.
    fn session(&self) -> Result<Option<Session>> {
        match Session::open(&self.dirs.state) {
            Err(ApplyError::Locked { .. }) => Ok(None),
            session => Ok(Some(session?)),
        }
    }
}

/// Keeps the contracts in force of a spec file's VMs until it is stopped, they are put back, or the
/// VMs end. `report` gets each amendment.
///
/// # Errors
/// [`Kind::NotInForce`] without contracts;
/// [`Kind::NotRunning`] without a VM;
/// [`Kind::InForce`] when other contracts are applied meanwhile.
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
    let keeper = Keeper { probe: probe(&root)?, root, by, vms, dirs };
    let every = options.every.max(SHORTEST_SCAN);
    let split_every = options.split_every.max(every);
    let (mut kept, mut search, mut sought) = (Vec::new(), Search::new(dirs), Sought::default());
    for of in contracts::in_force(&dirs.state)? {
        let Some(vm) = vms.iter().find(|vm| vm.name == of.vm) else {
            bail!(
                Argument,
                "the contracts in force are of another spec, with a VM `{}`: name that one, or `rtvirtio revert` and apply this one",
                of.vm
            );
        };
        sought.add(of, vm);
    }
    let is_urgent = |of: &InForce| of.urgency.is_some();
    let mut follower = if sought.any(is_urgent) { Some(Follower::start(dirs, progress)?) } else { None };
    let (mut failures, mut lookups) = (Failures::default(), Failures::default());
    // The second: whether the thread that follows urgency has seen the revert.
    let (mut has_kept, mut put_back) = (false, false);
    let (mut host_cpus, mut partitions) = (HostCpus::default(), Partitions::default());
    let mut memory = MemoryGroups::default();
    let mut next = Instant::now();
    while !progress.is_cancelled() {
        if !is_there(&dirs.state.join(JOURNAL_FILE))? {
            return Ok(Ended::PutBack);
        }
        for (of, vm, handle) in sought.poll(&mut search, Instant::now(), &|line| progress.warn(line)) {
            if let (Some(follower), true) = (&mut follower, is_urgent(&of)) {
                let wanted = Wanted { of: of.clone(), vm, handle: handle.clone() };
                if let Err(e) = follower.follow(wanted, dirs) {
                    progress.warn(&format!("the urgency of {} is not followed: {e:#}", of.vm));
                }
            }
            kept.push(ManagedVm::start(of, handle, &keeper.root, split_every));
            has_kept = true;
        }
        for vm in &mut kept {
            if !failures.is_due(&vm.contract().vm, Instant::now()) {
                continue;
            }
            let begin = Instant::now();
            match scan(vm, &keeper, &mut lookups, &mut search) {
                Ok(Scan::Busy) => continue,
                Ok(Scan::Done) => {}
                Ok(Scan::Written { amended, notes, without_cpus }) => report(&Amendment {
                    vm: &vm.contract().vm,
                    amended: &amended,
                    notes: &notes,
                    without_cpus: &without_cpus,
                })?,
                Ok(Scan::Replaced) => return Err(replaced()),
                Err(e) if is_of_all(&e) => return Err(e),
                Err(e) => {
                    let (name, why) = (&vm.contract().vm, format!("{e:#}"));
                    if failures.add(name, why.clone(), begin.elapsed(), Instant::now()) {
                        progress
                            .warn(&format!("new threads of {name} have no contract yet: {why}; tried again"));
                    }
                    continue;
                }
            }
            failures.forget(&vm.contract().vm);
        }
        host_cpus.poll(&keeper, &kept).iter().for_each(|line| progress.warn(line));
        memory.poll(&keeper, &kept).iter().for_each(|line| progress.warn(line));
        let invalid = partitions.poll(&keeper.root, kept.iter().map(ManagedVm::contract));
        invalid.iter().for_each(|line| progress.warn(line));
        if let Some(follower) = &mut follower {
            put_back |= follower.poll(dirs, progress)? == Some(rtvirtio_urgency_host::Ended::PutBack);
        }
        if put_back {
            match in_force::applied_by(dirs) {
                Ok(Some(now)) if now != by => return Err(replaced()),
                // A journal of the same process is what that revert has left, and has reported.
                Ok(_) => return Ok(Ended::PutBack),
                // A revert is still at work.
                Err(e) if matches!(e.cause(), Some(ApplyError::Locked { .. })) => {}
                Err(e) => return Err(e),
            }
        }
        kept.retain(|vm| {
            let runs = vm.runs();
            if !runs {
                progress.warn(&format!(
                    "{} has ended; a later start of it is not kept: `rtvirtio revert`, start it, and apply again",
                    vm.contract().vm
                ));
            }
            runs
        });
        if kept.is_empty() && sought.has_ended(Instant::now()) {
            if has_kept {
                return Ok(Ended::VmsEnded);
            }
            bail!(NotRunning, "no VM with a CPU contract runs: start it, revert, and `rtvirtio apply SPEC`");
        }
        // A scan that took longer is not repeated.
        let pause = if sought.is_searching(Instant::now()) { every.min(ARRIVALS) } else { every };
        next = (next + pause).max(Instant::now());
        // Cancelling ends the loop and is no error.
        let _ = progress.pause(next.saturating_duration_since(Instant::now()));
    }
    if let Some(follower) = &mut follower {
        follower.finish()?;
    }
    Ok(Ended::Cancelled)
}

fn replaced() -> Error {
    Error::new(Kind::InForce, "other contracts have been applied meanwhile: start `rtvirtio keep` again")
}

/// Whether it is an error of what is in force, not of one VM.
fn is_of_all(error: &Error) -> bool {
    matches!(
        error.cause::<ApplyError>(),
        Some(
            ApplyError::NotWhole { .. }
                | ApplyError::BadJournal { .. }
                | ApplyError::OtherVersion { .. }
                | ApplyError::UntrustedState { .. }
        )
    )
}

/// Outcome of a scan of one VM.
enum Scan {
    /// The lock is held by another rtvirtio: the next scan tries again.
    Busy,
    /// Nothing was to be written.
    Done,
    /// New threads have settings; with the limits of the contract, and the reasons why vCPUs have
    /// no CPU.
    Written { amended: Amended, notes: Vec<String>, without_cpus: Vec<String> },
    /// Other contracts are in force.
    Replaced,
}

/// Finds new threads of a VM, and gives them the contract's settings.
///
/// # Errors
/// Those threads are looked at again by the next scan.
fn scan(
    kept: &mut ManagedVm,
    keeper: &Keeper<'_>,
    lookups: &mut Failures,
    search: &mut Search,
) -> Result<Scan> {
    let root = &keeper.root;
    let vm = kept.contract().vm.clone();
    // A monitor that does not answer costs only the certainty of the roles, and all VMs the time.
    let mut look_up = || {
        let begin = Instant::now();
        if !lookups.is_due(&vm, begin) {
            return None;
        }
        let spec = keeper.vms.iter().find(|of| of.name == vm)?;
        let found = search.start(spec).and_then(|()| match search.wait_for(&vm, LOOK_UP) {
            Some(found) => found.found,
            None => bail!(NotRunning, "its monitor has not answered yet"),
        });
        match found {
            Ok((_, handle)) => {
                lookups.forget(&vm);
                Some(handle)
            }
            Err(e) => {
                lookups.add(&vm, e.to_string(), begin.elapsed(), Instant::now());
                None
            }
        }
    };
    let processes = process::pids(root)?.into_iter().collect();
    let Some(mut new) = kept.scan(root, &keeper.probe, &processes, &mut look_up)? else {
        return Ok(Scan::Done);
    };
    let Some(session) = keeper.session()? else { return Ok(Scan::Busy) };
    match session.applied_by()? {
        Some(now) if now == keeper.by => {}
        // The loop notices that the journal is gone.
        None => return Ok(Scan::Busy),
        Some(_) => return Ok(Scan::Replaced),
    }
    let mut without_cpus = Vec::new();
    if kept.lacks_cpus(&new) {
        let state = &keeper.dirs.state;
        let others = contracts_of_others(&vm, keeper.dirs)?;
        without_cpus = kept.place_hotplugged(&mut new, root, &keeper.probe, &others)?;
        // Before the write, so that nothing else is placed on these CPUs in any case.
        new.changed(kept.contract()).map_or(Ok(()), |of| contracts::replace_in_force(of, state))?;
    }
    let mut amended = session.amend(&new.settings.writes, &Machine::new(root, &NoGuests), &mut Silent)?;
    drop(session);
    amended.warnings.extend(new.stuck.clone());
    let notes = new.settings.notes.clone();
    kept.written(new);
    Ok(Scan::Written { amended, notes, without_cpus })
}

/// The contracts in force for the other VMs that run, those of the service and of agents among
/// them, each with the processes of its VM.
fn contracts_of_others(vm: &str, dirs: &Dirs) -> Result<Vec<(InForce, Vec<u32>)>> {
    let mut all = holders::cpu_in(&dirs.state)?;
    all.retain(|(of, _)| of.vm != vm);
    all.extend(holders::cpu_of_others(dirs)?);
    Ok(all)
}
