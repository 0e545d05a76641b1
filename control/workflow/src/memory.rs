//! `memory` of a spec as groups of resctrl: a share of the L3 cache and of the memory bandwidth for
//! the threads of a VM, and ways for what devices write.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_apply::{Form, Target, Write, append};
use rtvirtio_cpu::group_name;
use rtvirtio_kernel::Root;
use rtvirtio_kernel::resctrl::{
    self, ControlGroup, Maker, MemoryBandwidth, Offer, Resctrl, USUAL_MOUNT, absent, task_group,
};
use rtvirtio_spec::{Bandwidth, HostHandle, HostSpec, Memory, Reach, Vm, Ways};
use rtvirtio_traffic::MemoryControl;
use rtvirtio_units::Enforcement;
use rtvirtio_vmm::Thread;
use rtvirtio_vmm::threads::discover;

use crate::error::{Context as _, Result, bail, ensure};
use crate::find::HostVm;
use crate::progress::Progress;
use crate::regulator::memory_control;
use ways::WaysPlan;

mod ways;

/// Thread by process, number and start.
type Task = (u32, u32, u64);

/// Shows that the kernel tells a thread's group (`CONFIG_PROC_CPU_RESCTRL`).
const SHOWS_GROUP: &str = "/proc/self/cpu_resctrl_groups";

/// Whether a VM is to have a group.
fn asks(vm: &Vm) -> bool {
    vm.cpu.memory.is_some()
}

/// Whether anything of resctrl is to be set.
pub(crate) fn is_asked(host: &HostSpec) -> bool {
    host.device_ways().is_some() || host.vms().iter().any(asks)
}

/// Names of all VMs with `memory`, and the writes for them and for devices. Another program
/// than `rtvirtio apply` leaves them and warns of it.
///
/// # Errors
/// [`Kind::System`](crate::Kind::System) without resctrl,
/// [`Kind::Infeasible`](crate::Kind::Infeasible) where ways or groups do not suffice,
/// [`Kind::InForce`](crate::Kind::InForce) where threads are in a group of another program.
pub(crate) fn writes(
    host: &HostSpec,
    vms: &[&HostVm],
    is_apply: bool,
    progress: &dyn Progress,
) -> Result<(Vec<String>, Vec<Write>)> {
    if !is_asked(host) {
        return Ok((Vec::new(), Vec::new()));
    }
    if !is_apply {
        progress.warn(
            "`memory` of the spec is left: resctrl is one for all VMs, and set by `rtvirtio apply` alone",
        );
        return Ok((Vec::new(), Vec::new()));
    }
    let root = Root::default();
    let resctrl = mounted(&root)?;
    let mut tasks = BTreeMap::new();
    for vm in host.vms().iter().filter(|vm| asks(vm)) {
        let found = vms.iter().find(|of| of.name == vm.name).context("a VM without a name")?;
        let threads = discover(&root, &found.handle(progress)?)?;
        tasks.insert(vm.name.as_str(), threads.iter().map(|t| (t.pid, t.tid, t.start)).collect());
    }
    let (writes, notes) = of_tasks(host, &tasks, &root, &resctrl)?;
    notes.iter().for_each(|note| progress.step(note));
    Ok((tasks.keys().map(|vm| (*vm).to_owned()).collect(), writes))
}

fn mounted(root: &Root) -> Result<Resctrl> {
    match resctrl::find(root)? {
        Offer::Absent => bail!(System, "`memory` needs resctrl, which is {}", absent(root)),
        Offer::NotMounted => {
            bail!(
                System,
                "`memory` needs resctrl, which is not mounted: mount -t resctrl resctrl {USUAL_MOUNT}"
            )
        }
        Offer::Mounted(found) => {
            ensure!(
                root.exists(SHOWS_GROUP)?,
                System,
                "`memory`: this kernel does not show the group of a thread ({SHOWS_GROUP}), so that nothing could be put back"
            );
            Ok(found)
        }
    }
}

