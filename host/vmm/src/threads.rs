//! All threads of the host that work for one VM: those of its process, and kernel threads that were
//! started for it.
//!
//! QEMU's monitor reports reliably which threads are vCPUs and I/O threads ([`Named`]); it serves
//! one client only, so for a VM of libvirt the threads' names are used (`-name
//! VM,debug-threads=on`, which libvirt always gives). Other VMMs always name their threads. The
//! rest comes from `/proc`.

mod role;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_kernel::sched::{self, Attr, Policy, Reservation};
use rtvirtio_kernel::task::{self, Membership, TaskStat};
use rtvirtio_kernel::{HostError, Root, is_gone, process, unless_gone};
use serde::Serialize;

use crate::{Qmp, VmmError};

pub use role::{Role, kernel_owner, kernel_role, user_role};
pub use watch::{Appeared, Changes, Watcher};

/// State of a thread when it was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Thread {
    /// Process id; for a kernel thread its own id.
    pub pid: u32,
    /// Thread id, as in `/proc/PID/task/TID`.
    pub tid: u32,
    /// Start time in 1/100 s since boot: with `tid` it identifies a thread for good.
    pub start: u64,
    pub name: String,
    /// Role of the thread in the VM.
    pub role: Role,
    /// Whether it is a kernel thread outside of the VM's process (vhost before Linux 6.4, kvm-pit).
    pub kernel: bool,
    /// Scheduling policy; `None` for an unknown one.
    pub policy: Option<Policy>,
    /// Real-time priority 1 to 99; 0 under other policies.
    pub priority: u32,
    /// Nice value, -20 to 19.
    pub nice: i32,
    /// Parameters in nanoseconds under SCHED_DEADLINE.
    pub reservation: Option<Reservation>,
    /// Whether its children start as ordinary threads; `None` where only `/proc` was read.
    pub reset_on_fork: Option<bool>,
    /// CPUs that it may run on, such as `0-3`.
    pub affinity: String,
    /// Cgroups of the thread, one for each hierarchy.
    pub cgroups: Vec<Membership>,
    /// CPU time used since it started.
    #[serde(rename = "cpu_time_ns", serialize_with = "nanos")]
    pub cpu_time: Duration,
}

fn nanos<S: serde::Serializer>(time: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_u64(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

impl Thread {
    /// Cgroup in the v1 hierarchy of a controller, or in v2 for an empty name.
    #[must_use]
    pub fn cgroup(&self, controller: &str) -> Option<&PathBuf> {
        let fits = |m: &&Membership| {
            if controller.is_empty() { m.controllers.is_empty() } else { m.has(controller) }
        };
        self.cgroups.iter().find(fits).map(|m| &m.path)
    }

    /// Policy with its parameters: `fifo 97`, `other nice 0`, `deadline 4ms/20ms`.
    #[must_use]
    pub fn scheduling(&self) -> String {
        match (self.policy, self.reservation) {
            (None, _) => "unknown".to_owned(),
            (Some(Policy::Deadline), Some(r)) => {
                let ms = |ns: u64| format!("{}ms", ns as f64 / 1e6);
                format!("deadline {}/{}", ms(r.runtime), ms(r.period))
            }
            (Some(p @ (Policy::Fifo | Policy::Rr)), _) => format!("{} {}", p.name(), self.priority),
            (Some(p), _) => format!("{} nice {}", p.name(), self.nice),
        }
    }
}

/// Threads that the monitor has named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Numbers of vCPUs by thread id; several under TCG in one thread.
    pub vcpus: BTreeMap<u32, Vec<u32>>,
    /// Names of I/O threads by thread id.
    pub iothreads: BTreeMap<u32, String>,
}

impl Named {
    /// Queries the monitor for vCPUs and I/O threads.
    pub fn ask(qmp: &mut Qmp) -> Result<Self, VmmError> {
        let mut named = Self { vcpus: Self::ask_vcpus(qmp)?, ..Self::default() };
        for thread in qmp.query_iothreads()? {
            named.iothreads.insert(thread.thread_id.unsigned_abs(), thread.id);
        }
        Ok(named)
    }

    /// Queries the monitor for vCPUs alone.
    pub fn ask_vcpus(qmp: &mut Qmp) -> Result<BTreeMap<u32, Vec<u32>>, VmmError> {
        let mut vcpus = BTreeMap::<u32, Vec<u32>>::new();
        for cpu in qmp.query_cpus_fast()? {
            vcpus.entry(cpu.thread_id.unsigned_abs()).or_default().push(cpu.cpu_index);
        }
        Ok(vcpus)
    }

    /// Thread id of some thread of the VM, from which its process can be found.
    #[must_use]
    pub fn any_thread(&self) -> Option<u32> {
        self.vcpus.keys().chain(self.iothreads.keys()).next().copied()
    }
}

/// Processes of a VM, and threads named by its monitor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmHandle {
    /// Process ids: the VMM, and helpers where a cgroup holds some.
    pub pids: BTreeSet<u32>,
    /// Threads named by the monitor; empty without one.
    pub named: Named,
}

impl VmHandle {
    /// VM of which only the process of its VMM is known.
    #[must_use]
    pub fn of_pid(pid: u32) -> Self {
        Self { pids: BTreeSet::from([pid]), named: Named::default() }
    }
}

