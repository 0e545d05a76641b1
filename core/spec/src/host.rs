//! A whole spec file: the devices of one host, and the part of the file for each.

use serde::Serialize;

use crate::device::Devices;
use crate::error::{Report, SpecErrors};
use crate::network::Network;
use crate::path::VmPath;
use crate::types::{Device, LabKind, Reach, Spec, Task, TaskDisk, Vm, VmCpu, VmDisk};
use crate::vm::VmOnDisks;

/// A validated spec file: the devices of one host, and the VMs on them.
///
/// Devices are independent: models, planner and laboratory take one [`Part`] at a time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostSpec {
    parts: Vec<Part>,
    vms: Vec<Vm>,
    disks: Vec<Vec<TaskDisk>>,
    /// Paths of each VM.
    #[serde(skip_serializing_if = "no_paths")]
    paths: Vec<Vec<VmPath>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    networks: Vec<Network>,
    /// Ways of each L3 cache for what devices write into it.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_ways: Option<u32>,
    /// Error for a caller that supports one device only; `None` for a file with one.
    #[serde(skip)]
    several: Option<SpecErrors>,
}

/// Part of a spec file for one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Name of the device in the file; a file with one device need not give it.
    pub name: Option<String>,
    /// Device, and the VMs that have tasks on it, with those tasks only; in file order.
    pub spec: Spec,
    /// Disk of each task, VM by VM as in `spec`; `None` where the file does not say.
    pub disks: Vec<Vec<Option<VmDisk>>>,
}

impl HostSpec {
    /// Parts by device, in file order; never empty.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// VMs with all their tasks, in file order. Where a VM has several disks, `disk` of its
    /// [`Reach`] is that of its first task; see [`HostSpec::disks`].
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// Networks, in file order.
    #[must_use]
    pub fn networks(&self) -> &[Network] {
        &self.networks
    }

    /// Ways of each L3 cache for what devices write into it (`[memory]`); `None` leaves them.
    #[must_use]
    pub fn device_ways(&self) -> Option<u32> {
        self.device_ways
    }

    /// Adds what all VMs share.
    pub(crate) fn with_shared(self, networks: Vec<Network>, device_ways: Option<u32>) -> Self {
        Self { networks, device_ways, ..self }
    }

    /// Paths of the VM at this index; empty where there is no such VM.
    #[must_use]
    pub fn paths(&self, vm: usize) -> &[VmPath] {
        self.paths.get(vm).map_or(&[], Vec::as_slice)
    }

    /// Disk of each task of the VM at this index; empty where there is no such VM.
    #[must_use]
    pub fn disks(&self, vm: usize) -> &[TaskDisk] {
        self.disks.get(vm).map_or(&[], Vec::as_slice)
    }

    /// All tasks with their VMs, in file order.
    pub fn tasks(&self) -> impl Iterator<Item = (&Vm, &Task)> {
        self.vms.iter().flat_map(|vm| vm.tasks.iter().map(move |task| (vm, task)))
    }

    /// Kind of the VMs that the lab starts; `None` when the VMs run already.
    #[must_use]
    pub fn lab_kind(&self) -> Option<LabKind> {
        self.parts.iter().find_map(|part| part.spec.lab_kind())
    }

    /// Spec of a file that has one device; for several an error at the second.
    pub fn single(&self) -> Result<&Spec, SpecErrors> {
        match (&self.several, self.parts.as_slice()) {
            (None, [part]) => Ok(&part.spec),
            (several, _) => Err(several.clone().unwrap_or_else(|| Report::new("", "").into_errors())),
        }
    }
}

fn no_paths(paths: &[Vec<VmPath>]) -> bool {
    paths.iter().all(Vec::is_empty)
}

