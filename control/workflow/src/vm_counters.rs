//! Counters that show why a VM's requests were late, read before and after a window: waits of its
//! threads for CPUs, stops by CPU quotas, limits, and its part of a device.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_blame::{DeviceUse, Faults, Limit as LimitFact, Limiter, OtherUsers, Stops, VmUse};
use rtvirtio_kernel::cgroup::{Cgroups, Limit};
use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::faults::HostFaults;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::pressure::{Throttled, throttled};
use rtvirtio_kernel::steal::cpus_online;
use rtvirtio_kernel::{Hierarchy, HostError, Root, faults, process, task};
use rtvirtio_spec::{Op, Task};
use rtvirtio_units::{Nanos, blk_throttle};
use rtvirtio_vmm::disk_stats::{Counters, DiskStats};

/// Least part of a limit below [`blk_throttle::STEP`] that the kernel was seen to let through.
const ROUGHLY: f64 = 0.7;

/// Counters of one VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmCounters {
    /// Time that each thread was ready without a CPU; `None` where no thread has such a count.
    pub ready: Option<BTreeMap<u32, Duration>>,
    /// Stops by CPU quotas of its threads' cgroups and those above them.
    pub quota: Option<QuotaCounters>,
    /// Bytes at the device; `None` where the kernel does not count them for this VM alone.
    pub bytes: Option<f64>,
    /// CPU time that its processes used.
    pub used: Option<Duration>,
    /// Major page faults of its processes.
    pub faults: Option<OwnFaults>,
}

/// Major page faults of each process of a VM, by its id and start time.
pub type OwnFaults = BTreeMap<(u32, u64), u64>;

/// Stops by CPU quotas, of each cgroup that a VM's threads are in and of those above.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaCounters {
    groups: BTreeMap<PathBuf, Throttled>,
    /// Groups above the VM's own, where threads of others are stopped too.
    above: BTreeSet<PathBuf>,
    /// Number of the VM's threads that can be stopped at the same time.
    parts: u32,
    /// Number of CPUs on which threads can be.
    cpus: u32,
}

impl QuotaCounters {
    /// Throttling since an earlier reading, of the group with the longest; `None` where a thread
    /// has moved to another group, or counters began anew.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<Throttled> {
        let all = self.each_since(earlier)?.into_iter().map(|(_, of)| of);
        Some(all.max_by_key(|of| (of.time, of.periods)).unwrap_or_default())
    }

    /// Stops since an earlier reading, of the group with the longest; `None` as of
    /// [`QuotaCounters::since`]. The kernel adds their time up over CPUs, so that a part for each
    /// thread is what they last at least, and for each CPU where others' threads are in the group.
    #[must_use]
    pub fn stops_since(&self, earlier: &Self) -> Option<Stops> {
        let stops = |(group, of): (&PathBuf, Throttled)| {
            let parts = if self.above.contains(group) { self.cpus } else { self.parts };
            let total = (of.time / parts.max(1)).as_nanos();
            Stops { count: of.periods, total: Nanos(u64::try_from(total).unwrap_or(u64::MAX)) }
        };
        let all = self.each_since(earlier)?.into_iter().map(stops);
        let none = Stops { count: 0, total: Nanos(0) };
        Some(all.max_by_key(|stops| (stops.total, stops.count)).unwrap_or(none))
    }

    /// Throttling of each group since an earlier reading; `None` as of [`QuotaCounters::since`].
    fn each_since<'a>(&'a self, earlier: &Self) -> Option<Vec<(&'a PathBuf, Throttled)>> {
        let of = |(group, now): (&'a PathBuf, &'a Throttled)| {
            let then = earlier.groups.get(group)?;
            let periods = now.periods.checked_sub(then.periods)?;
            let time = now.time.checked_sub(then.time)?;
            Some((group, Throttled { periods, time }))
        };
        self.groups.iter().map(of).collect()
    }
}

