//! State of one thread in `/proc/PID/task/TID` (proc_pid_stat(5), cgroups(7)).
//!
//! A thread may end between any two reads. Then the error satisfies [`HostError::is_gone`], and
//! callers go on.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::sched::Policy;
use crate::{HostError, Root};

/// `PF_KTHREAD` (`include/linux/sched.h`): a thread of the kernel.
const PF_KTHREAD: u64 = 0x0020_0000;
/// `PF_EXITING`: the thread is exiting, and in the root cgroup of v1 already.
const PF_EXITING: u64 = 0x0000_0004;
/// `/proc/PID/stat` counts in 1/100 s whatever the kernel's tick is (`USER_HZ`).
pub(crate) const TICK: Duration = Duration::from_millis(10);

/// Fields of `/proc/PID/task/TID/stat` that scheduling needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskStat {
    /// Name, at most 15 bytes of it for a user thread.
    pub comm: String,
    /// State letter: `R` running, `S` sleeping, `Z` ended but not reaped, ...
    pub state: char,
    /// Process that started it.
    pub parent: u32,
    /// Whether it is a kernel thread, not one of a process.
    pub kernel: bool,
    /// Whether it is exiting, or a zombie: its cgroup is the root's, and it only gives back what it
    /// has.
    pub ended: bool,
    /// Nice value, -20 to 19.
    pub nice: i32,
    /// Start time, in 1/100 s since boot: with the id it identifies a thread for good.
    pub start: u64,
    /// Real-time priority 1 to 99; 0 under other policies.
    pub priority: u32,
    /// Scheduling policy; `None` for an unknown number.
    pub policy: Option<Policy>,
    /// CPU time used, in steps of 10 ms.
    pub cpu_time: Duration,
    /// Major page faults.
    pub major_faults: u64,
    /// CPU on which it last ran.
    pub cpu: u32,
}

/// Line of `/proc/PID/cgroup`: the cgroup in one hierarchy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Controllers of a v1 hierarchy (`cpu,cpuacct`, `name=systemd`); empty for v2.
    pub controllers: String,
    /// Path of the cgroup below the hierarchy's root.
    pub path: PathBuf,
}

impl Membership {
    /// Whether this is the v1 hierarchy of a controller.
    #[must_use]
    pub fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|c| c == controller)
    }
}

fn dir(pid: u32, tid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/task/{tid}"))
}

pub(crate) fn form(path: PathBuf, text: &str, expected: &'static str) -> HostError {
    HostError::Form { path, text: text.trim().chars().take(200).collect(), expected }
}

/// Thread ids of a process, ascending.
pub fn tids(root: &Root, pid: u32) -> Result<Vec<u32>, HostError> {
    numbers(root, PathBuf::from(format!("/proc/{pid}/task")))
}

pub(crate) fn numbers(root: &Root, dir: PathBuf) -> Result<Vec<u32>, HostError> {
    let mut found: Vec<u32> = root.list(dir)?.iter().filter_map(|name| name.parse().ok()).collect();
    found.sort_unstable();
    Ok(found)
}

/// Reads and parses a thread's `stat`.
pub fn stat(root: &Root, pid: u32, tid: u32) -> Result<TaskStat, HostError> {
    stat_at(root, dir(pid, tid).join("stat"))
}