impl HostSpec {
    /// Joins several files to one host, with the VMs that `keep` selects, and each block device
    /// once. Of VMs with the same name the first is taken. Networks and `[memory]` are left out.
    /// `None` where no VM remains.
    #[must_use]
    pub fn joined<'s>(all: impl IntoIterator<Item = &'s Self>, keep: impl Fn(&str) -> bool) -> Option<Self> {
        let mut host = Self {
            parts: Vec::new(),
            vms: Vec::new(),
            disks: Vec::new(),
            paths: Vec::new(),
            networks: Vec::new(),
            device_ways: None,
            several: None,
        };
        for file in all {
            let is_known = |host: &Self, name: &str| host.vms.iter().any(|vm| vm.name == name);
            let new: Vec<usize> = (0..file.vms.len())
                .filter(|i| file.vms.get(*i).is_some_and(|vm| keep(&vm.name) && !is_known(&host, &vm.name)))
                .collect();
            let names: Vec<&str> =
                new.iter().filter_map(|i| file.vms.get(*i)).map(|vm| vm.name.as_str()).collect();
            // Index in `host` of each part of the file.
            let places: Vec<usize> = file.parts.iter().map(|part| host.take(part, &names)).collect();
            for i in new {
                let (Some(vm), Some(disks)) = (file.vms.get(i), file.disks.get(i)) else { continue };
                let moved = |disk: &TaskDisk| TaskDisk {
                    part: places.get(disk.part).copied().unwrap_or(disk.part),
                    ..disk.clone()
                };
                host.vms.push(vm.clone());
                host.disks.push(disks.iter().map(moved).collect());
                host.paths.push(file.paths(i).to_vec());
            }
        }
        host.drop_empty_parts();
        (!host.parts.is_empty()).then_some(host)
    }

    /// Adds the named VMs of a part; returns its index.
    fn take(&mut self, part: &Part, names: &[&str]) -> usize {
        let known = self.parts.iter().position(|known| known.spec.device == part.spec.device);
        let place = known.unwrap_or_else(|| {
            let spec = Spec { device: part.spec.device.clone(), vms: Vec::new() };
            // Names are unique in one file only, paths on the whole host.
            let name = match &part.spec.device {
                Device::Path(path) => Some(path.display().to_string()),
                Device::Twin { .. } | Device::File { .. } => part.name.clone(),
            };
            self.parts.push(Part { name, spec, disks: Vec::new() });
            self.parts.len() - 1
        });
        if let Some(ours) = self.parts.get_mut(place) {
            for (vm, disks) in part.spec.vms.iter().zip(&part.disks) {
                if names.contains(&vm.name.as_str()) {
                    ours.spec.vms.push(vm.clone());
                    ours.disks.push(disks.clone());
                }
            }
        }
        place
    }

    /// Restricts the file to the devices that `keep` selects: the VMs with tasks there, and these
    /// tasks. Networks and `[memory]` are left out. `None` where nothing remains.
    #[must_use]
    pub fn on_devices(&self, keep: impl Fn(&Device) -> bool) -> Option<Self> {
        let is_kept: Vec<bool> = self.parts.iter().map(|part| keep(&part.spec.device)).collect();
        let kept = |place: usize| is_kept.get(place).copied().unwrap_or(false);
        let (mut parts, mut vms, mut disks, mut paths) = (self.parts.clone(), vec![], vec![], vec![]);
        for (_, part) in parts.iter_mut().enumerate().filter(|(place, _)| !kept(*place)) {
            (part.spec.vms, part.disks) = (Vec::new(), Vec::new());
        }
        for (i, vm) in self.vms.iter().enumerate() {
            let here: Vec<(&Task, &TaskDisk)> =
                vm.tasks.iter().zip(self.disks(i)).filter(|(_, disk)| kept(disk.part)).collect();
            if here.is_empty() {
                continue;
            }
            let first = here.iter().find_map(|(_, disk)| disk.disk.clone());
            let (tasks, on): (Vec<Task>, Vec<TaskDisk>) =
                here.into_iter().map(|(task, disk)| (task.clone(), disk.clone())).unzip();
            vms.push(Vm { tasks, ..with_disk(vm, first) });
            disks.push(on);
            paths.push(self.paths(i).to_vec());
        }
        let (networks, device_ways) = (Vec::new(), None);
        let mut host = Self { parts, vms, disks, paths, networks, device_ways, several: None };
        host.drop_empty_parts();
        (!host.parts.is_empty()).then_some(host)
    }

    /// Removes parts without VMs and updates the indices of the others.
    fn drop_empty_parts(&mut self) {
        let is_used: Vec<bool> = self.parts.iter().map(|part| !part.spec.vms.is_empty()).collect();
        let before = |place: usize| is_used.iter().take(place).filter(|used| **used).count();
        self.disks.iter_mut().flatten().for_each(|disk| disk.part = before(disk.part));
        self.parts.retain(|part| !part.spec.vms.is_empty());
        if let [only] = self.parts.as_mut_slice() {
            only.name = None;
        }
    }

    /// Removes `cpu` from all VMs.
    #[must_use]
    pub fn without_cpu(mut self) -> Self {
        let of_parts = self.parts.iter_mut().flat_map(|part| &mut part.spec.vms);
        of_parts.chain(&mut self.vms).for_each(|vm| vm.cpu = VmCpu::default());
        self
    }
}

