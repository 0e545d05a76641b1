//! Days that go wrong: VMs that die while they are taken in, a full disk for journals, many VMs at
//! once, a wall clock that jumps.

mod common;

use std::cmp::Ordering::{Greater, Less};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Plc, Rig, can_run};
use rtvirtio_testkit::site::{Random, number, wait_for};
use rtvirtio_testkit::{SmallDisk, skip};
use serde_json::Value;

#[test]
fn vms_that_die_at_any_moment_leave_nothing_and_disturb_no_other() {
    if !can_run("vms_that_die_at_any_moment_leave_nothing_and_disturb_no_other") {
        return;
    }
    let mut random = Random::new();
    println!("RTVIRTIO_SEED={}", random.seed());
    let mut rig = Rig::new();
    let (mut dying, steady) = (Plc::start(&rig, "dying"), Plc::start(&rig, "steady"));
    steady.contract(&rig, "4ms", "");
    dying.contract(&rig, "4ms", "");
    rig.start(&[]);
    rig.wait_state(&steady.name, "in_force");
    for _ in 0..8 {
        // From before it is seen to after it is in force.
        std::thread::sleep(Duration::from_secs_f64(0.5 * random.next()));
        dying.machine = None;
        dying.boot();
    }
    dying.machine = None;
    rig.wait_state(&dying.name, "off");
    wait_for("the group's end", || !dying.group().exists());
    assert_eq!(rig.vm(&steady.name)["state"], "in_force");
    let touched = |e: &Value| e["vm"] == steady.name.as_str() && e["kind"] == "failed";
    let failed: Vec<Value> = rig.events().into_iter().filter(touched).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    dying.boot();
    rig.wait_state(&dying.name, "in_force");
}

#[test]
fn without_room_for_the_journal_nothing_is_touched() {
    if !can_run("without_room_for_the_journal_nothing_is_touched") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    let before = plc.vcpus(&rig);
    let small = SmallDisk::mount(&rig.site.state_dir());
    rig.start(&[]);
    wait_for("the service", || rig.status()["pid"].is_number());
    small.fill();
    let spec = plc.spec(&rig, "4ms", "");
    let contracts = rig.contracts();
    let set =
        ["contract", "set", &plc.name, spec.to_str().unwrap(), "--contracts", contracts.to_str().unwrap()];
    // Written, and said to have failed where the service tries it in time.
    let code = rig.site.output(&set).status.code();
    assert!(matches!(code, Some(0 | 3)), "{code:?}");
    rig.wait_state(&plc.name, "failed");
    let why = rig.vm(&plc.name)["why"].as_str().unwrap().to_owned();
    assert!(why.contains("No space") || why.contains("free some space"), "{why}");
    assert_eq!((plc.vcpus(&rig), plc.group().exists()), (before.clone(), false));

    small.empty();
    rig.wait_state(&plc.name, "in_force");
    rig.contract(&["remove", &plc.name]);
    wait_for("the end of the contract", || !plc.group().exists());
    wait_for("the old policy", || plc.vcpus(&rig) == before);
    rig.kill();
    drop(small);
}

#[test]
fn many_vms_that_start_at_once_get_their_contracts() {
    if !can_run("many_vms_that_start_at_once_get_their_contracts") {
        return;
    }
    let n = number("RTVIRTIO_VMS", 64);
    let mut rig = Rig::new();
    rig.start(&[]);
    let vms: Vec<Plc> = (0..n).map(|i| Plc::start(&rig, &format!("m{i}"))).collect();
    // All contracts in one moment: in one file.
    let mut spec = "[device]\npath = \"/dev/sdz\"\n".to_owned();
    for vm in &vms {
        spec += &format!(
            "[[vm]]\nname = \"{}\"\nqmp = \"{}\"\ncpu = {{ budget = \"1ms\", period = \"100ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            vm.name,
            vm.qmp().display()
        );
    }
    fs::write(rig.contracts().join("all.toml"), spec).unwrap();
    wait_for("all contracts", || {
        let status = rig.status();
        let vms = status["vms"].as_array().cloned().unwrap_or_default();
        vms.len() == n as usize && vms.iter().all(|vm| vm["state"] == "in_force")
    });
    fs::remove_file(rig.contracts().join("all.toml")).unwrap();
    wait_for("their end", || vms.iter().all(|vm| !vm.group().exists()));
}

