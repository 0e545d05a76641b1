//! Kernel features that use or withhold a real-time budget: the fair server, polling before a halt,
//! a group budget that is used up.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::Finding;
use crate::fair_server::{SERVERS, SINCE, version};
use crate::mounts::{Mount, mounts};
use crate::topology::{isolated, tickless};
use crate::{HostError, Root, is_gone, process};

/// The kernel's default, 50 ms in 1 s (`fair_server_init()`).
const DEFAULT_SHARE: f64 = 0.05;
/// Longest polling, in nanoseconds, that is negligible in a budget of a few milliseconds.
const SHORT_POLL: u64 = 50_000;

pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    server(root, found);
    nohz(root, found);
    halt_poll(root, found);
    hcbs(root, found);
}

/// Whether the kernel stops no real-time thread for having used up its share of a period: without a
/// limit, or with one that is the whole period.
pub(super) fn is_unthrottled(runtime: i64, period: i64) -> bool {
    runtime < 0 || runtime > 0 && runtime >= period
}

/// Share of each CPU that the fair server takes from the deadline class for ordinary threads: the
/// largest of all CPUs, or the default where debugfs is not mounted or not for this user. `None` on
/// a kernel without one.
pub fn fair_server(root: &Root) -> Result<Option<f64>, HostError> {
    of_servers(root, f64::max, &BTreeSet::new())
}

/// Smallest share of the fair server on any CPU that is not isolated, which is certain on each of
/// these; of all CPUs where all are isolated.
pub fn least_fair_server(root: &Root) -> Result<Option<f64>, HostError> {
    of_servers(root, f64::min, &names(isolated(root)?))
}

/// Whether the kernel stops FIFO and RR threads that have used up `sched_rt_runtime_us`. Since it
/// has a fair server (Linux 6.12) it does so with CONFIG_RT_GROUP_SCHED only, seen by the root
/// group's budget on cgroup v1; else that number bounds the reservations of deadline threads alone.
pub fn stops_fifo(root: &Root) -> Result<bool, HostError> {
    Ok(fair_server(root)?.is_none() || group_budget(root)?.is_some())
}

/// File with the real-time budget of the root group on cgroup v1; `None` where groups have none, or
/// on cgroup v2, where CONFIG_RT_GROUP_SCHED does not show.
pub(super) fn group_budget(root: &Root) -> Result<Option<PathBuf>, HostError> {
    let is_cpu = |m: &Mount| m.fs == "cgroup" && m.options.iter().any(|option| option == "cpu");
    let file = mounts(root)?.into_iter().find(is_cpu).map(|m| m.point.join("cpu.rt_runtime_us"));
    Ok(match file {
        Some(file) if root.exists(&file)? => Some(file),
        _ => None,
    })
}

fn of_servers(
    root: &Root,
    pick: fn(f64, f64) -> f64,
    left_out: &BTreeSet<String>,
) -> Result<Option<f64>, HostError> {
    let shares = shares(root)?;
    if !shares.is_empty() {
        let is_counted = |share: &&(String, f64)| !left_out.contains(&share.0);
        // Where all are left out, all count.
        let counted = shares.iter().filter(is_counted).map(|share| share.1).reduce(pick);
        return Ok(counted.or_else(|| shares.iter().map(|share| share.1).reduce(pick)));
    }
    Ok((version(root)? >= SINCE).then_some(DEFAULT_SHARE))
}

/// Names of CPUs in the form `cpu3`.
fn names(cpus: BTreeSet<u32>) -> BTreeSet<String> {
    cpus.into_iter().map(|cpu| format!("cpu{cpu}")).collect()
}

/// Name and share of each CPU's server; none where debugfs is not mounted, or not for this user, or
/// where the kernel is locked down, which refuses root too (`debugfs_locked_down()`).
fn shares(root: &Root) -> Result<Vec<(String, f64)>, HostError> {
    match shown_shares(root) {
        Err(e) if e.is_errno(Errno::ACCESS) || e.is_errno(Errno::PERM) => Ok(Vec::new()),
        shares => shares,
    }
}