impl From<Spec> for Part {
    /// Part of a host with one device.
    fn from(spec: Spec) -> Self {
        let disks = |vm: &Vm| match &vm.reach {
            Reach::Existing { disk, .. } => vec![disk.clone(); vm.tasks.len()],
            Reach::Lab(_) => vec![None; vm.tasks.len()],
        };
        Self { name: None, disks: spec.vms.iter().map(disks).collect(), spec }
    }
}

impl From<Spec> for HostSpec {
    /// Host with one device.
    fn from(spec: Spec) -> Self {
        let (vms, part) = (spec.vms.clone(), Part::from(spec));
        let named = |disk: &Option<VmDisk>| TaskDisk { part: 0, name: None, disk: disk.clone() };
        let disks = part.disks.iter().map(|paths| paths.iter().map(named).collect()).collect();
        let paths = vec![Vec::new(); vms.len()];
        Self { parts: vec![part], vms, disks, paths, networks: Vec::new(), device_ways: None, several: None }
    }
}

impl Part {
    /// Distinct disks used by the tasks of the VM at this index, in order.
    #[must_use]
    pub fn disks_of(&self, vm: usize) -> Vec<&VmDisk> {
        let mut all: Vec<&VmDisk> = Vec::new();
        for disk in self.disks.get(vm).into_iter().flatten().flatten() {
            if !all.contains(&disk) {
                all.push(disk);
            }
        }
        all
    }
}

/// Combines devices and VMs; `None` when an error was reported.
pub(crate) fn assemble(
    report: &mut Report<'_>,
    text: &str,
    devices: Devices,
    mut vms: Vec<VmOnDisks>,
) -> Option<HostSpec> {
    for one in &mut vms {
        let Reach::Existing { disk: Some(disk), .. } = &one.vm.reach else { continue };
        one.disks.iter_mut().filter(|d| d.name.is_none()).for_each(|d| d.disk = Some(disk.clone()));
    }
    let several = several(report, text, &devices);
    let named = devices.entries.len() > 1;
    let mut parts = Vec::new();
    let (bad, mut good) = (devices.bad, !devices.bad);
    for (i, entry) in devices.entries.into_iter().enumerate() {
        let Some(device) = entry.device.into_value() else {
            good = false;
            continue;
        };
        let mut part = Part { name: entry.name, spec: Spec { device, vms: Vec::new() }, disks: Vec::new() };
        for one in &vms {
            let here: Vec<(&Task, &TaskDisk)> =
                one.vm.tasks.iter().zip(&one.disks).filter(|(_, disk)| disk.part == i).collect();
            if here.is_empty() {
                continue;
            }
            let disks: Vec<Option<VmDisk>> = here.iter().map(|(_, disk)| disk.disk.clone()).collect();
            let first = disks.iter().flatten().next().cloned();
            let tasks = here.into_iter().map(|(task, _)| task.clone()).collect();
            part.spec.vms.push(Vm { tasks, ..with_disk(&one.vm, first) });
            part.disks.push(disks);
        }
        if part.spec.vms.is_empty() && named && !bad {
            let message = "no task of any VM uses this device";
            report.add(entry.at, message, "remove it, or let a VM's disk name it: device = ...");
            good = false;
        }
        parts.push(part);
    }
    let paths = vms.iter().map(|one| one.paths.clone()).collect();
    let (vms, disks) = vms
        .into_iter()
        .map(|one| {
            let first = one.disks.iter().find_map(|disk| disk.disk.clone());
            (with_disk(&one.vm, first), one.disks)
        })
        .unzip();
    good.then_some(HostSpec { parts, vms, disks, paths, networks: Vec::new(), device_ways: None, several })
}

/// Copy of the VM with this disk, unless the lab starts it.
fn with_disk(vm: &Vm, first: Option<VmDisk>) -> Vm {
    let mut vm = vm.clone();
    if let Reach::Existing { disk, .. } = &mut vm.reach {
        *disk = first.or_else(|| disk.clone());
    }
    vm
}

