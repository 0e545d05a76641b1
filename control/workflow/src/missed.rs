//! Facts of a run that show why a target was missed, from counters before and after it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rtvirtio_blame::{DeviceUse, Facts, Faults, Limit as LimitFact, Limiter, Load, Stops, causes};
use rtvirtio_kernel::cgroup::{Cgroups, SetLimit};
use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::faults::{HostFaults, of_host};
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::steal::{StealWatch, cpus_online};
use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::standstill::Standstills;
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_measure::{TaskResult, Verdict};
use rtvirtio_spec::Task;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::throttle::Drive;

use crate::controls::{is_one_of, on_device};
use crate::device_windows::bfq_idles;
use crate::find::drives::MonitorTime;
use crate::group_limits::{GroupLimit, Member};
use crate::progress::Progress;
use crate::site::Site;
use crate::uncovered::UncoveredKind;
use crate::vm_counters::{
    self, Dimension, VmCounters, below, bytes_of, cpu_time, cpus_used, faults_since, group_io, own_faults,
    past, quota, ready, waited,
};

mod readings;

pub(crate) use readings::Readings;

/// Throttling by QEMU of the drives on the device.
type Throttles = Vec<(Dimension, String, f64)>;

/// All counters of one device's site at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counters {
    /// Time of the kernel's counters.
    at: Option<Instant>,
    vms: BTreeMap<String, VmCounters>,
    /// By VM; absent where its throttling is not known.
    throttles: BTreeMap<String, Throttles>,
    /// By VM: its only drive on the device, as QEMU counts it.
    drives: BTreeMap<String, DiskStats>,
    /// By VM: limits of its cgroups for the device; absent where they cannot be read.
    limits: BTreeMap<String, Vec<SetLimit>>,
    /// By cgroup: those of the VMs and above.
    groups: BTreeMap<PathBuf, IoCounters>,
    device: Option<DeviceIo>,
    /// Whether the device's elevator is BFQ and idles.
    idles: Option<bool>,
    /// Times of the host's CPUs.
    cpus: Option<StealWatch>,
    /// Number of these.
    online: Option<u32>,
    faults: Option<HostFaults>,
    /// By VM, at the end: spans in which it waited for memory; absent where these are not known.
    memory: BTreeMap<String, Stops>,
}

impl Counters {
    /// Reads the values before a run; what cannot be read is absent.
    pub fn before(site: &Site, progress: &dyn Progress) -> Self {
        let monitors = of_monitors(site, |_| true);
        Self::of_kernel(site, progress).with(monitors)
    }

    /// Reads the values after a run, first those of the kernel: monitors may take their time. One
    /// that has told nothing before is not asked again.
    pub fn after(site: &Site, before: &Self, progress: &dyn Progress) -> Self {
        let kernel = Self::of_kernel(site, progress);
        let has_told = |vm: &str| before.throttles.contains_key(vm) || before.drives.contains_key(vm);
        kernel.with(of_monitors(site, has_told))
    }

    fn with(self, OfMonitors { throttles, drives }: OfMonitors) -> Self {
        Self { throttles, drives, ..self }
    }

    /// Counters of the kernel.
    fn of_kernel(site: &Site, progress: &dyn Progress) -> Self {
        let root = site.root();
        let vms = site.host_vms().map(|vm| {
            let pids = vm.lasting_pids(progress).ok().flatten().unwrap_or_default();
            let counters = VmCounters {
                ready: ready(root, &pids).ok().flatten(),
                quota: quota(root, &pids).ok().flatten(),
                bytes: bytes(site, &vm.name),
                used: cpu_time(root, &pids).ok().flatten(),
                faults: own_faults(root, pids.iter().copied()).ok(),
            };
            (vm.name.clone(), counters)
        });
        let vms = vms.collect();
        let groups = site.host_vms().filter_map(|vm| site.io_group(&vm.name));
        let groups = groups.flat_map(|group| site.cgroups().limiting(group)).filter_map(|group| {
            let counters = group_io(root, site.cgroups(), &group, &site.stack.device.dev)?;
            Some((group, counters))
        });
        let dev = &site.stack.device.dev;
        let limits = site.host_vms().filter_map(|vm| {
            let set = site.cgroups().limits_on_path(root, site.io_group(&vm.name)?, dev).ok()?;
            Some((vm.name.clone(), set))
        });
        let (limits, groups) = (limits.collect(), groups.collect());
        Self {
            device: DeviceIo::read(root, &site.stack.device).ok(),
            idles: bfq_idles(&site.stack.device, root),
            cpus: StealWatch::start(root).ok(),
            online: cpus_online(root).ok(),
            faults: of_host(root).ok(),
            at: Some(Instant::now()),
            vms,
            limits,
            groups,
            ..Self::default()
        }
    }

