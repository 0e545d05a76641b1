//! Mechanisms of this kernel, the grant of each, and the choice among them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_kernel::task::Membership;
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root, process, root_domain, task, text, unless_gone};
use rtvirtio_units::Ratio;
use rtvirtio_vmm::threads::kernel_owner;
use serde::Serialize;

use crate::{Backend, Grant, Load, Over};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelMechanism {
    /// Mechanism that can be used.
    pub backend: Backend,
    /// Shares that it grants, and those taken.
    pub grant: Grant,
}

/// Mechanisms found, with the host's CPUs and cgroups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Usable mechanisms, the strongest first.
    pub found: Vec<KernelMechanism>,
    /// Missing mechanisms, with the reason and the remedy.
    pub missing: Vec<(Backend, String)>,
    /// Number of CPUs that are online.
    pub cpus: u32,
    /// Hierarchy of the CPU controller; `None` where none is mounted.
    #[serde(skip)]
    pub cgroups: Option<Cgroups>,
}

/// Looks for the mechanisms, without writing anything.
pub fn probe(root: &Root) -> Result<Probe, HostError> {
    let online = root.read("/sys/devices/system/cpu/online")?;
    let cpus = text::cpu_list(&online)
        .filter(|c| !c.is_empty())
        .ok_or_else(|| HostError::form("/sys/devices/system/cpu/online", &online, "a list of CPUs"))?;
    let cpus = u32::try_from(cpus.len()).unwrap_or(u32::MAX);
    let cgroups = Cgroups::detect_cpu(root);
    let mut probe = Probe { found: Vec::new(), missing: Vec::new(), cpus, cgroups: None };
    let global = limits(root)?;
    let no_cgroups = cgroups.as_ref().err().map(ToString::to_string);
    for backend in [Backend::Hcbs, Backend::RtGroup, Backend::Deadline, Backend::CpuMax, Backend::Throttle] {
        let result = match (backend, &cgroups) {
            (Backend::Deadline, _) => deadline(root, &global)?,
            (Backend::Throttle, _) => throttle(root, &global)?,
            (Backend::Hcbs, Ok(c)) => hcbs(root, c, &global)?,
            (Backend::RtGroup, Ok(c)) => rt_group(root, c, cpus, &global)?,
            (Backend::CpuMax, Ok(c)) => cpu_max(root, c)?,
            (_, Err(_)) => Err(no_cgroups.clone().unwrap_or_default()),
        };
        match result {
            Ok(grant) => probe.found.push(KernelMechanism { backend, grant }),
            Err(why) => probe.missing.push((backend, why)),
        }
    }
    probe.cgroups = cgroups.ok();
    Ok(probe)
}

/// Mechanism for a contract: the one asked for, else the strongest. Real-time priorities need one
/// that holds FIFO threads.
#[must_use]
pub fn choose(probe: &Probe, wanted: Option<Backend>, real_time: bool) -> Option<&KernelMechanism> {
    probe.found.iter().find(|f| wanted.map_or_else(|| holds(f.backend, real_time), |w| f.backend == w))
}

/// Like [`choose`], for a VM whose threads get CPUs of their own: a deadline thread must be allowed
/// on all CPUs.
#[must_use]
pub fn choose_pinned(probe: &Probe, real_time: bool) -> Option<&KernelMechanism> {
    probe.found.iter().find(|f| f.backend != Backend::Deadline && holds(f.backend, real_time))
}

fn holds(backend: Backend, real_time: bool) -> bool {
    match real_time {
        true => matches!(backend, Backend::Hcbs | Backend::RtGroup | Backend::Throttle),
        false => backend != Backend::Throttle,
    }
}

/// `sched_rt_runtime_us / sched_rt_period_us`; `None` without a limit (-1).
fn limits(root: &Root) -> Result<Option<f64>, HostError> {
    let read = |name: &str| root.optional_number::<i64>(Path::new("/proc/sys/kernel").join(name));
    let (runtime, period) = (read("sched_rt_runtime_us")?, read("sched_rt_period_us")?);
    Ok(match (runtime, period) {
        (Some(runtime), Some(period)) if runtime >= 0 && period > 0 => Some(runtime as f64 / period as f64),
        _ => None,
    })
}

/// Shares of the cgroups directly below the root; deeper ones draw on these.
fn taken(
    root: &Root,
    cgroups: &Cgroups,
    share: impl Fn(&Path) -> Result<Option<f64>, HostError>,
) -> Result<Vec<Load>, HostError> {
    let children = cgroups.all_dirs(root)?.into_iter().filter(|d| d.parent() == Some(&cgroups.mount));
    let mut loads = Vec::new();
    for dir in children {
        // A cgroup that is not counted would be promised a second time.
        let share = share(&dir)?.filter(|s| *s > 0.0);
        if let (Some(share), Some(name)) = (share, dir.file_name()) {
            let name = format!("cgroup {}", name.to_string_lossy());
            loads.push(Load { name, share: Ratio(share), over: Over::Every, pid: None });
        }
    }
    Ok(loads)
}