/// Error for a caller that supports one device only.
fn several(report: &Report<'_>, text: &str, devices: &Devices) -> Option<SpecErrors> {
    let second = devices.entries.get(1)?;
    let mut answer = Report::new(report.file(), text);
    answer.add(
        second.at.clone(),
        format!("this command takes one device, and this spec has {}", devices.entries.len()),
        "give it a spec with one [device], and the VMs on it",
    );
    Some(answer.into_errors())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(devices: &[&str], vms: &[(&str, &str)]) -> HostSpec {
        let mut text = String::new();
        for (i, path) in devices.iter().enumerate() {
            text += &format!("[[device]]\nname = \"d{i}\"\npath = \"{path}\"\n");
        }
        for (name, device) in vms {
            text += &format!(
                "[[vm]]\nname = \"{name}\"\ndevice = \"{device}\"\nqmp = \"/run/{name}.qmp\"\ncpu = {{ budget = \"4ms\", period = \"20ms\" }}\n\
                 [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
            );
        }
        HostSpec::parse("x.toml", &text).unwrap()
    }

    fn shape(host: &HostSpec) -> Vec<(Option<&str>, Vec<&str>)> {
        host.parts()
            .iter()
            .map(|p| (p.name.as_deref(), p.spec.vms.iter().map(|v| v.name.as_str()).collect()))
            .collect()
    }

    #[test]
    fn files_on_one_device_are_one_part_and_places_follow() {
        let one = file(&["/dev/sda", "/dev/sdb"], &[("plc", "d0"), ("hist", "d1")]);
        let two = file(&["/dev/sdc", "/dev/sda"], &[("x", "d0"), ("hmi", "d1"), ("plc", "d1")]);
        let all = HostSpec::joined([&one, &two], |_| true).unwrap();
        assert_eq!(
            shape(&all),
            [
                (Some("/dev/sda"), vec!["plc", "hmi"]),
                (Some("/dev/sdb"), vec!["hist"]),
                (Some("/dev/sdc"), vec!["x"])
            ]
        );
        let places = |host: &HostSpec| -> Vec<usize> {
            (0..host.vms().len()).map(|vm| host.disks(vm)[0].part).collect()
        };
        assert_eq!(places(&all), [0, 1, 2, 0]);
        // Some of its VMs; devices without VMs are removed.
        let some = HostSpec::joined([&all], |vm| vm == "x" || vm == "hmi").unwrap();
        assert_eq!(shape(&some), [(Some("/dev/sda"), vec!["hmi"]), (Some("/dev/sdc"), vec!["x"])]);
        assert_eq!(places(&some), [1, 0]);
        let only = HostSpec::joined([&all], |vm| vm == "hist").unwrap();
        assert_eq!((shape(&only), places(&only)), (vec![(None, vec!["hist"])], vec![0]));
        assert_eq!(HostSpec::joined([&all], |_| false), None);
        assert!(all.vms()[0].cpu.need.is_some() && all.without_cpu().vms()[0].cpu.need.is_none());
    }

    #[test]
    fn of_some_devices_a_vm_has_the_tasks_there_only() {
        let text = "[[device]]\nname = \"a\"\npath = \"/dev/sda\"\n[[device]]\nname = \"b\"\npath = \"/dev/sdb\"\n\
            [[vm]]\nname = \"plc\"\nqmp = \"/run/plc.qmp\"\n\
            disks = [{ name = \"fast\", device = \"a\", path = \"/dev/vda\" }, { name = \"slow\", device = \"b\", path = \"/dev/vdb\" }]\n\
            [[vm.task]]\nname = \"t\"\ndisk = \"fast\"\nop = \"read\"\nblock = \"4KiB\"\n\
            [[vm.task]]\nname = \"u\"\ndisk = \"slow\"\nop = \"read\"\nblock = \"4KiB\"\n";
        let host = HostSpec::parse("x.toml", text).unwrap();
        let on = |path: &str| host.on_devices(|device| *device == Device::Path(path.into()));
        let slow = on("/dev/sdb").unwrap();
        assert_eq!(shape(&slow), [(None, vec!["plc"])]);
        let tasks: Vec<&str> = slow.vms()[0].tasks.iter().map(|task| task.name.as_str()).collect();
        assert_eq!((tasks, slow.disks(0).len(), slow.disks(0)[0].part), (vec!["u"], 1, 0));
        assert_eq!(slow.parts()[0].spec.vms[0].tasks.len(), 1);
        let Reach::Existing { disk, .. } = &slow.vms()[0].reach else { panic!("{slow:?}") };
        assert_eq!(*disk, slow.disks(0)[0].disk);
        assert_eq!(on("/dev/sdc"), None);
        assert_eq!(host.on_devices(|_| true).unwrap().parts(), host.parts());
    }
}
