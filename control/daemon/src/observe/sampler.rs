//! Reading QEMU's counters, the I/O domain's and the kernel's, in a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rtvirtio_blame::{Faults, Limiter, Stops};
use rtvirtio_cpu::Backend;
use rtvirtio_domain_protocol::histograms::DiskHistograms;
use rtvirtio_kernel::faults::{HostFaults, of_host};
use rtvirtio_kernel::pressure::pressure;
use rtvirtio_kernel::steal::{StealWatch, cpus_online};
use rtvirtio_kernel::{HostError, ProcessId, Root, task, unless_gone};
use rtvirtio_vmm::Role;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::threads::user_role;
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::device_ageing::{DeviceAgeing, SampleStalls};
use rtvirtio_workflow::device_windows::DeviceWindows;
use rtvirtio_workflow::vm_counters::{OwnFaults, QuotaCounters, faults_since, own_faults, quota};

use super::coverage::Coverage;
use super::facts::{self, DeviceFacts, DeviceInterval, IntervalFacts, ThreadKey, devices, only_device};
use super::limiters::{LimiterCounters, LimiterInput};
use super::memory::MemoryWindow;
use super::monitors::{Disks, Monitors, limits};
use super::stalls::{StallWatch, Stalls};
use super::waits::WaitWindows;
use super::window::{DiskWindow, StoodStill, doubt_where_held_back, judge_task};
use super::{
    DiskObservation, DiskSource, HostObservation, Observation, TargetObservation, ThreadObservation,
    UncoveredObservation, VmObservation, ageing, causes, domain,
};
use crate::history::now;
use crate::linux::RunningVm;
use crate::lock::lock;

/// CPU time and run delay in ns.
type ThreadTimes = BTreeMap<ThreadKey, (u64, Option<u64>)>;

/// Age of a monitor's answer beyond which it is of another time than the other counters, over the
/// interval between samples.
const LATE_ANSWER: f64 = 0.1;

/// State of a VM between two samples.
struct VmSample {
    processes: Vec<ProcessId>,
    /// Windows of QEMU's disks.
    disks: BTreeMap<String, DiskWindow>,
    /// Windows of the I/O domain's disks.
    domain: BTreeMap<String, DiskWindow>,
    limiters: LimiterCounters,
    at: Option<Instant>,
    /// CPU time and delay of each thread, in ns; `None` where not all could be read.
    cpu: Option<(Instant, ThreadTimes)>,
    /// Stops by CPU quotas so far.
    quota: Option<QuotaCounters>,
    /// Major page faults so far, of the VM and of the host.
    faults: (Option<OwnFaults>, Option<HostFaults>),
}

/// Inputs that all VMs of one sample share.
#[derive(Clone, Copy)]
struct Surroundings<'a> {
    of_domain: &'a Result<Vec<DiskHistograms>, String>,
    stalls: &'a Stalls,
    stolen: Option<f64>,
    /// CPUs of the host.
    cpus: Option<u32>,
    /// Major page faults of the host so far.
    faults: Option<HostFaults>,
}

/// Use of a VM's device; nothing where its requests are not counted there.
#[derive(Default)]
struct OnDevice {
    device: Option<Arc<DeviceInterval>>,
    has_shares: bool,
}

/// Samples VMs and the host, in a thread of its own.
pub struct Sampler {
    root: Root,
    dirs: Dirs,
    seen: BTreeMap<String, VmSample>,
    monitors: Monitors,
    /// Devices whose service time is watched, because plans depend on it.
    devices: Option<DeviceWindows>,
    /// Devices against their profiles.
    ageing: DeviceAgeing,
    /// Whether plans are to follow a slower device.
    follows: bool,
    waits: WaitWindows,
    devices_used: DeviceFacts,
    coverage: Arc<Mutex<Coverage>>,
    memory: MemoryWindow,
    stalls: StallWatch,
    pressure: BTreeMap<&'static str, std::time::Duration>,
    steal: Option<StealWatch>,
    at: Option<Instant>,
}

