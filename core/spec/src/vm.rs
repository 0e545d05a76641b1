//! `[[vm]]`: access to a VM, and uniqueness between VMs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::device::Devices;
use crate::error::Report;
use crate::field::{Field, Section, each, quoted, tables};
use crate::limits::MAX_VMS;
use crate::network_read::{Networks, TakenPorts};
use crate::path::VmPath;
use crate::source::Span;
use crate::types::{Criticality, Device, HostHandle, Kernel, LabKind, Reach, TaskDisk, Vm, VmDisk};
use crate::{cpu, disk, libvirt, network_read, path, task, traffic};

const KEYS: &[&str] = &[
    "name",
    "domain",
    "uri",
    "proxmox",
    "cgroup",
    "pid",
    "qmp",
    "lab",
    "agent",
    "device",
    "disk",
    "disks",
    "cpu",
    "priorities",
    "urgency",
    "cores",
    "memory",
    "kernel",
    "criticality",
    "traffic",
    "task",
    "nic",
    "flow",
    "path",
];
const KEY_ALIASES: &[(&str, &str)] = &[
    ("tasks", "[[vm.task]]"),
    ("nics", "[[vm.nic]]"),
    ("port", "[[vm.nic]]"),
    ("flows", "[[vm.flow]]"),
    ("paths", "[[vm.path]]"),
    ("chain", "[[vm.path]]"),
    ("budget", "cpu = { budget, period }"),
    ("priority", "priorities"),
    ("target", "target below a [[vm.task]]"),
    ("kind", "lab"),
    ("qga", "agent"),
    ("socket", "qmp"),
    ("libvirt", "domain"),
    ("uuid", "domain"),
    ("dom", "domain"),
    ("connect", "uri"),
    ("vmid", "proxmox"),
    ("urgent", "urgency"),
    ("affinity", "cores"),
    ("pin", "cores"),
    ("cpuset", "cores"),
    ("vcpupin", "cores"),
    ("resctrl", "memory"),
    ("cachetune", "memory"),
    ("memorytune", "memory"),
    ("tspec", "traffic"),
    ("limits", "traffic"),
    ("iotune", "traffic"),
    ("bandwidth", "traffic"),
    ("twin", "twin below [device]"),
];
/// Keys of which a VM has exactly one.
pub(crate) const WAYS: [&str; 6] = ["lab", "domain", "proxmox", "cgroup", "pid", "qmp"];
const LABS: &[(&str, LabKind)] = &[("qemu", LabKind::Qemu), ("process", LabKind::Process)];
const LAB_ALIASES: &[(&str, &str)] = &[
    ("kvm", "lab = \"qemu\" (it uses KVM where that works)"),
    ("vm", "lab = \"qemu\""),
    ("fio", "lab = \"process\""),
    ("container", "lab = \"process\""),
];
const KERNELS: &[(&str, Kernel)] = &[("standard", Kernel::Standard), ("rt", Kernel::Rt)];
const KERNEL_ALIASES: &[(&str, &str)] = &[
    ("preempt_rt", "kernel = \"rt\""),
    ("preempt-rt", "kernel = \"rt\""),
    ("realtime", "kernel = \"rt\""),
    ("real-time", "kernel = \"rt\""),
    ("cloud", "kernel = \"standard\""),
    ("default", "kernel = \"standard\""),
];
const CRITICALITIES: &[(&str, Criticality)] =
    &[("high", Criticality::High), ("medium", Criticality::Medium), ("low", Criticality::Low)];
const CRITICALITY_ALIASES: &[(&str, &str)] =
    &[("normal", "criticality = \"medium\""), ("critical", "criticality = \"high\"")];
/// The kernel's PID_MAX_LIMIT on 64-bit machines (include/linux/threads.h).
const MAX_PID: u32 = 1 << 22;
/// Range of VMIDs in Proxmox VE (`pve-vmid` in its JSONSchema.pm).
const MIN_VMID: u32 = 100;
const MAX_VMID: u32 = 999_999_999;

