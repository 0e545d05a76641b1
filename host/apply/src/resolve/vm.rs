//! Weights, latency targets and limits of VMs: on their cgroups.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, HostError, text};
use rtvirtio_planner::{Knob, LimitKind};

use super::{Binding, Write, cannot};
use crate::error::ApplyError;
use crate::machine::Machine;
use crate::target::{Form, Target};

/// Divisions of the device between VMs, once the plan is applied.
#[derive(Clone, Copy)]
pub(super) struct Acting<'a> {
    /// Elevator of each disk that schedules.
    pub elevators: &'a [String],
    /// Whether io.cost acts on all of them.
    pub io_cost: bool,
}

/// Setting of a VM's cgroup.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    BfqWeight,
    IoWeight,
    IoLatency,
    Limit(LimitKind),
}

impl Kind {
    /// Name of what acts only between cgroups with one parent.
    fn of_siblings(self) -> Option<&'static str> {
        match self {
            Self::BfqWeight | Self::IoWeight => Some("weights compare"),
            Self::IoLatency => Some("latency targets compare"),
            Self::Limit(_) => None,
        }
    }
}

/// Requested weight or limit, with the VM's cgroup.
struct Ask<'a> {
    vm: &'a str,
    kind: Kind,
    value: &'a str,
    cgroup: PathBuf,
    knob: String,
}

pub(super) fn weights_and_limits(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    on: Acting<'_>,
    writes: &mut Vec<Write>,
) -> Result<(), ApplyError> {
    let mut asks = Vec::new();
    for (knob, value) in values {
        match knob {
            Knob::VmWeight { vm } => asks.push(ask(binding, vm, Kind::BfqWeight, value)?),
            Knob::VmIoWeight { vm } => asks.push(ask(binding, vm, Kind::IoWeight, value)?),
            Knob::VmIoLatency { vm } => asks.push(ask(binding, vm, Kind::IoLatency, value)?),
            Knob::VmLimit { vm, limit } => asks.push(ask(binding, vm, Kind::Limit(*limit), value)?),
            _ => {}
        }
    }
    let Some(first) = asks.first() else { return Ok(()) };
    let Some(cgroups) = &binding.cgroups else {
        let why = "no cgroup hierarchy with the block I/O controller is known";
        return Err(cannot(&first.knob, why, "mount cgroup v2 with `io`, or v1 `blkio`"));
    };
    alone_and_comparable(&asks, binding)?;
    if let Some(weight) = asks.iter().find(|a| a.kind == Kind::BfqWeight) {
        weights_act(&weight.knob, binding, on.elevators)?;
    }
    if let Some(weight) = asks.iter().find(|a| a.kind == Kind::IoWeight && !on.io_cost) {
        let why = "io.weight acts only under io.cost, which is off for the device";
        return Err(cannot(&weight.knob, why, "let the plan enable io.cost, or use BFQ's weights"));
    }
    let enabled = enable_io(&asks, cgroups, machine, writes)?;
    for ask in &asks {
        let created_by = enabled.get(&ask.cgroup).copied();
        let targets = match ask.kind {
            Kind::BfqWeight => weights(ask, cgroups, binding, machine, created_by.is_some())?,
            Kind::IoWeight => io_weights(ask, cgroups, binding, machine, created_by.is_some())?,
            Kind::IoLatency => io_latencies(ask, cgroups, binding, machine, created_by.is_some())?,
            Kind::Limit(kind) => vec![limit(ask, kind, cgroups, binding)?],
        };
        let write = |target| Write { created_by, ..Write::new(&ask.knob, target, ask.value) };
        writes.extend(targets.into_iter().map(write));
    }
    Ok(())
}

/// Refuses weights that would not act: they are BFQ's, on each disk that schedules.
fn weights_act(knob: &str, binding: &Binding, elevators: &[String]) -> Result<(), ApplyError> {
    let stack = &binding.stack;
    if stack.disks.is_empty() {
        let why = stack.describe().unwrap_or_default();
        return Err(cannot(knob, why, "drop the weight, or use limits"));
    }
    if let Some((disk, elevator)) = stack.disks.iter().zip(elevators).find(|(_, e)| *e != "bfq") {
        let why =
            format!("BFQ weights act only under BFQ, and the elevator of {} is `{elevator}`", disk.name);
        return Err(cannot(knob, why, "let the plan set the elevator to `bfq`, or use limits"));
    }
    if let Some(path) = stack.disks.iter().find(|disk| disk.is_hidden()) {
        let why = format!("{} is a path of {} and has no device number", path.name, stack.device.name);
        return Err(cannot(knob, why, "use limits: they act on the device above its paths"));
    }
    Ok(())
}

