//! The plan that the service makes from contracts, and holds: on a real disk and real QEMU
//! processes, with a profile that was measured elsewhere.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use common::disk::Disk;
use common::{Plc, Rig};
use rtvirtio_testkit::site::{text, wait_for};
use rtvirtio_testkit::{HANG, Need, has};
use serde_json::Value;

/// A drive's profile, taken for the loop device's.
const PROFILE: &str = include_str!("../../../control/learn/data/qlc-nvme.profile.json");

/// A controller with a target, and a neighbour that reads as fast as it can.
struct PlannedHost {
    plc: Plc,
    hist: Plc,
    disk: Disk,
    rig: Rig,
}

impl PlannedHost {
    fn new(test: &str, config: &str) -> Option<Self> {
        Self::faster(test, config, 1.0)
    }

    /// With the profile of a drive that is so many times as fast.
    fn faster(test: &str, config: &str, times: f64) -> Option<Self> {
        let rig = Rig::new();
        let disk = Disk::new(test, &rig)?;
        measured(&rig, &disk, times);
        let (plc, hist) = (Plc::start(&rig, "plc"), Plc::start(&rig, "hist"));
        disk.place(&plc, 1);
        disk.place(&hist, 1);
        let plant = Self { plc, hist, disk, rig };
        plant.configure(config);
        let target = (12_000.0 / times) as u64;
        plant.contract(&plant.plc, &format!("rate = \"200/s\"\ntarget = {{ latency = \"{target}us\" }}"));
        plant.contract(&plant.hist, "depth = 32");
        Some(plant)
    }

    fn configure(&self, config: &str) {
        fs::write(self.rig.config(), format!("compare = \"200ms\"\n{config}")).unwrap();
    }

    fn contract(&self, vm: &Plc, task: &str) {
        self.contract_on(&self.disk, vm, task);
    }

    fn contract_on(&self, disk: &Disk, vm: &Plc, task: &str) {
        let text = format!(
            "[device]\npath = \"/dev/{}\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n{task}\n",
            disk.device.name,
            vm.name,
            vm.qmp().display()
        );
        // Whole at once: half a file would be a mistake of its own.
        let new = self.rig.site.dir.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.rig.contracts().join(format!("{}.toml", vm.name))).unwrap();
    }

    fn plan(&self) -> Value {
        self.rig.status()["plan"].clone()
    }

    fn wait_plan(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let begin = std::time::Instant::now();
        loop {
            let plan = self.plan();
            if is_so(&plan) {
                return plan;
            }
            assert!(begin.elapsed() < HANG, "{what}: {plan:#}\n{}", self.rig.log());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn wait_state(&self, state: &str) -> Value {
        self.wait_plan(state, |plan| plan["state"] == state)
    }

    /// The limit that the plan gives the neighbour.
    fn limit(&self, start: u32) -> Option<u64> {
        self.disk.settings(&self.hist, start).1
    }

    fn restart_hist(&mut self, start: u32) {
        self.hist.machine = None;
        self.hist.boot();
        self.disk.place(&self.hist, start);
    }

    /// Events of this kind whose text has these words.
    fn events(&self, kind: &str, words: &str) -> Vec<Value> {
        let all = self.rig.events().into_iter();
        all.filter(|e| e["kind"] == kind && e["text"].as_str().is_some_and(|t| t.contains(words))).collect()
    }
}

/// Gives a disk a profile; returns its file.
fn measured(rig: &Rig, disk: &Disk, times: f64) -> PathBuf {
    let profiles = rig.site.state_dir().join("profiles");
    fs::create_dir_all(&profiles).unwrap();
    let mut profile: Value = serde_json::from_str(PROFILE).unwrap();
    speed_up(&mut profile, times);
    profile["device"] = disk.device.name.clone().into();
    let path = profiles.join(format!("{}.json", disk.device.name));
    fs::write(&path, profile.to_string()).unwrap();
    path
}

fn speed_up(profile: &mut Value, times: f64) {
    match profile {
        Value::Array(all) => all.iter_mut().for_each(|one| speed_up(one, times)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value.as_f64()) {
                    ("iops", Some(rate)) => *value = (rate * times).into(),
                    ("p50" | "p99" | "p9999" | "max", Some(ns)) => *value = ((ns / times) as u64).into(),
                    _ => speed_up(value, times),
                }
            }
        }
        _ => {}
    }
}