    fn bytes_since(&self, then: &Self, vm: &str) -> Option<f64> {
        let of = |all: &Self| all.vms.get(vm).and_then(|of| of.bytes);
        past(of(then), of(self))
    }
}

/// Drives of all VMs, as of [`Counters`].
#[derive(Default)]
struct OfMonitors {
    throttles: BTreeMap<String, Throttles>,
    drives: BTreeMap<String, DiskStats>,
}

/// Asks the monitors of these VMs, as far as all together answer in time: the others are absent.
fn of_monitors(site: &Site, is_asked: impl Fn(&str) -> bool) -> OfMonitors {
    let (mut found, time) = (OfMonitors::default(), MonitorTime::of_counters());
    for vm in site.host_vms().filter(|vm| is_asked(&vm.name)) {
        let Ok((of_vm, stats)) = vm.drives_and_stats(&time) else { continue };
        let known = of_vm.and_then(|of_vm| throttles_on(site, &of_vm));
        found.throttles.extend(known.map(|known| (vm.name.clone(), known)));
        found.drives.extend(only_drive(site, stats).map(|of| (vm.name.clone(), of)));
    }
    found
}

/// The only one of these drives that is on the device.
fn only_drive(site: &Site, all: Vec<DiskStats>) -> Option<DiskStats> {
    let (root, names) = (site.root(), site.device_names());
    let is_there =
        |disk: &DiskStats| disk.file.as_ref().is_some_and(|file| is_one_of(root, Path::new(file), &names));
    let mut all = all.into_iter().filter(is_there);
    all.next().filter(|_| all.next().is_none())
}

/// Whether no other task of the VM has one of the task's directions.
fn is_alone(load: &VmLoad, task: &Task) -> bool {
    let ways = |task: &Task| (task.op.write_share() < 1.0, task.op.write_share() > 0.0);
    let (reads, writes) = ways(task);
    let mut others = load.vm.tasks.iter().filter(|other| other.name != task.name).map(ways);
    !others.any(|(r, w)| reads && r || writes && w)
}

/// QEMU's limits on those of a VM's drives that are on the device; `None` where they are not known,
/// or a limit is one of several drives together or counts requests by their size.
fn throttles_on(site: &Site, drives: &[Drive]) -> Option<Throttles> {
    let on_it = on_device(site.root(), &site.device_names(), drives);
    let is_limited = |drive: &Drive| drive.limits.iter().any(|limits| !limits.is_none());
    let is_shared = |drive: &Drive| !drive.shared_with.is_empty() && is_limited(drive);
    let is_by_size = |drive: &Drive| {
        drive.limits.iter().any(|limits| limits.set().any(|limit| limits.is_by_size(limit.name)))
    };
    // Images on a file system of the device are on it, and not found by their names.
    let is_elsewhere = on_it.is_empty() && drives.iter().any(is_limited);
    if is_elsewhere || on_it.iter().any(|drive| is_shared(drive) || is_by_size(drive)) {
        return None;
    }
    let of = |drive: &&Drive| {
        let name = drive.name.clone();
        let all = drive.limits.iter().flat_map(|limits| limits.set());
        let all = all.map(move |limit| {
            (
                Dimension::of_throttle(limit.name),
                format!("{} of drive {name}", limit.name),
                limit.average as f64,
            )
        });
        all.collect::<Throttles>()
    };
    Some(on_it.iter().flat_map(of).collect())
}

