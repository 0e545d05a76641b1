//! A loop device under no elevator, and a cgroup for VMs.

use std::fs;
use std::path::PathBuf;

use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root, text as parse};
use rtvirtio_testkit::{LoopDevice, Need, has, skip, unique};

use super::{Plc, Rig};

/// Removed when it is dropped, after the VMs.
pub struct Disk {
    pub device: BlockDevice,
    cgroups: Cgroups,
    parent: PathBuf,
    _attached: LoopDevice,
}

impl Disk {
    pub fn new(test: &str, rig: &Rig) -> Option<Self> {
        Self::of_file(test, rig, "disk.img")
    }

    pub fn of_file(test: &str, rig: &Rig, file: &str) -> Option<Self> {
        if !has(test, &[Need::Root, Need::QEMU, Need::Path("/dev/loop-control", "no loop devices")]) {
            return None;
        }
        let root = Root::default();
        let cgroups = Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let file = rig.site.dir.path().join(file);
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let Some(attached) = LoopDevice::attach(&file) else {
            skip(test, "losetup");
            return None;
        };
        let device = BlockDevice::find(&root, &attached.0).unwrap();
        let parent = PathBuf::from(format!("/rtvirtio-{}", unique("plan")));
        let disk = Self { device, cgroups, parent, _attached: attached };
        if let Err(e) = disk.device.offers(&root, "bfq") {
            skip(test, &e.to_string());
            return None;
        }
        disk.device.set_elevator(&root, "none").unwrap();
        Some(disk)
    }

    fn group(&self, vm: &Plc, start: u32) -> PathBuf {
        // As libvirt, another one for each start.
        self.parent.join(format!("{}-{start}", vm.name))
    }

    /// Puts a VM into a cgroup of its own.
    pub fn place(&self, vm: &Plc, start: u32) {
        let (root, group) = (Root::default(), self.group(vm, start));
        self.cgroups.create(&root, &group).unwrap();
        self.cgroups.attach(&root, &group, vm.machine.as_ref().unwrap().pid()).unwrap();
    }

    /// Weight and read limit of a VM.
    pub fn settings(&self, vm: &Plc, start: u32) -> (Option<u64>, Option<u64>) {
        let group = self.group(vm, start);
        let file = self.cgroups.weight_file(&Root::default(), &group).unwrap();
        let weights = parse::weights(&fs::read_to_string(file.path).unwrap()).unwrap();
        let limit = fs::read_to_string(self.cgroups.limit_file(&group, Limit::ReadIops).unwrap()).unwrap();
        let limit = match self.cgroups.hierarchy {
            Hierarchy::V1 => parse::throttle_limit(&limit, &self.device.dev),
            Hierarchy::V2 => parse::io_max_limit(&limit, &self.device.dev, "riops"),
        };
        (weights.devices.get(&self.device.dev).copied(), limit)
    }

    pub fn set_weight(&self, vm: &Plc, start: u32, weight: u64) {
        let file = self.cgroups.weight_file(&Root::default(), &self.group(vm, start)).unwrap();
        fs::write(file.path, format!("{} {weight}", self.device.dev)).unwrap();
    }

    /// Another hand on the read limit.
    pub fn set_limit(&self, vm: &Plc, start: u32, limit: u64) {
        let path = self.cgroups.limit_file(&self.group(vm, start), Limit::ReadIops).unwrap();
        let line = match self.cgroups.hierarchy {
            Hierarchy::V1 => format!("{} {limit}", self.device.dev),
            Hierarchy::V2 => format!("{} riops={limit}", self.device.dev),
        };
        fs::write(path, line).unwrap();
    }

    /// The elevator in use.
    pub fn elevator(&self) -> String {
        self.device.elevators(&Root::default()).unwrap().current
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let root = Root::default();
        let dir = self.cgroups.dir(&self.parent).unwrap();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                // QEMU has ended; the kernel may still be about to notice.
                for _ in 0..100 {
                    if fs::remove_dir(entry.path()).is_ok() {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            }
        }
        let _ = self.cgroups.remove(&root, &self.parent);
        // A loop device keeps its queue settings when it is detached.
        let _ = root.write(self.device.queue("scheduler"), "none");
    }
}
