//! Real QEMU guests: tasks inside them, knobs inside them, and one that dies.

use std::time::Duration;

use rtvirtio_testkit::site::{Site, can_run, signal, text, wait_for};
use rustix::process::Signal;

const SPEC: &str = r#"
[device]
twin = "qlc-nvme"
size = "256MiB"
[[vm]]
name = "a"
lab = "qemu"
[[vm.task]]
name = "light"
op = "read"
block = "4KiB"
rate = "100/s"
target = { percentile = "p99", latency = "2s" }
[[vm]]
name = "b"
lab = "qemu"
kernel = "rt"
[[vm.task]]
name = "writer"
op = "write"
block = "16KiB"
pattern = "sequential"
rate = "50/s"
"#;

#[test]
fn guests_run_their_tasks_and_a_dead_one_is_told() {
    let name = "guests_run_their_tasks_and_a_dead_one_is_told";
    if !can_run(name) {
        return;
    }
    let site = Site::new();
    let spec = site.write("two.toml", SPEC);
    // TCG: whether KVM works here is another test's question.
    site.ok(&["lab", "up", &spec, "--accel", "tcg"]);
    let (_, state) = site.json(&["lab", "status"]);
    let kernels: Vec<&str> = [0, 1].map(|i| state["vms"][i]["kernel"].as_str().unwrap()).to_vec();
    assert!(kernels[0].ends_with("-cloud-amd64") && kernels[1].ends_with("-rt-amd64"), "{kernels:?}");
    let (_, result) = site.json(&["lab", "run", "--for", "4s"]);
    assert_eq!(result["host"]["accelerator"], "tcg");
    assert!(result["host"]["vmm"].as_str().unwrap().starts_with("QEMU "), "{result:#}");
    let run = &result["runs"][0];
    assert_eq!(run["kind"], "qemu");
    for task in run["tasks"].as_array().unwrap() {
        assert!(task["n"].as_u64().unwrap() > 0, "{task:#}");
    }

    // A knob inside a guest goes through the same journal.
    let plan = serde_json::json!({
        "schema": "rtvirtio.plan.v1", "scheme": "by-hand", "model": "slice",
        "settings": [
            {"knob": {"guest_elevator": {"vm": "a"}}, "value": "bfq", "reason": "test", "strength": "hint"},
            {"knob": {"guest_bfq": {"vm": "a", "tunable": "slice_idle"}}, "value": "0", "reason": "test", "strength": "hint"},
            {"knob": {"vm_weight": {"vm": "b"}}, "value": "50", "reason": "test", "strength": "hint"},
        ],
        "tasks": [], "feasible": true, "infeasible": null, "evaluated": 0,
    });
    let plan_file = site.write("hand.plan", &plan.to_string());
    let args: [&str; 3] = [&plan_file, "--spec", &spec];
    let dry = site.ok(&[&["apply"], &args[..], &["--dry-run"]].concat());
    assert!(dry.contains("a:/sys/block/vda/queue/scheduler"), "{dry}");
    site.ok(&[&["apply"], &args[..]].concat());
    let (_, status) = site.json(&["status"]);
    assert_eq!(status["knobs"].as_array().unwrap().len(), 3, "{status:#}");
    let reverted = site.ok(&["revert"]);
    assert!(reverted.contains("everything was put back"), "{reverted}");

    // The same guest as users have theirs: found by its monitor, verified through its agent.
    let (_, state) = site.json(&["lab", "status"]);
    let guests = site.run_dir().join("guests");
    let socket = |name: &str| guests.join(name).display().to_string();
    let text_of_spec = format!(
        "[device]\npath = {}\n[[vm]]\nname = \"plant\"\nqmp = {:?}\nagent = {:?}\ndisk = \"/dev/vda\"\n[[vm.task]]\n\
         name = \"light\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"50/s\"\n",
        state["device"],
        socket("a.qmp"),
        socket("a.qga")
    );
    let existing = site.write("existing.toml", &text_of_spec);
    let weight = ["a", "b"]
        .iter()
        .fold(plan.to_string(), |text, vm| text.replace(&format!("\"vm\":\"{vm}\""), "\"vm\":\"plant\""));
    site.write("hand.plan", &weight);
    let dry = site.ok(&["apply", &plan_file, "--spec", &existing, "--dry-run"]);
    let cgroup = state["vms"][0]["cgroup"].as_str().unwrap();
    assert!(dry.contains(cgroup) && dry.contains("plant:/sys/block/vda/queue/scheduler"), "{dry}");
    let (_, result) = site.json(&["verify", &existing, "--for", "2s"]);
    assert!(result["runs"][0]["tasks"][0]["n"].as_u64().unwrap() > 0, "{result:#}");

    // One guest dies in the middle of a run.
    let (_, state) = site.json(&["lab", "status"]);
    let pid: i32 = state["vms"][1]["qemu"]["process"]["pid"].as_i64().unwrap().try_into().unwrap();
    let child = site.spawn(&["lab", "run", "--for", "30s"]);
    std::thread::sleep(Duration::from_secs(4));
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("vm b"), "{}", text(&out.stderr));
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn ctrl_c_while_guests_boot_leaves_nothing() {
    if !can_run("ctrl_c_while_guests_boot_leaves_nothing") {
        return;
    }
    let site = Site::new();
    let child = site.spawn(&["lab", "up", "examples/fig7.toml", "--accel", "tcg"]);
    wait_for("QEMU", || site.left_behind().iter().any(|l| l.contains("qemu-system")));
    signal(&child, Signal::INT);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    site.assert_clean();
}