type ProbeResult = Result<Result<Grant, String>, HostError>;

fn hcbs(root: &Root, cgroups: &Cgroups, global: &Option<f64>) -> ProbeResult {
    let file = cgroups.mount.join("cpu.rt.max");
    let ratio = |text: &str| {
        let mut words = text.split_whitespace().map(str::parse::<f64>);
        match (words.next(), words.next()) {
            (Some(Ok(q)), Some(Ok(p))) if p > 0.0 => Some(q / p),
            _ => None,
        }
    };
    let (limit, fair_server) = match root.read_optional(&file)? {
        Some(text) => match ratio(&text).filter(|l| *l > 0.0) {
            Some(limit) => (limit, 0.0),
            None => {
                let why = format!(
                    "{} is `{text}`: the server is off; write `950000 1000000` to it",
                    file.display()
                );
                return Ok(Err(why));
            }
        },
        // The root need not have the file: the servers of the groups below are then admitted like
        // deadline threads.
        None if any_group_has(root, cgroups, "cpu.rt.max")? => {
            (global.unwrap_or(1.0), rtvirtio_kernel::check::fair_server(root)?.unwrap_or(0.0))
        }
        None => {
            return Ok(Err("this kernel has no cpu.rt.max (hierarchical CBS is not merged yet)".to_owned()));
        }
    };
    let share = |dir: &Path| {
        let Some(text) = root.read_optional(dir.join("cpu.rt.max"))? else { return Ok(None) };
        Ok(ratio(&text))
    };
    let taken = taken(root, cgroups, share)?;
    Ok(Ok(Grant { limit: Ratio(limit), fair_server: Ratio(fair_server), taken }))
}