/// Cgroup of a VM; `None` for the root, and where another VM of the spec is in it or above it.
fn own_group<'a>(site: &'a Site, vm: &str) -> Option<&'a Path> {
    let cgroup = site.io_group(vm).filter(|cgroup| !Cgroups::is_root(cgroup))?;
    let is_shared = |other: &Path| other.starts_with(cgroup) || cgroup.starts_with(other);
    let others = site.host_vms().filter(|other| other.name != vm);
    (!others.filter_map(|other| site.io_group(&other.name)).any(is_shared)).then_some(cgroup)
}

/// Bytes that the kernel counts for this VM; `None` where it counts others' with them.
fn bytes(site: &Site, vm: &str) -> Option<f64> {
    let io = group_io(site.root(), site.cgroups(), own_group(site, vm)?, &site.stack.device.dev);
    io.map(|io| bytes_of(&io))
}

/// Measurements of a run besides its tasks.
pub(crate) struct Watched<'a> {
    pub noise: Option<&'a Noise>,
    pub disk: Option<&'a Standstills>,
}

/// Names the causes of each missed target of a site's tasks.
fn explain(
    site: &Site,
    loads: &[VmLoad],
    window: &Window<'_>,
    watched: &Watched<'_>,
    results: &mut [TaskResult],
) {
    let Window { first, start, before, after, seconds } = *window;
    // A page cache or another process takes the requests, so that the VM's counters miss some.
    let elsewhere = site.lab.as_ref().is_some_and(|lab| lab.domain.is_some());
    let is_covered = |vm: &str| {
        !elsewhere
            && !site.uncovered_named(vm).iter().any(|of| {
                matches!(
                    of.kind,
                    UncoveredKind::PageCache | UncoveredKind::WriteBack | UncoveredKind::OtherProcess
                )
            })
    };
    let mut device = device_use(before, after);
    if let Some(device) = device.as_mut().filter(|_| !site.host_vms().all(|vm| is_covered(&vm.name))) {
        // What is counted for no VM may be one's.
        device.shares = None;
    }
    for load in loads.iter().filter(|load| site.spec.vm(&load.vm.name).is_some()) {
        let name = &load.vm.name;
        let is_covered = is_covered(name);
        let throttles = throttles_of(load, first, after);
        let all_limits =
            is_covered.then(|| limits(site, (load, loads), results, throttles.unwrap_or_default(), window));
        let all_limits = all_limits.flatten();
        let (then, now) = (before.vms.get(name), after.vms.get(name));
        let ready = waited(then.and_then(|c| c.ready.as_ref()), now.and_then(|c| c.ready.as_ref()));
        let facts = Facts {
            vm: name.clone(),
            seconds,
            has_throttling: throttles.is_some(),
            quota: stopped(then, now),
            ready: ready.map(|time| time.as_secs_f64() / seconds.max(f64::MIN_POSITIVE)),
            stolen: window.stolen(),
            cpus: window.cpus(),
            own_cpus: cpus_used(then, now, seconds),
            faults: window.faults_of(name),
            memory: after.memory.get(name).copied(),
            host: watched.noise.and_then(|noise| of_noise(noise, seconds)),
            disk: watched.disk.map(|disk| window.of_disk(disk)),
            device: device.clone().filter(|_| is_covered),
            held: watched.disk.and_then(|disk| window.held(disk)),
            // What the warm-up left over is sent later, and no more than is declared.
            load: load_of(site, name, after.bytes_since(start, name), window.with_warm_up())
                .filter(|_| is_covered),
            ..Facts::default()
        };
        let missed =
            |r: &&mut TaskResult| r.vm == *name && r.flow.is_none() && r.verdict == Some(Verdict::Missed);
        for result in results.iter_mut().filter(missed) {
            let task = load.vm.tasks.iter().find(|task| task.name == result.task);
            // The kernel holds back each direction by itself.
            let acts = |of: &Dimension| task.is_none_or(|task| of.of_task(task) > 0.0);
            let limits = all_limits
                .as_ref()
                .map(|all| all.iter().filter(|(of, _)| acts(of)).map(|(_, limit)| limit.clone()).collect());
            let facts = Facts {
                limits,
                rate: result.declared_rate.unwrap_or(result.achieved_rate).0,
                n: result.n,
                late: result.exceedances,
                target: result.target_ns.unwrap_or_default(),
                median: result.p50_ns,
                depth: task.filter(|task| task.rate.is_some()).map(|task| task.depth),
                // Its VMM counts all tasks of a direction together.
                below: task.and_then(|task| {
                    let readings = (before.drives.get(name)?, after.drives.get(name)?);
                    below(task.op, !is_alone(load, task), std::iter::once(readings))
                }),
                ..facts.clone()
            };
            result.causes = Some(causes(&facts));
            result.causes_unread = facts.unread();
        }
    }
}

