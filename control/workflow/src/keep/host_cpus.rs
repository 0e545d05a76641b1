//! CPUs of the host that go offline and come back while contracts with `cores` are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_apply::{Line, Machine, NoGuests};
use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{HostError, Root, cpuset, task, unless_gone};

use super::Keeper;
use crate::core_faults::{CoreFault, core_faults};
use crate::error::{Context as _, Result};
use crate::managed_vm::ManagedVm;

const CPUS: &str = "/sys/devices/system/cpu";
/// Begin of the sentence on an error.
const UNKNOWN: &str = "whether all CPUs of VMs with `cores` are there is not known";

/// Time after a change in which the kernel may take threads their CPUs: it does so by a work queue.
const SETTLES: Duration = Duration::from_secs(5);
/// Interval of looks in that time.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// CPUs that are online, each with the inode of its directory `topology`, where the kernel has one:
/// it makes that directory anew when the CPU comes back (`drivers/base/topology.c`).
type Online = BTreeMap<u32, Option<u64>>;

/// CPUs of the host at the last look.
#[derive(Default)]
pub(super) struct HostCpus {
    online: Option<Online>,
    /// VMs at the last look: each may have lost CPUs before it was found.
    vms: BTreeSet<String>,
    /// Last change of these, and the next look after it.
    changed: Option<(Instant, Instant)>,
    /// Time of the last look.
    looked: Option<Instant>,
    /// Whether the last try to give CPUs back did not come to its end.
    is_open: bool,
    said: BTreeSet<String>,
}

impl HostCpus {
    /// At first, and where CPUs have gone or come since the last look: gives threads the CPUs again
    /// that they lost by that, unless another VM is on the core by now. Before Linux 6.2 each
    /// change takes all threads of a cpuset their CPUs (`cpuset_hotplug_update_tasks()`), later
    /// ones only those that have none left. Returns what is to be said, each sentence once for as
    /// long as it is true.
    pub fn poll(&mut self, keeper: &Keeper<'_>, kept: &[ManagedVm]) -> Vec<String> {
        let now = Instant::now();
        let is_early = self.looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK_EVERY);
        if is_early || kept.iter().all(|vm| vm.contract().cores.is_none()) {
            return Vec::new();
        }
        self.looked = Some(now);
        match self.changes(now, keeper, kept) {
            Ok(None) => Vec::new(),
            Ok(Some(lines)) => self.new_lines(Ok(lines)),
            Err(e) => self.new_lines(Err(e)),
        }
    }

    /// The sentences that the last look did not have.
    fn new_lines(&mut self, found: Result<Vec<String>>) -> Vec<String> {
        let lines: BTreeSet<String> = match found {
            Ok(lines) => lines.into_iter().collect(),
            // Sentences that were true before may be so still.
            Err(e) => {
                let before = self.said.iter().filter(|line| !line.starts_with(UNKNOWN)).cloned();
                before.chain([format!("{UNKNOWN}: {e:#}")]).collect()
            }
        };
        let new = lines.difference(&self.said).cloned().collect();
        self.said = lines;
        new
    }

    fn changes(
        &mut self,
        now: Instant,
        keeper: &Keeper<'_>,
        kept: &[ManagedVm],
    ) -> Result<Option<Vec<String>>> {
        let online = online(&keeper.root)?;
        let vms = kept.iter().map(|vm| vm.contract().vm.clone()).collect();
        if !self.is_due(now, online.clone(), vms) {
            return Ok(None);
        }
        let faults = core_faults(&keeper.root, keeper.dirs)?;
        let mut lines: Vec<String> = faults.iter().map(|fault| fault.text.clone()).collect();
        let (told, is_open) = give_back(keeper, kept, &online.into_keys().collect(), &faults)?;
        lines.extend(told);
        self.is_open = is_open;
        Ok(Some(lines))
    }

    /// Whether threads may lack CPUs: for a while after each change, once after that while, however
    /// late that is, and until a try to give them back has come to its end.
    fn is_due(&mut self, now: Instant, online: Online, vms: BTreeSet<String>) -> bool {
        let has_new = vms.difference(&self.vms).next().is_some();
        self.vms = vms;
        if self.online.as_ref() != Some(&online) || has_new {
            self.changed = Some((now, now));
            self.is_open = true;
        }
        self.online = Some(online);
        let is_open = self.is_open;
        // The last look was after that while.
        let is_over = |at: Instant, next: Instant| next.saturating_duration_since(at) > SETTLES + LOOK_EVERY;
        self.changed.take_if(|(at, next)| !is_open && is_over(*at, *next));
        match &mut self.changed {
            Some((_, next)) if now >= *next => {
                *next = now + LOOK_EVERY;
                true
            }
            _ => false,
        }
    }
}

