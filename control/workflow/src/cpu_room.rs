//! CPU time that the host has for its guests' requests now.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use rtvirtio_cpu::turn;
use rtvirtio_kernel::steal::{IdleWatch, cpus_online};
use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{Cgroups, HostError, ProcessId, Root, process, task, unless_gone};
use rtvirtio_model::{GuestPoint, Profile, is_guest};
use rtvirtio_planner::{
    CpuRoom, CpuWaits, RunDelay, TaskOutlook, add_cpu_room, add_cpu_unknown, add_cpu_waits,
};
use rtvirtio_spec::{Device, HostSpec, Spec};
use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::dirs::Dirs;
use crate::error::{Result, bail};
use crate::find;
use crate::progress::Progress;
use crate::started::StartedVm;

/// Time over which the CPUs are watched.
const WINDOW: Duration = Duration::from_secs(1);
/// Fewest waits of a thread that give an estimate.
const LEAST_WAITS: u64 = 30;
/// Largest share of the CPUs that is idle on a host whose CPUs are used up.
const FULL: f64 = 0.05;

/// CPU time that VMs take of a host, over a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CpuUse {
    /// CPUs of the host that some thread of the VMs may use.
    pub cpus: u32,
    /// CPUs that the VMs used.
    pub used: f64,
    /// Part of these CPUs that was free; what these VMs used counts as free.
    pub free: f64,
}

impl CpuUse {
    /// Whether their CPUs were used up, so that those who need more wait.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.free - self.used < FULL * f64::from(self.cpus)
    }
}

impl fmt::Display for CpuUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpus, used, free } = self;
        write!(f, "VMs need {used:.2} of {cpus} CPUs for what they do now, {free:.2} of these are free")
    }
}

/// CPU time that VMs with these processes take for a second from now on; of all CPUs without a
/// process.
///
/// # Errors
/// When `/proc/stat` or the state of a process cannot be read, and cancellation.
pub fn cpu_use(own: &[u32], progress: &dyn Progress) -> Result<CpuUse> {
    let watch = CpuWatch::start(own)?;
    progress.pause(WINDOW)?;
    watch.so_far()
}

/// CPU time of a host and of some of its processes, from a moment on.
#[derive(Debug)]
pub struct CpuWatch {
    begin: Instant,
    /// CPUs that the processes may use.
    idle: IdleWatch,
    /// Each process with its CPU time at the begin.
    own: Vec<(ProcessId, Duration)>,
}

impl CpuWatch {
    /// Begins now.
    ///
    /// # Errors
    /// When `/proc/stat` or the state of a process cannot be read; one that has ended is no error.
    pub fn start(own: &[u32]) -> Result<Self> {
        let root = Root::default();
        let idle = IdleWatch::start(&root, cpus_of(&root, own)?.as_ref())?;
        let mut watched = Vec::new();
        for pid in own {
            let Some(process) = ProcessId::find(*pid)? else { continue };
            let time = unless_gone(process::cpu_time(&root, *pid))?;
            watched.extend(time.map(|time| (process, time)));
        }
        Ok(Self { begin: Instant::now(), idle, own: watched })
    }

    /// Mean use since the begin, of the CPUs that are online still.
    ///
    /// # Errors
    /// Those of [`CpuWatch::start`], counters of a CPU that went back, and a process that has ended
    /// meanwhile: how much of the time it used is not known.
    pub fn so_far(&self) -> Result<CpuUse> {
        let root = Root::default();
        let passed = self.begin.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        let mut more = Duration::ZERO;
        for (process, then) in &self.own {
            let time = process::cpu_time(&root, process.pid);
            if !process.is_alive() {
                bail!(System, "process {} has ended meanwhile: what it used is not known", process.pid);
            }
            more += time?.saturating_sub(*then);
        }
        let Some((cpus, idle)) = self.idle.idle(&root)? else {
            bail!(System, "the idle time of a CPU did not rise, as of one that goes offline");
        };
        let used = more.as_secs_f64() / passed;
        Ok(CpuUse { cpus, used, free: idle + used })
    }
}

