//! Counters between two samples that show why requests were late.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rtvirtio_blame::{Faults, Limiter, Stops};
use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{BlockDevice, Cgroups, Root};
use rtvirtio_spec::{Device, Task};
use rtvirtio_workflow::vm_counters::{Dimension, bytes_of, group_io};

use super::limiters::{LimiterKind, LimiterObservation};
use crate::linux::RunningVm;

/// Thread id and start time.
pub(super) type ThreadKey = (u32, u64);

/// Limit that was set during an interval.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct IntervalLimit {
    pub by: Limiter,
    pub name: String,
    pub value: f64,
    pub dimension: Dimension,
    /// Cgroup whose requests it counts; `None` for a limit of QEMU.
    pub cgroup: Option<PathBuf>,
}

/// Facts of the interval that a sample of a VM ends; `None` is what could not be read.
#[derive(Clone, Debug, Default)]
pub(super) struct IntervalFacts {
    pub seconds: f64,
    /// Time that each thread was ready without a CPU, ns.
    pub ready: Option<BTreeMap<ThreadKey, u64>>,
    /// Stops by CPU quotas.
    pub quota: Option<Stops>,
    /// Share of CPU time that the hypervisor below the host took.
    pub stolen: Option<f64>,
    /// CPUs of the host.
    pub cpus: Option<u32>,
    /// CPUs that the VM's threads used.
    pub own_cpus: Option<f64>,
    /// Major page faults.
    pub faults: Option<Faults>,
    pub limits: Option<Vec<IntervalLimit>>,
    /// Use of the VM's device, where its requests are counted there.
    pub device: Option<Arc<DeviceInterval>>,
    /// Whether the requests of all VMs on the device are counted in their cgroups.
    pub has_shares: bool,
}

/// Use of a device between two samples, by all programs.
#[derive(Clone, Debug)]
pub(super) struct DeviceInterval {
    pub io: DeviceIo,
    /// Bytes by VM; `None` where these are not counted for the VM alone.
    pub moved: BTreeMap<String, Option<f64>>,
    pub seconds: f64,
    /// Requests and bytes by cgroup: those of the VMs and above, where they are counted.
    pub groups: BTreeMap<PathBuf, IoCounters>,
    /// All VMs with a contract whose cgroup is known.
    pub members: Vec<DeviceMember>,
}

/// VM with a contract, as a user of a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DeviceMember {
    pub name: String,
    /// Cgroup of its processes.
    pub group: PathBuf,
    /// Tasks of the VM on the device.
    pub tasks: Vec<Task>,
}

/// Counters of a device at one sample.
#[derive(Debug)]
struct DeviceSample {
    at: Instant,
    io: DeviceIo,
    moved: BTreeMap<String, Moved>,
    groups: BTreeMap<PathBuf, IoCounters>,
}

/// Bytes of a VM so far, and the cgroup that counts them; none where nothing counts them.
type Moved = Option<(PathBuf, f64)>;

/// Counters of the devices of all contracts, at the last sample and since the one before.
#[derive(Debug, Default)]
pub(super) struct DeviceFacts {
    last: BTreeMap<PathBuf, DeviceSample>,
    since: BTreeMap<PathBuf, Arc<DeviceInterval>>,
}

impl DeviceFacts {
    /// Reads the devices of all VMs. One that cannot be read has no interval.
    pub fn sample(&mut self, vms: &[Arc<RunningVm>], root: &Root) {
        let paths: BTreeSet<PathBuf> = vms.iter().flat_map(|vm| devices(vm)).collect();
        let cgroups = Cgroups::detect(root).ok();
        let of_vms = cgroups.as_ref().map(|cgroups| groups_of(vms, cgroups, root)).unwrap_or_default();
        let own = own_groups(&of_vms);
        let mut before = std::mem::take(&mut self.last);
        self.since.clear();
        for path in paths {
            let Ok(device) = BlockDevice::find(root, &path) else { continue };
            let Ok(io) = DeviceIo::read(root, &device) else { continue };
            let groups = cgroups.as_ref().map(|cgroups| {
                let limiting = of_vms.values().flat_map(|group| cgroups.limiting(group));
                let all: BTreeSet<PathBuf> =
                    limiting.chain(of_vms.values().map(|group| Cgroups::unit_of(group))).collect();
                let read = |group: PathBuf| {
                    let io = group_io(root, cgroups, &group, &device.dev)?;
                    Some((group, io))
                };
                all.into_iter().filter_map(read).collect::<BTreeMap<_, _>>()
            });
            let groups = groups.unwrap_or_default();
            let moved = vms.iter().map(|vm| {
                let name = vm.contract.vm.name.clone();
                let group = own.get(&name);
                let moved = group.and_then(|group| Some((group.clone(), bytes_of(groups.get(group)?))));
                (name, moved)
            });
            let now = DeviceSample { at: Instant::now(), io, moved: moved.collect(), groups };
            let members = || vms.iter().filter_map(|vm| member(vm, &of_vms, &path)).collect();
            let since = before.remove(&path).and_then(|then| {
                Some(DeviceInterval {
                    io: now.io.since(&then.io)?,
                    moved: since(&then.moved, &now.moved),
                    seconds: now.at.duration_since(then.at).as_secs_f64(),
                    groups: groups_since(&then.groups, &now.groups),
                    members: members(),
                })
            });
            self.since.extend(since.map(|since| (path.clone(), Arc::new(since))));
            self.last.insert(path, now);
        }
    }

