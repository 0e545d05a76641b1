//! What acts on the VMs' I/O already and is set by no plan: limits and weights of cgroups above
//! theirs, QEMU's own throttling, io.cost and io.latency, and cgroups in which nothing of ours
//! acts.

mod cpu;
mod limits;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::cgroup::{OtherControl, SetLimit};
use rtvirtio_kernel::{BlockDevice, Cgroups, Root, Stack, unless_gone};
use rtvirtio_model::Config;
use rtvirtio_planner::{CgroupNode, Placement, Placements};
use rtvirtio_spec::Vm;
use rtvirtio_units::Iops;
use rtvirtio_vmm::throttle::{Drive, ThrottleLimits};
use serde::Serialize;

use crate::error::Result;
use crate::uncovered::{self, Uncovered};
use crate::vm_counters::Dimension;
use limits::{Limited, ceilings};

/// Kind of a control, which tells whether predictions count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlKind {
    /// A limit of a cgroup, counted in predictions.
    CgroupLimit,
    /// QEMU's throttling of a drive, counted in predictions.
    QemuThrottle,
    /// Weights on the paths of VMs whose own do not compare, counted in predictions.
    Weights,
    /// A cgroup in which some of our settings cannot act, which no plan therefore uses.
    Placement,
    /// Known to act, and not counted in predictions.
    NotCounted,
    /// Not known, and therefore assumed.
    Assumed,
    /// I/O of a VM on which no setting of the spec's devices acts.
    Uncovered,
}

/// Control that acts on I/O and is set by no plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Control {
    /// Kind of the control.
    pub kind: ControlKind,
    /// The VM on which it acts; `None` for one on several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Effect, what causes it, and the remedy where no setting of ours can act.
    pub text: String,
}

impl Control {
    fn of_uncovered(of: &Uncovered) -> Self {
        Self { kind: ControlKind::Uncovered, vm: Some(of.vm.clone()), text: of.text.clone() }
    }
}

impl std::fmt::Display for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.vm {
            Some(vm) => write!(f, "{vm}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// All that acts already on the VMs of a spec.
#[derive(Clone, Debug, Default)]
pub struct Controls {
    /// Controls to be reported, each with its text.
    pub list: Vec<Control>,
    /// Their effect on each VM, as input of the planner.
    pub placements: Placements,
}

/// A VM of the spec with what is known of it here.
pub(crate) struct Placed<'a> {
    pub vm: &'a Vm,
    /// Cgroup in the hierarchy of the block I/O controller.
    pub cgroup: &'a Path,
    /// Drives of its VMM, or why they are unknown; `None` without a monitor to ask.
    pub drives: Option<std::result::Result<Vec<Drive>, String>>,
    /// Processes of the VM, or why they are unknown.
    pub pids: std::result::Result<Vec<u32>, String>,
    /// Whether its own cgroup's limits are the cap of the configuration, which a plan may change.
    pub has_cap: bool,
    /// I/O on which no setting for the device acts.
    pub uncovered: Vec<Uncovered>,
}

impl Placed<'_> {
    /// Whether its tasks write, and that escapes its cgroup.
    fn writes_escape(&self) -> bool {
        uncovered::writes_escape(&self.uncovered) && self.vm.tasks.iter().any(|t| t.op.write_share() > 0.0)
    }
}

/// Input of `survey`: files of the host, and the device.
pub(crate) struct Survey<'a> {
    pub root: &'a Root,
    /// Hierarchy of the block I/O controller.
    pub io: &'a Cgroups,
    /// Hierarchy of the CPU controller, where there is one.
    pub cpu: Option<&'a Cgroups>,
    /// Files of the device.
    pub names: &'a [PathBuf],
    /// The device, with the disks that order its requests.
    pub stack: &'a Stack,
}