/// CPUs that some thread of these processes may use; `None` without a thread.
fn cpus_of(root: &Root, own: &[u32]) -> Result<Option<BTreeSet<u32>>, HostError> {
    let mut all: Option<BTreeSet<u32>> = None;
    for pid in own {
        for tid in unless_gone(task::tids(root, *pid))?.unwrap_or_default() {
            let Some(text) = unless_gone(task::affinity(root, *pid, tid))? else { continue };
            let path = format!("/proc/{pid}/task/{tid}/status").into();
            let list = cpu_list(&text);
            let list = list.ok_or(HostError::Form { path, text, expected: "a list of CPUs" })?;
            all.get_or_insert_with(BTreeSet::new).extend(list);
        }
    }
    Ok(all)
}

/// Smallest quota of CPU time that acts on a thread of these processes, in CPUs; `None` without
/// one, as on a host without a CPU controller.
fn quota_of(root: &Root, own: &[u32]) -> Result<Option<f64>, HostError> {
    let cgroups = match Cgroups::detect_cpu(root) {
        Err(HostError::NoCpuController { .. }) => return Ok(None),
        found => found?,
    };
    let mut groups = BTreeSet::new();
    for pid in own {
        for tid in unless_gone(task::tids(root, *pid))?.unwrap_or_default() {
            groups.extend(unless_gone(cgroups.of_pid(root, tid))?);
        }
    }
    let mut least: Option<f64> = None;
    for group in groups {
        for limit in cgroups.cpu_limits_on_path(root, &group)? {
            least = Some(least.map_or(limit.cpus(), |least| least.min(limit.cpus())));
        }
    }
    Ok(least)
}

/// Reason why what is free in sum is not free for each of the VMs with these processes; `None`
/// without one.
fn why_not_for_each(root: &Root, own: &BTreeMap<String, Vec<u32>>, free: f64) -> Result<Option<String>> {
    let mut first: Option<(&str, BTreeSet<u32>)> = None;
    for (vm, pids) in own {
        let Some(cpus) = cpus_of(root, pids)? else { continue };
        match &first {
            Some((other, of_other)) if *of_other != cpus => {
                return Ok(Some(format!("{other} and {vm} may use different CPUs")));
            }
            Some(_) => {}
            None => first = Some((vm.as_str(), cpus)),
        }
        if let Some(quota) = quota_of(root, pids)?.filter(|quota| *quota < free) {
            return Ok(Some(format!("a quota gives {vm} no more than {quota:.2} CPUs")));
        }
    }
    Ok(None)
}

/// Waits of threads for CPUs, with the number of times that each got one; none of a thread whose
/// waits cannot be read.
fn waits_of(pids: &[u32]) -> BTreeMap<u32, (Duration, u64)> {
    let root = Root::default();
    let threads = pids.iter().flat_map(|pid| {
        let tids = task::tids(&root, *pid).unwrap_or_default();
        tids.into_iter().map(move |tid| (*pid, tid))
    });
    let of = |(pid, tid)| Some((tid, task::waits(&root, pid, tid).ok().flatten()?));
    threads.filter_map(of).collect()
}

/// Waits of the thread with the longest mean between two readings; `None` where each has too few.
fn delay(then: &BTreeMap<u32, (Duration, u64)>, now: &BTreeMap<u32, (Duration, u64)>) -> Option<RunDelay> {
    let of = |(tid, (waited, times)): (&u32, &(Duration, u64))| {
        let (waited_then, times_then) = then.get(tid)?;
        let n = times.checked_sub(*times_then).filter(|n| *n >= LEAST_WAITS)?;
        let mean = waited.checked_sub(*waited_then)?.as_nanos() / u128::from(n);
        Some(RunDelay { mean_ns: Nanos(u64::try_from(mean).unwrap_or(u64::MAX)), n })
    };
    now.iter().filter_map(of).max_by_key(|delay| delay.mean_ns)
}

/// CPU time for guests that share CPUs with each other alone.
#[derive(Clone, Debug)]
pub struct SharedRoom {
    /// Names of these guests; `None` for all of the host.
    pub vms: Option<BTreeSet<String>>,
    /// Sum of what their requests need, against what is free.
    pub room: CpuRoom,
}

/// CPU time for the requests of a host's guests.
#[derive(Clone, Debug, Default)]
pub struct CpuTime {
    /// Sums for the guests without a contract; none where none of them declares a rate, or none of
    /// their devices was measured in a VM.
    pub rooms: Vec<SharedRoom>,
    /// Reason why it is not known whether the guests have CPU time enough.
    pub unknown: Option<String>,
    /// Facts that the waits for CPUs follow from.
    pub waits: CpuWaits,
}