    /// Use of a device since the sample before.
    pub fn interval_of(&self, path: &Path) -> Option<Arc<DeviceInterval>> {
        self.since.get(path).cloned()
    }
}

/// Bytes that each VM has moved between two samples; none for a VM that began or ended meanwhile,
/// or has another cgroup: some of its bytes are not counted.
fn since(then: &BTreeMap<String, Moved>, now: &BTreeMap<String, Moved>) -> BTreeMap<String, Option<f64>> {
    let moved = |name: &String| {
        let ((group, then), (of, now)) = (then.get(name)?.as_ref()?, now.get(name)?.as_ref()?);
        Some(now - then).filter(|moved| group == of && *moved >= 0.0)
    };
    then.keys().chain(now.keys()).map(|name| (name.clone(), moved(name))).collect()
}

/// Requests and bytes of each cgroup between two samples, without those that began anew.
fn groups_since(
    then: &BTreeMap<PathBuf, IoCounters>,
    now: &BTreeMap<PathBuf, IoCounters>,
) -> BTreeMap<PathBuf, IoCounters> {
    let of = |(group, io): (&PathBuf, &IoCounters)| Some((group.clone(), io.since(then.get(group)?)?));
    now.iter().filter_map(of).collect()
}

/// A VM as a user of a device.
fn member(vm: &RunningVm, groups: &BTreeMap<String, PathBuf>, path: &Path) -> Option<DeviceMember> {
    let name = vm.contract.vm.name.clone();
    let group = groups.get(&name)?.clone();
    let here = vm.contract.parts.iter().filter(|part| part.spec.device == Device::Path(path.to_owned()));
    let tasks = here.flat_map(|part| &part.spec.vms).flat_map(|vm| vm.tasks.clone()).collect();
    Some(DeviceMember { name, group, tasks })
}

fn groups_of(vms: &[Arc<RunningVm>], cgroups: &Cgroups, root: &Root) -> BTreeMap<String, PathBuf> {
    let of = |vm: &Arc<RunningVm>| {
        let group = cgroups.of_pid(root, vm.processes.first()?.pid).ok()?;
        Some((vm.contract.vm.name.clone(), group))
    };
    vms.iter().filter_map(of).collect()
}

/// The cgroup of each VM in whose counters no other VM is.
fn own_groups(groups: &BTreeMap<String, PathBuf>) -> BTreeMap<String, PathBuf> {
    let all: BTreeMap<String, PathBuf> =
        groups.iter().map(|(name, group)| (name.clone(), Cgroups::unit_of(group))).collect();
    let is_own = |(name, group): &(String, PathBuf)| {
        let is_shared = |(other, at): (&String, &PathBuf)| {
            other != name && (at.starts_with(group) || group.starts_with(at))
        };
        !Cgroups::is_root(group) && !all.iter().any(is_shared)
    };
    all.clone().into_iter().filter(is_own).collect()
}

/// The devices of a VM's contract that exist.
pub(super) fn devices(vm: &RunningVm) -> impl Iterator<Item = PathBuf> {
    vm.contract.parts.iter().filter_map(|part| match &part.spec.device {
        Device::Path(path) => Some(path.clone()),
        Device::Twin { .. } | Device::File { .. } => None,
    })
}

/// The device of a VM whose contract has only one.
pub(super) fn only_device(vm: &RunningVm) -> Option<PathBuf> {
    let mut all = devices(vm);
    let first = all.next()?;
    (all.next().is_none() && vm.contract.parts.len() == 1).then_some(first)
}

/// Limits of disks among a VM's limiters; `None` where one of them could not be read.
pub(super) fn limits(limiters: &[LimiterObservation]) -> Option<Vec<IntervalLimit>> {
    let of_disks = limiters.iter().filter_map(|one| match one.kind {
        LimiterKind::BlkThrottle => Some((one, Limiter::Kernel)),
        LimiterKind::QemuThrottle => Some((one, Limiter::Qemu)),
        LimiterKind::CpuQuota | LimiterKind::IoDomainCap | LimiterKind::Tc => None,
    });
    let read = of_disks.map(|(one, by)| {
        let (value, dimension, cgroup) = (one.limit?, one.dimension?, one.cgroup.clone());
        Some(IntervalLimit { by, name: one.name.clone(), value, dimension, cgroup })
    });
    read.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_vm_that_comes_or_goes_are_not_known() {
        let at = |of: &[(&str, &str, f64)]| -> BTreeMap<String, Moved> {
            of.iter().map(|(vm, group, n)| ((*vm).to_owned(), Some((PathBuf::from(group), *n)))).collect()
        };
        let (then, now) = (
            at(&[("plc", "/a", 5.0), ("gone", "/b", 9.0), ("again", "/c", 1.0)]),
            at(&[("plc", "/a", 8.0), ("new", "/d", 2.0), ("again", "/c2", 4.0)]),
        );
        let all = [("again", None), ("gone", None), ("new", None), ("plc", Some(3.0))];
        assert_eq!(since(&then, &now), all.map(|(vm, moved)| (vm.to_owned(), moved)).into());
    }
}
