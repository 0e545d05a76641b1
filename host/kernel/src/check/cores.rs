//! Traps of CPUs that are set apart: interrupts on them, and vCPUs that cannot leave one CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rtvirtio_cores::{Host, Request, Use};

use super::Finding;
use crate::irq::{IRQS, is_fixed};
use crate::partition::{PartitionError, invalid_partitions, partition_support};
use crate::sched::Policy;
use crate::task::{self, TaskStat};
use crate::topology::{cpus_in, isolated, topology};
use crate::{HostError, Root, text};

const WHY_FIFO: &str = "of two real-time vCPUs on one CPU the one that works keeps the other from running, unless each has a budget";
const WHY_ONE: &str = "vCPUs that share a CPU wait for each other, whatever other CPUs have nothing to do";

/// Interrupts on isolated CPUs; nothing where none is isolated.
pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "cpu.isolated_irq";
    const WHY: &str =
        "isolcpus= keeps threads from a CPU, not interrupts: each one there delays the vCPU that has the CPU";
    let read = || {
        let apart = isolated(root)?;
        if apart.is_empty() {
            return Ok(None);
        }
        Ok::<_, HostError>(Some((new_ones(root, &apart)?, routed(root, &apart)?, apart)))
    };
    let (new, routed, apart) = match read() {
        Ok(None) => return,
        Ok(Some(read)) => read,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    let apart = text::cpu_ranges(&apart);
    let Routed { movable, fixed, kept_off } = routed;
    if new.is_empty() && movable + fixed == 0 {
        let what = match kept_off {
            0 => format!("no interrupt is set to the isolated CPUs {apart}"),
            n => format!(
                "of the isolated CPUs {apart}: {n} interrupts of device queues are set to some, and come only for what these CPUs send themselves \
                 (isolcpus=managed_irq)"
            ),
        };
        return found.push(Finding::ok(ID, what, WHY));
    }
    let mut what = format!(
        "of the isolated CPUs {apart}: new interrupts may use {}, and {} interrupts are set to some",
        if new.is_empty() { "none".to_owned() } else { text::cpu_ranges(&new) },
        movable + fixed
    );
    if fixed > 0 {
        what.push_str(&format!("; {fixed} of these cannot be moved except by isolcpus=managed_irq"));
    }
    let mut remedies = Vec::new();
    if !new.is_empty() || movable > 0 {
        remedies.push(
            "boot with irqaffinity=CPUS, with the CPUs that are not isolated, and keep irqbalance from the others (IRQBALANCE_BANNED_CPULIST)",
        );
    }
    if fixed > 0 {
        remedies.push("for those of a device's queues boot with isolcpus=managed_irq,CPUS");
    } else if movable > 0 && kept_off == 0 {
        remedies.push(
            "those of a device's queues, which kernels before 6.11 do not tell apart, need isolcpus=managed_irq,CPUS",
        );
    }
    found.push(Finding::warn(ID, what, WHY, remedies.join("; ")));
}

/// Partitions of CPUs that are not valid, and whether VMs can have one.
pub(super) fn partitions(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "cpu.partition";
    const WHY: &str = "SCHED_DEADLINE holds a VM's contract on some of the CPUs only in a valid partition of cgroup v2's cpuset";
    const REMEDY: &str = "where rtvirtio has made it, `rtvirtio revert`, and apply again; else give it CPUs that no other group has, or write \
         `member` to its cpuset.cpus.partition";
    let invalid = match invalid_partitions(root) {
        Ok(invalid) => invalid,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    if !invalid.is_empty() {
        let all: Vec<String> =
            invalid.iter().map(|(group, kind)| format!("{} shows `{kind}`", group.display())).collect();
        return found.push(Finding::warn(ID, all.join("; "), WHY, REMEDY));
    }
    found.push(match partition_support(root) {
        Ok(()) => Finding::ok(ID, "VMs can have partitions of CPUs", WHY),
        // Nothing has to be done where no VM is to have one.
        Err(PartitionError::Cannot { why, remedy }) => {
            Finding::ok(ID, format!("VMs cannot have partitions of CPUs: {why}; {remedy}"), WHY)
        }
        Err(PartitionError::Host(e)) => Finding::unknown(ID, &e, WHY),
    });
}

/// Isolated CPUs that an interrupt may use that is requested from now on.
fn new_ones(root: &Root, apart: &BTreeSet<u32>) -> Result<BTreeSet<u32>, HostError> {
    let path = format!("{IRQS}/default_smp_affinity");
    let text = root.read(&path)?;
    let mask = text::cpu_mask(&text).ok_or_else(|| HostError::form(path, &text, "a mask of CPUs"))?;
    Ok(mask.intersection(apart).copied().collect())
}

/// Numbers of interrupts that the kernel has set to isolated CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Routed {
    /// Interrupts that a program may move away, or of which the kernel does not say.
    movable: usize,
    /// Interrupts that no program may move.
    fixed: usize,
    /// Further ones that no program may move and that `isolcpus=managed_irq` covers: the kernel
    /// sets them to another CPU of their queue where it has one (`irq_do_set_affinity()`), and else
    /// they come only for requests of the isolated CPUs.
    kept_off: usize,
}