fn ask<'a>(binding: &Binding, vm: &'a str, kind: Kind, value: &'a str) -> Result<Ask<'a>, ApplyError> {
    let knob = match kind {
        Kind::BfqWeight => format!("weight of {vm}"),
        Kind::IoWeight => format!("io.weight of {vm}"),
        Kind::IoLatency => format!("io.latency of {vm}"),
        Kind::Limit(kind) => format!("{} limit of {vm}", host_limit(kind).key()),
    };
    let Some(cgroup) = binding.vms.get(vm).and_then(|b| b.cgroup.clone()) else {
        return Err(cannot(
            &knob,
            "the VM's cgroup is not known",
            "is the VM running? give `cgroup`, `pid` or `qmp` for it in the spec",
        ));
    };
    if Cgroups::is_root(&cgroup) {
        return Err(cannot(
            &knob,
            "the VM runs in the root cgroup, which has neither weight nor limit of its own",
            "start it in a cgroup of its own, e.g. with `systemd-run --scope`",
        ));
    }
    Ok(Ask { vm, kind, value, cgroup: Path::new("/").join(cgroup), knob })
}

/// Refuses shared or nested cgroups, and weights without a sibling: weights and limits bind whole
/// cgroups, and weights compare siblings only.
fn alone_and_comparable(asks: &[Ask<'_>], binding: &Binding) -> Result<(), ApplyError> {
    for ask in asks {
        for (other, bound) in binding.vms.iter().filter(|(name, _)| *name != ask.vm) {
            let Some(cgroup) = &bound.cgroup else { continue };
            let cgroup = Path::new("/").join(cgroup);
            let nested = cgroup.starts_with(&ask.cgroup) || ask.cgroup.starts_with(&cgroup);
            if nested && !Cgroups::is_root(&cgroup) {
                return Err(cannot(
                    &ask.knob,
                    format!("{other} runs in the same cgroup or one inside the other: {}", cgroup.display()),
                    "give each VM a cgroup of its own",
                ));
            }
        }
    }
    // Two groups of siblings may each have weights of their own.
    let others = |ask: &Ask<'_>| -> Vec<PathBuf> {
        let of = binding.vms.iter().filter(|(name, _)| *name != ask.vm);
        of.filter_map(|(_, bound)| bound.cgroup.as_ref()).map(|cgroup| Path::new("/").join(cgroup)).collect()
    };
    for (ask, acts) in asks.iter().filter_map(|ask| Some((ask, ask.kind.of_siblings()?))) {
        let others = others(ask);
        if !others.is_empty() && others.iter().all(|other| other.parent() != ask.cgroup.parent()) {
            return Err(cannot(
                &ask.knob,
                format!(
                    "{acts} only cgroups with one parent, and no other VM's cgroup has that of {}",
                    ask.cgroup.display()
                ),
                "move the VMs below one parent cgroup, such as machine.slice",
            ));
        }
    }
    Ok(())
}