/// Writes that take threads of a VM into its group which came later and inherited none: threads of
/// the kernel, and of processes that QEMU did not start. Empty without its group.
pub(crate) fn late(root: &Root, vm: &Vm, threads: &[Thread]) -> Result<Vec<Write>> {
    late_tasks(root, vm, &threads.iter().map(|t| (t.pid, t.tid, t.start)).collect::<Vec<_>>())
}

fn late_tasks(root: &Root, vm: &Vm, tasks: &[Task]) -> Result<Vec<Write>> {
    let (Some(memory), Offer::Mounted(found)) = (&vm.cpu.memory, resctrl::find(root)?) else {
        return Ok(Vec::new());
    };
    let path = group_path(&vm.name, memory);
    if !root.exists(found.mount.join(path.trim_start_matches('/')))? {
        return Ok(Vec::new());
    }
    let mut out = Vec::new();
    for task in tasks {
        if group_of(root, &vm.name, *task)?.as_deref() == Some("/") {
            out.push(moved(&vm.name, &found.mount, &path, *task));
        }
    }
    Ok(out)
}

/// Path of a VM's group below the mount point: where nothing is limited, one that only counts.
fn group_path(vm: &str, memory: &Memory) -> String {
    let parent = if memory.is_limited() { "" } else { "/mon_groups" };
    format!("{parent}/{}", group_name(vm))
}

fn moved(vm: &str, mount: &Path, path: &str, (pid, tid, start): Task) -> Write {
    let target = Target::resctrl_task(pid, tid, start, mount);
    Write::new(format!("resctrl group of thread {tid} ({vm})"), target, path)
}

/// Group of a thread; `None` for one that has ended.
fn group_of(root: &Root, vm: &str, (pid, tid, _): Task) -> Result<Option<String>> {
    let file = format!("/proc/{pid}/task/{tid}/cpu_resctrl_groups");
    let Some(text) = root.read_optional(&file)? else { return Ok(None) };
    match task_group(&text) {
        Some(group) => Ok(Some(group)),
        None => bail!(System, "{vm}: {file} holds `{text}`, which is not understood"),
    }
}

/// The writes for these threads of each VM, and what a user has to know of them.
fn of_tasks(
    host: &HostSpec,
    tasks: &BTreeMap<&str, Vec<Task>>,
    root: &Root,
    resctrl: &Resctrl,
) -> Result<(Vec<Write>, Vec<String>)> {
    let others = resctrl.control_groups(root)?;
    let vms: Vec<(&Vm, &Memory)> =
        host.vms().iter().filter_map(|vm| Some((vm, vm.cpu.memory.as_ref()?))).collect();
    check_classes(host, resctrl, &others, &vms)?;
    let devices = if host.device_ways().is_some() { 0 } else { resctrl.device_ways(root)? };
    let mut plan = WaysPlan::new(resctrl, &others, devices);
    let mut ways = BTreeMap::new();
    // Ways of its own first: all others may share what is left.
    for (vm, memory) in vms.iter().filter(|(_, memory)| memory.own) {
        if let Some(wanted) = memory.ways {
            ways.insert(vm.name.as_str(), plan.own(&vm.name, wanted)?);
        }
    }
    let devices = host.device_ways().map(|n| plan.shared("[memory]", Ways::Count(n))).transpose()?;
    for (vm, memory) in vms.iter().filter(|(_, memory)| !memory.own) {
        if let Some(wanted) = memory.ways {
            ways.insert(vm.name.as_str(), plan.shared(&vm.name, wanted)?);
        }
    }
    let mut writes = Vec::new();
    for (vm, memory) in &vms {
        let of = tasks.get(vm.name.as_str()).map_or(&[][..], Vec::as_slice);
        let group = GroupOf { vm, memory, ways: ways.get(vm.name.as_str()).copied() };
        append(&mut writes, group.writes(of, root, resctrl, &mut plan.notes)?);
    }
    append(&mut writes, plan.rest(root)?);
    if let Some(mask) = devices {
        append(&mut writes, device_writes(resctrl, mask)?);
    }
    Ok((writes, plan.notes))
}

