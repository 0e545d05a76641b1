//! A plan that was applied by hand, kept by the service: a VM that is started again gets its weight
//! and limit, and another program's hand on a weight meets the policy. On a real disk and real QEMU
//! processes; where libvirt is to be slow, on a `virsh` of the test.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use common::disk::Disk;
use common::{Plc, Rig, can_run};
use rtvirtio_kernel::ProcessId;
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;
use serde_json::json;

const UUID: &str = "6d2c4f0e-52b1-4c1c-9a51-3a4a3f0c7d11";

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

/// A `virsh` that knows one VM. From the second look-up on it answers once it is allowed to.
struct SlowVirsh {
    dir: PathBuf,
}

impl SlowVirsh {
    fn new(rig: &Rig, vm: &Plc) -> Self {
        let dir = rig.site.dir.path().join("virsh");
        fs::create_dir(&dir).unwrap();
        let script = format!(
            r#"#!/bin/sh
cd '{dir}' || exit 1
case "$*" in
*" list "*)
    if ! mkdir first 2>/dev/null; then
        echo $$ >asked
        while [ -d first ] && [ ! -e answer ]; do sleep 0.05; done
    fi
    echo '{UUID} {name}' ;;
*" domstate "*) echo 'running (booted)' ;;
*" dumpxml "*) echo '<domain id="1"><name>{name}</name><uuid>{UUID}</uuid></domain>' ;;
*) exit 1 ;;
esac
"#,
            dir = dir.display(),
            name = vm.name
        );
        let path = dir.join("virsh");
        fs::write(&path, script).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    /// The service, with this `virsh` before any other.
    fn service(&self, rig: &Rig) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = rig.command(&[]);
        command.env("PATH", format!("{}:{path}", self.dir.display()));
        command
    }

    /// Waits until one has not been answered yet.
    fn asked(&self) -> ProcessId {
        let mut found = None;
        wait_for("a look-up", || {
            let text = fs::read_to_string(self.dir.join("asked")).unwrap_or_default();
            found = text.trim().parse::<u32>().ok().and_then(|pid| ProcessId::find(pid).ok().flatten());
            found.is_some()
        });
        found.unwrap()
    }

    fn answer(&self) {
        fs::write(self.dir.join("answer"), "").unwrap();
    }
}

/// Whether a thread of a VM has the policy of its contract.
fn is_taken_in(rig: &Rig, vm: &Plc, thread: &str) -> bool {
    let pid = vm.machine.as_ref().unwrap().pid().to_string();
    let all = rig.site.json(&["threads", &pid]).1;
    let threads = all[0]["threads"].as_array().cloned().unwrap_or_default();
    threads.iter().any(|t| t["name"] == thread && t["policy"] == "fifo")
}

#[test]
fn threads_are_taken_in_while_libvirt_does_not_answer_for_another_vm() {
    let test = "threads_are_taken_in_while_libvirt_does_not_answer_for_another_vm";
    if !can_run(test) {
        return;
    }
    let mut rig = Rig::new();
    let Some(disk) = Disk::new(test, &rig) else { return };
    let name = rig.site.vm("plc");
    let mut plc = Plc::named(&rig, "plc", name, &["-uuid", UUID]);
    let (hist, other) = (Plc::start(&rig, "hist"), Plc::start(&rig, "other"));
    disk.place(&plc, 1);
    disk.place(&hist, 1);
    let plan = plan(&rig, &disk, &[&plc, &hist]);
    rig.site.ok(&["apply", plan.to_str().unwrap()]);
    // From now on libvirt is asked for it; it is started again.
    let spec = rig.site.dir.path().join("plant.toml");
    let (by_qmp, by_name) =
        (format!("qmp = \"{}\"", plc.qmp().display()), format!("domain = \"{}\"", plc.name));
    fs::write(&spec, fs::read_to_string(&spec).unwrap().replace(&by_qmp, &by_name)).unwrap();
    plc.boot();
    disk.place(&plc, 2);
    other.contract(&rig, "4ms", "");
    let virsh = SlowVirsh::new(&rig, &plc);
    let service = virsh.service(&rig);
    rig.run(service);
    rig.wait_state(&other.name, "in_force");

    // A look-up ends by itself after a minute, so that one thread may come between two of them.
    let begin = Instant::now();
    for i in 1.. {
        let asked = virsh.asked();
        let thread = json!({ "qom-type": "iothread", "id": format!("io{i}") });
        other.machine.as_ref().unwrap().execute("object-add", &thread);
        wait_for("the new thread", || is_taken_in(&rig, &other, &format!("IO io{i}")));
        if asked.is_alive() {
            break;
        }
        assert!(begin.elapsed() < HANG, "threads are taken in only between look-ups\n{}", rig.log());
    }
    assert_eq!(disk.settings(&plc, 2), (None, None));
    virsh.answer();
    wait_for("weight and limit of the new start", || disk.settings(&plc, 2) == (Some(700), Some(1000)));
    rig.kill();
    rig.site.ok(&["revert"]);
    assert_eq!(disk.settings(&plc, 2), (None, None));
    drop((plc, hist, other));
}
