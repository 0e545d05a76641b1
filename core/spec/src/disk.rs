//! `device`, `disk` and `disks` of a VM, and `disk` of its tasks: the device of each task.

use std::collections::HashMap;

use toml::de::DeValue;

use crate::device::Devices;
use crate::error::Report;
use crate::field::{Field, Section, any_of, quoted, tables};
use crate::libvirt;
use crate::limits::MAX_DISKS_PER_VM;
use crate::types::{TaskDisk, VmDisk};

const KEYS: &[&str] = &["name", "device", "path", "target"];
const ALIASES: &[(&str, &str)] = &[("disk", "path"), ("dev", "device"), ("file", "path")];
const EXAMPLE: &str = "disks = [{ name = \"data\", device = \"fast\", path = \"/dev/vdb\" }]";

/// Disks of one VM.
pub(crate) enum Disks {
    /// A disk without a name for all tasks, by the index of its device.
    One(usize),
    /// Disks of the key `disks`.
    Named(Vec<Named>),
}

/// Entry of the key `disks`.
pub(crate) struct Named {
    name: String,
    device: usize,
    disk: Option<VmDisk>,
}

/// Reads `device` and `disks` of a VM; `None` when an error was reported. The value of `disk` is
/// read together with `reach`.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>, devices: &Devices) -> Option<Disks> {
    let device = device_of(report, vm, devices);
    let Some(place) = vm.place("disks") else {
        if vm.meant("disks") {
            return None;
        }
        return match device {
            Field::Given(device) => Some(Disks::One(device)),
            Field::Bad => None,
            Field::Absent => {
                if !devices.bad {
                    let message = "this VM does not say on which device its disk is";
                    let help = format!("add device = {}, or one disk per device: {EXAMPLE}", devices.names());
                    report.add(vm.span.clone(), message, help);
                }
                None
            }
        };
    };
    if let Some(other) = vm.place("disk") {
        let message = "`disk` and `disks` both say what the tasks use";
        report.add(other.key, message, "give this disk a name and move it into `disks`");
        return None;
    }
    if !matches!(vm.get("disks"), Some((_, DeValue::Array(_)))) {
        report.add(place.value, "`disks` must be a list of tables", format!("write {EXAMPLE}"));
        return None;
    }
    let items = tables(report, vm, "disks", "[[vm.disks]]")?;
    if items.len() > MAX_DISKS_PER_VM {
        let help = "name only the disks that tasks use";
        report.add(place.value, format!("a VM has at most {MAX_DISKS_PER_VM} disks"), help);
        return None;
    }
    let mut lines: HashMap<String, usize> = HashMap::new();
    let mut all = Vec::new();
    let mut good = true;
    for (table, span) in items {
        let section = Section::open(report, "a disk", table, span, KEYS, ALIASES);
        match read_disk(report, &section, vm.place("domain").is_some(), &device, devices, &mut lines) {
            Some(disk) => all.push(disk),
            None => good = false,
        }
    }
    good.then_some(Disks::Named(all))
}