impl Sampler {
    /// Sampler without a sample. With `monitor_of_libvirt` it asks monitors of libvirt's VMs, which
    /// taints these; with `devices` it watches the VMs' devices too.
    #[must_use]
    pub fn new(dirs: Dirs, monitor_of_libvirt: bool, devices: bool) -> Self {
        Self {
            root: Root::default(),
            monitors: Monitors::new(dirs.clone(), monitor_of_libvirt),
            dirs,
            seen: BTreeMap::new(),
            devices: devices.then(DeviceWindows::default),
            ageing: DeviceAgeing::default(),
            follows: false,
            waits: WaitWindows::default(),
            devices_used: DeviceFacts::default(),
            coverage: Arc::default(),
            memory: MemoryWindow::default(),
            stalls: StallWatch::default(),
            pressure: BTreeMap::new(),
            steal: None,
            at: None,
        }
    }

    /// Lets plans follow devices that are slower than their profiles.
    #[must_use]
    pub(crate) fn following(mut self, follows: bool) -> Self {
        self.follows = follows;
        self
    }

    /// Scans of open files, without which no use of a device is laid to a VM.
    #[must_use]
    pub(crate) fn with_coverage(mut self, coverage: Arc<Mutex<Coverage>>) -> Self {
        self.coverage = coverage;
        self
    }

    /// Takes one sample of all VMs that run.
    pub fn sample(&mut self, vms: &[Arc<RunningVm>]) -> Observation {
        self.seen.retain(|name, _| vms.iter().any(|vm| vm.contract.vm.name == *name));
        self.memory.sample(&self.root);
        self.devices_used.sample(vms, &self.root);
        let mut host = self.host();
        let mut observed = BTreeMap::new();
        let mut of_monitors = self.monitors.sample(vms);
        let (stalls, faults) = (self.stalls.take(), of_host(&self.root).ok());
        let cpus = cpus_online(&self.root).ok();
        // The reason of a failure is reported among `waits`.
        let of_domain = match domain::control(&self.dirs) {
            Ok(Some(control)) => domain::disks(&control),
            Ok(None) => Ok(Vec::new()),
            Err(why) => Err(why),
        };
        for vm in vms {
            let name = &vm.contract.vm.name;
            let not_asked = || (Instant::now(), Err("its monitor was not asked".to_owned()));
            let disks = of_monitors.remove(name).unwrap_or_else(not_asked);
            let on_device = self.on_device(vm, vms);
            let stolen = host.stolen;
            let shared = Surroundings { of_domain: &of_domain, stalls: &stalls, stolen, cpus, faults };
            observed.insert(name.clone(), self.sample_vm(vm, disks, &shared, on_device));
        }
        self.see_devices(vms, &stalls);
        host.ageing = ageing::observed(&self.ageing, vms, self.follows);
        host.ageing_unseen = self.ageing.problems().collect();
        host.standstills =
            stalls.disks.iter().map(|(path, one)| (path.display().to_string(), *one)).collect();
        (host.stalls, host.stalls_unseen) = (stalls.host, stalls.unseen);
        self.watch_stalls(vms);
        if let Some(windows) = &mut self.devices {
            let paths = vms.iter().flat_map(|vm| devices(vm)).collect();
            host.slow = windows.sample(&paths, false, &self.root, &self.dirs, Instant::now());
        }
        let only_disk = |seen: &VmSample| match seen.disks.values().collect::<Vec<_>>()[..] {
            [one] => one.latest().cloned(),
            _ => None,
        };
        let disks = self.seen.iter().filter_map(|(vm, seen)| Some((vm.clone(), only_disk(seen)?)));
        let waits = self.waits.sample(vms, &disks.collect(), &self.root, &self.dirs);
        let uncovered = UncoveredObservation::default();
        Observation { time: now(), vms: observed, host, waits, uncovered }
    }

    /// Samples the counters of all devices of VMs, with stalls since the last sample.
    fn see_devices(&mut self, vms: &[Arc<RunningVm>], stalls: &Stalls) {
        let host_s = stalls.of_host().map_or(0.0, |stalls| stalls.total.as_secs_f64());
        let paths = vms.iter().flat_map(|vm| devices(vm));
        let one = |path: PathBuf| {
            let standstill_s = stalls.disks.get(&path).map(|one| one.longest_ns.as_secs_f64());
            (path, SampleStalls { host_s, standstill_s })
        };
        self.ageing.sample(&paths.map(one).collect(), &self.root, &self.dirs, Instant::now());
    }