impl CpuTime {
    /// CPU time without an observation of the VMs' own threads.
    #[must_use]
    pub fn of_room(room: Option<CpuRoom>) -> Self {
        let waits = waits(room.is_some(), BTreeMap::new());
        Self {
            waits,
            rooms: room.map(|room| SharedRoom { vms: None, room }).into_iter().collect(),
            unknown: None,
        }
    }

    /// Adds what is known to the tasks that it is about.
    pub fn add_to(&self, tasks: &mut [TaskOutlook], spec: &Spec) {
        for SharedRoom { vms, room } in &self.rooms {
            add_cpu_room(tasks, spec, room, &|vm| is_among(vms.as_ref(), vm));
        }
        self.unknown.iter().for_each(|why| add_cpu_unknown(tasks, spec, why));
        add_cpu_waits(tasks, spec, &self.waits);
    }
}

/// Whether a VM is one of these; without a list all are.
fn is_among(vms: Option<&BTreeSet<String>>, vm: &str) -> bool {
    vms.is_none_or(|vms| vms.contains(vm))
}

/// Guests that may use the same CPUs, which no other guest may use.
#[derive(Debug, PartialEq, Eq)]
struct Sharing {
    /// Their names; `None` for all of the host.
    vms: Option<BTreeSet<String>>,
    pids: Vec<u32>,
}

/// Guests by the CPUs that they may use, where no CPU is of two groups; else all as one group.
fn sharing(root: &Root, own: &BTreeMap<String, Vec<u32>>, unseen: &[String]) -> Vec<Sharing> {
    let whole = || vec![Sharing { vms: None, pids: own.values().flatten().copied().collect() }];
    let mut groups: Vec<(BTreeSet<u32>, BTreeSet<String>, Vec<u32>)> = Vec::new();
    for (vm, pids) in own {
        // What cannot be read is said where the sums are judged.
        let Ok(Some(cpus)) = cpus_of(root, pids) else { return whole() };
        if let Some((_, vms, all)) = groups.iter_mut().find(|(of, ..)| *of == cpus) {
            vms.insert(vm.clone());
            all.extend(pids);
        } else if groups.iter().all(|(of, ..)| of.is_disjoint(&cpus)) {
            groups.push((cpus, BTreeSet::from([vm.clone()]), pids.clone()));
        } else {
            return whole();
        }
    }
    // A VM that does not run may use all CPUs.
    if groups.len() < 2 || !unseen.is_empty() {
        return whole();
    }
    groups.into_iter().map(|(_, vms, pids)| Sharing { vms: Some(vms), pids }).collect()
}

/// Use of CPUs by the processes of each group, all in the same second.
fn uses(groups: &[Sharing], progress: &dyn Progress) -> Result<Vec<CpuUse>> {
    let watches = groups.iter().map(|group| CpuWatch::start(&group.pids));
    let watches = watches.collect::<Result<Vec<_>>>()?;
    progress.pause(WINDOW)?;
    watches.iter().map(CpuWatch::so_far).collect()
}