/// Refuses more control groups than the CPU has classes for; `io_alloc` takes one too.
fn check_classes(
    host: &HostSpec,
    resctrl: &Resctrl,
    others: &[ControlGroup],
    vms: &[(&Vm, &Memory)],
) -> Result<()> {
    let Some(most) = resctrl.classes else { return Ok(()) };
    let new = vms.iter().filter(|(_, memory)| memory.is_limited()).count();
    let devices = resctrl.cache.as_ref().and_then(|cache| cache.devices);
    let devices = usize::from(devices == Some(true) || host.device_ways().is_some());
    let needed = 1 + others.len() + new + devices;
    ensure!(
        needed as u64 <= most,
        Infeasible,
        "`memory`: {needed} groups of resctrl are more than this CPU has (num_closids is {most}, and {} exist besides the default \
         one): remove one, or give fewer VMs `memory`",
        others.len()
    );
    Ok(())
}

fn line(schemata: &Path, resource: &str, whose: &str, value: String) -> Write {
    let form = Form::Schemata { resource: resource.to_owned() };
    Write::new(format!("{resource} of {whose}"), Target::host(schemata, form), value)
}

/// Value of a line that gives each domain this one.
fn everywhere(domains: &[u32], value: &str) -> String {
    domains.iter().map(|domain| format!("{domain}={value}")).collect::<Vec<_>>().join(";")
}

/// Group of one VM.
struct GroupOf<'a> {
    vm: &'a Vm,
    memory: &'a Memory,
    /// Ways that were chosen.
    ways: Option<u64>,
}

impl GroupOf<'_> {
    fn writes(
        &self,
        tasks: &[Task],
        root: &Root,
        resctrl: &Resctrl,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Write>> {
        let (name, memory) = (&self.vm.name, self.memory);
        self.check_tasks(tasks, root)?;
        if !memory.is_limited() && !resctrl.counts_bandwidth() {
            bail!(System, "{name}: `monitor`: this CPU limits memory bandwidth and does not count it");
        }
        let path = group_path(name, memory);
        let dir = resctrl.mount.join(path.trim_start_matches('/'));
        if root.exists(&dir)? {
            bail!(
                InForce,
                "{name}: there is a group {} already: put back what made it, or `rmdir` it",
                dir.display()
            );
        }
        let mut processes: Vec<u32> = tasks.iter().map(|(pid, ..)| *pid).collect();
        processes.sort_unstable();
        processes.dedup();
        let target = Target::host(&dir, Form::ResctrlGroup { processes });
        let mut writes = vec![Write::new(format!("resctrl group of {name}"), target, "present")];
        for (resource, value) in self.lines(resctrl, notes)? {
            let line = line(&dir.join("schemata"), resource, name, value);
            writes.push(Write { created_by: Some(0), ..line });
        }
        writes.extend(tasks.iter().map(|task| moved(name, &resctrl.mount, &path, *task)));
        Ok(writes)
    }

    /// Lines of its `schemata`.
    fn lines(&self, resctrl: &Resctrl, notes: &mut Vec<String>) -> Result<Vec<(&'static str, String)>> {
        let mut lines = Vec::new();
        if let (Some(mask), Some(cache)) = (self.ways, &resctrl.cache) {
            let value = everywhere(&cache.domains, &format!("{mask:x}"));
            lines.extend(cache.resources().iter().map(|resource| (*resource, value.clone())));
        }
        for (resource, key, wanted, of) in [
            ("MB", "bandwidth", self.memory.bandwidth, &resctrl.memory),
            ("SMBA", "slow_bandwidth", self.memory.slow_bandwidth, &resctrl.slow_memory),
        ] {
            let Some(wanted) = wanted else { continue };
            let Some(of) = of else {
                bail!(
                    System,
                    "{}: `{key}`: this CPU or kernel has no such control (no info/{resource} in resctrl)",
                    self.vm.name
                );
            };
            let (value, worth) = bandwidth(&self.vm.name, key, (resctrl.maker, of), wanted)?;
            notes.push(format!(
                "{}: {resource} {value} in each of {} domains ({}): of CPUs only, DMA of devices is not limited",
                self.vm.name,
                of.domains.len(),
                worth.name()
            ));
            lines.push((resource, everywhere(&of.domains, &value)));
        }
        Ok(lines)
    }

    /// Refuses threads in a group of another program.
    fn check_tasks(&self, tasks: &[Task], root: &Root) -> Result<()> {
        let name = &self.vm.name;
        for task in tasks {
            let Some(group) = group_of(root, name, *task)? else { continue };
            if group == "/" {
                continue;
            }
            let remedy = match &self.vm.reach {
                Reach::Existing { host: HostHandle::Domain(of), .. } => format!(
                    "where libvirt has made it (<cachetune>, <memorytune>), it sets these at a VM's start only: `virsh edit {}`, \
                     then shut the VM down and start it, and leave `memory` out",
                    of.domain
                ),
                _ => "let the program that made it put it back, or leave `memory` out".to_owned(),
            };
            bail!(
                InForce,
                "{name}: thread {} is in group {group} of resctrl, which is another program's: {remedy}",
                task.1
            );
        }
        Ok(())
    }
}