    /// Watches for stalls until the next sample, if requests with targets come.
    fn watch_stalls(&mut self, vms: &[Arc<RunningVm>]) {
        let has_work = |vm: &&Arc<RunningVm>| {
            let spec = &vm.contract.vm;
            let has_target = spec.tasks.iter().any(|task| task.goals().flatten().next().is_some());
            let seen = self.seen.get(&spec.name);
            let windows = seen.into_iter().flat_map(|seen| seen.disks.values().chain(seen.domain.values()));
            has_target && windows.into_iter().any(|window| window.ops_since_last() > 0)
        };
        let mut at_work = vms.iter().filter(has_work).peekable();
        if at_work.peek().is_some() {
            let devices: BTreeSet<PathBuf> = at_work.flat_map(|vm| devices(vm)).collect();
            self.stalls.start(&devices, &self.root);
        }
    }

    /// Use of the device of a VM since the last sample, where its requests are counted there.
    fn on_device(&self, vm: &RunningVm, vms: &[Arc<RunningVm>]) -> OnDevice {
        let now = Instant::now();
        let coverage = lock(&self.coverage);
        let covers = |vm: &RunningVm| {
            let seen = self.seen.get(&vm.contract.vm.name);
            let file = seen.and_then(|seen| seen.disks.values().next()?.file());
            coverage.covers(vm, file.as_deref(), now)
        };
        let Some(path) = only_device(vm).filter(|_| covers(vm)) else { return OnDevice::default() };
        // A VM whose contract names another device may write to this one through the page cache.
        OnDevice { device: self.devices_used.interval_of(&path), has_shares: vms.iter().all(|vm| covers(vm)) }
    }

    fn sample_vm(
        &mut self,
        vm: &RunningVm,
        (at, disks): (Instant, Disks),
        shared: &Surroundings<'_>,
        on_device: OnDevice,
    ) -> VmObservation {
        let Surroundings { of_domain, stalls, stolen, cpus, faults } = *shared;
        let spec = &vm.contract.vm;
        let seen = self.seen.entry(spec.name.clone()).or_insert_with(|| VmSample::new(&vm.processes));
        if seen.processes != vm.processes {
            *seen = VmSample::new(&vm.processes);
        }
        let now = Instant::now();
        let memory = self.memory.traffic_of(&self.root, &vm.processes);
        let mut out = VmObservation { memory, ..VmObservation::default() };
        let stood = stood_still(vm, stalls);
        let (disks, drives) = match disks {
            Ok((disks, drives)) => (disks, drives),
            Err(why) => {
                // A gap in the windows would count requests of the unseen time.
                seen.disks.clear();
                out.disks_unseen = Some(why);
                (Vec::new(), Vec::new())
            }
        };
        let all_of_domain = of_domain.as_deref().unwrap_or_default();
        let of_domain: Vec<&DiskHistograms> =
            all_of_domain.iter().filter(|disk| domain::is_of(disk, &spec.name, &vm.processes)).collect();
        let ready = seen.threads(&self.root, vm, now, &mut out);
        let quota = seen.throttling(&self.root, vm, now, &mut out);
        let faults = seen.faults(&self.root, faults);
        let looked = LimiterInput { vm, drives: &drives, disks: &disks, domain: &of_domain };
        out.limiters = seen.limiters.sample(&looked, &out, &self.root, now);
        let seconds = seen.at.map_or(0.0, |at| now.duration_since(at).as_secs_f64());
        let own_cpus = out.cpu_used;
        let threads = IntervalFacts {
            seconds,
            ready,
            quota,
            stolen,
            cpus,
            own_cpus,
            faults,
            ..IntervalFacts::default()
        };
        // Of requests that a cache answers, QEMU counts some that no limit of the kernel saw.
        let is_covered = on_device.device.is_some();
        let of_disks = facts::limits(&out.limiters)
            .filter(|all| is_covered || all.iter().all(|limit| limit.by == Limiter::Qemu));
        let facts = IntervalFacts {
            limits: of_disks,
            device: on_device.device,
            has_shares: on_device.has_shares,
            ..threads.clone()
        };
        // An answer that came long ago is of another interval than the other counters.
        let is_late = now.saturating_duration_since(at).as_secs_f64() > seconds * LATE_ANSWER;
        let facts = if is_late { IntervalFacts::default() } else { facts };
        add(&mut seen.disks, disks, (stood, facts), at);
        let limits = limits(spec);
        // The I/O domain's requests are in its own cgroup, where no limit of the VM acts.
        let served = of_domain.iter().map(|disk| domain::stats(disk, &limits)).collect();
        add(&mut seen.domain, served, (stood, threads), now);
        let of_qemu = seen.disks.iter().filter_map(|(id, window)| disk(id, window, DiskSource::Qemu));
        let served = seen.domain.iter().filter_map(|(id, window)| disk(id, window, DiskSource::IoDomain));
        out.disks = of_qemu.chain(served).collect();
        out.targets = targets(vm, seen, out.disks_unseen.is_some());
        doubt_where_held_back(&mut out.targets, &spec.tasks, (out.throttled_time, out.cpu_delay));
        seen.at = Some(now);
        // A late answer is as old as its reading.
        out.at = Some(at.min(now));
        out
    }