/// Finds the controls between the VMs and a device.
pub(crate) fn survey(at: &Survey<'_>, vms: &[Placed<'_>]) -> Result<Controls> {
    let Survey { root, io: cgroups, names, stack, .. } = *at;
    // All disks below have one weight, or there is no configuration.
    let scheduling = stack.disks.first().unwrap_or(&stack.device).dev.as_str();
    let mut list = Vec::new();
    let own = own_cgroups(vms, &mut list);
    let mut limited = BTreeMap::new();
    let mut paths = Vec::new();
    let mut others: BTreeMap<String, OtherControl> = BTreeMap::new();
    for (i, vm) in vms.iter().enumerate() {
        let mut path = Vec::new();
        for cgroup in cgroups.path_of(vm.cgroup) {
            let weight = cgroups.weight_of(root, &cgroup, scheduling)?;
            path.push(CgroupNode { path: cgroup.display().to_string(), weight });
        }
        paths.push(path);
        list.extend(vm.uncovered.iter().map(Control::of_uncovered));
        for (disk, set) in limits_of(at, vm)? {
            let of = if disk.dev == stack.device.dev { String::new() } else { format!(" of {}", disk.name) };
            let by = format!("{} ({}{of})", set.cgroup.display(), set.file);
            if !of.is_empty() && stack.disks.len() > 1 {
                let text = format!(
                    "{by} limits the part of its requests that goes to this disk to {}, which is not in the predictions",
                    set.value
                );
                list.push(Control { kind: ControlKind::NotCounted, vm: Some(vm.vm.name.clone()), text });
                continue;
            }
            let key = (set.cgroup.clone(), set.limit.key(), of.clone());
            let dimension = Dimension::of_limit(set.limit);
            if dimension.writes && vm.writes_escape() {
                let text = format!(
                    "{by} limits its writes to {} and does not act on them: they go through the host's page cache, so it is not in the \
                     predictions",
                    set.value
                );
                list.push(Control { kind: ControlKind::NotCounted, vm: Some(vm.vm.name.clone()), text });
                continue;
            }
            let of_plan =
                vm.has_cap && !dimension.bytes && of.is_empty() && set.cgroup == absolute(vm.cgroup);
            let kind = ControlKind::CgroupLimit;
            let value = set.value as f64;
            let remedy = format!("raise {by}, or lower its rates");
            let passes = Some(value);
            let new = Limited { kind, by, dimension, value, passes, remedy, vms: Vec::new(), of_plan };
            limited.entry(key).or_insert(new).vms.push(i);
        }
        if let Err(why) = &vm.pids {
            let text = format!("whether more limits act on its processes is not known: {why}");
            list.push(Control { kind: ControlKind::Assumed, vm: Some(vm.vm.name.clone()), text });
        }
        if let Some(cpu) = at.cpu {
            list.extend(cpu::limits(root, cpu, vm)?);
        }
        for disk in disks(stack) {
            for other in cgroups.other_controls(root, vm.cgroup, &disk.dev)? {
                others.insert(format!("{} {} {}", other.file, other.cgroup.display(), disk.name), other);
            }
        }
    }
    let mut limited: Vec<Limited> = limited.into_values().collect();
    for (i, vm) in vms.iter().enumerate() {
        match &vm.drives {
            None => {}
            Some(Ok(drives)) => {
                let on_it = on_device(root, names, drives);
                list.extend(on_it.iter().filter_map(|drive| recorded(drive, vm.vm)));
                limited.extend(on_it.into_iter().flat_map(|drive| throttled(drive, i)));
            }
            Some(Err(e)) => list.push(Control {
                kind: ControlKind::Assumed,
                vm: Some(vm.vm.name.clone()),
                text: format!("whether QEMU throttles its drives is not known: {e}"),
            }),
        }
    }
    let spec: Vec<&Vm> = vms.iter().map(|vm| vm.vm).collect();
    for limit in &limited {
        let kind = limit.kind;
        list.extend(limit.texts(&spec).map(|(vm, text)| Control { kind, vm: Some(vm.to_owned()), text }));
    }
    list.extend(
        others
            .values()
            .filter_map(|o| unknown(o).map(|text| Control { kind: ControlKind::NotCounted, vm: None, text })),
    );
    if cgroups.hides_parents() {
        let text = "the cgroups above this container's are not visible here: limits and weights there are not counted";
        list.push(Control { kind: ControlKind::Assumed, vm: None, text: text.to_owned() });
    }
    let ceilings = ceilings(&limited, &spec);
    let all =
        vms.iter().zip(own).zip(paths).zip(ceilings).map(|(((vm, own_cgroup), path), ceiling)| Placement {
            own_cgroup,
            writes_escape: vm.writes_escape(),
            path,
            ceiling: ceiling.map(|(most, _)| Iops(most)),
            ceiling_by: ceiling.map(|(_, by)| by.remedy.clone()).unwrap_or_default(),
        });
    let has_io_cost = others.values().any(|other| other.file == "io.cost.qos");
    let placements = Placements::new(all.collect()).under_io_cost(has_io_cost);
    list.extend(incomparable(vms, &placements));
    Ok(Controls { list, placements })
}

