//! Threads that a VM started while its others had CPUs of ours: they inherited these, and are in no
//! journal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rtvirtio_kernel::{is_gone, process, text};
use rustix::io::Errno;

use crate::journal::{Entry, Journal};
use crate::machine::{Fault, Machine};
use crate::outcome::Fate;
use crate::target::{Form, Place, Target};

/// Scans of a process's threads: one that was not looked at yet may start another meanwhile.
const ROUNDS: u32 = 20;
/// Name of the I/O domain's program.
const DOMAIN: &str = "rtvirtio-iod";

/// Entries of one process in a journal.
#[derive(Default)]
struct Process<'a> {
    /// Whether a thread of the journal lives, so that the pid is still of this process.
    lives: bool,
    threads: BTreeSet<u32>,
    /// Entries by a value of ours, with the CPUs that all threads with that value had before.
    ours: BTreeMap<&'a str, (&'a Entry, BTreeSet<u32>)>,
}

/// Gives threads that are in no journal and have the CPUs that another thread had from us those
/// that it had before. Of the I/O domain only single threads are ours, so it is left out. CPUs that
/// a user gave such a thread meanwhile cannot be told from inherited ones where they are the same.
/// Returns the entries of which that failed, with the reason.
pub(super) fn release<'j>(
    journal: &'j Journal,
    fates: &BTreeMap<usize, Fate>,
    machine: &Machine<'_>,
) -> Vec<(&'j Entry, String)> {
    let mut processes: BTreeMap<u32, Process<'_>> = BTreeMap::new();
    for entry in journal.entries.iter().filter(|e| e.target.form == Form::Affinity) {
        let (Place::Thread { pid, tid, .. }, Some(old)) = (&entry.target.place, entry.old.as_deref()) else {
            continue;
        };
        let of = processes.entry(*pid).or_default();
        of.threads.insert(*tid);
        // Those that keep our value keep what they hand down too.
        if !matches!(fates.get(&entry.id), Some(Fate::Restored { .. } | Fate::Untouched)) {
            continue;
        }
        of.lives = true;
        let Some(before) = text::cpu_list(old).filter(|cpus| !cpus.is_empty()) else { continue };
        let values = entry.new.iter().chain(&entry.also_ours).map(String::as_str);
        for value in values.filter(|value| *value != old) {
            let (_, common) = of.ours.entry(value).or_insert_with(|| (entry, before.clone()));
            // Which of several handed it down is not known: the CPUs that are none too many.
            if !common.is_disjoint(&before) {
                *common = common.intersection(&before).copied().collect();
            }
        }
    }
    let mut failed = Vec::new();
    for (pid, of) in &processes {
        if of.lives {
            failed.extend(release_of(*pid, of, machine));
        }
    }
    failed
}

fn release_of<'j>(pid: u32, of: &Process<'j>, machine: &Machine<'_>) -> Option<(&'j Entry, String)> {
    let (any, _) = of.ours.values().next()?;
    match process::is_of_root(machine.root(), pid, DOMAIN) {
        Ok(true) => return None,
        Ok(false) => {}
        Err(e) => return Some((any, format!("whether its process is the I/O domain is not known: {e}"))),
    }
    let dir = PathBuf::from(format!("/proc/{pid}/task"));
    for _ in 0..ROUNDS {
        let names = match machine.host().list(&dir) {
            Ok(names) => names,
            Err(e) if is_gone(&e) => return None,
            Err(e) => return Some((any, format!("its process's threads cannot be listed: {e}"))),
        };
        let mut found = false;
        for tid in names.iter().filter_map(|name| name.parse::<u32>().ok()) {
            if of.threads.contains(&tid) {
                continue;
            }
            match release_one(pid, tid, of, machine) {
                Ok(released) => found |= released,
                Err(failed) => return Some(failed),
            }
        }
        if !found {
            return None;
        }
    }
    Some((any, "threads with its CPUs keep starting; try again".to_owned()))
}

/// Returns whether the thread had CPUs of ours.
fn release_one<'j>(
    pid: u32,
    tid: u32,
    of: &Process<'j>,
    machine: &Machine<'_>,
) -> Result<bool, (&'j Entry, String)> {
    // The start is not looked at: a thread that ended meanwhile has nothing to give back.
    let target = Target::affinity(pid, tid, 0);
    let text = match machine.read_at(&Place::Host, &target.path) {
        Ok(text) => text,
        Err(Fault::Gone(_)) => return Ok(false),
        Err(Fault::Io(e)) => {
            let any = of.ours.values().next().map(|(entry, _)| (*entry, format!("thread {tid}: {e}")));
            return any.map_or(Ok(false), Err);
        }
    };
    let Some((entry, cpus)) = target.form.value(&text).and_then(|now| of.ours.get(now.as_str())) else {
        return Ok(false);
    };
    match machine.host().set_affinity(pid, tid, cpus).map_err(Fault::from_io) {
        Ok(()) => Ok(true),
        Err(Fault::Gone(_)) => Ok(false),
        // A worker of io_uring, which no program may move, or a cpuset without these CPUs.
        Err(Fault::Io(e)) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(false),
        Err(Fault::Io(e)) => {
            let cpus = text::cpu_ranges(cpus);
            Err((*entry, format!("thread {tid}, which has its CPUs, cannot have `{cpus}`: {e}")))
        }
    }
}
