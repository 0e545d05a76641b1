//! VMs whose threads a manager keeps in cgroups of its own, as libvirt does: below the VM's group
//! one for `emulator`, for each `vcpuN` and each `iothreadN` (libvirt's `docs/cgroups.rst`).
//!
//! On cgroup v1 the VM's group gets the budget, and the threads are moved up into it. In a group
//! elsewhere, libvirt would no longer find the VM's cgroup after a restart of its daemon: it looks
//! at the cgroup of QEMU's first thread, and accepts only one of the VM's name
//! (`virCgroupV1ValidateMachineGroup()`). The groups below cannot have the budget, because the
//! kernel limits the sum of theirs to that of the VM's group.

use std::path::{Path, PathBuf};

use rtvirtio_apply::{Form, Target, Write, append};
use rtvirtio_kernel::{Cgroups, Hierarchy, Root, process, unless_gone};
use rtvirtio_units::Ratio;
use rtvirtio_vmm::Thread;

use crate::{Ask, Backend, Contract, CpuError, Load, Over, Probe, Settings};

/// Names of processes that managers start for a VM and keep in its cgroup, as in `/proc/PID/comm`.
const HELPERS: [&str; 12] = [
    "swtpm",
    "virtiofsd",
    "passt",
    "pasta",
    "slirp4netns",
    "dbus-daemon",
    "qemu-bridge-hel",
    "qemu-pr-helper",
    "virt-launcher",
    "virt-launcher-m",
    "virtqemud",
    "virtlogd",
];

/// Whether a process of this name (cut at 15 bytes) serves the VM in whose cgroup it runs.
fn is_helper(name: &str) -> bool {
    HELPERS.contains(&name)
}

/// Whether a process is a helper of the VM in whose cgroup it runs, by its executable: its name it
/// chooses itself, as by QEMU's `-name process=`. A process whose executable cannot be read is no
/// helper.
#[must_use]
pub fn is_helper_process(root: &Root, pid: u32) -> bool {
    /// Most bytes of a process's name.
    const NAME_LEN: usize = 15;
    let Ok(Some(file)) = process::program(root, pid) else { return false };
    // passt has a file for each kind of CPU: `passt.avx2`.
    let stem = file.split('.').next().unwrap_or_default();
    is_helper(stem.get(..NAME_LEN).unwrap_or(stem))
}

/// Cgroup of the VM in the CPU controller's hierarchy, if a manager keeps `main`, the thread of
/// QEMU's main loop, in a group below it.
pub(crate) fn group(cgroups: &Cgroups, main: &Thread) -> Option<PathBuf> {
    let of_thread = cgroups.of_thread(&main.cgroups)?;
    let vm = of_thread.parent().filter(|vm| !Cgroups::is_root(vm))?;
    Cgroups::is_of_thread(of_thread).then(|| vm.to_owned())
}

/// Sets the budget of the VM's own group; for a real-time budget the threads are moved into it. A
/// quota limits the groups below it too.
pub(crate) fn budget(
    cgroups: &Cgroups,
    ask: &Ask<'_>,
    group: PathBuf,
    files: &[(&str, u64)],
    out: &mut Settings,
) -> Result<(), CpuError> {
    let dir = cgroups.dir(&group)?;
    out.writes.extend(files.iter().map(|(file, value)| {
        let target = Target::host(dir.join(file), Form::Plain);
        Write::new(format!("{file} of {}", ask.vm), target, value.to_string())
    }));
    if out.backend == Backend::RtGroup {
        out.writes.extend(ask.threads.iter().map(|t| moved(cgroups, ask, t, &group)));
    }
    out.group = Some(group);
    Ok(())
}

/// Budgets that groups above managed VMs need, so that the kernel accepts the VMs' budgets: to be
/// written before these. `all` are the VMs' groups with their contracts.
///
/// A group above must not run out of budget before a VM does, because then one VM would wait for
/// another. In one of its periods `P` a VM with a budget of `q` in each `p` uses at most `(ceil(P /
/// p) + 1) q`, since its own periods are not in step with `P`. The kernel detects at the next tick
/// that a budget is used up, and takes the excess from the next one: another `q`.
pub fn room(
    root: &Root,
    probe: &Probe,
    all: &[(&Path, Contract)],
    backend: Backend,
) -> Result<Vec<Write>, CpuError> {
    room_beyond(root, probe, all, backend, &|_| None)
}