    fn host(&mut self) -> HostObservation {
        let now = Instant::now();
        let passed = self.at.map(|at| now.duration_since(at).as_secs_f64());
        self.at = Some(now);
        let mut out = HostObservation::default();
        for resource in ["cpu", "io", "memory"] {
            let Ok(Some(total)) = pressure(&self.root, resource) else {
                // Otherwise the next share is of two intervals over the length of one.
                self.pressure.remove(resource);
                continue;
            };
            if let (Some(before), Some(passed)) = (self.pressure.insert(resource, total.some), passed) {
                let share = total.some.saturating_sub(before).as_secs_f64() / passed.max(f64::MIN_POSITIVE);
                out.pressure.insert(resource.to_owned(), share);
            }
        }
        out.stolen = self.steal.as_ref().and_then(|watch| watch.share(&self.root).ok().flatten());
        self.steal = StealWatch::start(&self.root).ok();
        out
    }
}

/// Stalls of the host, and of the VM's device: which of several holds the disk is not known.
fn stood_still(vm: &RunningVm, stalls: &Stalls) -> StoodStill {
    let disk = match devices(vm).collect::<Vec<_>>()[..] {
        [ref device] => stalls.of_disk(device),
        _ => None,
    };
    StoodStill { host: stalls.of_host(), disk }
}

/// Adds a sample of disks; windows of disks that are gone are dropped.
fn add(
    windows: &mut BTreeMap<String, DiskWindow>,
    disks: Vec<DiskStats>,
    (stood, facts): (StoodStill, IntervalFacts),
    now: Instant,
) {
    let facts = Arc::new(facts);
    windows.retain(|id, _| disks.iter().any(|disk| disk.id == *id));
    for disk in disks {
        windows.entry(disk.id.clone()).or_default().add_with(now, disk, stood, Some(Arc::clone(&facts)));
    }
}

fn disk(id: &str, window: &DiskWindow, source: DiskSource) -> Option<DiskObservation> {
    let (directions, time) = window.observed()?;
    Some(DiskObservation {
        source,
        id: id.to_owned(),
        file: window.file(),
        seconds: time.as_secs_f64(),
        directions,
        histogram: window.histogram(),
    })
}

/// Verdicts of a VM with one disk. Which of several a task uses is known inside the guest only.
/// Where QEMU's disks are not seen, the disk of the I/O domain is the only one if the contract is
/// about one device.
fn targets(vm: &RunningVm, seen: &VmSample, is_unseen: bool) -> Vec<TargetObservation> {
    let spec = &vm.contract.vm;
    let mut windows = seen.disks.values().chain(seen.domain.values());
    match (windows.next(), windows.next()) {
        (Some(window), None) if !is_unseen || vm.contract.parts.len() == 1 => {
            let mut judged: Vec<TargetObservation> =
                spec.tasks.iter().flat_map(|task| judge_task(spec, task, window)).collect();
            causes::explain(vm, window, &mut judged);
            judged
        }
        _ => Vec::new(),
    }
}

/// Whether a thread runs vCPUs or moves data for as long as the VM runs.
fn is_lasting(role: &Role) -> bool {
    matches!(role, Role::Vcpu(_) | Role::IoThread(_) | Role::Emulator | Role::Vhost)
}

impl VmSample {
    fn new(processes: &[ProcessId]) -> Self {
        Self {
            processes: processes.to_vec(),
            disks: BTreeMap::new(),
            domain: BTreeMap::new(),
            limiters: LimiterCounters::default(),
            at: None,
            cpu: None,
            quota: None,
            faults: (None, None),
        }
    }

