//! Reasons why the kernel refuses a scheduling policy: `EPERM` has five
//! (`kernel/sched/syscalls.c`).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::{Attr, Policy};
use crate::{Root, mounts, root_domain, task, text};

/// Number of the capability (capabilities(7)).
pub const CAP_SYS_NICE: u32 = 23;

/// Refused policy, with the reason and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("thread {tid} ({name}) cannot get `{wanted}`: {why}; {remedy}")]
pub struct Refusal {
    /// Thread id of the thread.
    pub tid: u32,
    /// Name of the thread.
    pub name: String,
    /// Text of the `Attr` that was asked for.
    pub wanted: String,
    /// Reason of the refusal.
    pub why: String,
    pub remedy: String,
    pub source: io::Error,
}

/// Finds the reason why `wanted` was refused for a thread of a process.
#[must_use]
pub fn explain(root: &Root, pid: u32, tid: u32, wanted: &Attr, source: io::Error) -> Refusal {
    let name = task::stat(root, pid, tid).map_or_else(|_| "gone".to_owned(), |s| s.comm);
    let errno = source.raw_os_error().map(Errno::from_raw_os_error);
    let (why, remedy) = match errno {
        Some(Errno::SRCH) => ("it has ended".to_owned(), "look at the threads again".to_owned()),
        Some(Errno::BUSY) => (
            format!(
                "the kernel has no deadline bandwidth left (sched_rt_runtime_us less all reservations and the fair server{})",
                ext_server(root)
            ),
            "make the budget smaller or the period longer, or remove another reservation. Where none is left: other programs lose \
             bandwidth of threads that are asleep while their reservation is taken away, and a change of the CPU sets finds it again"
                .to_owned(),
        ),
        Some(Errno::INVAL) => (
            "its parameters are outside of what the kernel takes".to_owned(),
            "a period of 100 us to 4 s and a budget from 1 us to the period; see /proc/sys/kernel/sched_deadline_period_{min,max}_us".to_owned(),
        ),
        Some(Errno::PERM) => permission(root, pid, tid, wanted),
        _ => (source.to_string(), "see sched_setattr(2)".to_owned()),
    };
    Refusal { tid, name, wanted: wanted.to_string(), why, remedy, source }
}

fn permission(root: &Root, pid: u32, tid: u32, wanted: &Attr) -> (String, String) {
    if matches!(wanted.policy, Policy::Fifo | Policy::Rr) {
        if let Some((cgroup, file)) = group_without_budget(root, pid, tid) {
            return (
                format!("its cgroup {} has a real-time budget of 0 (RT_GROUP_SCHED)", cgroup.display()),
                format!("give it one, its parents first: echo 400000 >{}", file.display()),
            );
        }
    }
    if !can_nice(root) {
        return (
            "this process lacks CAP_SYS_NICE".to_owned(),
            "run as root, or with AmbientCapabilities=CAP_SYS_NICE".to_owned(),
        );
    }
    if wanted.policy == Policy::Deadline {
        let (mask, domain) = allowed(root, pid, tid).unwrap_or_default();
        if text::cpu_list(&mask).is_some_and(|have| !domain.is_subset(&have)) {
            return (
                format!("its affinity {mask} is narrower than the CPUs of its root domain, and a deadline thread may run on all of them"),
                "widen the affinity, or make its CPUs a partition of their own (echo root >cpuset.cpus.partition, cgroup v2)"
                    .to_owned(),
            );
        }
        // A new cpuset moves threads that run, not those that sleep, and `__sched_setscheduler()`
        // compares with the root domain of the CPU that it finds the thread on.
        let cpu = task::stat(root, pid, tid).ok().map(|s| s.cpu);
        if let Some(cpu) = cpu.filter(|cpu| !domain.is_empty() && !domain.contains(cpu)) {
            return (
                format!(
                    "it has not run since its CPUs were changed, and asleep the kernel counts it to the root domain of CPU {cpu}"
                ),
                "try again when it has run: an I/O thread does when the guest reads its disk".to_owned(),
            );
        }
    }
    (
        "the kernel does not allow it".to_owned(),
        "is it a kernel thread bound to one CPU, or in another user namespace?".to_owned(),
    )
}

/// The second server, which takes bandwidth while a sched_ext scheduler is loaded (Linux 7.0): the
/// end of the list of holders, empty without one.
fn ext_server(root: &Root) -> String {
    const SERVERS: &str = "/sys/kernel/debug/sched/ext_server";
    let state = root.read_optional("/sys/kernel/sched_ext/state");
    match (state, root.exists(SERVERS)) {
        (Ok(Some(state)), Ok(true)) if state != "disabled" => format!(
            ", and ext_server of the sched_ext scheduler {}, see {SERVERS}",
            root.read_optional("/sys/kernel/sched_ext/root/ops").ok().flatten().unwrap_or(state)
        ),
        // debugfs that is not mounted, or not for this user, hides it.
        (Ok(Some(state)), _) if state != "disabled" => {
            ", and perhaps ext_server: a sched_ext scheduler is loaded".to_owned()
        }
        (Err(e), _) => format!(", and perhaps ext_server: {e}"),
        _ => String::new(),
    }
}

/// Cgroup of a thread with the v1 `cpu` controller, and its budget file, when the budget is 0.
fn group_without_budget(root: &Root, pid: u32, tid: u32) -> Option<(PathBuf, PathBuf)> {
    let all = task::cgroups(root, pid, tid).ok()?;
    let cgroup = all.into_iter().find(|m| m.has("cpu"))?.path;
    let mount = mounts::mounts(root)
        .ok()?
        .into_iter()
        .find(|m| m.fs == "cgroup" && m.options.iter().any(|o| o == "cpu"))?;
    let below = Path::new("/").join(&cgroup);
    let file = mount.point.join(below.strip_prefix("/").ok()?).join("cpu.rt_runtime_us");
    (root.read(&file).ok()?.trim() == "0").then_some((cgroup, file))
}

/// Whether this process has `CAP_SYS_NICE`; true when `/proc` does not show it.
fn can_nice(root: &Root) -> bool {
    let Ok(status) = root.read("/proc/self/status") else { return true };
    let caps = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    caps.and_then(|c| u64::from_str_radix(c.trim(), 16).ok()).is_none_or(|c| c >> CAP_SYS_NICE & 1 == 1)
}

/// Affinity of a thread, and the CPUs of its root domain; `None` when either is unknown.
fn allowed(root: &Root, pid: u32, tid: u32) -> Option<(String, BTreeSet<u32>)> {
    let mask = task::affinity(root, pid, tid).ok()?;
    let domain = root_domain(root, &task::cgroups(root, pid, tid).ok()?, &mask).ok()?;
    Some((mask, domain))
}