/// On v2, writes that enable `io` in the parents of the VMs' cgroups; returns the last such write
/// for each cgroup that needs one.
fn enable_io(
    asks: &[Ask<'_>],
    cgroups: &Cgroups,
    machine: &Machine<'_>,
    writes: &mut Vec<Write>,
) -> Result<BTreeMap<PathBuf, usize>, ApplyError> {
    let mut placed: BTreeMap<PathBuf, usize> = BTreeMap::new();
    let mut enabled = BTreeMap::new();
    for ask in asks {
        let mut above: Option<usize> = None;
        let files = cgroups.io_to_enable(machine.root(), &ask.cgroup).map_err(|e| explain(e, ask))?;
        for file in files {
            let index = *placed.entry(file.clone()).or_insert_with(|| {
                let mut write = Write::new(
                    format!("I/O control for {}", ask.cgroup.parent().unwrap_or(&ask.cgroup).display()),
                    Target::host(file, Form::IoEnabled),
                    "+io",
                );
                write.created_by = above;
                writes.push(write);
                writes.len() - 1
            });
            above = Some(index);
        }
        if let Some(index) = above {
            enabled.insert(ask.cgroup.clone(), index);
        }
    }
    Ok(enabled)
}

/// Weight files to write: each scheduling disk's line, or the group's default on old kernels.
fn weights(
    ask: &Ask<'_>,
    cgroups: &Cgroups,
    binding: &Binding,
    machine: &Machine<'_>,
    not_there_yet: bool,
) -> Result<Vec<Target>, ApplyError> {
    if !ask.value.parse::<u64>().is_ok_and(|w| (1..=1000).contains(&w)) {
        let why = format!("`{}` is not a BFQ weight, a whole number from 1 to 1000", ask.value);
        return Err(cannot(&ask.knob, why, "correct it in the plan"));
    }
    let file = cgroups.weight_file(machine.root(), &ask.cgroup)?;
    if !not_there_yet && !machine.root().exists(&file.path)? {
        if !machine.root().exists(cgroups.dir(&ask.cgroup)?)? {
            return Err(gone(ask));
        }
        return Err(cannot(
            &ask.knob,
            format!("{} does not exist: BFQ is not loaded, or has no cgroup support", file.path.display()),
            "modprobe bfq, or use a kernel with CONFIG_BFQ_GROUP_IOSCHED",
        ));
    }
    if !file.per_device {
        return Ok(vec![Target::host(file.path, Form::Plain)]);
    }
    let of =
        |disk: &BlockDevice| Target::host(file.path.clone(), Form::DeviceWeight { dev: disk.dev.clone() });
    Ok(binding.stack.disks.iter().map(of).collect())
}

/// Weight files of io.cost to write: each scheduling disk's line.
fn io_weights(
    ask: &Ask<'_>,
    cgroups: &Cgroups,
    binding: &Binding,
    machine: &Machine<'_>,
    not_there_yet: bool,
) -> Result<Vec<Target>, ApplyError> {
    if !ask.value.parse::<u64>().is_ok_and(|w| (1..=10_000).contains(&w)) {
        let why = format!("`{}` is not a weight of io.cost, a whole number from 1 to 10000", ask.value);
        return Err(cannot(&ask.knob, why, "correct it in the plan"));
    }
    let path = cgroups.dir(&ask.cgroup)?.join("io.weight");
    if !not_there_yet && !machine.root().exists(&path)? {
        return Err(gone(ask));
    }
    let of = |disk: &BlockDevice| Target::host(path.clone(), Form::IoWeight { dev: disk.dev.clone() });
    Ok(binding.stack.disks.iter().map(of).collect())
}

/// Files of io.latency to write: each scheduling disk's line.
fn io_latencies(
    ask: &Ask<'_>,
    cgroups: &Cgroups,
    binding: &Binding,
    machine: &Machine<'_>,
    not_there_yet: bool,
) -> Result<Vec<Target>, ApplyError> {
    // The kernel keeps nanoseconds in 64 bits.
    const MOST_US: u64 = u64::MAX / 1_000;
    if ask.value != "max" && !ask.value.parse::<u64>().is_ok_and(|us| (1..=MOST_US).contains(&us)) {
        let why = format!("`{}` is neither `max` nor a whole number of us above 0", ask.value);
        return Err(cannot(&ask.knob, why, "correct it in the plan"));
    }
    let dir = cgroups.dir(&ask.cgroup)?;
    let path = dir.join("io.latency");
    if !not_there_yet && !machine.root().exists(&path)? {
        if !machine.root().exists(&dir)? {
            return Err(gone(ask));
        }
        let why = format!("{} does not exist: the kernel was built without io.latency", path.display());
        let remedy = "use a kernel with CONFIG_BLK_CGROUP_IOLATENCY, or BFQ's weights";
        return Err(cannot(&ask.knob, why, remedy));
    }
    let of = |disk: &BlockDevice| Target::host(path.clone(), Form::IoLatency { dev: disk.dev.clone() });
    Ok(binding.stack.disks.iter().map(of).collect())
}

/// BFQ's weight of a group where none is set (`bfq-iosched.rst`).
const DEFAULT_WEIGHT: u64 = 100;

/// Weight in force by a weight file: the device's, else the group's default; `DEFAULT_WEIGHT` while
/// the file is not there yet.
pub(super) fn weight_now(target: &Target, machine: &Machine<'_>) -> Result<String, ApplyError> {
    let file = machine.root().read_optional(&target.path)?.unwrap_or_default();
    let Some(weights) = text::weights(&file) else {
        return Err(ApplyError::Form { label: target.to_string(), text: file });
    };
    let of_device = target.dev().and_then(|dev| weights.devices.get(dev).copied());
    Ok(of_device.or(weights.default).unwrap_or(DEFAULT_WEIGHT).to_string())
}

fn limit(ask: &Ask<'_>, kind: LimitKind, cgroups: &Cgroups, binding: &Binding) -> Result<Target, ApplyError> {
    let limit = host_limit(kind);
    let largest = limit.largest();
    if ask.value != "max" && !ask.value.parse::<u64>().is_ok_and(|v| (1..=largest).contains(&v)) {
        let why = format!("`{}` is neither `max` nor a whole number from 1 to {largest}", ask.value);
        return Err(cannot(&ask.knob, why, "correct it in the plan"));
    }
    let dev = binding.stack.device.dev.clone();
    let form = match cgroups.hierarchy {
        Hierarchy::V1 => Form::Throttle { dev },
        Hierarchy::V2 => Form::IoMax { dev, key: limit.key().to_owned() },
    };
    Ok(Target::host(cgroups.limit_file(&ask.cgroup, limit)?, form))
}

fn host_limit(kind: LimitKind) -> Limit {
    match kind {
        LimitKind::ReadBps => Limit::ReadBps,
        LimitKind::WriteBps => Limit::WriteBps,
        LimitKind::ReadIops => Limit::ReadIops,
        LimitKind::WriteIops => Limit::WriteIops,
    }
}

fn explain(error: HostError, ask: &Ask<'_>) -> ApplyError {
    if error.is_gone() { gone(ask) } else { error.into() }
}

fn gone(ask: &Ask<'_>) -> ApplyError {
    cannot(
        &ask.knob,
        format!("the cgroup {} is gone", ask.cgroup.display()),
        "is the VM running? start it first",
    )
}
