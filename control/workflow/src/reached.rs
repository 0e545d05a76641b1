//! Share of a run's reads that reached the device: answers from the host's memory or a hole of an
//! image say nothing of the device.

use std::path::Path;

use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_measure::{TaskResult, Verdict};
use rtvirtio_spec::Task;

use crate::site::Site;
use crate::uncovered::UncoveredKind;

/// Share of the reads that must have reached the device. Counters see the warm-up too, so that all
/// do where nothing answers in the device's place.
const ENOUGH: f64 = 0.99;
/// Bytes of a sector in `/sys/block/*/stat` (`Documentation/block/stat.rst`).
const SECTOR: u64 = 512;

/// Requests and bytes that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reads {
    requests: f64,
    bytes: f64,
}

/// Counter at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Counter {
    /// Reads so far.
    At(Reads),
    /// Not there, or not yet: a group of v1 gets its counters with its first request, and one of v2
    /// has none without the I/O controller.
    Absent,
    /// Not known: it could not be read.
    Unread,
}

/// Counted reads of a VM on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CountedReads {
    /// Of the VM's cgroup.
    group: Counter,
    /// Reads of the device by all programs.
    device: Counter,
}

/// The counters of all VMs of a run at one moment: by VM, then by device.
pub(crate) struct Counters(Vec<(String, Vec<CountedReads>)>);

impl Counters {
    /// Reads the current values.
    pub fn read(sites: &[&Site], loads: &[VmLoad]) -> Self {
        let of = |load: &VmLoad| {
            let here = sites.iter().filter(|site| site.spec.vm(&load.vm.name).is_some());
            (load.vm.name.clone(), here.map(|site| seen(site, &load.vm.name)).collect())
        };
        Self(loads.iter().map(of).collect())
    }
}

fn seen(site: &Site, vm: &str) -> CountedReads {
    let own = site.io_group(vm).filter(|cgroup| !Cgroups::is_root(cgroup));
    let dev = &site.stack.device.dev;
    let group = own.map_or(Counter::Absent, |cgroup| of_group(site.root(), site.cgroups(), cgroup, dev));
    let stat = site.root().read(site.stack.device.sysfs().join("stat")).ok();
    CountedReads { group, device: stat.as_deref().and_then(of_stat).map_or(Counter::Unread, Counter::At) }
}

fn of_group(root: &Root, cgroups: &Cgroups, cgroup: &Path, dev: &str) -> Counter {
    match IoCounters::read(root, cgroups, cgroup, dev) {
        Ok(Some(io)) => Counter::At(Reads { requests: io.reads as f64, bytes: io.read_bytes as f64 }),
        // On v1 nothing may be counted at all.
        Ok(None) if cgroups.hierarchy == Hierarchy::V1 => Counter::Absent,
        // A group without a line has had no request. Without the I/O controller there is no file.
        Ok(None) => match cgroups.dir(cgroup).and_then(|dir| root.exists(dir.join("io.stat"))) {
            Ok(true) => Counter::At(Reads::default()),
            Ok(false) => Counter::Absent,
            Err(_) => Counter::Unread,
        },
        Err(_) => Counter::Unread,
    }
}

/// Reads, reads that were merged with others, sectors read.
fn of_stat(text: &str) -> Option<Reads> {
    let mut fields = text.split_ascii_whitespace().map(|n| n.parse::<u64>().ok());
    let (done, merged, sectors) = (fields.next()??, fields.next()??, fields.next()??);
    Some(Reads { requests: (done + merged) as f64, bytes: (sectors * SECTOR) as f64 })
}

/// Difference of two samples; `None` where a counter began anew, or one of them is not known: all
/// that was ever read would count as this run's.
fn between(before: Counter, after: Counter) -> Option<Reads> {
    let (before, after) = match (before, after) {
        (Counter::At(before), Counter::At(after)) => (before, after),
        (Counter::Absent, Counter::At(after)) => (Reads::default(), after),
        (Counter::Unread, _) | (_, Counter::Absent | Counter::Unread) => return None,
    };
    let past = Reads { requests: after.requests - before.requests, bytes: after.bytes - before.bytes };
    (past.requests >= 0.0 && past.bytes >= 0.0).then_some(past)
}