/// Whether a cgroup below the root has this file.
fn any_group_has(root: &Root, cgroups: &Cgroups, file: &str) -> Result<bool, HostError> {
    for dir in cgroups.all_dirs(root)? {
        if root.exists(dir.join(file))? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn rt_group(root: &Root, cgroups: &Cgroups, cpus: u32, global: &Option<f64>) -> ProbeResult {
    let share = |dir: &Path| {
        let read = |name: &str| root.optional_number::<i64>(dir.join(name));
        let (runtime, period) = (read("cpu.rt_runtime_us")?, read("cpu.rt_period_us")?);
        Ok(match (runtime, period) {
            (Some(-1), _) => Some(1.0),
            (Some(runtime), Some(period)) if period > 0 => Some(runtime as f64 / period as f64),
            _ => None,
        })
    };
    if cgroups.hierarchy == Hierarchy::V2 {
        return Ok(Err(
            "the cpu controller is on cgroup v2, where groups have no real-time budget".to_owned()
        ));
    }
    let Some(limit) = share(&cgroups.mount)? else {
        return Ok(Err("this kernel has no CONFIG_RT_GROUP_SCHED, as most distributions'".to_owned()));
    };
    // The fair server, where there is one, takes its share from groups too.
    let server = rtvirtio_kernel::check::fair_server(root)?.unwrap_or(0.0);
    let limit = Ratio(limit.min(global.unwrap_or(1.0)).min(1.0 - server));
    if limit.0 <= 0.0 {
        return Ok(Err(
            "the root group has a real-time budget of 0; write 950000 to its cpu.rt_runtime_us".to_owned()
        ));
    }
    let mut taken = taken(root, cgroups, share)?;
    // Deadline threads run before every FIFO thread, and the kernel counts the two apart.
    taken.extend(deadline_threads(root)?.into_iter().map(|load| load.spread(cpus as usize)));
    Ok(Ok(Grant { limit, fair_server: Ratio(0.0), taken }))
}

fn deadline(root: &Root, global: &Option<f64>) -> ProbeResult {
    // Without a limit the kernel admits everything, and missed deadlines go unnoticed; plans still
    // stay below one CPU each.
    let limit = Ratio(global.unwrap_or(1.0));
    let fair_server = Ratio(rtvirtio_kernel::check::fair_server(root)?.unwrap_or(0.0));
    // Linux 7 takes no limit below the fair server's share, so its least one leaves nothing.
    if limit.0 <= fair_server.0 {
        let beside = if limit.0 > 0.0 { " beside the fair server" } else { "" };
        return Ok(Err(format!(
            "sched_rt_runtime_us leaves reservations nothing{beside}; sysctl kernel.sched_rt_runtime_us=950000"
        )));
    }
    Ok(Ok(Grant { limit, fair_server, taken: deadline_threads(root)? }))
}

/// Share of each CPU that the deadline threads of each process have reserved, by root domain.
fn deadline_threads(root: &Root) -> Result<Vec<Load>, HostError> {
    // Reservations can only be read on the real machine.
    if !root.is_real() {
        return Ok(Vec::new());
    }
    let top = Membership { controllers: String::new(), path: "/".into() };
    let (rest, mut loads) = (root_domain(root, &[top], "")?, Vec::new());
    for pid in process::pids(root)? {
        let (mut taken, mut holder) = (BTreeMap::<BTreeSet<u32>, f64>::new(), pid);
        for tid in unless_gone(task::tids(root, pid))?.unwrap_or_default() {
            let Some(stat) = unless_gone(task::stat(root, pid, tid))? else { continue };
            // Threads of schedutil only look like deadline threads: the kernel admits them without
            // counting them (SCHED_FLAG_SUGOV).
            if stat.policy == Some(Policy::Deadline) && !(stat.kernel && stat.comm.starts_with("sugov:")) {
                let path = || PathBuf::from(format!("/proc/{pid}/task/{tid}/sched"));
                let attr = sched::get(tid).map_err(|source| HostError::Read { path: path(), source });
                let Some(of) = unless_gone(attr)?.and_then(|a| a.reservation) else { continue };
                let Some(cpus) = domain_of_thread(root, pid, tid)? else { continue };
                *taken.entry(cpus).or_default() += of.runtime as f64 / of.period.max(1) as f64;
                // Before Linux 6.4 vhost threads are processes of their own.
                if let Some((_, owner)) = stat.kernel.then(|| kernel_owner(&stat.comm)).flatten() {
                    holder = unless_gone(process::of_thread(root, owner))?.unwrap_or(pid);
                }
            }
        }
        for (cpus, taken) in taken.into_iter().filter(|(_, taken)| *taken > 0.0) {
            let program = unless_gone(process::name(root, holder))?.unwrap_or_default();
            let name = format!("deadline threads of {program}");
            let share = Ratio(taken / cpus.len().max(1) as f64);
            let over = if cpus == rest { Over::Rest(cpus) } else { Over::Partition(cpus) };
            loads.push(Load { name, share, over, pid: Some(holder) });
        }
    }
    Ok(loads)
}

/// CPUs of a thread's root domain; `None` for one that has ended.
fn domain_of_thread(root: &Root, pid: u32, tid: u32) -> Result<Option<BTreeSet<u32>>, HostError> {
    let Some(cgroups) = unless_gone(task::cgroups(root, pid, tid))? else { return Ok(None) };
    let Some(affinity) = unless_gone(task::affinity(root, pid, tid))? else { return Ok(None) };
    root_domain(root, &cgroups, &affinity).map(Some)
}

fn cpu_max(root: &Root, cgroups: &Cgroups) -> ProbeResult {
    // The root group has no limit of its own; on v2 its children show the file once the controller
    // is enabled for them.
    let there = cgroups.hierarchy == Hierarchy::V2 || root.exists(cgroups.mount.join("cpu.cfs_quota_us"))?;
    if !there {
        return Ok(Err("this kernel has no CONFIG_CFS_BANDWIDTH".to_owned()));
    }
    Ok(Ok(Grant { limit: Ratio(1.0), fair_server: Ratio(0.0), taken: Vec::new() }))
}

/// No budget of a VM: the kernel keeps a share for ordinary threads, and the rest is granted.
fn throttle(root: &Root, global: &Option<f64>) -> ProbeResult {
    let server = rtvirtio_kernel::check::least_fair_server(root)?;
    let stopped = if rtvirtio_kernel::check::stops_fifo(root)? { *global } else { None };
    let limit = stopped.unwrap_or(1.0).min(1.0 - server.unwrap_or(0.0));
    if limit > 0.0 && limit < 1.0 {
        return Ok(Ok(Grant { limit: Ratio(limit), fair_server: Ratio(0.0), taken: Vec::new() }));
    }
    let why = match server {
        _ if limit <= 0.0 => {
            "real-time threads get no time at all; sysctl kernel.sched_rt_runtime_us=950000, and see rt.fair_server of `rtvirtio check`"
        }
        Some(_) => {
            "nothing keeps a share for ordinary threads: the fair server of a CPU is off, and sched_rt_runtime_us stops no real-time thread \
             here; a spinning one would stop the host: see rt.fair_server of `rtvirtio check`"
        }
        None => {
            "nothing keeps a share for ordinary threads: sched_rt_runtime_us is no limit; a spinning real-time thread would stop the host: \
             sysctl kernel.sched_rt_runtime_us=950000"
        }
    };
    Ok(Err(why.to_owned()))
}