/// All threads of a VM at this moment. Threads that end meanwhile are left out.
///
/// # Errors
/// When none of its processes exists any more, or `/proc` cannot be read.
pub fn discover(root: &Root, vm: &VmHandle) -> Result<Vec<Thread>, HostError> {
    discover_among(root, vm, &process::pids(root)?.into_iter().collect())
}

/// All threads of a VM, as [`discover`], with kernel threads searched only among these processes:
/// one list of [`kernel_threads`] serves many VMs.
pub fn discover_among(
    root: &Root,
    vm: &VmHandle,
    processes: &BTreeSet<u32>,
) -> Result<Vec<Thread>, HostError> {
    let own = own_threads(root, vm)?;
    let tids: BTreeSet<u32> = own.iter().map(|t| t.tid).collect();
    let mut all = own;
    for &pid in processes.difference(&vm.pids) {
        all.extend(kernel_thread(root, pid, vm, &tids)?);
    }
    Ok(all)
}

/// Processes among the given ones that are kernel threads for some VM, by their names.
pub fn kernel_threads(root: &Root, processes: impl Iterator<Item = u32>) -> BTreeSet<u32> {
    // A process that has ended, or cannot be read, belongs to no VM.
    let has_owner = |pid: &u32| process::name(root, *pid).is_ok_and(|name| kernel_owner(&name).is_some());
    processes.filter(has_owner).collect()
}

/// Main loop of a VMM without any thread that is known to run vCPUs: QEMU without thread names, not
/// queried by its monitor.
#[must_use]
pub fn main_loop_without_vcpus(threads: &[Thread]) -> Option<&Thread> {
    let with_vcpus: BTreeSet<u32> =
        threads.iter().filter(|t| matches!(t.role, Role::Vcpu(_))).map(|t| t.pid).collect();
    threads.iter().find(|t| t.role == Role::Emulator && !with_vcpus.contains(&t.pid))
}

/// Threads of the VM's own processes.
fn own_threads(root: &Root, vm: &VmHandle) -> Result<Vec<Thread>, HostError> {
    let mut all = Vec::new();
    let mut gone = None;
    for &pid in &vm.pids {
        match process_threads(root, pid, vm) {
            Ok(threads) => all.extend(threads),
            Err(e) if e.is_gone() => gone = Some(e),
            Err(e) => return Err(e),
        }
    }
    match gone {
        Some(e) if all.is_empty() => Err(e),
        _ => Ok(all),
    }
}

/// Threads of one process; an error only when the process itself cannot be read.
fn process_threads(root: &Root, pid: u32, vm: &VmHandle) -> Result<Vec<Thread>, HostError> {
    let mut threads = Vec::new();
    for tid in task::tids(root, pid)? {
        let Some(stat) = unless_gone(task::stat(root, pid, tid))? else { continue };
        let role = user_role(pid, tid, &stat.comm, &vm.named);
        threads.extend(unless_gone(read_thread(root, pid, tid, stat, role))?);
    }
    role::name_main_loop(&mut threads);
    role::name_rcu(&mut threads);
    role::name_cloud_hypervisor(&mut threads);
    Ok(threads)
}

/// Kernel thread that works for the VM; `None` for any other process.
fn kernel_thread(
    root: &Root,
    pid: u32,
    vm: &VmHandle,
    tids: &BTreeSet<u32>,
) -> Result<Option<Thread>, HostError> {
    let found = unless_gone(task::stat(root, pid, pid))?.filter(|s| s.kernel);
    let Some(mut stat) = found else { return Ok(None) };
    let Some(name) = unless_gone(process::name(root, pid))? else { return Ok(None) };
    let Some(role) = kernel_role(&name, &vm.pids, tids) else { return Ok(None) };
    stat.comm = name;
    unless_gone(read_thread(root, pid, pid, stat, role))
}

fn read_thread(root: &Root, pid: u32, tid: u32, stat: TaskStat, role: Role) -> Result<Thread, HostError> {
    // Attributes that /proc does not show; only the real machine can be queried.
    let attr: Option<Attr> = match root.is_real().then(|| sched::get(tid)) {
        None => None,
        Some(Ok(attr)) => Some(attr),
        // A security module may forbid it. A deadline thread alone has a reservation, and without
        // it would be taken for an ordinary one.
        Some(Err(e)) if !is_gone(&e) && stat.policy.is_some_and(|p| p != Policy::Deadline) => None,
        Some(Err(source)) => {
            return Err(HostError::Read { path: format!("/proc/{pid}/task/{tid}/sched").into(), source });
        }
    };
    Ok(Thread {
        pid,
        tid,
        start: stat.start,
        name: stat.comm,
        role,
        kernel: stat.kernel && pid == tid,
        policy: stat.policy,
        priority: stat.priority,
        nice: stat.nice,
        reservation: attr.and_then(|a| a.reservation),
        reset_on_fork: attr.map(|a| a.reset_on_fork),
        affinity: task::affinity(root, pid, tid)?,
        cgroups: task::cgroups(root, pid, tid)?,
        cpu_time: task::cpu_time(root, pid, tid)?,
    })
}

#[cfg(test)]
mod tests;
