//! The whole loop on process VMs: up, profile, verify, plan, apply, verify, revert, down; and what
//! crashes leave.

use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_testkit::site::{PROFILE, Site, can_run, signal, text, wait_for};
use rustix::process::Signal;
use serde_json::Value;

const SPEC: &str = "examples/fig7-process.toml";

/// Brings the lab up and gives its state.
fn lab_up(site: &Site) -> Value {
    site.ok(&["lab", "up", SPEC]);
    site.json(&["lab", "status"]).1
}

fn queue_of(device: &str) -> PathBuf {
    Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("queue")
}

fn queue_settings(device: &str) -> Vec<(String, String)> {
    let queue = queue_of(device);
    let names = ["scheduler", "nr_requests", "async_depth", "wbt_lat_usec"];
    let mut files: Vec<_> = names.iter().map(|name| queue.join(name)).collect();
    if let Ok(entries) = fs::read_dir(queue.join("iosched")) {
        files.extend(entries.flatten().map(|e| e.path()));
    }
    files.sort();
    files.iter().map(|f| (f.display().to_string(), fs::read_to_string(f).unwrap_or_default())).collect()
}

#[test]
fn the_whole_loop() {
    if !can_run("the_whole_loop") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", SPEC]);
    let again = site.output(&["lab", "up", SPEC]);
    assert!(text(&again.stderr).contains("lab is up already"), "{}", text(&again.stderr));
    assert!(!text(&again.stderr).contains("could be removed"), "{}", text(&again.stderr));
    let none = site.output(&["verify", SPEC, "--for", "0s"]);
    assert!(text(&none.stderr).contains("--for: at least 1ms"), "{}", text(&none.stderr));
    let (_, state) = site.json(&["lab", "status"]);
    let device = state["device"].as_str().unwrap().to_owned();

    site.ok(&["profile", SPEC, "--for", "22s"]);
    let before = queue_settings(&device);
    let (_, outlook) = site.json(&["predict", SPEC]);
    assert_eq!(outlook.as_array().unwrap().len(), 6);
    let plan_arg = &site.path("a.plan");
    // On a busy machine the measured profile may carry no plan; that of a quiet one does.
    let (code, plan) = site.json(&["plan", SPEC, "-o", plan_arg, "--profile", PROFILE]);
    assert_eq!((code, &plan["feasible"]), (0, &true.into()), "{plan:#}");
    assert!(!plan["devices"][0]["plan"]["settings"].as_array().unwrap().is_empty());

    let dry = site.ok(&["apply", plan_arg, "--dry-run"]);
    assert!(dry.lines().all(|l| l.contains(": ") && l.contains(" -> ")), "{dry}");
    assert_eq!(queue_settings(&device), before, "a dry run changes nothing");

    site.ok(&["apply", plan_arg]);
    assert_ne!(queue_settings(&device), before);
    let (_, status) = site.json(&["status"]);
    let in_force = |k: &Value| k["state"]["state"] == "in_force" || k["state"] == "in_force";
    assert!(status["knobs"].as_array().unwrap().iter().all(in_force), "{status:#}");
    let twice = site.output(&["apply", plan_arg, "--spec", SPEC]);
    assert!(text(&twice.stderr).contains("rtvirtio revert"), "{}", text(&twice.stderr));

    let (result_file, html) = (site.path("result.json"), site.path("r.html"));
    let files = ["-o", &result_file, "--html", &html];
    let (_, result) = site.json(&[&["verify", SPEC, "--for", "3s"][..], &files].concat());
    assert_eq!(result["schema"], "rtvirtio.result.v1");
    assert_eq!(result["runs"][0]["kind"], "process");
    assert_eq!(result["runs"][0]["scheme"], plan["devices"][0]["plan"]["scheme"]);
    let tasks = result["runs"][0]["tasks"].as_array().unwrap();
    assert_eq!(tasks.len(), 6);
    for task in tasks {
        let keys = "vm task target_ns declared_rate achieved_rate n p50_ns p99_ns p9999_ns max_ns predicted_ns verdict";
        for key in keys.split(' ') {
            assert!(!task[key].is_null(), "{key} in {task:#}");
        }
        assert!(task["n"].as_u64().unwrap() > 0);
        // Three seconds cannot prove a p99.99.
        assert_ne!(task["verdict"], "met");
    }
    assert!(fs::read_to_string(&html).unwrap().starts_with("<!DOCTYPE html>"));
    let saved: serde_json::Value = serde_json::from_slice(&fs::read(&result_file).unwrap()).unwrap();
    assert_eq!(saved, result);

    site.ok(&["revert"]);
    assert_eq!(queue_settings(&device), before, "revert restores every byte");
    assert!(site.ok(&["revert"]).contains("nothing to put back"));
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn a_lab_killed_on_its_way_up_is_removed() {
    if !can_run("a_lab_killed_on_its_way_up_is_removed") {
        return;
    }
    // Later and later: before, between and after its parts are made.
    for delay_ms in [0, 5, 20, 40, 60, 90] {
        let site = Site::new();
        let mut child = site.spawn(&["lab", "up", SPEC]);
        wait_for("the lab's state file", || {
            site.run_dir().join("lab.json").exists() || child.try_wait().unwrap().is_some()
        });
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        let _ = child.kill();
        let _ = child.wait();
        site.ok(&["lab", "down"]);
        // A twin's process that `lab up` had no time to write down ends by itself, at once.
        wait_for("the end of everything", || site.left_behind().is_empty());
        site.assert_clean();
    }
}

#[test]
fn ctrl_c_during_a_run_leaves_the_lab_usable() {
    if !can_run("ctrl_c_during_a_run_leaves_the_lab_usable") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", SPEC]);
    let child = site.spawn(&["lab", "run", "--for", "60s"]);
    wait_for("fio", || site.left_behind().iter().any(|l| l.contains("job.fio")));
    signal(&child, Signal::INT);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    wait_for("the end of fio", || !site.left_behind().iter().any(|l| l.contains("job.fio")));
    let (_, result) = site.json(&["lab", "run", "--for", "1s"]);
    assert_eq!(result["runs"][0]["tasks"].as_array().unwrap().len(), 6);
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

/// The measurement takes another elevator than the lab's; killed in the middle, it leaves a journal
/// and not a changed device.
#[test]
fn a_killed_profile_is_put_back_by_revert() {
    if !can_run("a_killed_profile_is_put_back_by_revert") {
        return;
    }
    let site = Site::new();
    let state = lab_up(&site);
    let device = state["device"].as_str().unwrap().to_owned();
    let queue = queue_of(&device);
    // Lost with a change of the elevator, unless somebody remembers it.
    fs::write(queue.join("iosched/slice_idle"), "3").unwrap();
    let before = queue_settings(&device);
    let mut child = site.spawn(&["profile", SPEC]);
    wait_for("another elevator", || fs::read_to_string(queue.join("scheduler")).unwrap().contains("[none]"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_ne!(queue_settings(&device), before);
    let again = site.refused(&["profile", SPEC]);
    assert!(again.contains("rtvirtio revert"), "{again}");
    site.ok(&["revert"]);
    assert_eq!(queue_settings(&device), before);
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn a_vanished_cgroup_is_a_clear_error() {
    if !can_run("a_vanished_cgroup_is_a_clear_error") {
        return;
    }
    let site = Site::new();
    let state = lab_up(&site);
    let vm1 = state["vms"][1]["cgroup"].as_str().unwrap();
    let dir = ["/sys/fs/cgroup/blkio", "/sys/fs/cgroup"]
        .iter()
        .map(|root| Path::new(root).join(vm1.trim_start_matches('/')))
        .find(|d| d.exists())
        .unwrap();
    fs::remove_dir(&dir).unwrap();
    let out = site.output(&["lab", "run", "--for", "1s"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1));
    assert!(said.contains("vm1") && said.contains("cgroup"), "{said}");
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn a_small_demo_leaves_nothing_also_after_ctrl_c() {
    if !can_run("a_small_demo_leaves_nothing_also_after_ctrl_c") {
        return;
    }
    let site = Site::new();
    let out_dir = site.dir.path().join("out");
    let args = ["lab", "demo", SPEC, "--for", "3s", "--out", out_dir.to_str().unwrap()];
    let child = site.spawn(&args);
    wait_for("the first run", || site.left_behind().iter().any(|l| l.contains("job.fio")));
    signal(&child, Signal::INT);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    site.assert_clean();
    assert!(!out_dir.exists());

    let out = site.output(&args);
    // 2: a busy machine may miss a target; the demo itself has worked all the same.
    assert!(matches!(out.status.code(), Some(0 | 2)), "{}\n{}", text(&out.stdout), text(&out.stderr));
    let result: serde_json::Value =
        serde_json::from_slice(&fs::read(out_dir.join("result.json")).unwrap()).unwrap();
    let schemes: Vec<_> = result["runs"].as_array().unwrap().iter().map(|r| r["scheme"].clone()).collect();
    assert_eq!(schemes, ["default-bfq", "slice"]);
    assert!(fs::metadata(out_dir.join("report.html")).unwrap().len() > 10_000);
    site.assert_clean();
}

/// A spec on a file that the lab makes at `path`.
fn on_a_file(site: &Site, path: &Path) -> String {
    let text = format!(
        "[device]\nfile = {:?}\nsize = \"64MiB\"\n[[vm]]\nname = \"a\"\nlab = \"process\"\n\
         [[vm.task]]\nname = \"t\"\nop = \"write\"\nblock = \"4KiB\"\nrate = \"100/s\"\n",
        path.display().to_string()
    );
    site.write("own-disk.toml", &text)
}

#[test]
fn a_file_stands_for_a_disk_and_goes_with_the_lab() {
    if !can_run("a_file_stands_for_a_disk_and_goes_with_the_lab") {
        return;
    }
    let site = Site::new();
    let path = site.dir.path().join("disk.img");
    let spec = on_a_file(&site, &path);
    site.ok(&["lab", "up", &spec]);
    let device = site.json(&["lab", "status"]).1["device"].as_str().unwrap().to_owned();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), 64 << 20);
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 >= 64 << 20, "no holes");
    let loop_of = |file: &str| {
        fs::read_to_string(queue_of(&device).parent().unwrap().join("loop").join(file)).unwrap_or_default()
    };
    assert_eq!(loop_of("backing_file").trim(), path.to_str().unwrap());
    // The lab has made the file, so a task may write to it without --destroy-data. On a busy host
    // a first request may take longer than one run.
    let verified = |seconds| site.json(&["verify", &spec, "--for", seconds]).1;
    let mut result = verified("1s");
    if result["runs"][0]["tasks"][0]["n"] == 0 {
        result = verified("10s");
    }
    assert!(result["runs"][0]["tasks"][0]["n"].as_u64().unwrap() > 0, "{result:#}");
    assert!(result["runs"][0]["disk"]["n"].as_u64().unwrap() > 0, "the disk was watched: {result:#}");
    site.ok(&["lab", "down"]);
    assert!(!path.exists());
    assert_eq!(loop_of("backing_file"), "");
    // A file that is there already is not touched.
    fs::write(&path, "precious").unwrap();
    let refused = site.output(&["lab", "up", &spec]);
    assert!(text(&refused.stderr).contains("exists already"), "{}", text(&refused.stderr));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    site.assert_clean();
}

#[test]
fn a_lab_killed_while_it_writes_its_file_is_removed() {
    if !can_run("a_lab_killed_while_it_writes_its_file_is_removed") {
        return;
    }
    let site = Site::new();
    let path = site.dir.path().join("disk.img");
    let spec = on_a_file(&site, &path);
    let mut up = site.spawn(&["lab", "up", &spec]);
    wait_for("the file", || path.exists());
    signal(&up, Signal::KILL);
    up.wait().unwrap();
    site.ok(&["lab", "down"]);
    assert!(!path.exists());
    site.assert_clean();
}