fn routed(root: &Root, apart: &BTreeSet<u32>) -> Result<Routed, HostError> {
    let (mut found, mut managed) = (Routed::default(), None);
    for irq in root.list(IRQS)?.iter().filter(|name| name.parse::<u32>().is_ok()) {
        // The interrupt may be given back meanwhile. Not all kernels tell the CPU it is sent to.
        let mut on = root.read_optional(format!("{IRQS}/{irq}/effective_affinity_list"))?;
        if on.is_none() {
            on = root.read_optional(format!("{IRQS}/{irq}/smp_affinity_list"))?;
        }
        let Some(list) = on else { continue };
        let form = || HostError::form(format!("{IRQS}/{irq}"), &list, "a list of CPUs");
        let on: BTreeSet<u32> = text::cpu_list(&list).ok_or_else(form)?;
        let mut there = on.intersection(apart).copied().peekable();
        if there.peek().is_none() {
            continue;
        }
        if !is_fixed(root, irq)? {
            found.movable += 1;
            continue;
        }
        let managed = match &managed {
            Some(read) => read,
            None => managed.insert(managed_irq(root)?),
        };
        if there.all(|cpu| managed.contains(&cpu)) {
            found.kept_off += 1;
        } else {
            found.fixed += 1;
        }
    }
    Ok(found)
}

/// Isolated CPUs from which the kernel keeps the interrupts that it manages (`isolcpus=` with
/// `managed_irq`, `Documentation/admin-guide/kernel-parameters.txt`).
fn managed_irq(root: &Root) -> Result<BTreeSet<u32>, HostError> {
    let line = root.read("/proc/cmdline")?;
    let mut found = BTreeSet::new();
    for value in line.split_ascii_whitespace().filter_map(|word| word.strip_prefix("isolcpus=")) {
        let is_flag = |word: &&str| matches!(*word, "domain" | "nohz" | "managed_irq");
        let flags: Vec<&str> = value.split(',').take_while(is_flag).collect();
        if !flags.contains(&"managed_irq") {
            continue;
        }
        let list = value.split(',').skip(flags.len()).collect::<Vec<_>>().join(",");
        match text::cpu_list(&list) {
            Some(cpus) => found.extend(cpus),
            // `all`, or the last CPU as `N`, of those that the kernel has.
            None => {
                let possible =
                    cpus_in(root, Path::new("/sys/devices/system/cpu/possible"))?.unwrap_or_default();
                let last = possible.last().map(u32::to_string).unwrap_or_default();
                match list.as_str() {
                    "all" => found.extend(possible),
                    _ => found.extend(text::cpu_list(&list.replace('N', &last)).unwrap_or_default()),
                }
            }
        }
    }
    Ok(found)
}

/// Thousandths of a CPU.
const WHOLE: u32 = 1000;

/// Thread that runs vCPUs.
struct Vcpu {
    stat: TaskStat,
    may_use: BTreeSet<u32>,
}

/// Findings on the vCPUs of VMs that run, by their threads' names.
pub(super) fn vms(root: &Root, pids: &[u32]) -> Vec<Finding> {
    let apart = match isolated(root) {
        Ok(apart) => apart,
        Err(e) => return vec![Finding::unknown("vm.cores", &e, WHY_ONE)],
    };
    let mut found = Vec::new();
    let mut real_time: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut all = Vec::new();
    for &pid in pids {
        match vcpus(root, pid) {
            Ok(vcpus) => all.push((pid, vcpus)),
            Err(e) if e.is_gone() => {}
            Err(e) => found.push(Finding::unknown(&format!("vm.cores.{pid}"), &e, WHY_ONE)),
        }
    }
    let stuck = all.iter().filter_map(|(pid, vcpus)| Some((&vcpus[..], on_one(*pid, vcpus, &apart)?)));
    found.extend(with_proposals(root, &all, stuck.collect(), &apart));
    for (pid, vcpus) in &all {
        for vcpu in vcpus.iter().filter(|v| matches!(v.stat.policy, Some(Policy::Fifo | Policy::Rr))) {
            if let (Some(cpu), 1) = (vcpu.may_use.first(), vcpu.may_use.len()) {
                real_time.entry(*cpu).or_default().push(*pid);
            }
        }
    }
    for (cpu, pids) in real_time.into_iter().filter(|(_, pids)| pids.len() > 1) {
        let vms: BTreeSet<String> = pids.iter().map(u32::to_string).collect();
        let vms: Vec<String> = vms.into_iter().collect();
        found.push(Finding::warn(
            &format!("cpu.real_time.{cpu}"),
            format!("{} real-time vCPUs may use CPU {cpu} only (VM {})", pids.len(), vms.join(", ")),
            WHY_FIFO,
            "give each a CPU of its own (`vcpupin`, `taskset -p`), or a budget (`cpu` in the spec)",
        ));
    }
    found
}

