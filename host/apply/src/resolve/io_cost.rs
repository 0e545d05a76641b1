//! io.cost of the shared device: two files of the root cgroup, a line for each disk.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, text, unless_gone};
use rtvirtio_planner::{IoCostFile, Knob};
use rtvirtio_units::io_cost::CostQos;

use super::{Binding, Write, cannot};
use crate::error::ApplyError;
use crate::machine::Machine;
use crate::target::{Form, Target};

/// File of the queue that goes off and on with io.cost: writeback throttling
/// (`wbt_disable_default()` in `ioc_qos_write()`).
const ALONG: &str = "wbt_lat_usec";

/// Pushes the writes for each disk that schedules: its model, then whether io.cost acts. Returns
/// whether it acts on all of them then. `elevators` are those that will be in use.
pub(super) fn host_io_cost(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    elevators: &[String],
    writes: &mut Vec<Write>,
) -> Result<bool, ApplyError> {
    let wanted = wanted(values)?;
    let has_weights = values.keys().any(|knob| matches!(knob, Knob::VmIoWeight { .. }));
    let Some(name) = wanted.first().map(|(file, _)| file.file_name()).or(has_weights.then_some("io.weight"))
    else {
        return Ok(false);
    };
    let cgroups = hierarchy(name, binding, machine)?;
    if binding.stack.disks.is_empty() {
        let why = binding.stack.describe().unwrap_or_default();
        return Err(cannot(name, why, "leave io.cost out, or use limits"));
    }
    if !wanted.is_empty() && binding.stack.disks.len() > 1 {
        let names: Vec<&str> = binding.stack.disks.iter().map(|disk| disk.name.as_str()).collect();
        return Err(cannot(
            name,
            format!(
                "the device has several drives ({}), and its model is of all together, not of each of them",
                names.join(", ")
            ),
            "use BFQ's weights or limits, or plan for each drive by itself",
        ));
    }
    let then = wanted.iter().find(|(file, _)| *file == IoCostFile::Qos).map(|(_, value)| value);
    let mut acts = true;
    for (disk, elevator) in binding.stack.disks.iter().zip(elevators) {
        let knob = format!("{name} of {}", disk.name);
        let now = qos_now(disk, cgroups, machine)?;
        if !wanted.is_empty() {
            check(&knob, disk, now, cgroups)?;
            without_io_latency(&knob, disk, cgroups, machine)?;
        }
        let on = then.map_or(now.enable, |value| value.parse::<CostQos>().is_ok_and(|qos| qos.enable));
        if on && elevator == "bfq" {
            return Err(cannot(
                &knob,
                "BFQ is its elevator and divides the device too, and of the two neither share would hold",
                "let the plan set the elevator to `none` or `mq-deadline`, or drop io.cost and use BFQ's weights",
            ));
        }
        if !on && name == IoCostFile::Model.file_name() {
            let why = "the model acts only under io.cost, which is off";
            return Err(cannot(&knob, why, "let the plan set `enable=1` in io.cost.qos"));
        }
        acts &= on;
        for (file, value) in &wanted {
            push(*file, value, disk, cgroups, writes);
        }
    }
    Ok(acts)
}