/// The limits that act on a VM's processes, each once: also those of cgroups below its own, which
/// libvirt has on v2.
fn limits_of<'a>(at: &Survey<'a>, vm: &Placed<'_>) -> Result<Vec<(&'a BlockDevice, SetLimit)>> {
    let mut inner = vec![vm.cgroup.to_owned()];
    for &pid in vm.pids.iter().flatten() {
        inner.extend(unless_gone(at.io.of_pid(at.root, pid))?);
    }
    let mut found = Vec::new();
    for cgroup in inner {
        for disk in disks(at.stack) {
            for limit in at.io.limits_on_path(at.root, &cgroup, &disk.dev)? {
                if !found.contains(&(disk, limit.clone())) {
                    found.push((disk, limit));
                }
            }
        }
    }
    Ok(found)
}

/// The device, and the disks below it that are others.
fn disks(stack: &Stack) -> impl Iterator<Item = &BlockDevice> {
    let below = stack.disks.iter().filter(|disk| !disk.is_hidden() && disk.dev != stack.device.dev);
    std::iter::once(&stack.device).chain(below)
}

/// Notes on the controls that a verification bypasses where it runs a VM's tasks on the host
/// instead of in the guest: QEMU's throttling. `on_host` tells for which VMs it does.
pub fn bypassed(controls: &Controls, on_host: impl Fn(&str) -> bool) -> Vec<Control> {
    let of = |c: &&Control| c.kind == ControlKind::QemuThrottle && c.vm.as_deref().is_some_and(&on_host);
    let text = "without an agent its tasks run on the host, past QEMU and its throttling: a target that is met here may be missed in the guest; run qemu-guest-agent in it, and name its socket by `agent` \
                where the spec has no `domain` or `proxmox`";
    let mut vms: Vec<&String> = controls.list.iter().filter(of).filter_map(|c| c.vm.as_ref()).collect();
    vms.dedup();
    let one =
        |vm: &String| Control { kind: ControlKind::NotCounted, vm: Some(vm.clone()), text: text.to_owned() };
    vms.into_iter().map(one).collect()
}

/// The shares that VMs of different parents have through the weights in force.
pub(crate) fn shares_in_force(
    vms: &[Placed<'_>],
    placements: &Placements,
    config: &Config,
) -> Option<Control> {
    let apart = (0..vms.len()).any(|i| placements.limits_act(i) && !placements.weights_compare(i));
    if vms.len() < 2 || !apart {
        return None;
    }
    let effect = placements.in_effect(config);
    let sum: f64 = effect.vms.iter().map(|vm| f64::from(vm.weight)).sum();
    let share = |(vm, of): (&Placed<'_>, &rtvirtio_model::VmConfig)| {
        format!("{} {:.0} %", vm.vm.name, 100.0 * f64::from(of.weight) / sum)
    };
    let all: Vec<String> = vms.iter().zip(&effect.vms).map(share).collect();
    let text = format!(
        "under BFQ the weights in force on their paths give the VMs, while all are busy and nothing else is: {}",
        all.join(", ")
    );
    Some(Control { kind: ControlKind::Weights, vm: None, text })
}

/// Whether each VM has a cgroup of its own below the root; `list` gets the remedy for the others.
fn own_cgroups(vms: &[Placed<'_>], list: &mut Vec<Control>) -> Vec<bool> {
    let mut own = Vec::new();
    for vm in vms {
        let name = || Some(vm.vm.name.clone());
        if Cgroups::is_root(vm.cgroup) {
            let text = "is in the root cgroup: no weights or limits can act; start it in a cgroup of its own, e.g. with `systemd-run --scope`";
            list.push(Control { kind: ControlKind::Placement, vm: name(), text: text.to_owned() });
            own.push(false);
            continue;
        }
        let cgroup = absolute(vm.cgroup);
        let shares = |other: &&Placed<'_>| {
            let there = absolute(other.cgroup);
            other.vm.name != vm.vm.name
                && !Cgroups::is_root(other.cgroup)
                && (there.starts_with(&cgroup) || cgroup.starts_with(&there))
        };
        let other = vms.iter().find(shares);
        if let Some(other) = other {
            let text = format!(
                "shares the cgroup {} with {}: no weights or limits can act on one of them; give each VM a cgroup of its own",
                cgroup.display(),
                other.vm.name
            );
            list.push(Control { kind: ControlKind::Placement, vm: name(), text });
        }
        own.push(other.is_none());
    }
    own
}

/// VMs whose weights compare with no other's.
fn incomparable(vms: &[Placed<'_>], placements: &Placements) -> Option<Control> {
    let apart = |i: &usize| placements.limits_act(*i) && !placements.weights_compare(*i);
    let apart: Vec<usize> = (0..vms.len()).filter(apart).collect();
    if vms.len() < 2 || apart.is_empty() {
        return None;
    }
    let named: Vec<String> = apart
        .iter()
        .map(|&i| format!("{} ({})", vms[i].vm.name, absolute(vms[i].cgroup).display()))
        .collect();
    let text = format!(
        "weights compare only cgroups with one parent, so a plan sets none for {}; to use weights, move the VMs below one parent, such as machine.slice",
        named.join(", ")
    );
    Some(Control { kind: ControlKind::Placement, vm: None, text })
}

/// Effect of a control that the models do not know; `None` where it has none.
fn unknown(other: &OtherControl) -> Option<String> {
    let of = other.cgroup.display();
    let text = match other.file {
        "io.cost.qos" => format!(
            "io.cost is enabled on the device ({}): it divides it by io.weight, so nothing is predicted",
            other.value
        ),
        "io.weight" => format!("{of} has io.weight {}, by which io.cost divides the device", other.value),
        "io.latency" => format!(
            "{of} has io.latency ({}): the kernel may hold its sibling cgroups back for it, which is not in the predictions",
            other.value
        ),
        // CFQ's default.
        _ if other.value == "500" => return None,
        file => format!("{of} has {file} {}, which is not in the predictions", other.value),
    };
    Some(text)
}

/// Drives on the device, by their files. Where none matches and the VM has one disk only, that one.
pub(crate) fn on_device<'d>(root: &Root, names: &[PathBuf], drives: &'d [Drive]) -> Vec<&'d Drive> {
    let there = |drive: &&Drive| drive.file.as_ref().is_some_and(|file| is_one_of(root, file, names));
    let mut on_it: Vec<&Drive> = drives.iter().filter(there).collect();
    if on_it.is_empty() {
        let disks: Vec<&Drive> = drives.iter().filter(|drive| !drive.removable).collect();
        if let [only] = disks[..] {
            on_it.push(only);
        }
    }
    on_it
}