fn vcpus(root: &Root, pid: u32) -> Result<Vec<Vcpu>, HostError> {
    let mut all = Vec::new();
    for tid in task::tids(root, pid)? {
        let read = || {
            let stat = task::stat(root, pid, tid)?;
            Ok((stat, task::affinity(root, pid, tid)?))
        };
        match read() {
            Ok((stat, list)) if !stat.ended && task::vcpus_in_name(&stat.comm).is_some() => {
                all.extend(text::cpu_list(&list).map(|may_use| Vcpu { stat, may_use }));
            }
            Ok(_) => {}
            Err(e) if HostError::is_gone(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}

/// The findings, each with CPUs that are free for the VM's vCPUs, where the topology can be read.
fn with_proposals(
    root: &Root,
    all: &[(u32, Vec<Vcpu>)],
    mut stuck: Vec<(&[Vcpu], Finding)>,
    apart: &BTreeSet<u32>,
) -> Vec<Finding> {
    let host = if stuck.is_empty() { None } else { topology(root).ok() };
    if let Some(mut host) = host.and_then(|cpus| Host::new(cpus, WHOLE).ok()) {
        let pinned = all.iter().flat_map(|(_, vcpus)| vcpus).map(|vcpu| &vcpu.may_use);
        pinned.filter(|may_use| may_use.len() == 1).flatten().for_each(|cpu| host.fill(*cpu));
        for (vcpus, finding) in &mut stuck {
            finding.remedy.push_str(&proposal(&mut host, vcpus, apart).unwrap_or_default());
        }
    }
    stuck.into_iter().map(|(_, finding)| finding).collect()
}

/// Takes CPUs for the vCPUs of a VM that no other vCPU has to itself; `None` where there are too
/// few.
fn proposal(host: &mut Host, vcpus: &[Vcpu], apart: &BTreeSet<u32>) -> Option<String> {
    let mut may_use = vcpus.iter().flat_map(|vcpu| &vcpu.may_use);
    let each = if may_use.all(|cpu| apart.contains(cpu)) { Use::Whole } else { Use::Part(WHOLE) };
    let vcpus = u32::try_from(vcpus.len()).ok()?;
    let found = host.place(&Request { vcpus, each, service: 0, service_share: 1, node: None }).ok()?;
    host.take(&found);
    let list: Vec<String> = found.vcpus.iter().map(u32::to_string).collect();
    Some(format!("; free by core, cache and node: CPUs {}, if its cpuset has them", list.join(", ")))
}

/// A VM whose vCPUs all have the same single CPU, or are left where they are.
fn on_one(pid: u32, vcpus: &[Vcpu], apart: &BTreeSet<u32>) -> Option<Finding> {
    let id = format!("vm.cores.{pid}");
    if vcpus.len() < 2 {
        return None;
    }
    let all: BTreeSet<u32> = vcpus.iter().flat_map(|vcpu| &vcpu.may_use).copied().collect();
    if let (Some(only), 1) = (all.first(), all.len()) {
        let what = format!("all {} vCPUs of VM {pid} may use CPU {only} only", vcpus.len());
        return Some(Finding::warn(
            &id,
            what,
            WHY_ONE,
            "give each a CPU of its own (`vcpupin`, `taskset -p`)",
        ));
    }
    // The kernel pushes real-time and deadline threads to other isolated CPUs, but not these.
    let ordinary =
        |vcpu: &&Vcpu| matches!(vcpu.stat.policy, Some(Policy::Other | Policy::Batch | Policy::Idle));
    let stay = |vcpu: &&Vcpu| vcpu.may_use.len() > 1 && vcpu.may_use.is_subset(apart);
    let left: Vec<&Vcpu> = vcpus.iter().filter(ordinary).filter(stay).collect();
    let mut on: BTreeMap<u32, usize> = BTreeMap::new();
    left.iter().for_each(|vcpu| *on.entry(vcpu.stat.cpu).or_default() += 1);
    let (cpu, n) = on.into_iter().max_by_key(|(_, n)| *n).filter(|(_, n)| *n > 1)?;
    Some(Finding::warn(
        &id,
        format!("{n} vCPUs of VM {pid} last ran on CPU {cpu}, and may use several isolated CPUs"),
        "between isolated CPUs the scheduler moves no ordinary thread: all stay where they started, often on the first",
        "pin each vCPU to one of them (`vcpupin`, `taskset -p`)",
    ))
}

#[cfg(test)]
mod tests;