fn stopped(before: Option<&VmCounters>, after: Option<&VmCounters>) -> Option<Stops> {
    after?.quota.as_ref()?.stops_since(before?.quota.as_ref()?)
}

/// Stalls longer than 1 ms; `None` where probes could not tell them from load.
fn of_noise(noise: &Noise, seconds: f64) -> Option<Stops> {
    // Time in which some CPU stalled, of stalls of any length; those counted are no longer in sum.
    let any = noise.stood_still.filter(|_| noise.realtime)? * seconds;
    Some(Stops { count: noise.stalls, total: noise.stalled_ns.min(Nanos::from_secs_f64(any)) })
}

fn device_use(before: &Counters, after: &Counters) -> Option<DeviceUse> {
    let io = after.device?.since(&before.device?)?;
    let moved = after.vms.iter().map(|(name, now)| {
        (name.as_str(), past(before.vms.get(name).and_then(|then| then.bytes), now.bytes))
    });
    Some(vm_counters::device_use(&io, moved))
}

/// Throttling by QEMU that acted on a VM's tasks in all of the window; `None` where that is not
/// known. Tasks that run on the host go past QEMU.
fn throttles_of<'a>(
    load: &VmLoad,
    before: &'a Counters,
    after: &'a Counters,
) -> Option<&'a [(Dimension, String, f64)]> {
    if matches!(load.place, Place::Host { .. }) {
        return Some(&[]);
    }
    let now = after.throttles.get(&load.vm.name)?;
    (before.throttles.get(&load.vm.name)? == now).then_some(now)
}

/// Bytes that a VM moved, against those that its tasks declare; `None` where one has no rate.
fn load_of(site: &Site, vm: &str, moved: Option<f64>, seconds: f64) -> Option<Load> {
    let both = Dimension { reads: true, writes: true, bytes: true };
    let declared = both.asked(&site.spec.vm(vm)?.tasks);
    let sent = moved? / seconds.max(f64::MIN_POSITIVE);
    declared.is_finite().then_some(Load { sent, declared, bytes: true })
}

/// Readings before and after a window of so many seconds.
#[derive(Clone, Copy)]
struct Window<'a> {
    /// Reading before the run, and thus before its VMs were prepared.
    first: &'a Counters,
    /// Reading at the begin of the warm-up.
    start: &'a Counters,
    before: &'a Counters,
    after: &'a Counters,
    seconds: f64,
}

impl<'a> Window<'a> {
    /// Window from the begin of the measured part, or from the last reading before it.
    fn new(
        first: &'a Counters,
        start: Option<&'a Counters>,
        begin: Option<&'a Counters>,
        after: &'a Counters,
    ) -> Self {
        let start = start.unwrap_or(first);
        let before = begin.unwrap_or(first);
        Self { first, start, before, after, seconds: seconds(before, after) }
    }

    fn with_warm_up(&self) -> f64 {
        seconds(self.start, self.after)
    }

    /// Share of the time of the host's CPUs that its hypervisor took in the window, 0 to 1.
    fn stolen(&self) -> Option<f64> {
        self.before.cpus?.share_until(&self.after.cpus?)
    }