/// Refuses a plan that relies on BFQ where a disk with BFQ has io.cost on. `elevators` are those
/// that will be in use.
///
/// No plan switches io.cost off there itself: its settings are refused where io.cost is on.
pub(super) fn bfq_is_alone(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    elevators: &[String],
) -> Result<(), ApplyError> {
    let is_of_bfq =
        |knob: &Knob| matches!(knob, Knob::HostElevator | Knob::HostBfq(_) | Knob::VmWeight { .. });
    let v2 = binding.cgroups.as_ref().filter(|c| c.hierarchy == Hierarchy::V2);
    let (Some(cgroups), true) = (v2, values.keys().any(is_of_bfq)) else { return Ok(()) };
    let path = cgroups.mount.join(IoCostFile::Qos.file_name());
    let disks = binding.stack.disks.iter().zip(elevators).filter(|(_, elevator)| *elevator == "bfq");
    for (disk, _) in disks.filter(|(disk, _)| !disk.is_hidden()) {
        // A kernel without io.cost has no such file.
        let Some(content) = machine.root().read_optional(&path)? else { return Ok(()) };
        let now = qos_of(disk, &path, &content)?;
        if now.enable {
            return Err(cannot(
                &format!("BFQ of {}", disk.name),
                format!(
                    "io.cost is enabled there ({now}) and divides the device too, and of the two neither share would \
                     hold"
                ),
                format!(
                    "let the plan set the elevator to `none` or `mq-deadline`, or {}",
                    switch_off(disk, cgroups)
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses latency targets of VMs where they cannot act: without cgroup v2 or a disk with a number,
/// and where io.cost controls a disk or is to.
pub(super) fn io_latency_is_alone(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
) -> Result<(), ApplyError> {
    let is_latency = |knob: &&Knob| matches!(knob, Knob::VmIoLatency { .. });
    let Some(Knob::VmIoLatency { vm }) = values.keys().find(is_latency) else { return Ok(()) };
    let knob = format!("io.latency of {vm}");
    let Some(cgroups) = binding.cgroups.as_ref().filter(|c| c.hierarchy == Hierarchy::V2) else {
        let why = "io.latency belongs to cgroup v2, and the block I/O controller is not there";
        return Err(cannot(&knob, why, "boot with `cgroup_no_v1=blkio`, or use BFQ's weights"));
    };
    if binding.stack.disks.is_empty() {
        let why = binding.stack.describe().unwrap_or_default();
        return Err(cannot(&knob, why, "leave io.latency out, or use limits"));
    }
    let qos = values.get(&Knob::HostIoCost(IoCostFile::Qos)).and_then(|value| value.parse::<CostQos>().ok());
    if qos.is_some_and(|qos| qos.enable) {
        let why = "the plan enables io.cost too, which holds the same requests back";
        return Err(cannot(&knob, why, "leave one of the two out of the plan"));
    }
    let path = cgroups.mount.join(IoCostFile::Qos.file_name());
    // A kernel without io.cost has no such file.
    let content = machine.root().read_optional(&path)?.unwrap_or_default();
    for disk in &binding.stack.disks {
        if disk.is_hidden() {
            let why =
                format!("{} is a path of {} and has no device number", disk.name, binding.stack.device.name);
            return Err(cannot(&knob, why, "leave io.latency out, or use limits"));
        }
        let now = qos_of(disk, &path, &content)?;
        if now.enable {
            let why = format!("io.cost is enabled on {} ({now}) and holds the same requests back", disk.name);
            return Err(cannot(
                &knob,
                why,
                format!("leave io.latency out, or {}", switch_off(disk, cgroups)),
            ));
        }
    }
    Ok(())
}

/// The plan's settings of io.cost, each in its one form.
fn wanted(values: &BTreeMap<Knob, String>) -> Result<Vec<(IoCostFile, String)>, ApplyError> {
    let mut found = Vec::new();
    for file in [IoCostFile::Model, IoCostFile::Qos] {
        let Some(value) = values.get(&Knob::HostIoCost(file)) else { continue };
        match file.canonical(value) {
            Ok(canonical) => found.push((file, canonical)),
            Err(e) => {
                return Err(cannot(file.file_name(), format!("`{value}`: {e}"), "correct it in the plan"));
            }
        }
    }
    Ok(found)
}

fn push(file: IoCostFile, value: &str, disk: &BlockDevice, cgroups: &Cgroups, writes: &mut Vec<Write>) {
    let dev = disk.dev.clone();
    let form = match file {
        IoCostFile::Model => Form::IoCostModel { dev },
        IoCostFile::Qos => Form::IoCostQos { dev },
    };
    let target = Target::host(cgroups.mount.join(file.file_name()), form);
    let mut write = Write::new(format!("{} of {}", file.file_name(), disk.name), target, value);
    // Another elevator changes it too, and is put back after io.cost.
    let along = Target::host(disk.queue(ALONG), Form::Plain);
    if file == IoCostFile::Qos && !writes.iter().any(|w| w.side_effects.contains(&along)) {
        write.side_effects.push(along);
    }
    writes.push(write);
}

/// The hierarchy with the files of io.cost.
fn hierarchy<'b>(name: &str, binding: &'b Binding, machine: &Machine<'_>) -> Result<&'b Cgroups, ApplyError> {
    let Some(cgroups) = binding.cgroups.as_ref().filter(|c| c.hierarchy == Hierarchy::V2) else {
        return Err(cannot(
            name,
            "io.cost belongs to cgroup v2, and the block I/O controller is not there",
            "boot with `cgroup_no_v1=blkio`, or use BFQ's weights",
        ));
    };
    let file = cgroups.mount.join(IoCostFile::Qos.file_name());
    if machine.root().exists(&file)? {
        return Ok(cgroups);
    }
    Err(cannot(
        name,
        format!(
            "{} does not exist: the kernel was built without io.cost, or this is no root cgroup",
            file.display()
        ),
        "use a kernel with CONFIG_BLK_CGROUP_IOCOST, outside of containers, or BFQ's weights",
    ))
}

/// The line of a disk; that of one that was never set up is the kernel's default.
fn qos_now(disk: &BlockDevice, cgroups: &Cgroups, machine: &Machine<'_>) -> Result<CostQos, ApplyError> {
    let path = cgroups.mount.join(IoCostFile::Qos.file_name());
    qos_of(disk, &path, &machine.root().read(&path)?)
}

fn qos_of(disk: &BlockDevice, path: &Path, content: &str) -> Result<CostQos, ApplyError> {
    let line = text::device_line(content, &disk.dev);
    line.map_or_else(|| Ok(CostQos::default()), str::parse)
        .map_err(|_| ApplyError::Form { label: path.display().to_string(), text: content.trim().to_owned() })
}

/// Refuses a disk for which a cgroup has a latency target of the other controller.
fn without_io_latency(
    knob: &str,
    disk: &BlockDevice,
    cgroups: &Cgroups,
    machine: &Machine<'_>,
) -> Result<(), ApplyError> {
    for dir in cgroups.all_dirs(machine.root())? {
        let file = dir.join("io.latency");
        let content = unless_gone(machine.root().read_optional(&file))?.flatten().unwrap_or_default();
        if text::device_line(&content, &disk.dev).is_some() {
            return Err(cannot(
                knob,
                format!("{} has a latency target for it, which throttles the same requests", file.display()),
                "remove that one first (of systemd's units `IODeviceLatencyTargetSec=`), or leave io.cost out",
            ));
        }
    }
    Ok(())
}

/// Refuses a disk that another program controls already, or that has no number.
fn check(knob: &str, disk: &BlockDevice, now: CostQos, cgroups: &Cgroups) -> Result<(), ApplyError> {
    if disk.is_hidden() {
        return Err(cannot(knob, "it has no device number", "leave io.cost out, or use limits"));
    }
    if now.enable {
        return Err(cannot(
            knob,
            format!("io.cost is enabled there already ({now}), and what enabled it is not overwritten"),
            format!("leave io.cost out of the plan, or {}", switch_off(disk, cgroups)),
        ));
    }
    Ok(())
}

/// Remedy for a disk that another program's io.cost divides.
fn switch_off(disk: &BlockDevice, cgroups: &Cgroups) -> String {
    format!(
        "switch it off first, with what set it (systemd's iocost.conf by udev, resctl-demo): echo '{} enable=0' \
         >{}/io.cost.qos",
        disk.dev,
        cgroups.mount.display()
    )
}