/// Time that each thread of these processes was ready without a CPU; `None` where the kernel counts
/// that of none.
pub(crate) fn ready(root: &Root, pids: &[u32]) -> Result<Option<BTreeMap<u32, Duration>>, HostError> {
    let mut all = BTreeMap::new();
    for pid in pids {
        for tid in task::tids(root, *pid)? {
            match task::run_delay(root, *pid, tid) {
                Ok(Some(waited)) => drop(all.insert(tid, waited)),
                // A thread that has not run has not waited, or the kernel does not count it.
                Ok(None) => {}
                Err(e) if e.is_gone() => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok((!all.is_empty()).then_some(all))
}

/// Stops by the quotas of all groups of these processes' threads, and of those above; `None` where
/// one of them counts none, and without a thread.
///
/// # Errors
/// A process is gone, or a file cannot be read.
pub fn quota(root: &Root, pids: &[u32]) -> Result<Option<QuotaCounters>, HostError> {
    let cgroups = Cgroups::detect_cpu(root)?;
    let (mut groups, mut above, mut threads) = (BTreeSet::new(), BTreeSet::new(), 0);
    for pid in pids {
        for tid in task::tids(root, *pid)? {
            match cgroups.of_pid(root, tid) {
                Ok(group) => {
                    let (path, unit) = (cgroups.path_of(&group), Cgroups::unit_of(&group));
                    above.extend(path.iter().filter(|of| **of != unit && unit.starts_with(of)).cloned());
                    groups.extend(path);
                }
                Err(e) if e.is_gone() => continue,
                Err(e) => return Err(e),
            }
            threads += 1;
        }
    }
    if threads == 0 {
        return Ok(None);
    }
    let mut counters = BTreeMap::new();
    for group in groups {
        let Some(one) = throttled(root, &cgroups.dir(&group)?)? else { return Ok(None) };
        counters.insert(group, one);
    }
    let cpus = cpus_online(root)?.max(1);
    Ok(Some(QuotaCounters { groups: counters, above, parts: threads.min(cpus), cpus }))
}

/// CPU time that these processes have used so far; `None` without one.
pub(crate) fn cpu_time(root: &Root, pids: &[u32]) -> Result<Option<Duration>, HostError> {
    let all = pids.iter().map(|pid| process::cpu_time(root, *pid));
    let sum = all.sum::<Result<Duration, HostError>>()?;
    Ok((!pids.is_empty()).then_some(sum))
}

/// CPUs that a VM used between two readings, so many seconds apart.
pub(crate) fn cpus_used(
    before: Option<&VmCounters>,
    after: Option<&VmCounters>,
    seconds: f64,
) -> Option<f64> {
    let used = after?.used?.checked_sub(before?.used?)?;
    Some(used.as_secs_f64() / seconds.max(f64::MIN_POSITIVE))
}

/// Major page faults of these processes so far.
///
/// # Errors
/// A process is gone.
pub fn own_faults(root: &Root, pids: impl IntoIterator<Item = u32>) -> Result<OwnFaults, HostError> {
    let of = |pid| faults::of_process(root, pid).map(|of| ((pid, of.start), of.count));
    pids.into_iter().map(of).collect()
}

/// Page faults of a VM's processes and of the host between two readings of both; `None` where one
/// was not read or began anew, where the processes are others, and without one.
#[must_use]
pub fn faults_since(
    then: (Option<&OwnFaults>, Option<HostFaults>),
    now: (Option<&OwnFaults>, Option<HostFaults>),
) -> Option<Faults> {
    let (own_then, own_now, host_then, host_now) = (then.0?, now.0?, then.1?, now.1?);
    if own_now.is_empty() || !own_then.keys().eq(own_now.keys()) {
        return None;
    }
    let own = own_then.values().zip(own_now.values()).map(|(then, now)| now.checked_sub(*then));
    Some(Faults {
        own: own.sum::<Option<u64>>()?,
        host: host_now.count.checked_sub(host_then.count)?,
        may_be_compressed: host_then.may_be_compressed || host_now.may_be_compressed,
    })
}

/// Requests and bytes of a cgroup at a device so far; `None` where nothing counts them.
#[must_use]
pub fn group_io(root: &Root, cgroups: &Cgroups, group: &Path, dev: &str) -> Option<IoCounters> {
    // A group of v2 that is not in the file has sent nothing yet; on v1 nothing may count it.
    match IoCounters::read(root, cgroups, group, dev).ok()? {
        Some(counters) => Some(counters),
        None if cgroups.hierarchy == Hierarchy::V2 => {
            let file = cgroups.dir(group).ok()?.join("io.stat");
            root.exists(file).ok()?.then(IoCounters::default)
        }
        None => None,
    }
}

/// Bytes of these counters.
#[must_use]
pub fn bytes_of(io: &IoCounters) -> f64 {
    io.read_bytes as f64 + io.write_bytes as f64
}

/// Counters of the directions of an operation.
#[must_use]
pub fn directions(op: Op) -> &'static [fn(&DiskStats) -> &Counters] {
    match op {
        Op::Read => &[|s| &s.read],
        Op::Write => &[|s| &s.write],
        Op::Mixed { .. } => &[|s| &s.read, |s| &s.write],
    }
}

/// Requests of an operation's directions between readings of a drive, as QEMU counts them, those of
/// other tasks with them or not; `None` where counters began anew or are another disk's, and
/// without a request.
pub fn below<'a>(
    op: Op,
    is_mixed: bool,
    readings: impl Iterator<Item = (&'a DiskStats, &'a DiskStats)>,
) -> Option<VmUse> {
    let (mut requests, mut ns) = (0, 0);
    for (then, now) in readings {
        // A disk that was plugged in meanwhile has taken the place of one that is gone.
        if (&then.id, &then.file) != (&now.id, &now.file) {
            return None;
        }
        for of in directions(op) {
            requests += of(now).ops.checked_sub(of(then).ops)?;
            ns += of(now).time_ns.checked_sub(of(then).time_ns)?;
        }
    }
    (requests > 0).then_some(VmUse { requests: requests as f64, waited: ns as f64 / 1e9, is_mixed })
}

/// Difference of two counters; `None` where one was not read or began anew.
pub(crate) fn past(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    Some(after? - before?).filter(|past| *past >= 0.0)
}

/// Longest time that a thread of both readings waited for a CPU between them.
pub(crate) fn waited(
    before: Option<&BTreeMap<u32, Duration>>,
    after: Option<&BTreeMap<u32, Duration>>,
) -> Option<Duration> {
    let (before, after) = (before?, after?);
    after.iter().filter_map(|(tid, now)| now.checked_sub(*before.get(tid)?)).max()
}

/// Use of a device in a window, with the bytes that each VM moved there; no shares where these are
/// not known of some VM.
pub fn device_use<'a>(io: &DeviceIo, moved: impl Iterator<Item = (&'a str, Option<f64>)>) -> DeviceUse {
    let bytes = (io.read_bytes + io.write_bytes) as f64;
    let share = |(name, moved): (&str, Option<f64>)| {
        let moved = moved?;
        Some((name.to_owned(), if bytes > 0.0 { (moved / bytes).min(1.0) } else { 0.0 }))
    };
    let waited = (io.read_time + io.write_time).as_secs_f64();
    DeviceUse { requests: (io.reads + io.writes) as f64, waited, shares: moved.map(share).collect() }
}