    /// Limits of a VM's cgroups in all of the window; `None` where that is not known.
    fn limits_of(&self, vm: &str) -> Option<&'a [SetLimit]> {
        let now = self.after.limits.get(vm)?;
        (self.before.limits.get(vm)? == now).then_some(now)
    }

    /// Most CPUs of the host at its begin and end.
    fn cpus(&self) -> Option<u32> {
        Some(self.before.online?.max(self.after.online?))
    }

    /// Major page faults of a VM and of the host in the window.
    fn faults_of(&self, vm: &str) -> Option<Faults> {
        let (before, after) = (self.before, self.after);
        let of = |at: &'a Counters| (at.vms.get(vm).and_then(|of| of.faults.as_ref()), at.faults);
        faults_since(of(before), of(after))
    }

    /// Standstills of the window: its part of those of the run, of which only the sum is known.
    fn of_disk(&self, disk: &Standstills) -> Stops {
        let part = (self.seconds / self.with_warm_up().max(f64::MIN_POSITIVE)).min(1.0);
        let count = (disk.count as f64 * part).ceil() as u64;
        Stops { count, total: Nanos::from_secs_f64(disk.total_ns.0 as f64 / 1e9 * part) }
    }

    /// Share of the run in which BFQ held requests back while the driver had none, if seen.
    fn held(&self, disk: &Standstills) -> Option<f64> {
        match (self.before.idles?, self.after.idles?) {
            (false, false) => Some(0.0),
            (true, true) if disk.held > 0 => Some(disk.held as f64 / disk.n.max(1) as f64),
            _ => None,
        }
    }

    /// Amount per second that a cgroup moved.
    fn used_by(&self, group: &Path, dimension: Dimension) -> Option<f64> {
        let io = self.after.groups.get(group)?.since(self.before.groups.get(group)?)?;
        Some(dimension.of_counters(&io) / self.seconds.max(f64::MIN_POSITIVE))
    }
}

fn seconds(then: &Counters, now: &Counters) -> f64 {
    let length = then.at.zip(now.at).map(|(then, now)| now.saturating_duration_since(then));
    length.unwrap_or_default().as_secs_f64()
}

/// Limits of cgroups and of QEMU that act on a VM, with what was completed of them and is asked
/// for. `None` where they cannot be read or changed meanwhile, or a task has no result.
fn limits(
    site: &Site,
    (load, loads): (&VmLoad, &[VmLoad]),
    results: &[TaskResult],
    throttles: &[(Dimension, String, f64)],
    window: &Window<'_>,
) -> Option<Vec<(Dimension, LimitFact)>> {
    let cgroup = site.io_group(&load.vm.name)?;
    let of_kernel = window.limits_of(&load.vm.name)?.iter().map(|set| {
        let dimension = Dimension::of_limit(set.limit);
        let completed = |load| completed(load, results, dimension);
        let vm = Member { group: cgroup, tasks: &load.vm.tasks, completed: Some(completed(load)?) };
        let others = site.host_vms().filter(|other| other.name != load.vm.name).filter_map(|other| {
            let group = site.io_group(&other.name)?;
            // A VM whose tasks do not run asks for nothing.
            let load = loads.iter().find(|load| load.vm.name == other.name);
            let tasks = load.map_or(&[][..], |load| &load.vm.tasks);
            Some(Member { group, tasks, completed: load.and_then(completed) })
        });
        let others: Vec<Member<'_>> = others.collect();
        let name = format!("{} ({})", set.cgroup.display(), set.file);
        let limit = GroupLimit { cgroup: &set.cgroup, name, value: set.value as f64, dimension };
        Some((dimension, limit.fact(&vm, &others, &|group| window.used_by(group, dimension))?))
    });
    let of_qemu = throttles.iter().map(|(dimension, name, value)| {
        let amounts = (completed(load, results, *dimension)?, dimension.asked(&load.vm.tasks));
        Some((*dimension, dimension.fact(Limiter::Qemu, name.clone(), *value, amounts)))
    });
    of_kernel.chain(of_qemu).collect()
}

/// Amount per second that the tasks of a VM completed; `None` where one has no result.
fn completed(load: &VmLoad, results: &[TaskResult], dimension: Dimension) -> Option<f64> {
    let of = |task: &Task| {
        let of_task = |r: &&TaskResult| r.vm == load.vm.name && r.task == task.name && r.flow.is_none();
        match dimension.of_task(task) {
            0.0 => Some(0.0),
            amount => Some(results.iter().find(of_task)?.achieved_rate.0 * amount),
        }
    };
    load.vm.tasks.iter().map(of).sum()
}

#[cfg(test)]
mod tests;
