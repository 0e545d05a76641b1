//! A plan that was applied by hand, kept by the service: a VM that is started again gets its weight
//! and limit, and another program's hand on a weight meets the policy. On a real disk and real QEMU
//! processes.

mod common;

use std::fs;
use std::path::PathBuf;

use common::disk::Disk;
use common::{Plc, Rig};
use rtvirtio_testkit::site::wait_for;
use serde_json::json;

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
    assert_eq!(disk.elevator(), "none");
    drop((plc, hist));
}