/// A VM with the disk of each of its tasks.
pub(crate) struct VmOnDisks {
    pub(crate) vm: Vm,
    pub(crate) disks: Vec<TaskDisk>,
    pub(crate) paths: Vec<VmPath>,
}

/// Names and handles used by earlier VMs, each with its line.
#[derive(Default)]
struct Taken<'t> {
    names: HashMap<&'t str, usize>,
    pids: HashMap<u32, usize>,
    sockets: HashMap<PathBuf, usize>,
    proxmox: HashMap<u32, usize>,
    /// By name or UUID, and URI of the daemon.
    domains: HashMap<(String, String), usize>,
    ports: TakenPorts,
    cgroups: Vec<(PathBuf, usize)>,
    kind: Option<(&'static str, usize)>,
}

/// Reads all VMs; `None` when an error was reported.
pub(crate) fn read_all(
    report: &mut Report<'_>,
    file: &Section<'_, '_>,
    devices: &Devices,
    networks: &Networks,
) -> Option<Vec<VmOnDisks>> {
    let tables = tables(report, file, "vm", "[[vm]]")?;
    let mut taken = Taken::default();
    let of = ("a spec", "VMs", "split the VMs over several devices and specs");
    each(report, tables, MAX_VMS, of, |report, table, span| {
        let section = Section::open(report, "[[vm]]", table, span, KEYS, KEY_ALIASES);
        read(report, &section, (devices, networks), &mut taken)
    })
}

fn read<'t>(
    report: &mut Report<'_>,
    section: &Section<'t, '_>,
    (devices, networks): (&Devices, &Networks),
    taken: &mut Taken<'t>,
) -> Option<VmOnDisks> {
    let name = section.name(report, "\"vm0\"");
    let unique = name.given().is_none_or(|name| {
        let message = format!("there is already a VM \"{name}\"");
        let more = "; give each VM its own name";
        section.first_use(report, "name", (&mut taken.names, *name), message, more)
    });
    let reach = reach(report, section, devices, taken);
    let cpu = cpu::read(report, section);
    let kernel = kernel(report, section);
    let criticality = section.word(report, "criticality", CRITICALITIES, CRITICALITY_ALIASES).optional();
    let traffic = traffic::read(report, section);
    let disks = disk::read(report, section, devices);
    let tasks = task::read_all(report, section);
    let ports = network_read::of_vm(report, section, networks, &mut taken.ports);
    let known = tasks.as_ref().zip(ports.as_ref());
    let paths = known.map(|(tasks, (_, flows))| path::read_all(report, section, tasks, flows));
    let disks = disks.zip(tasks.as_ref()).and_then(|(disks, _)| disk::of_tasks(report, section, &disks));
    let (nics, flows) = ports?;
    let vm = Vm {
        name: name.into_value()?.to_owned(),
        reach: reach?,
        cpu: cpu?,
        kernel: kernel?,
        criticality: criticality?.unwrap_or_default(),
        traffic: traffic?,
        tasks: tasks?,
        nics,
        flows,
    };
    let (disks, paths) = (disks?, paths??);
    unique.then_some(VmOnDisks { vm, disks, paths })
}

