//! Waits of a VM for memory during a run, as the kernel counts them.
//!
//! Pressure stall information has the time in which some task waited for memory that was in use
//! before and must be read back, or for other memory to be reclaimed
//! (`Documentation/accounting/psi.rst`, `psi_memstall_enter` in `mm/`). Of several CPUs at work it
//! is the mean (`collect_percpu_times` in `kernel/sched/psi.c`): at most the time of the longest. A
//! thread reads it every 10 ms, with the major faults of the VM's processes. Consecutive intervals
//! with waits for at least a quarter of their time are one span, as long as its waits, but at most
//! 20 ms for each fault of the VM in it.
//!
//! The scope is the VM's cgroup (v2), or the host where that has no such counters: v1 counts for no
//! cgroup, and with many CPUs at work the host's mean shows little. The waits are not known to be
//! the VM's where others in the scope have more than a tenth of its faults, as where KVM reads the
//! memory of a vCPU back in a thread of the kernel.

use std::path::{Path, PathBuf};

use rtvirtio_kernel::faults::{self, ProcessFaults};
use rtvirtio_kernel::pressure::pressure_in;
use rtvirtio_kernel::{ProcessId, Root};

use crate::late::StallTotal;
use crate::sampler::{Options, Sampler, now};

/// Time between two readings: each takes some ten microseconds of a CPU.
const PERIOD_NS: u64 = 10_000_000;
/// Part of the time between two readings from which on it counts as one of waiting, as a divisor.
const DENSE: u64 = 4;
/// Length above which a span is kept, as of standstills of a disk.
const KEPT_NS: u64 = 5_000_000;
/// Longest part of a span that one fault of the VM stands for: others' waits for memory, which need
/// no fault, may be in it.
const EACH_NS: u64 = 20_000_000;
/// Part of the faults of the scope that must be the VM's.
const OWN: f64 = 0.9;

/// Part of the host whose waits and faults the kernel counts together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// File of its pressure of memory.
    pressure: PathBuf,
    /// File of its major faults.
    faults: PathBuf,
}

impl Scope {
    #[must_use]
    pub fn host() -> Self {
        Self { pressure: "/proc/pressure/memory".into(), faults: faults::HOST.into() }
    }

    /// A cgroup of v2, by its directory.
    #[must_use]
    pub fn of_cgroup(dir: &Path) -> Self {
        Self { pressure: dir.join("memory.pressure"), faults: dir.join("memory.stat") }
    }
}

/// Thread that watches the processes of a VM. Dropping it stops the thread.
#[derive(Debug)]
pub struct MemoryWatch {
    thread: Sampler<Finder>,
    counters: Counters,
    first: Reading,
    /// Faults of the scope at the begin.
    all: u64,
}

impl MemoryWatch {
    /// Watches these processes, in the first scope that counts waits and faults; `None` where none
    /// does, or a process is gone.
    #[must_use]
    pub fn start(
        root: &Root,
        processes: &[ProcessId],
        scopes: impl IntoIterator<Item = Scope>,
    ) -> Option<Self> {
        let of = |scope| Counters { root: root.clone(), processes: processes.to_vec(), scope };
        let begin = |counters: Counters| Some((counters.all()?, counters.read()?, counters));
        let (all, first, counters) = scopes.into_iter().find_map(|scope| begin(of(scope)))?;
        let options =
            Options { name: "memory-watch".to_owned(), period_ns: PERIOD_NS, cpu: None, priority: None };
        let sampled = counters.clone();
        let thread = Sampler::start(
            options,
            move |_| Finder::new(first),
            move |finder: &mut Finder, _| {
                // The counters of a VM that ended cannot be read: ends the thread.
                let reading = sampled.read()?;
                finder.take(reading);
                Some(reading.at)
            },
        )?;
        Some(Self { thread, counters, first, all })
    }

    /// Stops watching and returns the spans of waiting; `None` where their length or whose they are
    /// is not known.
    #[must_use]
    pub fn finish(self) -> Option<StallTotal> {
        let Self { thread, counters, first, all } = self;
        let mut finder = thread.finish()?;
        let last = counters.read()?;
        finder.take(last);
        let (own, all) = (last.faults.checked_sub(first.faults)?, counters.all()?.checked_sub(all)?);
        (own as f64 >= OWN * all as f64).then(|| finder.total())
    }
}

/// Counters of some processes and their scope.
#[derive(Clone, Debug)]
struct Counters {
    root: Root,
    processes: Vec<ProcessId>,
    scope: Scope,
}

impl Counters {
    /// Faults of the scope.
    fn all(&self) -> Option<u64> {
        faults::counted_in(&self.root, &self.scope.faults).ok()
    }

    fn read(&self) -> Option<Reading> {
        let waited = pressure_in(&self.root, &self.scope.pressure).ok()??.some;
        let of = |process: &ProcessId| {
            let ProcessFaults { start, count } = faults::of_process(&self.root, process.pid).ok()?;
            (start == process.start_time).then_some(count)
        };
        let faults = self.processes.iter().map(of).sum::<Option<u64>>()?;
        Some(Reading { at: now(), waited: u64::try_from(waited.as_nanos()).ok()?, faults })
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    /// CLOCK_MONOTONIC, ns.
    at: u64,
    /// Time that the scope waited for memory so far, ns.
    waited: u64,
    /// Major faults of the VM's processes so far.
    faults: u64,
}

/// Finds spans of waiting in a sequence of readings.
#[derive(Debug)]
struct Finder {
    last: Reading,
    /// Waits of the possible span so far, ns, and the VM's faults in it.
    span: (u64, u64),
    found: StallTotal,
}

impl Finder {
    fn new(first: Reading) -> Self {
        Self { last: first, span: (0, 0), found: StallTotal::default() }
    }

