//! A plan that was applied by hand, kept by the service: a VM that is started again gets its weight
//! and limit, and another program's hand on a weight meets the policy. On a real disk and real QEMU
//! processes.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Plc, Rig};
use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root, text as parse};
use rtvirtio_testkit::site::{text, wait_for};
use rtvirtio_testkit::{Need, has, skip, unique};
use serde_json::json;

/// A loop device under BFQ, and a cgroup for two VMs. Removed when it is dropped, after the VMs.
struct Disk {
    device: BlockDevice,
    cgroups: Cgroups,
    parent: PathBuf,
}

impl Disk {
    fn new(test: &str, rig: &Rig) -> Option<Self> {
        if !has(test, &[Need::Root, Need::QEMU, Need::Path("/dev/loop-control", "no loop devices")]) {
            return None;
        }
        let root = Root::default();
        let cgroups = Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let file = rig.site.dir.path().join("disk.img");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let out = Command::new("losetup").args(["--find", "--show"]).arg(&file).output().unwrap();
        if !out.status.success() {
            skip(test, &format!("losetup: {}", text(&out.stderr).trim()));
            return None;
        }
        let device = BlockDevice::find(&root, text(&out.stdout).trim()).unwrap();
        let parent = PathBuf::from(format!("/rtvirtio-{}", unique("plan")));
        let disk = Self { device, cgroups, parent };
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
    fn place(&self, vm: &Plc, start: u32) {
        let (root, group) = (Root::default(), self.group(vm, start));
        self.cgroups.create(&root, &group).unwrap();
        self.cgroups.attach(&root, &group, vm.machine.as_ref().unwrap().pid()).unwrap();
    }

    /// Weight and read limit of a VM.
    fn settings(&self, vm: &Plc, start: u32) -> (Option<u64>, Option<u64>) {
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

    fn set_weight(&self, vm: &Plc, start: u32, weight: u64) {
        let file = self.cgroups.weight_file(&Root::default(), &self.group(vm, start)).unwrap();
        fs::write(file.path, format!("{} {weight}", self.device.dev)).unwrap();
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
        let _ = Command::new("losetup").arg("-d").arg(format!("/dev/{}", self.device.name)).status();
    }
}

fn plan(rig: &Rig, disk: &Disk, vms: &[&Plc]) -> PathBuf {
    let mut spec = format!("[device]\npath = \"/dev/{}\"\n", disk.device.name);
    for vm in vms {
        spec += &format!(
            "[[vm]]\nname = \"{}\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n",
            vm.name,
            vm.qmp().display()
        );
    }
    let spec_file = rig.site.dir.path().join("plant.toml");
    fs::write(&spec_file, spec).unwrap();
    let setting = |knob: serde_json::Value, value: &str| json!({ "knob": knob, "value": value, "reason": "test", "strength": "hint" });
    let plan = json!({
        "schema": "rtvirtio.plan.v1",
        "spec_file": spec_file,
        "scheme": "test",
        "model": "slice",
        "settings": [
            setting(json!("host_elevator"), "bfq"),
            setting(json!({ "vm_weight": { "vm": vms[0].name } }), "700"),
            setting(json!({ "vm_weight": { "vm": vms[1].name } }), "300"),
            setting(json!({ "vm_limit": { "vm": vms[0].name, "limit": "read_iops" } }), "1000"),
        ],
        "tasks": [],
        "feasible": true,
        "infeasible": null,
        "evaluated": 0,
    });
    let path = rig.site.dir.path().join("plant.plan");
    fs::write(&path, serde_json::to_vec(&plan).unwrap()).unwrap();
    path
}

#[test]
fn a_restarted_vm_gets_the_weights_and_limits_of_the_plan_in_force() {
    let test = "a_restarted_vm_gets_the_weights_and_limits_of_the_plan_in_force";
    let mut rig = Rig::new();
    let Some(disk) = Disk::new(test, &rig) else { return };
    let (mut plc, hist) = (Plc::start(&rig, "plc"), Plc::start(&rig, "hist"));
    disk.place(&plc, 1);
    disk.place(&hist, 1);
    let plan = plan(&rig, &disk, &[&plc, &hist]);
    rig.site.ok(&["apply", plan.to_str().unwrap()]);
    assert_eq!(disk.settings(&plc, 1), (Some(700), Some(1000)));
    fs::write(rig.config(), "compare = \"200ms\"\n").unwrap();
    rig.start(&[]);

    // Another hand.
    disk.set_weight(&hist, 1, 50);
    wait_for("the weight again", || disk.settings(&hist, 1).0 == Some(300));

    // A restart, in another cgroup as libvirt makes one.
    plc.machine = None;
    plc.boot();
    disk.place(&plc, 2);
    wait_for("weight and limit of the new start", || disk.settings(&plc, 2) == (Some(700), Some(1000)));
    wait_for("rest", || rig.site.output(&["status"]).status.success());

    // Both starts are in one journal, and all of it goes back.
    rig.kill();
    rig.site.ok(&["revert"]);
    assert_eq!(disk.settings(&plc, 2), (None, None));
    assert_eq!(disk.settings(&hist, 1), (None, None));
    let elevator = fs::read_to_string(
        Path::new("/sys").join(disk.device.queue("scheduler").strip_prefix("/sys").unwrap()),
    );
    assert!(elevator.unwrap().contains("[none]"));
    drop((plc, hist));
}
