//! Events that wake the loop, in a thread of their own: contract files, cgroups and ends of VMs,
//! events of libvirt and of QEMU's monitors. They only shorten the reaction: the scan and the
//! comparison find everything without them.

mod budget;
mod reports;
mod retry;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{ProcessId, Root, process};
use rtvirtio_vmm::machines::CommandLine;

use crate::host::Millis;
use budget::Asks;
use reports::{Reporter, Reports};
use watch::{WatchKind, Watches, of_files, of_vm};

pub(crate) use budget::Ask;

/// Interval at which the set of watches is renewed.
const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Most watched cgroups above those of VMs that have ended: their next start is noticed there.
const MOST_ABOVE: usize = 64;
/// Pause after events that concern no contract, before the next ones are read.
const NOISE: Duration = Duration::from_millis(10);

/// Files and daemons that events come from.
pub(crate) struct Sources {
    pub contracts: PathBuf,
    /// Spec files besides the directory.
    pub specs: Vec<PathBuf>,
    /// Interval of scans: in a storm of events, after a burst, the loop is woken once in it.
    pub scan: Duration,
    /// URI of the libvirt daemon that is asked for contracts.
    pub libvirt: Option<String>,
}

/// The VMs that run.
#[derive(Debug, Default)]
pub(crate) struct Running {
    /// Processes of each VM.
    pub vms: Vec<Vec<ProcessId>>,
    /// URIs of the libvirt daemons that manage any.
    pub libvirt: BTreeSet<String>,
}

/// Interface of the event thread to the service.
pub(crate) trait Woken: Send {
    /// The VMs that are watched.
    fn running(&self) -> Running;

    /// Wakes the loop with a request.
    fn ask(&self, ask: Ask);

    /// Takes the number of new events that may concern a contract.
    fn reported(&self, events: u64);

    /// Takes the number of sources that are heard, and messages about others, when these change.
    fn heard(&self, reporters: usize, problems: Vec<String>);
}

/// Wakes the loop soon after something has happened, until the sender is dropped.
///
/// # Errors
/// When the kernel gives no notifications, or no thread.
pub(crate) fn start(sources: Sources, woken: impl Woken + 'static) -> std::io::Result<Sender<()>> {
    let watches = Watches::new()?;
    let (sender, end) = channel::<()>();
    let run = move || run(&sources, watches, &woken, &end);
    std::thread::Builder::new().name("events".to_owned()).spawn(run)?;
    Ok(sender)
}

fn run(sources: &Sources, mut watches: Watches, woken: &dyn Woken, end: &Receiver<()>) {
    let begin = Instant::now();
    let now = || Millis(u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX));
    let until = |due: Millis| Duration::from_millis(due.since(now())).min(RENEW_INTERVAL);
    let every = u64::try_from(sources.scan.min(RENEW_INTERVAL).as_millis()).unwrap_or(u64::MAX);
    let mut asks = Asks::new(every, now());
    let (mut around, mut reports) = (Around::default(), Reports::default());
    let mut heard = (0, Vec::new());
    let mut looked: Option<Instant> = None;
    while matches!(end.try_recv(), Err(TryRecvError::Empty)) {
        if looked.is_none_or(|at| at.elapsed() >= RENEW_INTERVAL) {
            let running = woken.running();
            let mut wanted = of_files(&sources.contracts, &sources.specs);
            wanted.extend(around.groups_to_watch(&Root::default(), &running.vms));
            if watches.set(&wanted, &running.vms.concat()) {
                asks.came(now());
            }
            let daemons = sources.libvirt.iter().cloned().chain(running.libvirt).map(Reporter::Libvirt);
            reports.set(daemons.chain(around.monitors()).collect(), now());
            looked = Some(Instant::now());
        }
        let happened = match asks.look_due() {
            // Until then nothing is read: an event storm costs this thread no more than the loop.
            Some(due) => {
                std::thread::sleep(until(due));
                watches.wait(Duration::ZERO, &[])
            }
            None => watches.wait(asks.compare_due().map_or(RENEW_INTERVAL, until), &reports.fds()),
        };
        if happened.here {
            asks.came(now());
        }
        let reported = reports.read(now());
        if reported.events > 0 {
            woken.reported(reported.events);
            asks.reported(reported.contracts, now());
        } else if happened.others {
            std::thread::sleep(NOISE);
        }
        let heard_now = (reports.heard(), reports.problems());
        if heard_now != heard {
            heard = heard_now;
            woken.heard(heard.0, heard.1.clone());
            asks.came(now());
        }
        if let Some(ask) = asks.take(now()) {
            woken.ask(ask);
        }
    }
}

