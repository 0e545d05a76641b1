//! Plants a cause before a run, and undoes it after the run, on an error too.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{Cgroups, Hierarchy, ProcessId, Root};
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_testbed::Lab;
use rtvirtio_workflow::cpus;
use rtvirtio_workflow::site::Site;
use rustix::process::Signal;
use serde_json::json;

use super::guest;
use super::paging::{self, MemoryGroup, wait};
use super::plant::{Kind, PlantedCause};
use super::spec::{NEIGHBOUR, VICTIM, flood_task, rate_of};

/// Period of the CPU quota.
const PERIOD_US: u64 = 100_000;

/// Places where causes are planted.
pub struct Target<'a> {
    pub site: &'a Site,
    pub lab: &'a Lab,
    /// Group of the VM's memory, where it is to be paged.
    pub memory: Option<&'a MemoryGroup>,
}

/// A step that takes a planted cause away. Done on drop at the latest.
pub struct Undo<'a>(Option<Box<dyn FnOnce() -> anyhow::Result<()> + 'a>>);

impl<'a> Undo<'a> {
    fn new(step: impl FnOnce() -> anyhow::Result<()> + 'a) -> Self {
        Self(Some(Box::new(step)))
    }

    /// Takes the cause away.
    pub fn undo(mut self) -> anyhow::Result<()> {
        self.0.take().map_or(Ok(()), |step| step())
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(step) = self.0.take() {
            // The error that led here is reported; the lab's removal takes the rest with it.
            let _ = step();
        }
    }
}

/// Plants a cause: on the host, or as further load.
pub fn plant<'a>(
    what: &PlantedCause,
    target: &'a Target<'a>,
    loads: &mut [VmLoad],
) -> anyhow::Result<Option<Undo<'a>>> {
    let load = |loads: &mut [VmLoad], at: usize| -> anyhow::Result<()> {
        let (block, depth) = what.flood();
        let load = loads.get_mut(at).context("no such VM")?;
        load.vm.tasks.push(flood_task(block, depth)?);
        load.predicted.push(None);
        Ok(())
    };
    Ok(match what.kind {
        Kind::Nothing => None,
        Kind::Load => {
            load(loads, VICTIM)?;
            None
        }
        Kind::Neighbour => {
            load(loads, NEIGHBOUR)?;
            None
        }
        Kind::CpuOthers => Some(busy_threads(what.threads_per_cpu() * cpus() as usize, what.weight())?),
        Kind::CpuQuota => Some(quota(what, target, loads)?),
        Kind::DiskStall => Some(stops(what, target)?),
        Kind::KernelLimit => Some(kernel_limit(what, target)?),
        Kind::QemuThrottle => Some(throttle(what, target)?),
        Kind::Device => Some(slow(target)?),
        Kind::GuestLimit => {
            let reads = what.limit(rate_of(&target.site.spec)?);
            Some(Undo::new(guest::limit(reads, loads.get(VICTIM).context("no such VM")?)?))
        }
        Kind::Paging => {
            let group = target.memory.context("the VM's memory has no cgroup of its own")?;
            Some(Undo::new(paging::squeeze(group, what.squeeze())?))
        }
    })
}

/// Ends threads by their flag.
fn end(stop: &AtomicBool, threads: Vec<JoinHandle<()>>) -> anyhow::Result<()> {
    stop.store(true, Ordering::Relaxed);
    let ended = threads.into_iter().map(JoinHandle::join).filter(Result::is_err).count();
    ensure!(ended == 0, "{ended} threads ended by a panic");
    Ok(())
}