/// Number of a VM's reads that reached the device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reached {
    /// At most so many.
    AtMost(f64),
    /// No counter has this VM's reads alone.
    Unknown,
}

/// Makes the verdicts of reads that did not reach the device unproven.
pub(crate) fn judge(
    sites: &[&Site],
    loads: &[VmLoad],
    (before, after): (&Counters, &Counters),
    results: &mut [TaskResult],
) {
    let readers = loads.iter().filter(|load| load.vm.tasks.iter().any(|t| read_share(t) > 0.0)).count();
    for ((load, (_, before)), (_, after)) in loads.iter().zip(&before.0).zip(&after.0) {
        let measured = measured(load, results);
        if measured.requests < 1.0 {
            continue;
        }
        let kinds: Vec<UncoveredKind> =
            sites.iter().flat_map(|site| site.uncovered_named(&load.vm.name)).map(|of| of.kind).collect();
        let is_cached =
            kinds.iter().any(|k| matches!(k, UncoveredKind::PageCache | UncoveredKind::WriteBack));
        let elsewhere = kinds.contains(&UncoveredKind::OtherProcess)
            || sites.iter().any(|site| site.lab.as_ref().is_some_and(|lab| lab.domain.is_some()));
        let (mut sum, mut is_alone) = (Some(Reads::default()), true);
        for (then, now) in before.iter().zip(after) {
            let group = between(then.group, now.group).filter(|_| !elsewhere);
            is_alone &= group.is_some() || readers == 1;
            let past = group.or_else(|| between(then.device, now.device));
            sum = sum
                .zip(past)
                .map(|(a, b)| Reads { requests: a.requests + b.requests, bytes: a.bytes + b.bytes });
        }
        let reached = reached(measured, sum, is_cached, is_alone);
        let of_vm = |r: &&mut TaskResult| r.vm == load.vm.name && r.flow.is_none();
        for result in results.iter_mut().filter(of_vm) {
            let reads = load.vm.tasks.iter().any(|t| t.name == result.task && read_share(t) > 0.0);
            if reads {
                take_back(result, reached, measured);
            }
        }
    }
}

/// Of neighbouring requests QEMU, the guest or the kernel may make one, so that bytes count as
/// well; where the page cache reads ahead, requests alone.
fn reached(measured: Reads, past: Option<Reads>, is_cached: bool, is_alone: bool) -> Reached {
    let Some(past) = past else { return Reached::Unknown };
    let by_requests = past.requests / measured.requests;
    let by_bytes = past.bytes / measured.bytes.max(1.0);
    let share = if is_cached { by_requests } else { by_requests.max(by_bytes) };
    if share < ENOUGH || is_alone || !is_cached {
        Reached::AtMost(share * measured.requests)
    } else {
        // Others read the same device.
        Reached::Unknown
    }
}

fn take_back(result: &mut TaskResult, reached: Reached, measured: Reads) {
    let why = match reached {
        Reached::AtMost(n) if n >= ENOUGH * measured.requests => return,
        Reached::AtMost(n) => format!(
            "{n:.0} of {:.0} reads reached the device: the others were answered by the host's page cache (set cache=none) or a hole of \
             the image (fill it)",
            measured.requests
        ),
        // Nothing says that the device did not answer.
        Reached::Unknown => {
            "how many of its reads reached the device is not known: its disk goes through the host's page cache (set cache=none)".to_owned()
        }
    };
    if result.verdict == Some(Verdict::Met) {
        result.verdict = Some(Verdict::Unproven);
    }
    result.why = if result.why.is_empty() { why } else { format!("{why}; {}", result.why) };
}

fn read_share(task: &Task) -> f64 {
    1.0 - task.op.write_share()
}