fn shown_shares(root: &Root) -> Result<Vec<(String, f64)>, HostError> {
    let dir = Path::new(SERVERS);
    let names = if root.exists(dir)? { root.list(dir)? } else { Vec::new() };
    let number = |cpu: &str, file: &str| root.number::<f64>(dir.join(cpu).join(file));
    let mut shares = Vec::new();
    for cpu in names {
        let share = number(&cpu, "runtime")? / number(&cpu, "period")?;
        if share.is_finite() {
            shares.push((cpu, share));
        }
    }
    Ok(shares)
}

fn server(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.fair_server";
    const WHY: &str = "the fair server keeps a share of each CPU for ordinary threads: it is what lets a shell survive a spinning \
                       real-time guest, and deadline reservations get that much less";
    let read = || {
        let value = |name: &str| root.optional_number::<i64>(Path::new("/proc/sys/kernel").join(name));
        let (runtime, period) = (value("sched_rt_runtime_us")?, value("sched_rt_period_us")?);
        let throttled = runtime.is_some_and(|runtime| !is_unthrottled(runtime, period.unwrap_or(i64::MAX)));
        Ok::<_, HostError>((shares(root)?, throttled, version(root)?, nohz_full(root)?))
    };
    let (all, throttled, version, apart) = match read() {
        Ok(read) => read,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    // On a CPU without a tick it may well be off.
    let off: Vec<_> =
        all.iter().filter(|s| s.1 <= 0.0 && !apart.contains(&s.0)).map(|s| s.0.as_str()).collect();
    found.push(match (version, all.is_empty()) {
        _ if !off.is_empty() => Finding::warn(
            ID,
            format!("switched off on {}", off.join(", ")),
            WHY,
            format!("echo 50000000 >{SERVERS}/CPU/runtime, unless the CPU is set apart for one VM"),
        ),
        (_, false) => {
            let most = all.iter().map(|s| s.1).fold(0.0, f64::max);
            Finding::ok(ID, format!("{:.1} % of each CPU", most * 100.0), WHY)
        }
        (v, true) if v >= SINCE => Finding::ok(
            ID,
            format!(
                "this kernel has one, by default {:.0} % of each CPU; mount debugfs to see it",
                DEFAULT_SHARE * 100.0
            ),
            WHY,
        ),
        (_, true) if throttled => Finding::ok(ID, "none before Linux 6.12; RT throttling does its work", WHY),
        (_, true) => Finding::warn(
            ID,
            "none before Linux 6.12, and RT throttling is off",
            WHY,
            "sysctl kernel.sched_rt_runtime_us=950000",
        ),
    });
}

/// Names of the CPUs that run without a tick (`nohz_full=`).
fn nohz_full(root: &Root) -> Result<BTreeSet<String>, HostError> {
    Ok(names(tickless(root)?))
}

/// The fair server on CPUs without a tick; nothing where there are none.
fn nohz(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.nohz_full";
    const WHY: &str = "on a CPU without a tick the fair server's timer starts the tick again while an ordinary thread waits behind a \
                       real-time one";
    let read = || Ok::<_, HostError>((nohz_full(root)?, shares(root)?, version(root)?));
    let (apart, shares, version) = match read() {
        Ok((apart, ..)) if apart.is_empty() => return,
        Ok(read) => read,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    let names = |cpus: &[&str]| cpus.join(", ");
    let all: Vec<&str> = apart.iter().map(String::as_str).collect();
    let on: Vec<&str> =
        shares.iter().filter(|s| s.1 > 0.0 && apart.contains(&s.0)).map(|s| s.0.as_str()).collect();
    found.push(if version < SINCE {
        Finding::ok(ID, format!("{}; no fair server before Linux 6.12", names(&all)), WHY)
    } else if shares.is_empty() {
        Finding::warn(
            ID,
            format!("{}; whether the fair server is on there is not visible", names(&all)),
            WHY,
            "mount debugfs, and run as root",
        )
    } else if on.is_empty() {
        Finding::ok(ID, format!("{}; the fair server is off there", names(&all)), WHY)
    } else {
        Finding::warn(
            ID,
            format!("the fair server is on on {}", names(&on)),
            WHY,
            format!(
                "where one VM has the CPU for itself: fair_server = \"off\" in its `cores`, or echo 0 >{SERVERS}/CPU/runtime"
            ),
        )
    });
}

fn halt_poll(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "kvm.halt_poll";
    const WHY: &str =
        "a vCPU that halts polls for so long before it sleeps, and that time is taken from its budget";
    const PATH: &str = "/sys/module/kvm/parameters/halt_poll_ns";
    let nanos = match root.optional_number::<u64>(PATH) {
        Ok(nanos) => nanos,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    found.push(match nanos {
        None => Finding::ok(ID, "KVM is not loaded", WHY),
        Some(ns) if ns <= SHORT_POLL => Finding::ok(ID, format!("{ns} ns"), WHY),
        Some(ns) => Finding::warn(
            ID,
            format!("up to {} us", ns / 1000),
            WHY,
            "for VMs with a CPU contract: echo 0 >/sys/module/kvm/parameters/halt_poll_ns",
        ),
    });
}

/// Budget of the v2 root for hierarchical CBS, where the kernel has it.
fn hcbs(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.hcbs";
    const WHY: &str = "with cpu.rt.max a VM's real-time threads share one budget on cgroup v2";
    let read = mounts(root).and_then(|all| {
        let mount = all.into_iter().find(|m| m.fs == "cgroup2");
        let file: Option<PathBuf> = mount.map(|m| m.point.join("cpu.rt.max"));
        let text = file.as_ref().map_or(Ok(None), |f| root.read_optional(f))?;
        // The root need not have the file where the groups below have it.
        let below = match (&file, &text) {
            (Some(file), None) => any_below(root, file)?,
            _ => false,
        };
        Ok((file, text, below))
    });
    let (file, text, below) = match read {
        Ok(read) => read,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    found.push(match (file, text) {
        (Some(file), Some(text)) if text.starts_with("max") || text.starts_with("0 ") => Finding::warn(
            ID,
            format!("{} is `{text}`: no group gets a budget", file.display()),
            WHY,
            format!("echo '950000 1000000' >{}", file.display()),
        ),
        (_, Some(text)) => Finding::ok(ID, format!("cpu.rt.max is `{text}`"), WHY),
        _ if below => Finding::ok(ID, "groups have cpu.rt.max; the root has none", WHY),
        _ => Finding::ok(ID, "this kernel has no cpu.rt.max; other mechanisms are used", WHY),
    });
}

/// Whether a cgroup directly below that of this file has one too.
fn any_below(root: &Root, file: &Path) -> Result<bool, HostError> {
    let (Some(dir), Some(name)) = (file.parent(), file.file_name()) else { return Ok(false) };
    let groups = match root.list(dir) {
        Err(e) if e.is_gone() => return Ok(false),
        groups => groups?,
    };
    for group in groups {
        if root.exists(dir.join(group).join(name))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Findings on running VMs: whether their memory is locked, whether a QCOW2 image is among their
/// disks, whether each has a cgroup of its own, and vCPUs that cannot leave one CPU.
///
/// Processes that have ended meanwhile are left out; of those that may not be inspected the
/// findings say that it is not known.
#[must_use]
pub fn vms(root: &Root) -> Vec<Finding> {
    let programs = match programs(root) {
        Ok(programs) => programs,
        Err(e) => {
            return vec![Finding::unknown("vm", &e, "what the VMs have in memory, and on which images")];
        }
    };
    let mut found = Vec::new();
    for (pid, _) in programs.iter().filter(|(_, program)| is_qemu(program)) {
        found.extend(locked(root, *pid));
        found.extend(qcow2(root, *pid));
    }
    let vmms: Vec<u32> = programs.iter().map(|(pid, _)| *pid).collect();
    found.extend(super::placement::findings(root, &vmms));
    found.extend(super::cores::vms(root, &vmms));
    found
}

/// Processes of VMMs, by their programs.
pub(super) fn vmms(root: &Root) -> Result<Vec<u32>, HostError> {
    Ok(programs(root)?.into_iter().map(|(pid, _)| pid).collect())
}

/// Processes of VMMs, each with its program.
fn programs(root: &Root) -> Result<Vec<(u32, String)>, HostError> {
    let mut found = Vec::new();
    for pid in process::pids(root)? {
        let program = process::program_or_name(root, pid)?.filter(|name| is_vmm(name));
        found.extend(program.map(|program| (pid, program)));
    }
    Ok(found)
}

fn is_qemu(name: &str) -> bool {
    name.starts_with("qemu-system-") || name == "qemu-kvm" || name == "kvm"
}

/// Whether a program is a VMM. Some are released with a version in their names, which the kernel
/// cuts at 15 bytes where only the process's name can be read.
fn is_vmm(name: &str) -> bool {
    let is_released = ["cloud-hyperviso", "firecracker-v"].iter().any(|start| name.starts_with(start));
    is_qemu(name) || is_released || name == "firecracker" || name == "crosvm"
}

/// Finding for a part of a VM that cannot be read; `None` for a VM that has ended.
fn unseen(root: &Root, id: &str, pid: u32, error: &HostError, why: &str) -> Option<Finding> {
    (!error.is_gone()).then(|| Finding {
        what: format!("not known for VM {pid}{}: {error}", super::placement::vm_name(root, pid)),
        ..Finding::unknown(id, error, why)
    })
}

fn locked(root: &Root, pid: u32) -> Option<Finding> {
    const WHY: &str =
        "a page that is not in RAM is fetched while a vCPU waits; memory that is locked is always there";
    let id = format!("vm.memlock.{pid}");
    let (locked, resident) = match process::locked_memory(root, pid) {
        Ok(read) => read,
        Err(e) => return unseen(root, &id, pid, &e, WHY),
    };
    let mib = |bytes: u64| bytes >> 20;
    Some(if locked >= resident / 2 {
        Finding::ok(&id, format!("{} MiB of VM {pid} are locked", mib(locked)), WHY)
    } else {
        let limit = process::memlock_limit(root, Some(pid)).ok().flatten();
        let limit = limit.as_deref().unwrap_or("not known");
        Finding::warn(
            &id,
            format!(
                "{} MiB of {} MiB of VM {pid} are locked (RLIMIT_MEMLOCK {limit})",
                mib(locked),
                mib(resident)
            ),
            WHY,
            "start QEMU with `-overcommit mem-lock=on` and LimitMEMLOCK=infinity (libvirt: <memoryBacking><locked/>)",
        )
    })
}

/// Whether a process has a QCOW2 image open.
fn qcow2(root: &Root, pid: u32) -> Option<Finding> {
    const WHY: &str = "a write to a new cluster of a QCOW2 image waits for its tables; the RT hypervisor paper (section 6) met high \
                       latencies with it whatever the priorities";
    let id = format!("vm.qcow2.{pid}");
    let descriptors = match process::descriptors(root, pid) {
        Ok(descriptors) => descriptors,
        Err(e) => return unseen(root, &id, pid, &e, WHY),
    };
    let (mut images, mut unread) = (Vec::new(), None);
    for descriptor in descriptors {
        // Through the link, so that a file in another mount namespace is found too; only regular
        // files are opened.
        let path = root.at(descriptor.link());
        let target = std::fs::read_link(&path).unwrap_or_else(|_| path.clone());
        match is_qcow2(&path) {
            Ok(true) => images.push(root.host_path(&target).display().to_string()),
            Ok(false) => {}
            // Closed meanwhile, or a file of the kernel's own, without a place in a directory.
            Err(e) if is_gone(&e) || !target.is_absolute() => {}
            Err(source) => {
                unread.get_or_insert(HostError::Read { path: root.host_path(&target), source });
            }
        }
    }
    images.sort();
    images.dedup();
    if images.is_empty() {
        return unread.and_then(|e| unseen(root, &id, pid, &e, WHY));
    }
    let more = unread.map_or_else(String::new, |e| format!("; of another file it is not known: {e}"));
    Some(Finding::warn(
        &id,
        format!("VM {pid} has a QCOW2 image open: {}{more}", images.join(", ")),
        WHY,
        "convert it: qemu-img convert -O raw IMAGE IMAGE.raw, or preallocate: -o preallocation=full",
    ))
}

/// Whether a regular file begins as a QCOW2 image does; no other file is opened.
fn is_qcow2(path: &Path) -> io::Result<bool> {
    /// Magic bytes of an image (QEMU's docs/interop/qcow2.rst).
    const MAGIC: [u8; 4] = *b"QFI\xfb";
    if !std::fs::metadata(path)?.is_file() {
        return Ok(false);
    }
    let mut head = [0; 4];
    match crate::trusted::open_config(path)?.read_exact(&mut head) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| head == MAGIC),
    }
}

#[cfg(test)]
mod tests;
