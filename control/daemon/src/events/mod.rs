//! Events that wake the loop, in a thread of their own: files of contracts, groups and ends of VMs.
//! They make it sooner, never right: the scan finds everything without them.

mod budget;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{ProcessId, Root};

use crate::host::Millis;
use budget::WakeBudget;
use watch::{Of, Watches, of_files, of_vm};

/// What is watched is looked through again after so long.
const AGAIN: Duration = Duration::from_secs(1);
/// Groups above those of VMs that have ended: their next start is noticed there.
const MOST_ABOVE: usize = 64;

/// Where events come from.
pub(crate) struct Sources {
    /// The directory of contract files.
    pub contracts: PathBuf,
    /// Further spec files.
    pub specs: Vec<PathBuf>,
    /// Between two scans: in a storm of events the loop is woken at most so often.
    pub scan: Duration,
}

/// Calls `wake` soon after something has happened, until the sender is dropped. `running` are the
/// processes of the VMs that are watched, VM by VM.
///
/// # Errors
/// When the kernel gives no notifications, or no thread.
pub(crate) fn start(
    sources: Sources,
    running: impl Fn() -> Vec<Vec<ProcessId>> + Send + 'static,
    wake: impl Fn() + Send + 'static,
) -> std::io::Result<Sender<()>> {
    let watches = Watches::new()?;
    let (sender, end) = channel::<()>();
    let run = move || run(&sources, watches, &running, &wake, &end);
    std::thread::Builder::new().name("events".to_owned()).spawn(run)?;
    Ok(sender)
}

fn run(
    sources: &Sources,
    mut watches: Watches,
    running: &dyn Fn() -> Vec<Vec<ProcessId>>,
    wake: &dyn Fn(),
    end: &Receiver<()>,
) {
    let begin = Instant::now();
    let now = || Millis(u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX));
    let every = u64::try_from(sources.scan.min(AGAIN).as_millis()).unwrap_or(u64::MAX);
    let mut budget = WakeBudget::new(every, now());
    let mut around = Around::default();
    let mut looked: Option<Instant> = None;
    while matches!(end.try_recv(), Err(TryRecvError::Empty)) {
        if looked.is_none_or(|at| at.elapsed() >= AGAIN) {
            let vms = running();
            let mut wanted = of_files(&sources.contracts, &sources.specs);
            wanted.extend(around.of(&Root::default(), &vms));
            if watches.set(&wanted, &vms.concat()) {
                budget.event(now());
            }
            looked = Some(Instant::now());
        }
        match budget.due() {
            // Until then nothing is read: a storm costs this thread no more than the loop.
            Some(due) => {
                std::thread::sleep(Duration::from_millis(due.since(now())).min(AGAIN));
                if budget.take(now()) {
                    watches.wait(Duration::ZERO);
                    wake();
                }
            }
            None => {
                if watches.wait(AGAIN) {
                    budget.event(now());
                }
            }
        }
    }
}

/// The groups around VMs, read when their processes change.
#[derive(Default)]
struct Around {
    known: BTreeMap<Vec<(u32, u64)>, BTreeMap<PathBuf, Of>>,
    /// Of VMs that have ended.
    above: BTreeSet<PathBuf>,
}

impl Around {
    fn of(&mut self, root: &Root, vms: &[Vec<ProcessId>]) -> BTreeMap<PathBuf, Of> {
        let key = |vm: &Vec<ProcessId>| vm.iter().map(|p| (p.pid, p.start_time)).collect::<Vec<_>>();
        let keys: BTreeSet<_> = vms.iter().map(key).collect();
        for vm in vms {
            self.known.entry(key(vm)).or_insert_with(|| of_vm(root, vm));
        }
        for (_, around) in self.known.iter().filter(|(key, _)| !keys.contains(*key)) {
            let dirs: Vec<&PathBuf> = around.keys().collect();
            let is_above = |dir: &&&PathBuf| dirs.iter().any(|other| other.parent() == Some(dir.as_path()));
            self.above.extend(dirs.iter().filter(is_above).map(|dir| (*dir).clone()));
        }
        self.known.retain(|key, _| keys.contains(key));
        while self.above.len() > MOST_ABOVE {
            self.above.pop_first();
        }
        let mut out: BTreeMap<PathBuf, Of> = self.above.iter().map(|dir| (dir.clone(), Of::Groups)).collect();
        out.extend(self.known.values().flatten().map(|(path, of)| (path.clone(), of.clone())));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_above_an_ended_vm_stays_watched() {
        let groups = |dirs: &[&str]| dirs.iter().map(|dir| (PathBuf::from(dir), Of::Groups)).collect();
        let process = ProcessId { pid: u32::MAX, start_time: 1 };
        let mut around = Around::default();
        around.known.insert(vec![(u32::MAX, 1)], groups(&["/m", "/m/plc-1"]));
        assert_eq!(around.of(&Root::default(), &[vec![process]]), groups(&["/m", "/m/plc-1"]));
        assert_eq!(around.of(&Root::default(), &[]), groups(&["/m"]));
        assert!(around.known.is_empty());
    }
}