    fn take(&mut self, reading: Reading) {
        let passed = reading.at.saturating_sub(self.last.at);
        let waited = reading.waited.saturating_sub(self.last.waited).min(passed);
        let faults = reading.faults.saturating_sub(self.last.faults);
        self.last = reading;
        if waited > 0 && waited.saturating_mul(DENSE) >= passed {
            self.span = (self.span.0 + waited, self.span.1 + faults);
        } else {
            self.close();
        }
    }

    fn close(&mut self) {
        let (waited, faults) = std::mem::take(&mut self.span);
        let waited = waited.min(faults.saturating_mul(EACH_NS));
        if waited > KEPT_NS {
            self.found.count += 1;
            self.found.total.0 += waited;
        }
    }

    fn total(mut self) -> StallTotal {
        self.close();
        self.found
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rtvirtio_units::Nanos;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Readings every 10 ms, given as the waits, in ms, and faults between them.
    fn found(readings: &[(u64, u64)]) -> StallTotal {
        let (mut now, mut finder) = (Reading::default(), Finder::new(Reading::default()));
        for (waited, faults) in readings {
            now.at += 10 * MS;
            now.waited += waited * MS;
            now.faults += faults;
            finder.take(now);
        }
        finder.total()
    }

    fn spans(count: u64, ms: u64) -> StallTotal {
        StallTotal { count, total: Nanos::from_millis(ms) }
    }

    #[test]
    fn waits_next_to_each_other_are_one_span_and_those_without_a_fault_none() {
        assert_eq!(found(&[(0, 0), (9, 3), (4, 0), (10, 2), (0, 0), (7, 1)]), spans(2, 30));
        assert_eq!(found(&[(9, 0), (10, 0)]), spans(0, 0), "another program's");
        assert_eq!(found(&[(2, 5), (2, 5), (2, 5), (2, 5)]), spans(0, 0), "a fifth of the time");
        assert_eq!(found(&[(5, 1), (0, 0), (5, 1)]), spans(0, 0), "too short");
        assert_eq!(found(&[(40, 1)]), spans(1, 10), "no more than passed");
        assert_eq!(found(&[(10, 0), (10, 0), (10, 1), (10, 0)]), spans(1, 20), "others wait as well");
    }

    #[test]
    fn a_scope_that_counts_is_taken_and_waits_of_others_are_not_the_vms() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let put = |path: &str, text: String| {
            fs::create_dir_all(root.at(path).parent().unwrap()).unwrap();
            fs::write(root.at(path), text).unwrap();
        };
        let (group, file) = (Path::new("/cg/vm"), "/cg/vm/memory.pressure");
        let pressure = |us: u64| format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={us}\n");
        let own = |count: u64| {
            let zeros = "0 ".repeat(15);
            let counters = format!("900 0 {count} 0 5 6 0 0 20 0 1 0 99 {zeros}17 0 0 0");
            put("/proc/7/stat", format!("7 (a) S 1 7 7 0 -1 4194560 {counters}\n"));
        };
        let vm = |start_time| [ProcessId { pid: 7, start_time }];
        let scopes = || [Scope::of_cgroup(group), Scope::host()];
        assert!(MemoryWatch::start(&root, &vm(99), scopes()).is_none());
        own(20);
        put("/proc/vmstat", "pgfault 9\npgmajfault 500\n".to_owned());
        put("/proc/pressure/memory", pressure(100));
        let watch = MemoryWatch::start(&root, &vm(99), scopes()).unwrap();
        assert_eq!(watch.counters.scope, Scope::host(), "the cgroup counts nothing");
        drop(watch);
        put(file, pressure(100));
        put("/cg/vm/memory.stat", "anon 5\npgmajfault 30\n".to_owned());
        let watch = MemoryWatch::start(&root, &vm(99), scopes()).unwrap();
        assert_eq!(watch.counters.scope, Scope::of_cgroup(group));
        assert_eq!(watch.finish(), Some(spans(0, 0)));
        assert!(MemoryWatch::start(&root, &vm(98), scopes()).is_none(), "another process has its id");
        // Nine of ten faults are the VM's, then eight of twelve.
        for (all, whose) in [(40, Some(spans(0, 0))), (52, None)] {
            let watch = MemoryWatch::start(&root, &vm(99), scopes()).unwrap();
            own(if whose.is_some() { 29 } else { 37 });
            put("/cg/vm/memory.stat", format!("pgmajfault {all}\n"));
            assert_eq!(watch.finish(), whose);
        }
        let watch = MemoryWatch::start(&root, &vm(99), scopes()).unwrap();
        fs::remove_file(root.at("/proc/7/stat")).unwrap();
        assert_eq!(watch.finish(), None, "the VM has ended");
    }

    #[test]
    fn the_kernels_own_counters_are_read() {
        let root = Root::default();
        let me = ProcessId::find(std::process::id()).unwrap().unwrap();
        let Ok(Some(_)) = pressure_in(&root, &Scope::host().pressure) else {
            return rtvirtio_testkit::skip("the_kernels_own_counters_are_read", "no pressure of memory");
        };
        assert!(MemoryWatch::start(&root, &[me], [Scope::host()]).is_some());
    }
}