    /// CPU time and delay of all threads since the last sample; threads that came meanwhile count
    /// from their start. Returns each thread's delay, `None` where none is counted.
    fn threads(
        &mut self,
        root: &Root,
        vm: &RunningVm,
        now: Instant,
        out: &mut VmObservation,
    ) -> Option<BTreeMap<ThreadKey, u64>> {
        // A thread that could not be read would count from its start at the next sample.
        let before = self.cpu.take();
        let Ok((cpu, roles)) = read_threads(root, &self.processes, vm) else { return None };
        let mut ready = None;
        if let Some((at, then)) = before {
            let passed = now.duration_since(at).as_secs_f64().max(f64::MIN_POSITIVE);
            let before = |key: &ThreadKey| then.get(key).copied().unwrap_or((0, Some(0)));
            let used: u64 = cpu.iter().map(|(key, now)| now.0.saturating_sub(before(key).0)).sum();
            out.cpu_used = Some(used as f64 / 1e9 / passed);
            let delay_of = |(key, now): (&ThreadKey, &(u64, Option<u64>))| {
                Some((*key, now.1?.saturating_sub(before(key).1?)))
            };
            let delays: BTreeMap<ThreadKey, u64> = cpu.iter().filter_map(delay_of).collect();
            ready = (!delays.is_empty()).then_some(delays);
            let delay = ready.as_ref().map(|all| all.values().sum::<u64>());
            out.cpu_delay = delay.map(|delay| delay as f64 / 1e9 / passed);
            let share = |ns: u64| ns as f64 / 1e9 / passed;
            let one = |(key, role): &(ThreadKey, Role)| {
                let (now, then) = (cpu.get(key)?, before(key));
                let delay = now.1.zip(then.1).map(|(now, then)| share(now.saturating_sub(then)));
                let cpu_used = share(now.0.saturating_sub(then.0));
                Some(ThreadObservation { tid: key.0, role: role.to_string(), cpu_used, cpu_delay: delay })
            };
            out.threads = roles.iter().filter_map(one).collect();
        }
        self.cpu = Some((now, cpu));
        ready
    }

    /// Major page faults of the VM and of the host, whose count is given, since the last sample.
    fn faults(&mut self, root: &Root, of_host: Option<HostFaults>) -> Option<Faults> {
        let own = own_faults(root, self.processes.iter().map(|process| process.pid)).ok();
        let before = std::mem::replace(&mut self.faults, (own, of_host));
        faults_since((before.0.as_ref(), before.1), (self.faults.0.as_ref(), of_host))
    }

    /// Throttling by CPU quotas since the last sample.
    fn throttling(
        &mut self,
        root: &Root,
        vm: &RunningVm,
        now: Instant,
        out: &mut VmObservation,
    ) -> Option<Stops> {
        let found = quota_of(root, vm);
        let before = std::mem::replace(&mut self.quota, found);
        let (now_of, then, at) = (self.quota.as_ref()?, before?, self.at?);
        let passed = now.duration_since(at).as_secs_f64().max(f64::MIN_POSITIVE);
        let between = now_of.since(&then)?;
        out.throttled_per_s = Some(between.periods as f64 / passed);
        out.throttled_time = Some(between.time.as_secs_f64() / passed);
        now_of.stops_since(&then)
    }
}

/// Times of all threads of a VM, and roles of the lasting ones.
fn read_threads(
    root: &Root,
    processes: &[ProcessId],
    vm: &RunningVm,
) -> Result<(ThreadTimes, Vec<(ThreadKey, Role)>), HostError> {
    let nanos = |t: std::time::Duration| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
    let (mut cpu, mut roles) = (BTreeMap::new(), Vec::new());
    for pid in processes.iter().map(|process| process.pid) {
        for tid in unless_gone(task::tids(root, pid))?.unwrap_or_default() {
            let Some(stat) = unless_gone(task::stat(root, pid, tid))? else { continue };
            let Some(used) = unless_gone(task::cpu_time(root, pid, tid))? else { continue };
            let Some(delay) = unless_gone(task::run_delay(root, pid, tid))? else { continue };
            let role = user_role(pid, tid, &stat.comm, &vm.named);
            let key = (tid, stat.start);
            cpu.insert(key, (nanos(used), delay.map(nanos)));
            roles.extend(is_lasting(&role).then_some((key, role)));
        }
    }
    Ok((cpu, roles))
}

/// Stops of a VM by CPU quotas; `None` where nothing counts them, as under a real-time budget.
fn quota_of(root: &Root, vm: &RunningVm) -> Option<QuotaCounters> {
    if vm.cpu.as_ref().is_some_and(|cpu| cpu.backend != Backend::CpuMax) {
        return None;
    }
    let pids: Vec<u32> = vm.processes.iter().map(|process| process.pid).collect();
    quota(root, &pids).ok().flatten()
}