fn read_disk(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    in_domain: bool,
    of_vm: &Field<usize>,
    devices: &Devices,
    lines: &mut HashMap<String, usize>,
) -> Option<Named> {
    let name = section.name(report, "\"data\"");
    let (key, other) = if in_domain { ("target", "path") } else { ("path", "target") };
    if let Some(place) = section.place(other) {
        let (what, help) = if in_domain {
            (
                "a disk of a libvirt domain is named by `target`",
                "write target = \"vdb\", as `virsh domblklist` shows it",
            )
        } else {
            ("`target` is libvirt's name of a disk, and this VM is no `domain`", "write path = \"/dev/vdb\"")
        };
        report.add(place.key, what, help);
    }
    let disk = if in_domain {
        libvirt::target(report, section, "target")
    } else {
        section.path(report, "path", "\"/dev/vdb\"").map(VmDisk::Path)
    };
    let device = match (device_of(report, section, devices), of_vm) {
        (Field::Given(own), _) if section.place("device").is_some() => Some(own),
        (Field::Absent | Field::Given(_), Field::Given(of_vm)) => Some(*of_vm),
        (Field::Given(only), _) => Some(only),
        (Field::Absent, Field::Absent) => {
            if !devices.bad {
                let help = format!("add device = {}", devices.names());
                report.add(section.span.clone(), "this disk does not say on which device it is", help);
            }
            None
        }
        _ => None,
    };
    let name = name.into_value()?.to_owned();
    let mut distinct = true;
    let given = disk.given().map(|disk| match disk {
        VmDisk::Path(path) => path.display().to_string(),
        VmDisk::Target(target) => format!("target {target}"),
    });
    for (key, value) in [("name", Some(name.clone())), (key, given)] {
        let Some(value) = value else { continue };
        let shown = quoted(value.strip_prefix("target ").unwrap_or(&value));
        let message = format!("this VM already has a disk with {key} {shown}");
        // Unambiguous: names have neither a slash nor a space.
        distinct &= section.first_use(report, key, (&mut *lines, value), message, "; name each disk once");
    }
    let disk = disk.optional()?;
    device.filter(|_| distinct).map(|device| Named { name, device, disk })
}

/// Index of the device named by `device`, or of the only one.
fn device_of(report: &mut Report<'_>, section: &Section<'_, '_>, devices: &Devices) -> Field<usize> {
    let example = devices.names();
    let example = if example.is_empty() { "\"fast\"" } else { &example };
    match section.string(report, "device", example) {
        Field::Bad => Field::Bad,
        Field::Absent if devices.only().is_some() => Field::Given(0),
        Field::Absent => Field::Absent,
        Field::Given(name) => match devices.position(name) {
            Some(position) => Field::Given(position),
            None => {
                if !devices.bad {
                    let help = match devices.names() {
                        none if none.is_empty() => format!("add name = {} to [device]", quoted(name)),
                        names => format!("write {names}"),
                    };
                    report.add(
                        section.value_span("device"),
                        format!("there is no device {}", quoted(name)),
                        help,
                    );
                }
                Field::Bad
            }
        },
    }
}

/// Disk of each task, in order. The tasks must have been read without an error.
pub(crate) fn of_tasks(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    disks: &Disks,
) -> Option<Vec<TaskDisk>> {
    let mut all = Vec::new();
    let mut good = true;
    for (table, span) in tables(report, vm, "task", "[[vm.task]]")? {
        let task = Section::checked("[[vm.task]]", table, span);
        match of_task(report, &task, disks) {
            Some(disk) => all.push(disk),
            None => good = false,
        }
    }
    good.then_some(all)
}

fn of_task(report: &mut Report<'_>, task: &Section<'_, '_>, disks: &Disks) -> Option<TaskDisk> {
    let of =
        |disk: &Named| TaskDisk { part: disk.device, name: Some(disk.name.clone()), disk: disk.disk.clone() };
    match disks {
        Disks::One(device) => match task.place("disk") {
            None => Some(TaskDisk { part: *device, name: None, disk: None }),
            Some(place) => {
                let help = format!("remove this line, or name the VM's disks: {EXAMPLE}");
                report.add(place.key, "this VM has no named disks", help);
                None
            }
        },
        Disks::Named(all) => {
            let names = any_of(all.iter().map(|d| d.name.as_str()));
            match task.string(report, "disk", &names) {
                Field::Bad => None,
                Field::Absent => match all.as_slice() {
                    [only] => Some(of(only)),
                    _ => {
                        let message = "the VM has several disks, and this task names none";
                        report.add(task.span.clone(), message, format!("add disk = {names}"));
                        None
                    }
                },
                Field::Given(name) => match all.iter().find(|d| d.name == name) {
                    Some(disk) => Some(of(disk)),
                    None => {
                        let message = format!("this VM has no disk {}", quoted(name));
                        report.add(task.value_span("disk"), message, format!("write {names}"));
                        None
                    }
                },
            }
        }
    }
}