/// The library that shows a program another wall clock: Debian's package `libfaketime`.
fn faketime() -> Option<PathBuf> {
    let dirs = fs::read_dir("/usr/lib").ok()?.flatten();
    dirs.map(|dir| dir.path().join("faketime/libfaketimeMT.so.1")).find(|path| path.exists())
}

/// What libfaketime leaves in `/dev/shm` of a process that was killed; removed when this is
/// dropped.
#[derive(Default)]
struct FaketimeFiles(Option<u32>);

impl Drop for FaketimeFiles {
    fn drop(&mut self) {
        let Some(pid) = self.0 else { return };
        for name in [format!("faketime_shm_{pid}"), format!("sem.faketime_sem_{pid}")] {
            let _ = fs::remove_file(Path::new("/dev/shm").join(name));
        }
    }
}

#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    let test = "a_wall_clock_that_jumps_changes_nothing";
    if !can_run(test) {
        return;
    }
    let Some(library) = faketime() else { return skip(test, "libfaketime is not installed") };
    // Before the rig, so that it goes after the service.
    let mut files = FaketimeFiles::default();
    let mut rig = Rig::new();
    let mut plc = Plc::start(&rig, "plc");
    let clock = rig.site.dir.path().join("clock");
    fs::write(&clock, "+0\n").unwrap();
    fs::write(rig.config(), "compare = \"500ms\"\n").unwrap();
    plc.contract(&rig, "4ms", "");
    let mut command = rig.command(&[]);
    command
        .env("LD_PRELOAD", library)
        .env("FAKETIME_TIMESTAMP_FILE", &clock)
        .env("FAKETIME_NO_CACHE", "1")
        // Only the wall clock jumps, as on a host whose clock is set.
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("NO_FAKE_STAT", "1");
    rig.run(command);
    files.0 = rig.service.as_ref().map(|service| service.0.id());
    rig.wait_state(&plc.name, "in_force");
    let of_plc = |kinds: &[&str]| {
        let is_one = |e: &Value| e["vm"] == plc.name.as_str() && kinds.iter().any(|kind| e["kind"] == *kind);
        rig.events().into_iter().filter(is_one).count()
    };
    let before = of_plc(&["changed", "failed", "gone", "appeared"]);
    let broken = rig.contracts().join("broken.toml");
    // In UTC, so that text is ordered as time is.
    let last = || rig.events().last().unwrap()["time"].as_str().unwrap().to_owned();
    let mut time = last();
    for (jump, expected) in [("-1h", Less), ("+0", Greater), ("+1h", Greater), ("+0", Less)] {
        fs::write(&clock, format!("{jump}\n")).unwrap();
        let seen = rig.events().len();
        // An event shows which time it is there, and that the service still looks.
        fs::write(&broken, format!("[[vm]\n# {jump} {seen}\n")).unwrap();
        wait_for("the fault", || rig.status()["faults"].as_array().is_some_and(|all| all.len() == 1));
        fs::remove_file(&broken).unwrap();
        wait_for("no fault", || rig.status()["faults"].as_array().is_some_and(Vec::is_empty));
        let (before, now) = (std::mem::replace(&mut time, last()), last());
        assert_eq!(now.cmp(&before), expected, "{before} {jump}: {now}");
        assert_eq!(
            (rig.vm(&plc.name)["state"].as_str(), plc.budget().as_deref()),
            (Some("in_force"), Some("4000"))
        );
    }
    assert_eq!(of_plc(&["changed", "failed", "gone", "appeared"]), before, "{:#?}", rig.events());
    // Another hand is still noticed, by comparisons that are due by a clock that does not jump.
    fs::write(plc.group().join("cpu.rt_runtime_us"), "3000").unwrap();
    wait_for("the budget again", || plc.budget().as_deref() == Some("4000"));
    plc.machine = None;
    rig.wait_state(&plc.name, "off");
}