/// A bandwidth in the unit of the host, rounded down, and its worth.
fn bandwidth(
    vm: &str,
    key: &str,
    (maker, of): (Maker, &MemoryBandwidth),
    wanted: Bandwidth,
) -> Result<(String, Enforcement)> {
    match (memory_control(maker, of, None), wanted) {
        (MemoryControl::Percent { least, step, mpam, .. }, Bandwidth::Percent(percent)) => {
            let value = percent / step.max(1) * step.max(1);
            ensure!(
                value >= least,
                Infeasible,
                "{vm}: `{key}` of {percent} % is less than this CPU can limit to: {least} %"
            );
            Ok((value.to_string(), if mpam { Enforcement::Cap } else { Enforcement::Hint }))
        }
        (MemoryControl::Percent { .. }, Bandwidth::Rate(_)) => {
            bail!(Argument, "{vm}: this CPU limits memory bandwidth in percent: write {key} = \"40%\"")
        }
        (_, Bandwidth::Percent(_)) => {
            bail!(Argument, "{vm}: this host limits memory bandwidth in bytes: write {key} = \"8GB/s\"")
        }
        (control, Bandwidth::Rate(rate)) => match control.value(rate) {
            Ok((value, _, worth)) => Ok((value, worth)),
            Err(e) => bail!(Infeasible, "{vm}: `{key}`: {e}"),
        },
    }
}

/// Ways for what devices write into the cache.
fn device_writes(resctrl: &Resctrl, mask: u64) -> Result<Vec<Write>> {
    let devices = resctrl.cache.as_ref().and_then(|cache| Some((cache, cache.devices?)));
    let Some((cache, is_on)) = devices else {
        bail!(
            System,
            "[memory]: this CPU or kernel gives devices no ways (info/L3/io_alloc: AMD with SDCIAE, Linux 6.19, without `cdp`)"
        );
    };
    let info = resctrl.mount.join("info/L3");
    let on = Target::host(info.join("io_alloc"), Form::IoAlloc);
    let ways = Target::host(info.join("io_alloc_cbm"), Form::IoAllocWays);
    let value = everywhere(&cache.domains, &format!("{mask:x}"));
    let created_by = (!is_on).then_some(0);
    Ok(vec![
        Write::new("ways of devices, on", on, "enabled"),
        Write { created_by, ..Write::new("ways of devices", ways, value) },
    ])
}

#[cfg(test)]
mod tests;