/// The reads that a VM's tasks completed. A task with several targets has as many results.
fn measured(load: &VmLoad, results: &[TaskResult]) -> Reads {
    let of = |task: &Task| {
        let here = results.iter().find(|r| r.vm == load.vm.name && r.task == task.name && r.flow.is_none());
        let n = here.map_or(0.0, |r| r.n as f64) * read_share(task);
        Reads { requests: n, bytes: n * task.mean_block() }
    };
    let all = load.vm.tasks.iter().map(of);
    all.fold(Reads::default(), |a, b| Reads { requests: a.requests + b.requests, bytes: a.bytes + b.bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(requests: f64, bytes: f64) -> Reads {
        Reads { requests, bytes }
    }

    #[test]
    fn what_the_device_did_not_see_is_not_reached() {
        let measured = reads(1000.0, 4_096_000.0);
        let of = |past, is_cached, is_alone| reached(measured, past, is_cached, is_alone);
        assert_eq!(of(Some(reads(0.0, 0.0)), true, true), Reached::AtMost(0.0));
        assert_eq!(of(Some(reads(1200.0, 4_915_200.0)), false, true), Reached::AtMost(1200.0));
        // Neighbouring requests that became one.
        assert_eq!(of(Some(reads(40.0, 4_096_000.0)), false, true), Reached::AtMost(1000.0));
        // Read-ahead moves many bytes for few requests.
        assert_eq!(of(Some(reads(40.0, 4_096_000.0)), true, true), Reached::AtMost(40.0));
        // Of a device that others read too, few are few, and many are nobody's.
        assert_eq!(of(Some(reads(40.0, 0.0)), true, false), Reached::AtMost(40.0));
        assert_eq!(of(Some(reads(9000.0, 0.0)), true, false), Reached::Unknown);
        assert_eq!(of(None, true, true), Reached::Unknown);
    }

    /// Reads that no counter of the group has are not reads that did not reach the device.
    #[test]
    fn a_group_without_the_io_controller_has_no_counter() {
        let (_dir, root) = crate::fixtures::root();
        let put = |path: &str, text: &str| crate::fixtures::put(&root, path, text);
        put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        put("/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
        put("/sys/fs/cgroup/vm.scope/cgroup.procs", "7\n");
        let cgroups = Cgroups::detect(&root).unwrap();
        let of = || of_group(&root, &cgroups, Path::new("/vm.scope"), "8:0");
        assert_eq!(of(), Counter::Absent);
        put("/sys/fs/cgroup/vm.scope/io.stat", "8:16 rbytes=1 wbytes=1 rios=1 wios=1\n");
        assert_eq!(of(), Counter::At(Reads::default()));
        put("/sys/fs/cgroup/vm.scope/io.stat", "8:0 rbytes=8192 wbytes=0 rios=2 wios=0\n");
        assert_eq!(of(), Counter::At(reads(2.0, 8192.0)));
        std::fs::remove_file(root.at("/sys/fs/cgroup/vm.scope/io.stat")).unwrap();
        std::fs::create_dir(root.at("/sys/fs/cgroup/vm.scope/io.stat")).unwrap();
        assert_eq!(of(), Counter::Unread, "it cannot be read");
    }

    #[test]
    fn counters_are_read_and_compared() {
        let text = "  10 5 128 1 2 3 4 5 6 7 8\n";
        assert_eq!(of_stat(text), Some(reads(15.0, 65_536.0)));
        assert_eq!((of_stat("x 1 2"), of_stat("")), (None, None));
        let at = |requests: f64, bytes: f64| Counter::At(reads(requests, bytes));
        assert_eq!(between(at(1.0, 1.0), at(3.0, 4.0)), Some(reads(2.0, 3.0)));
        assert_eq!(between(Counter::Absent, at(3.0, 4.0)), Some(reads(3.0, 4.0)));
        assert_eq!(between(Counter::Unread, at(3.0, 4.0)), None, "what was read before is not known");
        assert_eq!(between(at(9.0, 4.0), at(3.0, 4.0)), None, "it began anew");
        for after in [Counter::Absent, Counter::Unread] {
            assert_eq!(between(at(9.0, 4.0), after), None);
        }
    }
}