#[test]
fn a_device_that_is_slower_than_it_was_measured_is_planned_for() {
    let test = "a_device_that_is_slower_than_it_was_measured_is_planned_for";
    let config = "observe = \"200ms\"\n[plan]\nevery = \"1s\"\nconfirm = \"1s\"\n";
    // Requests of a loop device take more than 3 us; the profile says so of none.
    let Some(mut plant) = PlannedHost::faster(test, config, 50.0) else { return };
    plant.rig.start(&[]);
    plant.wait_state("in_force");
    let stop = AtomicBool::new(false);
    let path = format!("/dev/{}", plant.disk.device.name);
    std::thread::scope(|scope| {
        // One request after the other, past the page cache.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let mut dd = Command::new("dd");
                dd.arg(format!("if={path}")).args(["of=/dev/null", "bs=4k", "iflag=direct", "status=none"]);
                assert!(dd.status().unwrap().success());
            }
        });
        let _end = End(&stop);
        // Where the new plan would hurt, it waits with the same reason.
        plant.wait_plan("a plan for the slower device", |plan| {
            let says = |of: &Value| of.as_str().is_some_and(|text| text.contains("times as long"));
            says(&plan["assumes"]) || says(&plan["proposal"]["reason"])
        });
    });
    plant.rig.kill();
    plant.rig.site.ok(&["revert"]);
    drop(plant);
}

/// Ends the load also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn contracts_hold_a_plan_through_other_hands_restarts_and_kills() {
    let test = "contracts_hold_a_plan_through_other_hands_restarts_and_kills";
    let Some(mut plant) = PlannedHost::new(test, "[plan]\n") else { return };
    plant.rig.start(&[]);
    let plan = plant.wait_state("in_force");
    assert_eq!(plan["vms"].as_array().unwrap().len(), 2, "{plan}");
    let limit = plant.limit(1).unwrap_or_else(|| panic!("no limit: {plan:#}\n{}", plant.rig.log()));
    let set = plant.events("changed", "plan put in force");
    assert!(set.len() == 1 && !set[0]["changes"].as_array().unwrap().is_empty(), "{set:?}");
    assert_eq!(plant.rig.site.output(&["status"]).status.code(), Some(0));

    // Another hand, and a plan by hand.
    plant.disk.set_limit(&plant.hist, 1, limit + 7);
    wait_for("the limit again", || plant.limit(1) == Some(limit));
    let spec = plant.rig.contracts().join(format!("{}.toml", plant.hist.name));
    let device = format!("/dev/{}", plant.disk.device.name);
    let port = format!("{}=/nowhere/port", plant.hist.name);
    let spec = spec.to_str().unwrap();
    // The device's settings would be measured, and a raised weight would be set again.
    for against in [&["apply", spec][..], &["profile", &device, "--yes"], &["starts", spec, "--port", &port]]
    {
        let refused = plant.rig.site.output(against);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("rtvirtiod holds a plan"), "{against:?}: {said}");
    }

    // Another start, in another cgroup as libvirt makes one; and the service killed meanwhile.
    plant.rig.kill();
    plant.restart_hist(2);
    plant.rig.start(&[]);
    wait_for("the limit of the new start", || plant.limit(2) == Some(limit));
    plant.wait_state("in_force");
    assert_eq!(plant.events("changed", "plan put in force").len(), 1, "not planned anew");

    // Other contracts are another plan, in place of the one that is in force.
    plant.contract(&plant.plc, "rate = \"2000/s\"\ntarget = { latency = \"4ms\" }");
    wait_for("another limit", || plant.limit(2).is_some_and(|now| now != limit));
    plant.wait_state("in_force");
    assert_eq!(plant.events("changed", "the contracts were changed").len(), 1);

    // Their end puts all of it back. While the service holds it, `revert` says so.
    let kept = plant.rig.site.output(&["revert"]);
    assert_eq!(kept.status.code(), Some(3), "{}", text(&kept.stdout));
    for vm in [&plant.plc, &plant.hist] {
        fs::remove_file(plant.rig.contracts().join(format!("{}.toml", vm.name))).unwrap();
    }
    wait_for("the end of the plan", || plant.limit(2).is_none());
    assert_eq!((plant.disk.settings(&plant.plc, 1), plant.disk.elevator().as_str()), ((None, None), "none"));

    // Killed while it is in force, it is put back by hand.
    plant.contract(&plant.plc, "rate = \"200/s\"\ntarget = { latency = \"12ms\" }");
    plant.contract(&plant.hist, "depth = 32");
    wait_for("the plan", || plant.limit(2) == Some(limit));
    plant.rig.kill();
    plant.rig.site.ok(&["revert"]);
    assert_eq!((plant.limit(2), plant.disk.elevator().as_str()), (None, "none"));
    drop(plant);
}