/// Busy threads in a cgroup with this weight: in the group of this program the kernel would give
/// all of them together the part of one VM.
fn busy_threads<'a>(n: usize, weight: u64) -> anyhow::Result<Undo<'a>> {
    let group = own_group("busy")?;
    let dir = group.dir.clone();
    group.write("cpu.shares", weight)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for _ in 0..n {
        let (flag, tasks) = (Arc::clone(&stop), dir.join("tasks"));
        let spin = move || {
            // 0 is the thread itself. One that stays outside is a weaker cause, and no error.
            let _ = Root::default().write(tasks, "0");
            while !flag.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        match std::thread::Builder::new().name("busy".to_owned()).spawn(spin) {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                end(&stop, threads)?;
                group.remove()?;
                return Err(e.into());
            }
        }
    }
    Ok(Undo::new(move || {
        end(&stop, threads)?;
        group.remove()
    }))
}

/// Cgroup of the CPU controller that a cause is planted with. It is removed on drop at the latest.
struct OwnGroup {
    cgroups: Cgroups,
    path: PathBuf,
    dir: PathBuf,
}

/// Makes a cgroup named after this process, so that it is known as left over should this process be
/// killed.
fn own_group(name: &str) -> anyhow::Result<OwnGroup> {
    ensure!(has_cpu_groups(), "causes on CPUs are planted by cgroup v1 only");
    let cgroups = Cgroups::detect_cpu(&Root::default())?;
    let path = PathBuf::from(format!("/{}{name}", ProcessId::prefix("bench")));
    cgroups.create(&Root::default(), &path)?;
    let dir = cgroups.dir(&path)?;
    Ok(OwnGroup { cgroups, path, dir })
}

impl OwnGroup {
    fn write(&self, file: &str, value: u64) -> anyhow::Result<()> {
        Ok(Root::default().write(self.dir.join(file), &value.to_string())?)
    }

    fn remove(&self) -> anyhow::Result<()> {
        Ok(self.cgroups.remove(&Root::default(), &self.path)?)
    }
}

impl Drop for OwnGroup {
    fn drop(&mut self) {
        // Removed before, where all went well; else the error that led here is reported.
        let _ = self.remove();
    }
}

/// Whether causes on CPUs can be planted here.
pub fn has_cpu_groups() -> bool {
    Cgroups::detect_cpu(&Root::default()).is_ok_and(|cgroups| cgroups.hierarchy == Hierarchy::V1)
}

/// Moves the VM into a cgroup of its own with a quota.
fn quota<'a>(what: &PlantedCause, target: &'a Target<'a>, loads: &mut [VmLoad]) -> anyhow::Result<Undo<'a>> {
    let root = Root::default();
    let vm = target.lab.state().vms.get(VICTIM).context("no VM")?;
    let pid = vm.qemu.as_ref().map(|qemu| qemu.process.pid);
    let before = pid.map(|pid| Cgroups::detect_cpu(&root)?.of_pid(&root, pid)).transpose()?;
    let kind = target.site.spec.lab_kind().context("the VM is no lab's")?;
    let group = Arc::new(own_group("blame")?);
    let of_undo = Arc::clone(&group);
    let undo = Undo::new(move || {
        if let (Some(pid), Some(before)) = (pid, before) {
            of_undo.cgroups.attach(&Root::default(), &before, pid)?;
        }
        of_undo.remove()
    });
    group.write("cpu.cfs_period_us", PERIOD_US)?;
    group.write("cpu.cfs_quota_us", what.quota_us(kind))?;
    match (pid, loads.get_mut(VICTIM).map(|load| &mut load.place)) {
        (Some(pid), _) => group.cgroups.attach(&root, &group.path, pid)?,
        (None, Some(Place::Host { cgroup_procs, .. })) => cgroup_procs.push(group.dir.join("cgroup.procs")),
        _ => anyhow::bail!("the VM has no process"),
    }
    Ok(undo)
}