pub(crate) fn stat_at(root: &Root, path: PathBuf) -> Result<TaskStat, HostError> {
    // A name may hold any byte; only the rest of the line must be text.
    let bytes =
        std::fs::read(root.at(&path)).map_err(|source| HostError::Read { path: path.clone(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    parse_stat(&text).ok_or_else(|| form(path, &text, "a task's stat line"))
}

/// Parses a `stat` line. The name is in parentheses and may contain some: the last one ends it.
fn parse_stat(text: &str) -> Option<TaskStat> {
    let (open, close) = (text.find('(')?, text.rfind(')')?);
    let comm = text.get(open + 1..close)?.to_owned();
    let fields: Vec<&str> = text.get(close + 1..)?.split_whitespace().collect();
    // Fields are counted from 1 in the manual page; the state is number 3.
    let field = |n: usize| fields.get(n - 3).copied();
    let number = |n: usize| field(n)?.parse::<u64>().ok();
    let ticks = number(14)?.checked_add(number(15)?)?;
    let state = field(3)?.chars().next()?;
    Some(TaskStat {
        comm,
        state,
        parent: field(4)?.parse().ok()?,
        kernel: number(9)? & PF_KTHREAD != 0,
        ended: number(9)? & PF_EXITING != 0 || matches!(state, 'Z' | 'X'),
        nice: field(19)?.parse().ok()?,
        start: number(22)?,
        priority: field(40)?.parse().ok()?,
        policy: Policy::of_number(field(41)?.parse().ok()?),
        cpu_time: TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)),
        major_faults: number(12)?,
        cpu: field(39)?.parse().ok()?,
    })
}

/// CPU time that a thread has used, to the nanosecond where the kernel reports it (`schedstat`),
/// else in steps of 10 ms.
pub fn cpu_time(root: &Root, pid: u32, tid: u32) -> Result<Duration, HostError> {
    let path = dir(pid, tid).join("schedstat");
    if let Some(text) = root.read_optional(&path)? {
        // Without CONFIG_SCHED_INFO the line is `0 0 0`.
        let nanos = text.split_whitespace().next().and_then(|n| n.parse().ok());
        if let Some(nanos) = nanos.filter(|n| *n > 0) {
            return Ok(Duration::from_nanos(nanos));
        }
    }
    Ok(stat(root, pid, tid)?.cpu_time)
}

/// Time that a thread was ready to run and waited for a CPU, since it started; `None` where the
/// kernel does not count it (`schedstat`, proc_pid_schedstat(5)).
pub fn run_delay(root: &Root, pid: u32, tid: u32) -> Result<Option<Duration>, HostError> {
    Ok(waits(root, pid, tid)?.map(|(waited, _)| waited))
}

/// [`run_delay`], with the number of times that the thread got a CPU.
pub fn waits(root: &Root, pid: u32, tid: u32) -> Result<Option<(Duration, u64)>, HostError> {
    let text = root.read(dir(pid, tid).join("schedstat"))?;
    let numbers: Vec<u64> = text.split_whitespace().map_while(|n| n.parse().ok()).collect();
    // Without CONFIG_SCHED_INFO the line is `0 0 0`.
    let [ran, waited, times] = numbers[..] else { return Ok(None) };
    Ok((ran > 0).then_some((Duration::from_nanos(waited), times)))
}

/// Numbers of vCPUs in a thread's name: `CPU 0/KVM`, `CPU 3/TCG`; `ALL CPUs/TCG` is one thread for
/// all, whose numbers only the monitor knows. Other VMMs have a fixed word and the number.
#[must_use]
pub fn vcpus_in_name(name: &str) -> Option<Vec<u32>> {
    if name.starts_with("ALL CPUs/") {
        return Some(Vec::new());
    }
    let of_qemu = || name.strip_prefix("CPU ")?.split_once('/').map(|(number, _)| number);
    let of_others =
        || ["fc_vcpu ", "crosvm_vcpu", "kvm-vcpu-", "vcpu"].iter().find_map(|p| name.strip_prefix(p));
    Some(vec![of_qemu().or_else(of_others)?.parse().ok()?])
}

/// CPUs that a thread may run on, as the kernel lists them: `0-3,6`.
pub fn affinity(root: &Root, pid: u32, tid: u32) -> Result<String, HostError> {
    let path = dir(pid, tid).join("status");
    let text = root.read(&path)?;
    let list = text.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    list.map(|l| l.trim().to_owned()).ok_or_else(|| form(path, "no Cpus_allowed_list", "a task's status"))
}

/// Allows a thread these CPUs. A thread that had no affinity of its own has one from then on: a
/// cpuset that grows later gives it no further CPUs.
///
/// # Errors
/// As `sched_setaffinity(2)` reports: `EINVAL` where none of them is online and in the thread's
/// cpuset, `EPERM` for a deadline thread that would lose CPUs of its root domain.
pub fn set_affinity(tid: u32, cpus: &BTreeSet<u32>) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        let cpu = cpu as usize;
        if cpu >= CpuSet::MAX_CPU {
            let text = format!("CPU {cpu}: affinities are set up to CPU {} only", CpuSet::MAX_CPU - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        set.set(cpu);
    }
    let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
    // Thread 0 would be the caller.
    let pid = pid.ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(sched_setaffinity(Some(pid), &set)?)
}

/// Cgroups of a thread, one for each hierarchy.
pub fn cgroups(root: &Root, pid: u32, tid: u32) -> Result<Vec<Membership>, HostError> {
    cgroups_at(root, &dir(pid, tid).join("cgroup"))
}

pub(crate) fn cgroups_at(root: &Root, path: &Path) -> Result<Vec<Membership>, HostError> {
    let text = root.read(path)?;
    let line = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, cgroup) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Membership { controllers: controllers.to_owned(), path: PathBuf::from(cgroup) })
    };
    text.lines().map(|l| line(l).ok_or_else(|| form(path.to_owned(), l, "a list of cgroups"))).collect()
}

#[cfg(test)]
mod tests;