#[test]
fn a_plan_waits_where_it_is_asked_for_and_each_policy_holds() {
    let test = "a_plan_waits_where_it_is_asked_for_and_each_policy_holds";
    if !has(test, &[Need::Root]) {
        return;
    }
    let ask = "[plan]\nmode = \"ask\"\n[drift]\nlimit = \"report\"\n";
    let Some(mut plant) = PlannedHost::new(test, ask) else { return };
    plant.rig.start(&[]);
    let plan = plant.wait_state("waiting");
    assert!(!plan["proposal"]["changes"].as_array().unwrap().is_empty(), "{plan:#}");
    assert_eq!(plant.limit(1), None);
    let (code, shown) = plant.rig.site.json(&["contract", "plan"]);
    assert_eq!((code, &shown["proposal"]), (3, &plan["proposal"]));
    assert_eq!(plant.events("waiting", "rtvirtio contract plan").len(), 1);
    plant.rig.site.ok(&["contract", "plan", "accept"]);
    plant.wait_state("in_force");
    let limit = plant.limit(1).unwrap();
    assert!(!plant.rig.site.output(&["contract", "plan", "refuse"]).status.success(), "none waits");

    // `report`: it is said, and left.
    plant.disk.set_limit(&plant.hist, 1, limit + 7);
    let plan = plant.wait_state("drift");
    assert_eq!(plan["drift"][0]["found"], (limit + 7).to_string());
    assert_eq!(plant.limit(1), Some(limit + 7));

    // `yield`: it is no longer kept, and the next start has it no more. What was accepted before is
    // not asked for again.
    plant.rig.kill();
    plant.configure(&ask.replace("report", "yield"));
    plant.rig.start(&[]);
    let plan = plant.wait_plan("left", |plan| plan["yielded"].as_array().is_some_and(|all| all.len() == 1));
    assert_eq!((plan["state"].as_str(), plant.limit(1)), (Some("in_force"), Some(limit + 7)));
    plant.restart_hist(2);
    wait_for("the new start in the plan", || !plant.events("changed", "the VM was restarted").is_empty());
    assert_eq!((plant.limit(2), plant.plan()["state"].as_str()), (None, Some("in_force")));
    plant.rig.kill();
    plant.rig.site.ok(&["revert"]);
    drop(plant);
}

#[test]
fn a_device_without_a_profile_does_not_block_the_others() {
    let test = "a_device_without_a_profile_does_not_block_the_others";
    let Some(mut plant) = PlannedHost::new(test, "[plan]\n") else { return };
    let Some(bare) = Disk::of_file(test, &plant.rig, "bare.img") else { return };
    let other = Plc::start(&plant.rig, "other");
    bare.place(&other, 1);
    plant.contract_on(&bare, &other, "rate = \"200/s\"\ntarget = { latency = \"12ms\" }");
    plant.rig.start(&[]);
    let plan = plant.wait_state("partial");
    let limit = plant.limit(1).unwrap_or_else(|| panic!("no limit: {plan:#}\n{}", plant.rig.log()));
    let device = format!("/dev/{}", bare.device.name);
    let remedy = format!("rtvirtio profile {device}");
    assert_eq!(plan["unplanned"][0]["device"], device.as_str());
    assert_eq!(plan["unplanned"][0]["remedy"], remedy.as_str());
    assert_eq!(
        (plan["vms"].as_array().unwrap().len(), plan["unplanned"][0]["vms"].as_array().unwrap().len()),
        (2, 1)
    );
    assert_eq!(plant.rig.vm(&other.name)["state"], "unplanned");
    let shown = plant.rig.site.output(&["contract", "plan"]);
    assert_eq!(shown.status.code(), Some(3));
    assert!(text(&shown.stdout).contains(&remedy), "{}", text(&shown.stdout));
    assert_eq!(plant.events("failed", &remedy).len(), 1);

    // It is measured: it is planned for, and the others keep what they have.
    let profile = measured(&plant.rig, &bare, 1.0);
    let plan = plant.wait_state("in_force");
    assert_eq!((plan["vms"].as_array().unwrap().len(), plant.limit(1)), (3, Some(limit)));
    assert_eq!(plant.rig.site.output(&["status"]).status.code(), Some(0));

    // The profile vanishes, and with it what was promised; not what was set.
    fs::remove_file(profile).unwrap();
    let plan = plant.wait_state("partial");
    assert_eq!((&plan["unplanned"][0]["is_held"], plant.limit(1)), (&Value::from(true), Some(limit)));
    plant.rig.kill();
    plant.rig.site.ok(&["revert"]);
    assert_eq!(
        (plant.limit(1), plant.disk.elevator().as_str(), bare.elevator().as_str()),
        (None, "none", "none")
    );
    drop(other);
    drop(bare);
    drop(plant);
}