/// Budgets as by [`room`], for groups that may have room already: `before` is the budget that a
/// file had before that, in microseconds.
pub fn room_beyond(
    root: &Root,
    probe: &Probe,
    all: &[(&Path, Contract)],
    backend: Backend,
    before: &dyn Fn(&Path) -> Option<u64>,
) -> Result<Vec<Write>, CpuError> {
    let v1 = probe.cgroups.as_ref().filter(|c| c.hierarchy == Hierarchy::V1);
    let (Some(cgroups), Backend::RtGroup) = (v1, backend) else { return Ok(Vec::new()) };
    let limit = probe.found.iter().find(|f| f.backend == backend).map_or(1.0, |f| f.grant.limit.0);
    let above = |group: &Path| -> Vec<PathBuf> {
        group.ancestors().skip(1).filter(|a| !Cgroups::is_root(a)).map(Path::to_owned).collect()
    };
    let mut groups: Vec<PathBuf> = all.iter().flat_map(|(group, _)| above(group)).collect();
    // Each group before those below it.
    groups.sort();
    groups.dedup();
    let mut writes = Vec::new();
    for group in groups {
        let dir = cgroups.dir(&group)?;
        let period: i64 = root.number(dir.join("cpu.rt_period_us"))?;
        let path = dir.join("cpu.rt_runtime_us");
        let now = u64::try_from(root.number::<i64>(&path)?);
        let Some(old) = before(&path).or(now.ok()) else { continue };
        let period = u64::try_from(period).unwrap_or(0);
        let below = all.iter().filter(|(vm, _)| vm.starts_with(&group));
        let needed: u64 = below.map(|(_, contract)| most(contract, period)).sum();
        // No more than the root's share: the kernel would refuse it.
        let all_of_it = (period as f64 * limit) as u64;
        let value = old.saturating_add(needed).min(all_of_it.max(old));
        let target = Target::host(path, Form::Plain);
        let knob = format!("cpu.rt_runtime_us of {}", group.display());
        append(&mut writes, vec![Write::new(knob, target, value.to_string())]);
    }
    Ok(writes)
}

/// Largest CPU time of a VM under this contract in one period of a group above it, in microseconds.
fn most(contract: &Contract, period_us: u64) -> u64 {
    (period_us.div_ceil(contract.period_us()) + 2).saturating_mul(contract.budget_us())
}

/// Part of the topmost group's load that [`room`] has added for one VM, named and counted as by a
/// probe.
///
/// # Errors
/// When the group cannot be read; one that is gone is no load.
pub fn room_load(
    root: &Root,
    probe: &Probe,
    group: &Path,
    contract: &Contract,
) -> Result<Option<Load>, CpuError> {
    let Some(cgroups) = &probe.cgroups else { return Ok(None) };
    let Some(top) = group.ancestors().filter(|a| !Cgroups::is_root(a)).last().filter(|top| *top != group)
    else {
        return Ok(None);
    };
    let file = cgroups.dir(top)?.join("cpu.rt_period_us");
    let Some(period) =
        unless_gone(root.number::<i64>(file))?.and_then(|p| u64::try_from(p).ok()).filter(|p| *p > 0)
    else {
        return Ok(None);
    };
    let name = format!("cgroup {}", top.file_name().unwrap_or_default().to_string_lossy());
    let share = Ratio(most(contract, period) as f64 / period as f64);
    Ok(Some(Load { name, share, over: Over::Every, pid: None }))
}

pub(crate) fn moved(cgroups: &Cgroups, ask: &Ask<'_>, t: &Thread, group: &Path) -> Write {
    let target = Target::thread_cgroup(t.pid, t.tid, t.start, "cpu", &cgroups.mount);
    Write::new(format!("cgroup of {} ({})", t.role, ask.vm), target, group.to_string_lossy())
}
