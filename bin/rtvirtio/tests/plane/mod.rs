//! Loop devices with cgroups of VMs, and a plan that changes settings of both.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_kernel::{BlockDevice, Cgroups, Root};
use rtvirtio_model::ModelKind;
use rtvirtio_planner::{BfqTunable, Enforcement, Knob, LimitKind, Plan, Setting};
use rtvirtio_testkit::{LoopDevice, Need, has, skip, unique};

use rtvirtio_testkit::site::{Site, text};

/// Every file that can be set, with its content.
pub type Snapshot = BTreeMap<PathBuf, Vec<u8>>;

/// Loop devices, and the cgroups of VMs. All of it is removed when this is dropped.
pub struct Host {
    pub devices: Vec<BlockDevice>,
    pub cgroups: Cgroups,
    /// The cgroup above those of the VMs.
    pub parent: PathBuf,
    vms: usize,
    disks: Vec<LoopDevice>,
}

impl Host {
    /// `None`, after saying so, where the machine does not allow it.
    pub fn new(test: &str, site: &Site, devices: usize, vms: usize) -> Option<Self> {
        if !has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
            return None;
        }
        let root = Root::default();
        let cgroups = Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let parent = PathBuf::from(format!("/rtvirtio-{}", unique(test)));
        let mut host = Self { devices: Vec::new(), cgroups, parent, vms, disks: Vec::new() };
        for n in 0..devices {
            let file = site.dir.path().join(format!("disk-of-host{n}.img"));
            fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
            // With partitions, which a loop device has only when asked.
            let Some(disk) = LoopDevice::with_options(&file, &["-P"]) else {
                skip(test, "losetup");
                return None;
            };
            let device = BlockDevice::find(&root, &disk.0).unwrap();
            host.devices.push(device.clone());
            host.disks.push(disk);
            // An earlier user of this loop device may have left another.
            device.set_elevator(&root, "none").unwrap();
            if let Err(e) = device.offers(&root, "bfq") {
                skip(test, &e.to_string());
                return None;
            }
        }
        for n in 0..vms {
            host.cgroups.create(&root, &host.vm(n)).unwrap();
        }
        Some(host)
    }

    /// Cgroup of a VM.
    pub fn vm(&self, n: usize) -> PathBuf {
        self.parent.join(format!("vm{n}"))
    }

    /// All settings of the devices' queues and of the cgroups.
    pub fn snapshot(&self) -> Snapshot {
        let mut files = Snapshot::new();
        let dirs = self.devices.iter().map(|device| device.queue(""));
        for dir in dirs.chain([self.cgroups.dir(&self.parent).unwrap()]) {
            walk(&dir, &mut files);
        }
        files
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let root = Root::default();
        for n in 0..self.vms {
            let _ = self.cgroups.remove(&root, &self.vm(n));
        }
        let _ = self.cgroups.remove(&root, &self.parent);
        for device in &self.devices {
            let _ = Command::new("delpart").args([&format!("/dev/{}", device.name), "1"]).output();
            // A loop device keeps its queue settings when it is detached.
            let _ = root.write(device.queue("scheduler"), "none");
        }
    }
}

/// One device with three VMs, and the plan in a file.
pub struct Plane {
    pub device: BlockDevice,
    host: Host,
    plan: PathBuf,
}

impl Plane {
    /// `None`, after saying so, where the machine does not allow it.
    pub fn new(test: &str, site: &Site) -> Option<Self> {
        let host = Host::new(test, site, 1, 3)?;
        let plan = site.dir.path().join("plane.plan");
        let plane = Self { device: host.devices[0].clone(), host, plan };
        let mut spec = format!("[device]\npath = \"/dev/{}\"\n", plane.device.name);
        for n in 0..3 {
            spec += &format!(
                "[[vm]]\nname = \"vm{n}\"\ncgroup = '{}'\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n",
                plane.host.vm(n).display()
            );
        }
        let spec_file = site.dir.path().join("plane.toml");
        fs::write(&spec_file, spec).unwrap();
        fs::write(&plane.plan, serde_json::to_vec(&changes(&spec_file)).unwrap()).unwrap();
        Some(plane)
    }

    /// The plan's file.
    pub fn plan(&self) -> &str {
        self.plan.to_str().unwrap()
    }

    /// The cgroup above those of the VMs, and its hierarchy.
    pub fn groups(&self) -> (&Path, &Cgroups) {
        (&self.host.parent, &self.host.cgroups)
    }

    /// All settings of the device's queue and of the cgroups.
    pub fn snapshot(&self) -> Snapshot {
        self.host.snapshot()
    }
}

/// A plan in the first form of its file.
fn changes(spec: &Path) -> serde_json::Value {
    let weight = |n: usize| Knob::VmWeight { vm: format!("vm{n}") };
    let limit = |n: usize, limit| Knob::VmLimit { vm: format!("vm{n}"), limit };
    let settings = [
        (Knob::HostElevator, "bfq"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "2"),
        (Knob::HostBfq(BfqTunable::TimeoutSync), "30"),
        (Knob::HostBfq(BfqTunable::LowLatency), "0"),
        (Knob::HostBfq(BfqTunable::MaxBudget), "512"),
        (weight(0), "700"),
        (weight(1), "300"),
        (weight(2), "50"),
        (limit(2, LimitKind::ReadIops), "1000"),
    ];
    let setting = |(knob, value): (Knob, &str)| Setting {
        knob,
        value: value.to_owned(),
        reason: "test".into(),
        strength: Enforcement::Hint,
    };
    let plan = Plan {
        scheme: "test".into(),
        model: ModelKind::Slice,
        settings: settings.into_iter().map(setting).collect(),
        tasks: Vec::new(),
        feasible: true,
        infeasible: None,
        evaluated: 0,
    };
    let mut file = serde_json::to_value(plan).unwrap();
    file["schema"] = "rtvirtio.plan.v1".into();
    file["spec_file"] = spec.to_str().unwrap().into();
    file
}

/// Files below a directory that can be set. Not the kernel's counters; links are not followed.
pub fn walk(dir: &Path, files: &mut Snapshot) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            walk(&entry.path(), files);
        } else if kind.is_file()
            && entry.metadata().unwrap().mode() & 0o200 != 0
            && !entry.file_name().to_string_lossy().ends_with(".peak")
        {
            // Some can only be written.
            if let Ok(bytes) = fs::read(entry.path()) {
                files.insert(entry.path(), bytes);
            }
        }
    }
}

/// The settings that differ, as `path: before -> after`.
pub fn differences(before: &Snapshot, after: &Snapshot) -> Vec<String> {
    let text = |bytes: Option<&Vec<u8>>| bytes.map(|b| text(b));
    let paths: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let differ = paths.into_iter().filter(|path| before.get(*path) != after.get(*path));
    differ
        .map(|p| format!("{}: {:?} -> {:?}", p.display(), text(before.get(p)), text(after.get(p))))
        .collect()
}
