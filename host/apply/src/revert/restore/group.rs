//! Removing a cgroup of ours: threads that were started in it while it stood are in no journal, and
//! must leave it first.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rtvirtio_kernel::process;
use rtvirtio_kernel::sched::Attr;
use rustix::io::Errno;

use super::{Fate, failed};
use crate::machine::{Machine, TASKS};
use crate::target::Target;

/// Number of further scans of the threads: one that is moved may start another meanwhile.
const ROUNDS: u32 = 20;
/// Pause before the next scan: a cgroup stays busy for a moment after its last thread has ended.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum number of pauses for threads that end. A process that ends keeps its threads in the
/// cgroup until its memory is freed, a second for many GiB: the kernel silently moves none of them.
const ENDING: u32 = 300;

/// Gives every thread that is left the scheduling of the VM's other threads, and moves it to
/// `home`.
pub(super) fn empty(dir: &Path, home: &Path, scheduling: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    let attr = scheduling.parse::<Attr>().map_err(|e| failed(e.to_string()))?;
    let host = machine.host();
    let (mut known, mut rounds, mut pauses) = (BTreeSet::new(), 0, 0);
    while rounds < ROUNDS && pauses < ENDING {
        let tasks = match host.read(&dir.join(TASKS)) {
            Ok(tasks) => tasks,
            Err(e) if rtvirtio_kernel::is_gone(&e) => return Ok(()),
            Err(e) => return Err(failed(format!("reading its threads: {e}"))),
        };
        let left: BTreeSet<u32> = tasks.split_whitespace().filter_map(|t| t.parse().ok()).collect();
        if left.is_empty() {
            return Ok(());
        }
        if left.is_subset(&known) {
            pauses += 1;
            thread::sleep(PAUSE);
        } else {
            rounds += 1;
        }
        known.clone_from(&left);
        for tid in left {
            // A real-time thread is let into no group without a budget, so its policy goes first.
            let moved = host
                .set_scheduling(tid, tid, &attr)
                .and_then(|()| host.write(&home.join(TASKS), &tid.to_string()));
            match moved {
                Ok(()) => {}
                // An ended thread has left by itself. A missing cgroup is not a missing thread.
                Err(e) if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                Err(e) => return Err(failed(format!("moving thread {tid} out of it: {e}"))),
            }
        }
    }
    let why = if pauses < ENDING { "threads keep starting in it" } else { "threads in it do not end" };
    Err(failed(format!("{why}; stop the VM, or try again")))
}

/// Refuses while a group of resctrl has a thread of another process than these, or a monitoring
/// group, which would be removed with it.
pub(super) fn has_no_others(dir: &Path, processes: &[u32], machine: &Machine<'_>) -> Result<(), Fate> {
    let used = |by: String| Err(Fate::Conflict { found: format!("present, with {by}") });
    match machine.host().list(&dir.join("mon_groups")) {
        Ok(names) if names.is_empty() => {}
        Ok(names) => return used(format!("monitoring group {}", names.join(", "))),
        Err(e) if rtvirtio_kernel::is_gone(&e) => {}
        Err(e) => return Err(failed(format!("reading its monitoring groups: {e}"))),
    }
    let tasks = match machine.host().read(&dir.join(TASKS)) {
        Ok(tasks) => tasks,
        Err(e) if rtvirtio_kernel::is_gone(&e) => return Ok(()),
        Err(e) => return Err(failed(format!("reading its threads: {e}"))),
    };
    for tid in tasks.split_whitespace().filter_map(|tid| tid.parse().ok()) {
        match process::of_thread(machine.root(), tid) {
            Ok(pid) if processes.contains(&pid) => {}
            Ok(pid) => return used(format!("thread {tid} of process {pid}")),
            Err(e) if e.is_gone() => {}
            Err(e) => return Err(failed(format!("the process of thread {tid}: {e}"))),
        }
    }
    Ok(())
}

/// Takes the real-time budget from a cgroup that is about to be removed. The kernel counts a
/// removed cgroup's budget until its last reference is dropped, some milliseconds later
/// (`cpu_cgroup_css_released()`), and refuses the next cgroup's meanwhile. The journal has 0 as an
/// intermediate value, so that a run that is killed here can be resumed.
pub(super) fn give_back(dir: &Path, machine: &Machine<'_>) {
    let file = dir.join(super::budget::FILE);
    // A kernel without such budgets has no such file. Where it cannot be read or is refused, the
    // next group may have to wait: nothing worse.
    if machine.host().read(&file).is_ok() {
        let _ = machine.host().write(&file, "0");
    }
}

/// Removes the empty group.
pub(super) fn remove(target: &Target, machine: &Machine<'_>) -> Result<(), Fate> {
    for _ in 0..ROUNDS {
        match machine.host().remove_dir(&target.path) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => thread::sleep(PAUSE),
            Err(e) if rtvirtio_kernel::is_gone(&e) => return Ok(()),
            other => return other.map_err(|e| failed(format!("removing it: {e}"))),
        }
    }
    Err(failed("it is still in use".to_owned()))
}