fn reach(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    devices: &Devices,
    taken: &mut Taken<'_>,
) -> Option<Reach> {
    let mut ways: Vec<(&str, Span)> =
        WAYS.iter().filter_map(|way| section.place(way).map(|place| (*way, place.key))).collect();
    ways.sort_by_key(|(_, span)| span.start);
    let (way, at) = match ways.as_slice() {
        [] if WAYS.iter().any(|way| section.meant(way)) => return None,
        [] => {
            let help = "add lab = \"qemu\" or lab = \"process\", or for a running VM one of domain, proxmox, cgroup, pid or qmp";
            report.add(section.span.clone(), "[[vm]] does not say how to reach the VM", help);
            return None;
        }
        [(way, at)] => (*way, at.clone()),
        [(first, _), rest @ ..] => {
            for (way, at) in rest {
                let message = format!("`{way}` and `{first}` both say how to reach this VM");
                report.add(at.clone(), message, "keep one of lab, domain, proxmox, cgroup, pid and qmp");
            }
            return None;
        }
    };
    if way == "lab" {
        let lab = section.word(report, "lab", LABS, LAB_ALIASES);
        let alone = no_host_keys(report, section) & one_device(report, &at, devices);
        let lab = lab.into_value()?;
        let name = if lab == LabKind::Qemu { "lab = \"qemu\"" } else { "lab = \"process\"" };
        let same = same_kind(report, name, at, taken);
        return (alone && same).then_some(Reach::Lab(lab));
    }
    let only = devices.only().and_then(|entry| entry.device.given());
    let fits = if let Some(made) = only.filter(|d| d.is_made()) {
        let what = if matches!(made, Device::Twin { .. }) { "twin" } else { "file" };
        let help = format!("write lab = \"qemu\" here, or give [device] a path instead of a {what}");
        report.add(
            at,
            format!("a running VM cannot use a {what}: the lab makes the {what}, for its own VMs"),
            help,
        );
        false
    } else {
        same_kind(report, "a running VM", at, taken)
    };
    let uri = libvirt::uri(report, section, way);
    let host = match way {
        "domain" => libvirt::domain(report, section, uri, &mut taken.domains),
        "proxmox" => proxmox(report, section, taken),
        _ => host(report, section, way, taken),
    };
    let agent = match way {
        "domain" | "proxmox" => libvirt::no_agent(report, section, way),
        _ => {
            let agent = section.socket(report, "agent", "\"/run/vm0.qga\"");
            agent.and_then(|path| socket(report, section, "agent", path, taken))
        }
    };
    let disk = match way {
        "domain" => libvirt::target(report, section, "disk"),
        _ => section.path(report, "disk", "\"/dev/vdb\"").map(VmDisk::Path),
    };
    let reach =
        Reach::Existing { host: host.into_value()?, agent: agent.optional()?, disk: disk.optional()? };
    fits.then_some(reach)
}