/// Part of I/O that a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// Reads count.
    pub reads: bool,
    /// Writes count.
    pub writes: bool,
    /// Bytes are counted, else requests.
    pub bytes: bool,
}

impl Dimension {
    /// Dimension of a cgroup's limit.
    #[must_use]
    pub fn of_limit(limit: Limit) -> Self {
        Self {
            reads: matches!(limit, Limit::ReadBps | Limit::ReadIops),
            writes: matches!(limit, Limit::WriteBps | Limit::WriteIops),
            bytes: matches!(limit, Limit::ReadBps | Limit::WriteBps),
        }
    }

    /// Dimension of QEMU's throttling by its name, such as `iops-read`.
    #[must_use]
    pub fn of_throttle(name: &str) -> Self {
        Self {
            reads: !name.ends_with("-write"),
            writes: !name.ends_with("-read"),
            bytes: name.starts_with("bps"),
        }
    }

    /// Amount that counts of a cgroup's I/O.
    #[must_use]
    pub fn of_counters(self, io: &IoCounters) -> f64 {
        let (reads, writes) =
            if self.bytes { (io.read_bytes, io.write_bytes) } else { (io.reads, io.writes) };
        let of = |acts: bool, n: u64| if acts { n as f64 } else { 0.0 };
        of(self.reads, reads) + of(self.writes, writes)
    }