fn online(root: &Root) -> Result<Online> {
    let online = cpu_list(root.read(format!("{CPUS}/online"))?.trim()).context("the CPUs that are online")?;
    let inode = |cpu: u32| unless_gone(root.inode(format!("{CPUS}/cpu{cpu}/topology")));
    let all: Result<Online, HostError> = online.into_iter().map(|cpu| Ok((cpu, inode(cpu)?))).collect();
    Ok(all?)
}

/// Whether a thread that is allowed these CPUs has all that are online of its cpuset, and so none
/// by the contract. The root cpuset also allows CPUs that may come.
fn has_all(allowed: &BTreeSet<u32>, online: &BTreeSet<u32>, cpuset: &BTreeSet<u32>) -> bool {
    allowed.intersection(online).eq(cpuset)
}

/// CPUs of a thread, compared with those that it is to have by the contract.
#[derive(Debug, PartialEq, Eq)]
enum CpuState {
    /// CPUs by the contract as far as its cpuset has them, or another program's choice.
    Settled,
    /// All of its cpuset, and so none by the contract.
    All,
    /// CPUs by chance: its cpuset has none of those by the contract, though some are online.
    Without,
}

/// `may_use` are the CPUs of the thread's cpuset.
fn compare(
    now: &BTreeSet<u32>,
    wanted: &BTreeSet<u32>,
    online: &BTreeSet<u32>,
    may_use: &BTreeSet<u32>,
) -> CpuState {
    let reachable: BTreeSet<u32> = wanted.intersection(may_use).copied().collect();
    if reachable.is_empty() {
        return if wanted.is_disjoint(online) { CpuState::Settled } else { CpuState::Without };
    }
    if *now != reachable && has_all(now, online, may_use) { CpuState::All } else { CpuState::Settled }
}

/// Paths of threads that are to get their CPUs again, and what is to be said of others.
fn without_own(
    keeper: &Keeper<'_>,
    kept: &[ManagedVm],
    online: &BTreeSet<u32>,
    faults: &[CoreFault],
) -> Result<(BTreeSet<PathBuf>, Vec<String>)> {
    let (mut paths, mut lines) = (BTreeSet::new(), Vec::new());
    for vm in kept {
        let of = vm.contract();
        let Some(cores) = &of.cores else { continue };
        let of_vm = faults.iter().filter(|fault| fault.is_shared && fault.vm == of.vm);
        let shared: BTreeSet<u32> = of_vm.flat_map(|fault| &fault.cpus).copied().collect();
        for thread in vm.threads() {
            let Some(now) = unless_gone(task::affinity(&keeper.root, thread.pid, thread.tid))? else {
                continue;
            };
            let now = cpu_list(&now).unwrap_or_default();
            let (writes, _) = cores.writes(&of.vm, std::slice::from_ref(&thread));
            for write in writes {
                let wanted = cpu_list(&write.value).unwrap_or_default();
                if now == wanted {
                    continue;
                }
                match compare(&now, &wanted, online, &cpuset(&keeper.root, &thread.cgroups)?) {
                    CpuState::Settled => {}
                    CpuState::Without => lines.push(format!(
                        "{}: its cpuset no longer has CPU {} (cgroup v1 does not give it back): write `cpuset.cpus`",
                        write.knob, write.value
                    )),
                    CpuState::All if wanted.is_disjoint(&shared) => {
                        paths.insert(write.target.path);
                    }
                    CpuState::All => {
                        lines.push(format!(
                            "{}: not {} again: another VM is on it",
                            write.knob, write.value
                        ));
                    }
                }
            }
        }
    }
    Ok((paths, lines))
}