/// Kernel of a guest that the lab starts; `None` when an error was reported.
fn kernel(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Kernel> {
    let Some(place) = section.place("kernel") else { return Some(Kernel::default()) };
    // If the VM's kind is unreadable, only that is reported.
    let is_other = match section.get("lab") {
        Some((_, value)) => value.as_str() == Some("process"),
        None => WAYS.iter().any(|way| section.place(way).is_some()),
    };
    if is_other {
        let message = "`kernel` is for a guest that the lab boots, and this VM is none";
        report.add(place.key, message, "remove this line, or write lab = \"qemu\"");
        return None;
    }
    section.word(report, "kernel", KERNELS, KERNEL_ALIASES).into_value()
}

/// Reports keys that are not allowed in a lab VM.
fn no_host_keys(report: &mut Report<'_>, section: &Section<'_, '_>) -> bool {
    let mut none = true;
    for key in ["agent", "disk", "disks", "uri"] {
        if let Some(place) = section.place(key) {
            let message = format!("`{key}` belongs to a running VM; the lab sets up its own");
            report.add(place.key, message, "remove this line");
            none = false;
        }
    }
    none
}

/// Reports a lab VM in a spec with several devices.
fn one_device(report: &mut Report<'_>, at: &Span, devices: &Devices) -> bool {
    let many = devices.entries.len();
    if many > 1 {
        let message = format!("the lab has one device, and this spec has {many}");
        report.add(at.clone(), message, "keep one device, or name running VMs by cgroup, pid or qmp");
    }
    many <= 1
}

/// Reports VMs of different kinds: a result states the kind of its VMs, and the lab is started and
/// stopped as a whole.
fn same_kind(report: &mut Report<'_>, kind: &'static str, at: Span, taken: &mut Taken<'_>) -> bool {
    let line = report.line(at.start);
    let (first, first_line) = *taken.kind.get_or_insert((kind, line));
    if first != kind {
        let message = format!("one spec cannot hold both {first} and {kind}");
        report.add(
            at,
            message,
            format!("line {first_line} has {first}; make all VMs the same, or write two specs"),
        );
    }
    first == kind
}

fn proxmox(report: &mut Report<'_>, section: &Section<'_, '_>, taken: &mut Taken<'_>) -> Field<HostHandle> {
    section.integer(report, "proxmox", MIN_VMID, MAX_VMID).and_then(|id| {
        let message = format!("another VM has the Proxmox id {id} too");
        let unique = section.first_use(report, "proxmox", (&mut taken.proxmox, id), message, "");
        unique.then_some(HostHandle::Proxmox(id)).into()
    })
}

fn host(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    way: &str,
    taken: &mut Taken<'_>,
) -> Field<HostHandle> {
    match way {
        "pid" => section.integer(report, "pid", 1, MAX_PID).and_then(|pid| {
            let message = format!("another VM has pid {pid} too");
            let unique = section.first_use(report, "pid", (&mut taken.pids, pid), message, "");
            unique.then_some(HostHandle::Pid(pid)).into()
        }),
        "cgroup" => section
            .path(report, "cgroup", "\"/machine.slice/vm0.scope\"")
            .and_then(|path| cgroup(report, section, path, taken)),
        _ => section
            .socket(report, "qmp", "\"/run/vm0.qmp\"")
            .and_then(|path| socket(report, section, "qmp", path, taken))
            .map(HostHandle::Qmp),
    }
}

fn cgroup(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    path: PathBuf,
    taken: &mut Taken<'_>,
) -> Field<HostHandle> {
    let at = section.value_span("cgroup");
    if let Ok(below) = path.strip_prefix("/sys/fs/cgroup") {
        // On cgroup v1 each controller has its own mount point below it.
        let below =
            ["blkio", "unified", "systemd"].iter().find_map(|c| below.strip_prefix(c).ok()).unwrap_or(below);
        let below = below.display().to_string();
        // In double quotes TOML would decode a backslash as an escape.
        let quote = if below.contains('\\') { '\'' } else { '"' };
        let help = format!("leave out the mount point: cgroup = {quote}/{below}{quote}");
        report.add(at, "`cgroup` starts with the mount point of cgroups", help);
        return Field::Bad;
    }
    let line = report.line(at.start);
    // A nested group shares the weight of the outer one, so the two VMs could not be told apart.
    let nested = |other: &Path| path.starts_with(other) || other.starts_with(&path);
    if let Some((other, first)) = taken.cgroups.iter().find(|(other, _)| nested(other)) {
        let message = if *other == path {
            "another VM has this cgroup too".to_owned()
        } else {
            format!(
                "this cgroup and {} of another VM lie inside one another",
                quoted(&other.display().to_string())
            )
        };
        report.add(at, message, format!("the first is on line {first}; give each VM a cgroup of its own"));
        return Field::Bad;
    }
    taken.cgroups.push((path.clone(), line));
    Field::Given(HostHandle::Cgroup(path))
}

/// Reports a socket that is used twice.
fn socket(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    key: &str,
    path: PathBuf,
    taken: &mut Taken<'_>,
) -> Field<PathBuf> {
    let at = section.value_span(key);
    let line = report.line(at.start);
    if let Some(first) = taken.sockets.get(&path) {
        let message = format!("the socket {} is already used", quoted(&path.display().to_string()));
        report.add(at, message, format!("the first use is on line {first}; each VM has its own sockets"));
        return Field::Bad;
    }
    taken.sockets.insert(path.clone(), line);
    Field::Given(path)
}