    /// Amount per second that a limit of a cgroup lets through.
    #[must_use]
    pub fn let_through(self, limit: f64) -> f64 {
        if self.bytes { limit } else { blk_throttle::let_through(limit) }
    }

    /// Limit of the VM alone as a fact, with what was used of it and is asked for.
    #[must_use]
    pub fn fact(self, by: Limiter, file: String, value: f64, (used, asked): (f64, f64)) -> LimitFact {
        // Below a request in each slice the kernel lets through less, or more.
        let is_rough = by == Limiter::Kernel && !self.bytes && value < blk_throttle::STEP;
        let passes = match by {
            Limiter::Kernel if is_rough => ROUGHLY * value,
            Limiter::Kernel => self.let_through(value),
            Limiter::Qemu => value,
        };
        LimitFact { by, file, value, passes, used, asked, others: OtherUsers::None }
    }

    /// Amount that counts of a mean request of a task.
    #[must_use]
    pub fn of_task(self, task: &Task) -> f64 {
        let writes = task.op.write_share();
        let reads = if self.reads { 1.0 - writes } else { 0.0 };
        let part = reads + if self.writes { writes } else { 0.0 };
        part * if self.bytes { task.mean_block() } else { 1.0 }
    }

    /// Amount per second that tasks ask for; without end for one without a rate.
    #[must_use]
    pub fn asked(self, tasks: &[Task]) -> f64 {
        let one = |task: &Task| match self.of_task(task) {
            0.0 => 0.0,
            amount => task.rate.map_or(f64::INFINITY, |rate| rate.0 * amount),
        };
        tasks.iter().map(one).sum()
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::HostSpec;

    use super::*;

    #[test]
    fn the_group_with_the_longest_stops_of_the_window_counts() {
        let at = |of: &[(&str, u64, u64)]| QuotaCounters {
            groups: of
                .iter()
                .map(|(group, periods, ms)| {
                    (PathBuf::from(group), Throttled { periods: *periods, time: Duration::from_millis(*ms) })
                })
                .collect(),
            above: BTreeSet::from([PathBuf::from("/s")]),
            parts: 2,
            cpus: 16,
        };
        // The slice was stopped long ago, the VM's own group is now.
        let (then, now) =
            (at(&[("/s", 90, 9_000), ("/s/vm", 1, 10)]), at(&[("/s", 90, 9_000), ("/s/vm", 5, 90)]));
        let stops = Throttled { periods: 4, time: Duration::from_millis(80) };
        assert_eq!(now.since(&then), Some(stops));
        assert_eq!(now.stops_since(&then), Some(Stops { count: 4, total: Nanos::from_millis(40) }));
        // The slice's is of threads of all VMs in it, on any of the CPUs.
        let others = at(&[("/s", 99, 10_600), ("/s/vm", 5, 90)]);
        assert_eq!(others.since(&then), Some(Throttled { periods: 9, time: Duration::from_millis(1_600) }));
        assert_eq!(others.stops_since(&then), Some(Stops { count: 9, total: Nanos::from_millis(100) }));
        assert_eq!(then.since(&now), None, "the counters began anew");
        assert_eq!(now.since(&at(&[("/s", 90, 9_000)])), None, "a thread has moved");
        assert_eq!(now.since(&now), Some(Throttled::default()));
    }

    #[test]
    fn cpus_used_need_two_readings_of_the_same_processes() {
        let of = |ms| VmCounters { used: Some(Duration::from_millis(ms)), ..VmCounters::default() };
        assert_eq!(cpus_used(Some(&of(500)), Some(&of(3_500)), 2.0), Some(1.5));
        assert_eq!(cpus_used(Some(&of(500)), Some(&of(100)), 2.0), None, "it was started anew");
        assert_eq!(cpus_used(Some(&VmCounters::default()), Some(&of(100)), 2.0), None);
        assert!(cpu_time(&Root::default(), &[std::process::id()]).unwrap().is_some());
        assert!(cpu_time(&Root::default(), &[u32::MAX]).is_err());
    }

    #[test]
    fn no_process_is_no_reading() {
        assert_eq!(cpu_time(&Root::default(), &[]).unwrap(), None);
        assert_eq!(quota(&Root::default(), &[]).ok().flatten(), None);
    }

    #[test]
    fn faults_of_other_processes_are_no_facts() {
        let host = |count| Some(HostFaults { count, may_be_compressed: false });
        let own = |of: &[(u32, u64, u64)]| -> OwnFaults {
            of.iter().map(|(pid, start, count)| ((*pid, *start), *count)).collect()
        };
        let (then, now) = (own(&[(7, 1, 20)]), own(&[(7, 1, 23)]));
        let since =
            |then: &OwnFaults, now: &OwnFaults| faults_since((Some(then), host(50)), (Some(now), host(90)));
        let found = Faults { own: 3, host: 40, may_be_compressed: false };
        assert_eq!(since(&then, &now), Some(found));
        // The VM was started anew, under the same id or with one process more, or is gone.
        for other in [own(&[(7, 9, 600)]), own(&[(7, 1, 23), (8, 9, 600)]), own(&[])] {
            assert_eq!(since(&then, &other), None, "{other:?}");
        }
        assert_eq!(since(&own(&[]), &own(&[])), None);
        let swapped = Some(HostFaults { count: 90, may_be_compressed: true });
        let both = faults_since((Some(&then), host(50)), (Some(&now), swapped));
        assert_eq!(both, Some(Faults { may_be_compressed: true, ..found }));
        assert_eq!(faults_since((Some(&then), None), (Some(&now), host(90))), None);
    }

    #[test]
    fn counters_of_a_disk_that_was_plugged_in_meanwhile_are_no_facts() {
        let disk = |id: &str, ops| DiskStats {
            id: id.to_owned(),
            file: Some("/dev/sdz".to_owned()),
            format: None,
            read_only: false,
            read: Counters { ops, time_ns: ops * 1_000_000, ..Counters::default() },
            write: Counters::default(),
            flush: Counters::default(),
        };
        let of = |then: &DiskStats, now: &DiskStats| below(Op::Read, false, std::iter::once((then, now)));
        let found = Some(VmUse { requests: 400.0, waited: 0.4, is_mixed: false });
        assert_eq!(of(&disk("d0", 100), &disk("d0", 500)), found);
        assert_eq!(of(&disk("d0", 100), &disk("d1", 500)), None);
    }

    #[test]
    fn threads_that_were_not_read_twice_are_no_facts() {
        let ms = Duration::from_millis;
        let (then, now) = (
            BTreeMap::from([(1, ms(5)), (2, ms(9)), (4, ms(1))]),
            BTreeMap::from([(1, ms(8)), (3, ms(70)), (4, ms(3))]),
        );
        assert_eq!(waited(Some(&then), Some(&now)), Some(ms(3)), "the longest of threads of both readings");
        assert_eq!(waited(None, Some(&now)), None);
    }

    #[test]
    fn a_limit_counts_what_is_its_own() {
        let text = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n\
            [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\n\
            [[vm.task]]\nname = \"log\"\nop = \"write\"\nblock = \"64KiB\"\n";
        let spec = HostSpec::parse("x.toml", text).unwrap();
        let tasks = &spec.vms()[0].tasks;
        assert_eq!(Dimension::of_limit(Limit::ReadIops).asked(tasks), 100.0);
        assert_eq!(Dimension::of_limit(Limit::ReadBps).asked(tasks), 409_600.0);
        assert_eq!(Dimension::of_limit(Limit::WriteIops).asked(tasks), f64::INFINITY);
        let both = Dimension { reads: true, writes: true, bytes: false };
        assert_eq!(both.asked(&tasks[..1]), 100.0);
    }
}