/// Stops the process that serves the device again and again.
fn stops<'a>(what: &PlantedCause, target: &Target<'_>) -> anyhow::Result<Undo<'a>> {
    let twin = target.lab.state().twin.as_ref().and_then(|twin| twin.process.clone());
    let twin = twin.context("the device is no twin")?;
    let (length, pause) = what.stops();
    let (length, pause) = (Duration::from_millis(length), Duration::from_millis(pause));
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let process = twin.clone();
    let thread = std::thread::Builder::new().name("stops".to_owned()).spawn(move || {
        while !flag.load(Ordering::Relaxed) {
            wait(&flag, pause);
            process.signal(Signal::STOP);
            wait(&flag, length);
            process.signal(Signal::CONT);
        }
    })?;
    Ok(Undo::new(move || {
        let ended = end(&stop, vec![thread]);
        twin.signal(Signal::CONT);
        ended
    }))
}

/// Limits the VM's reads by its cgroup.
fn kernel_limit<'a>(what: &PlantedCause, target: &'a Target<'a>) -> anyhow::Result<Undo<'a>> {
    let root = Root::default();
    let cgroups = Cgroups::detect(&root)?;
    let vm = target.lab.state().vms.get(VICTIM).context("no VM")?;
    let file = cgroups.limit_file(&vm.cgroup, Limit::ReadIops)?;
    let dev = &target.site.stack.device.dev;
    let limit = what.limit(rate_of(&target.site.spec)?);
    let (set, none) = match cgroups.hierarchy {
        Hierarchy::V1 => (format!("{dev} {limit}"), format!("{dev} 0")),
        Hierarchy::V2 => {
            let key = Limit::ReadIops.key();
            (format!("{dev} {key}={limit}"), format!("{dev} {key}=max"))
        }
    };
    root.write(&file, &set)?;
    Ok(Undo::new(move || Ok(Root::default().write(&file, &none)?)))
}

/// Limits the VM's reads by QEMU.
fn throttle<'a>(what: &PlantedCause, target: &'a Target<'a>) -> anyhow::Result<Undo<'a>> {
    let limit = what.limit(rate_of(&target.site.spec)?);
    set_throttle(target.site, VICTIM, [limit, 0])?;
    Ok(Undo::new(move || set_throttle(target.site, VICTIM, [0, 0])))
}

/// Limits a VM's reads and writes per second by QEMU; 0 for no limit.
pub(crate) fn set_throttle(site: &Site, vm: usize, [reads, writes]: [u64; 2]) -> anyhow::Result<()> {
    let vm = site.host_vms().nth(vm).context("no VM")?;
    let mut qmp = vm.monitor(&Root::default())?.context("the VM has no monitor")?;
    let disk = qmp.disk_stats()?.into_iter().find(|disk| !disk.read_only).context("the VM has no disk")?;
    let limits = json!({ "id": disk.id, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": reads, "iops_wr": writes });
    qmp.execute("block_set_io_throttle", Some(limits))?;
    Ok(())
}

/// Slows the device down.
fn slow<'a>(target: &'a Target<'a>) -> anyhow::Result<Undo<'a>> {
    let twin = target.lab.state().twin.as_ref().context("the device is no twin")?;
    twin.set_slow(true)?;
    Ok(Undo::new(move || Ok(twin.set_slow(false)?)))
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::{Need, has, skip};

    use super::*;

    #[test]
    fn a_cgroup_that_cannot_be_set_up_is_not_left_behind() {
        let test = "a_cgroup_that_cannot_be_set_up_is_not_left_behind";
        if !has(test, &[Need::Root]) {
            return;
        }
        if !has_cpu_groups() {
            return skip(test, "no cgroup v1 of the CPU controller");
        }
        let set_up = |file: &str| -> anyhow::Result<PathBuf> {
            let group = own_group("left-behind")?;
            group.write(file, 64)?;
            assert!(group.dir.exists());
            Ok(group.dir.clone())
        };
        let dir = set_up("cpu.shares").unwrap();
        assert!(!dir.exists(), "{}", dir.display());
        assert!(set_up("cpu.no_such_file").is_err());
        assert!(!dir.exists(), "{}", dir.display());
    }
}