/// CPU time for the guests of a host with these parts, measured for a second; nothing without
/// guests, and for a device or a measurement of another machine. What cannot be read is a warning.
///
/// # Errors
/// Cancellation.
pub fn measure<'a>(
    host: &HostSpec,
    parts: impl Iterator<Item = (&'a Spec, &'a Profile)>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<CpuTime> {
    let parts: Vec<_> = parts.collect();
    let is_elsewhere = |spec: &Spec| matches!(&spec.device, Device::Path(path) if !path.exists());
    let none = || Ok(CpuTime::default());
    if parts.iter().any(|(spec, _)| is_elsewhere(spec)) || !host.vms().iter().any(is_guest) {
        return none();
    }
    let (own, unseen) = seen(host, dirs, progress);
    let groups = sharing(&Root::default(), &own, &unseen);
    let read = || own.iter().map(|(vm, pids)| (vm.clone(), waits_of(pids))).collect::<BTreeMap<_, _>>();
    let before = read();
    let used = match uses(&groups, progress) {
        Ok(used) => used,
        Err(_) if progress.is_cancelled() => return progress.check_cancelled().and_then(|()| none()),
        Err(e) => {
            let why = format!("free CPU time is not known: {e:#}");
            progress.warn(&why);
            let is_measured = parts.iter().any(|(_, profile)| is_measured(profile));
            return Ok(CpuTime { unknown: is_measured.then_some(why), ..CpuTime::default() });
        }
    };
    // Measured on a host with other CPUs.
    let online = cpus_online(&Root::default())?;
    if parts.iter().any(|(_, profile)| profile.guest.is_some() && profile.cpus > online) {
        return none();
    }
    let delays = read().into_iter().filter_map(|(vm, now)| Some((delay(before.get(&vm)?, &now)?, vm)));
    let delays = delays.map(|(delay, vm)| (vm, delay)).collect();
    let mut rooms = Vec::new();
    for (Sharing { vms, .. }, of) in groups.into_iter().zip(used) {
        let room = CpuRoom::sum_of(parts.iter().copied(), of.cpus, of.free, &|vm| is_among(vms.as_ref(), vm));
        rooms.extend(room.map(|room| SharedRoom { vms, room }));
    }
    let unknown = why_unknown(&rooms, &parts, &own);
    if let Some(why) = &unknown {
        progress.warn(&format!("whether the guests have CPU time enough is not known: {why}"));
    }
    if rooms.iter().any(|of| of.room.is_short()) && !unseen.is_empty() {
        let names = unseen.join(", ");
        progress.step(&format!("{names}: not seen to run; CPU time of such a VM counts as other programs'"));
    }
    Ok(CpuTime { waits: waits(!rooms.is_empty(), delays), rooms, unknown })
}

/// Whether a device was measured in a VM.
fn is_measured(profile: &Profile) -> bool {
    profile.guest.as_ref().is_some_and(GuestPoint::is_of_guest)
}

/// Reason why it is not known whether each of the guests has CPU time enough; `None` where it is,
/// and where all together have too little.
fn why_unknown(
    rooms: &[SharedRoom],
    parts: &[(&Spec, &Profile)],
    own: &BTreeMap<String, Vec<u32>>,
) -> Option<String> {
    let enough: Vec<_> = rooms.iter().filter(|of| !of.room.is_short()).collect();
    let unpriced = CpuRoom::unpriced(parts.iter().copied());
    if !enough.is_empty() && !unpriced.is_empty() {
        return Some(format!("{}: no CPU time of a request was measured on the device", unpriced.join(", ")));
    }
    enough.iter().find_map(|SharedRoom { vms, room }| {
        let own = own.iter().filter(|(vm, _)| is_among(vms.as_ref(), vm));
        let own = own.map(|(vm, pids)| (vm.clone(), pids.clone())).collect();
        let why = why_not_for_each(&Root::default(), &own, room.free);
        why.unwrap_or_else(|e| Some(format!("{e:#}")))
    })
}

fn waits(is_used: bool, delays: BTreeMap<String, RunDelay>) -> CpuWaits {
    let root = Root::default();
    // Turns are as long as all CPUs of the host make them.
    let cpus = if is_used { cpus_online(&root).ok() } else { None };
    let turn = cpus.map(|cpus| turn(&root, cpus)).unwrap_or_default();
    CpuWaits { turn, delays }
}

/// Processes of the VMs without a contract, and the names of those not seen to run. Of VMs with one
/// the time is reserved: it is not free for others.
fn seen(host: &HostSpec, dirs: &Dirs, progress: &dyn Progress) -> (BTreeMap<String, Vec<u32>>, Vec<String>) {
    let vms = host.vms().iter().filter(|vm| vm.cpu.need.is_none()).map(|vm| vm.name.as_str());
    let vms: BTreeSet<&str> = vms.collect();
    let found = match find::of_host(host.vms(), dirs) {
        Ok(found) => found,
        Err(e) => {
            progress.warn(&format!("waits of VMs for CPUs are not known: {e:#}"));
            return (BTreeMap::new(), vms.into_iter().map(str::to_owned).collect());
        }
    };
    let (mut own, mut unseen) = (BTreeMap::new(), Vec::new());
    for vm in found.iter().filter(|vm| vms.contains(vm.name.as_str())) {
        match StartedVm::find(vm, progress) {
            Ok(Some(of)) => {
                own.insert(vm.name.clone(), of.processes.iter().map(|process| process.pid).collect());
            }
            Ok(None) | Err(_) => unseen.push(vm.name.clone()),
        }
    }
    (own, unseen)
}

#[cfg(test)]
mod tests;