/// Gives threads that have all CPUs of their cpuset, and so none by the contract, theirs again as
/// far as these are online. Other CPUs are another program's choice, which is left to it. Threads
/// of the I/O domain get none again: they are no threads of a VM that is kept. Returns what is to
/// be said, and whether another rtvirtio was at work, so that it is to be tried again.
fn give_back(
    keeper: &Keeper<'_>,
    kept: &[ManagedVm],
    online: &BTreeSet<u32>,
    faults: &[CoreFault],
) -> Result<(Vec<String>, bool)> {
    let (paths, mut lines) = without_own(keeper, kept, online, faults)?;
    if paths.is_empty() {
        return Ok((lines, false));
    }
    let Some(session) = keeper.session()? else { return Ok((lines, true)) };
    if session.applied_by()? != Some(keeper.by) {
        return Ok((lines, false));
    }
    let chosen = |_: &str, path: &str| paths.contains(Path::new(path));
    let done = session.restore(&chosen, &Machine::new(&keeper.root, &NoGuests))?;
    let again = |line: Line| {
        format!("{}: {} again, which the kernel took away with a CPU of the host", line.knob, line.new)
    };
    lines.extend(done.written.into_iter().map(again));
    lines.extend(done.failed.into_iter().map(|(knob, why)| format!("{knob}: not set again: {why}")));
    Ok((lines, false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};

    fn cpus(list: &str) -> BTreeSet<u32> {
        cpu_list(list).unwrap()
    }

    #[test]
    fn cpus_are_given_back_at_first_after_a_change_and_until_it_is_done() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let of = |inodes: &[u64]| (0..).zip(inodes.iter().map(|inode| Some(*inode))).collect::<Online>();
        let vms = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
        let mut host = HostCpus::default();
        let due = |host: &mut HostCpus, ms: u64, inodes: &[u64]| host.is_due(at(ms), of(inodes), vms(&["a"]));
        assert!(due(&mut host, 0, &[1, 2]), "keep may start after a change");
        assert!(!due(&mut host, 100, &[1, 2]));
        assert!(due(&mut host, 200, &[1, 2]));
        // Another rtvirtio holds the lock for longer than a change takes to settle.
        assert!(due(&mut host, 9_000, &[1, 2]));
        host.is_open = false;
        assert!(!due(&mut host, 18_000, &[1, 2]));
        // Off and on between two looks.
        assert!(due(&mut host, 20_000, &[1, 3]));
        host.is_open = false;
        assert!(due(&mut host, 24_000, &[1, 3]));
        assert!(due(&mut host, 26_000, &[1, 3]), "the first look after a change has settled");
        assert!(!due(&mut host, 27_000, &[1, 3]));
        assert!(due(&mut host, 30_000, &[1]), "off");
        host.is_open = false;
        // Scans may be further apart than a change takes to settle.
        assert!(due(&mut host, 40_000, &[1]) && !due(&mut host, 40_500, &[1]));
        assert!(host.is_due(at(41_000), of(&[1]), vms(&["a", "b"])), "a VM that is found later");
    }

    #[test]
    fn an_error_makes_no_sentence_come_again() {
        let mut host = HostCpus::default();
        let line = |text: &str| vec![text.to_owned()];
        let error = |text: &str| Err(Error::new(Kind::System, text));
        assert_eq!(host.new_lines(Ok(line("a"))), ["a"]);
        assert_eq!(host.new_lines(error("one")), [format!("{UNKNOWN}: one")]);
        assert_eq!(host.new_lines(error("two")), [format!("{UNKNOWN}: two")]);
        assert!(host.new_lines(Ok(line("a"))).is_empty());
        assert_eq!(host.new_lines(error("two")).len(), 1);
    }

    #[test]
    fn a_cpu_that_came_back_is_another_one() {
        let (dir, root) = crate::fixtures::root();
        assert!(online(&root).is_err());
        for cpu in [0, 1] {
            std::fs::create_dir_all(root.at(format!("{CPUS}/cpu{cpu}/topology"))).unwrap();
        }
        std::fs::write(root.at(format!("{CPUS}/online")), "0-2\n").unwrap();
        let before = online(&root).unwrap();
        assert_eq!(before.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(before[&2], None);
        let topology = root.at(format!("{CPUS}/cpu1/topology"));
        // Kept, so that its inode is not used again.
        std::fs::rename(&topology, dir.path().join("gone")).unwrap();
        std::fs::create_dir(&topology).unwrap();
        let now = online(&root).unwrap();
        assert!(now[&0] == before[&0] && now[&1] != before[&1], "{before:?} {now:?}");
    }

    #[test]
    fn a_thread_of_the_root_cpuset_may_be_allowed_cpus_that_are_not_there() {
        assert!(has_all(&cpus("0-127"), &cpus("0-7"), &cpus("0-7")));
        assert!(has_all(&cpus("0-3"), &cpus("0-7"), &cpus("0-3")));
        assert!(!has_all(&cpus("0-3"), &cpus("0-7"), &cpus("0-7")));
        assert!(!has_all(&cpus("6-9"), &cpus("0-7"), &cpus("0-7")));
    }

    #[test]
    fn cpus_that_a_cpuset_no_longer_has_are_not_given_back() {
        let of = |now: &str, may_use: &str| compare(&cpus(now), &cpus("4-5"), &cpus("0-7"), &cpus(may_use));
        assert_eq!(of("0-7", "0-7"), CpuState::All);
        assert_eq!(of("2", "0-7"), CpuState::Settled, "another program's choice");
        assert_eq!(of("4", "4"), CpuState::Settled);
        assert_eq!(of("3-4", "3-4"), CpuState::All);
        assert_eq!(of("0-3", "0-3"), CpuState::Without);
        let offline = compare(&cpus("0-3"), &cpus("4-5"), &cpus("0-3"), &cpus("0-3"));
        assert_eq!(offline, CpuState::Settled);
    }
}