/// Watched cgroups and monitors of VMs, read when their processes change.
#[derive(Default)]
struct Around {
    /// Running VMs, by PID and start time of their processes.
    known: BTreeMap<Vec<(u32, u64)>, AroundVm>,
    /// Cgroups above those of VMs that have ended.
    above: BTreeSet<PathBuf>,
}

/// Watched cgroups and monitor of one VM.
#[derive(Debug, Default, PartialEq, Eq)]
struct AroundVm {
    groups: BTreeMap<PathBuf, WatchKind>,
    monitor: Option<Reporter>,
}

impl AroundVm {
    fn read(root: &Root, processes: &[ProcessId]) -> Self {
        Self { groups: of_vm(root, processes), monitor: processes.iter().find_map(|p| monitor_of(root, p)) }
    }
}

/// Monitor for events on QEMU's command line; `None` without one.
fn monitor_of(root: &Root, process: &ProcessId) -> Option<Reporter> {
    let arguments = process::command_line(root, process.pid).ok()?;
    let socket = CommandLine::parse(arguments.get(1..)?).events?;
    socket.is_absolute().then(|| Reporter::Monitor { socket, pids: vec![process.pid] })
}

impl Around {
    fn groups_to_watch(&mut self, root: &Root, vms: &[Vec<ProcessId>]) -> BTreeMap<PathBuf, WatchKind> {
        let key = |vm: &Vec<ProcessId>| vm.iter().map(|p| (p.pid, p.start_time)).collect::<Vec<_>>();
        let keys: BTreeSet<_> = vms.iter().map(key).collect();
        for vm in vms {
            self.known.entry(key(vm)).or_insert_with(|| AroundVm::read(root, vm));
        }
        for (_, around) in self.known.iter().filter(|(key, _)| !keys.contains(*key)) {
            let dirs: Vec<&PathBuf> = around.groups.keys().collect();
            let is_above = |dir: &&&PathBuf| dirs.iter().any(|other| other.parent() == Some(dir.as_path()));
            self.above.extend(dirs.iter().filter(is_above).map(|dir| (*dir).clone()));
        }
        self.known.retain(|key, _| keys.contains(key));
        while self.above.len() > MOST_ABOVE {
            self.above.pop_first();
        }
        let mut out: BTreeMap<PathBuf, WatchKind> =
            self.above.iter().map(|dir| (dir.clone(), WatchKind::Groups)).collect();
        out.extend(self.known.values().flat_map(|vm| vm.groups.clone()));
        out
    }

    /// Event monitors of the running VMs.
    fn monitors(&self) -> impl Iterator<Item = Reporter> {
        self.known.values().filter_map(|vm| vm.monitor.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_above_an_ended_vm_stays_watched() {
        let groups = |dirs: &[&str]| dirs.iter().map(|dir| (PathBuf::from(dir), WatchKind::Groups)).collect();
        let process = ProcessId { pid: u32::MAX, start_time: 1 };
        let mut around = Around::default();
        let vm = AroundVm { groups: groups(&["/m", "/m/plc-1"]), monitor: None };
        around.known.insert(vec![(u32::MAX, 1)], vm);
        assert_eq!(around.groups_to_watch(&Root::default(), &[vec![process]]), groups(&["/m", "/m/plc-1"]));
        assert_eq!(around.groups_to_watch(&Root::default(), &[]), groups(&["/m"]));
        assert!(around.known.is_empty());
    }

    #[test]
    fn a_monitor_for_events_is_found_on_the_command_line() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let at = |pid: u32, line: &str| {
            std::fs::create_dir_all(dir.path().join(format!("proc/{pid}"))).unwrap();
            std::fs::write(dir.path().join(format!("proc/{pid}/cmdline")), line.replace(' ', "\0")).unwrap();
            ProcessId { pid, start_time: 1 }
        };
        let line = |path: &str| {
            format!(
                "qemu-system-x86_64 -chardev socket,id=rtvirtio-events,path={path},server=on \
                 -mon chardev=rtvirtio-events,mode=control"
            )
        };
        let socket = PathBuf::from("/run/plc.events");
        let monitor = |pid| Some(Reporter::Monitor { socket: socket.clone(), pids: vec![pid] });
        assert_eq!(monitor_of(&root, &at(7, &line("/run/plc.events"))), monitor(7));
        assert_eq!(monitor_of(&root, &at(8, &line("plc.events"))), None, "relative to a directory of QEMU's");
        assert_eq!(monitor_of(&root, &at(9, "swtpm socket")), None);
        let mut around = Around::default();
        around.groups_to_watch(&root, &[vec![at(9, "swtpm socket"), at(7, &line("/run/plc.events"))]]);
        assert_eq!(around.monitors().collect::<Vec<_>>(), Vec::from_iter(monitor(7)));
        around.groups_to_watch(&root, &[]);
        assert_eq!(around.monitors().count(), 0);
    }
}