/// QEMU's limits on a drive.
fn throttled(drive: &Drive, vm: usize) -> Vec<Limited> {
    let mut out = Vec::new();
    for limits in &drive.limits {
        let with = match drive.shared_with.as_slice() {
            [] => String::new(),
            others => format!(
                ", which it shares with drive {}: what that takes of it is not in the predictions",
                others.join(" and drive ")
            ),
        };
        out.extend(limits.set().map(|limit| {
            let dimension = Dimension::of_throttle(limit.name);
            let is_bounded = dimension.bytes || drive.merges == Some(false);
            Limited {
                kind: ControlKind::QemuThrottle,
                by: format!("QEMU's own throttling of drive {} ({limits}){with}", drive.name),
                dimension,
                value: limit.average as f64,
                passes: is_bounded.then(|| limit.passes() as f64),
                remedy: format!("raise `{}` of drive {}, or lower its rates", limit.name, drive.name),
                vms: vec![vm],
                of_plan: false,
            }
        }));
    }
    out
}

/// Note that libvirt will replace QEMU's throttling by the limits that it has recorded.
fn recorded(drive: &Drive, vm: &Vm) -> Option<Control> {
    let words = |limits: &ThrottleLimits| match limits.is_none() {
        true => "no limit".to_owned(),
        false => limits.to_string(),
    };
    let record = drive.recorded.as_ref()?;
    let text = format!(
        "QEMU holds {} for drive {}, and libvirt has recorded {}, which comes back with the next `virsh blkdeviotune` or start: set it by \
         `virsh blkdeviotune`",
        words(&drive.limits.first().copied().unwrap_or_default()),
        drive.name,
        words(record)
    );
    Some(Control { kind: ControlKind::NotCounted, vm: Some(vm.name.clone()), text })
}

/// Whether a file is a device of these names, or another name of it.
pub(crate) fn is_one_of(root: &Root, file: &Path, names: &[PathBuf]) -> bool {
    let real = |path: &Path| std::fs::canonicalize(root.at(path)).ok();
    real(file).is_some_and(|file| names.iter().any(|name| real(name).is_some_and(|name| name == file)))
}

/// Path from the root of the hierarchy: a spec may name a cgroup without its first slash.
pub(crate) fn absolute(cgroup: &Path) -> PathBuf {
    Path::new("/").join(cgroup)
}

#[cfg(test)]
mod tests;
