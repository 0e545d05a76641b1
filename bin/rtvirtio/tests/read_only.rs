//! Commands that only look change nothing: no file and no directory is made, no module is loaded,
//! nothing is signalled.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

mod plane;

use plane::{Plane, differences};
use rtvirtio_testkit::site::{PROFILE, Site, text};
use rtvirtio_testkit::{Need, has};

/// Everything below a directory: kind, permissions, size, time of the last change and content.
fn tree(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(path) = open.pop() {
        let meta = path.symlink_metadata().unwrap();
        let content = if meta.is_file() { text(&fs::read(&path).unwrap()) } else { String::new() };
        let what =
            format!("{:o} {} {}.{} {content}", meta.mode(), meta.len(), meta.mtime(), meta.mtime_nsec());
        if meta.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        all.insert(path, what);
    }
    all
}

/// A program `modprobe` that notes that it was started.
fn watched_modprobe(site: &Site) -> (PathBuf, PathBuf) {
    let (bin, mark) = (site.dir.path().join("bin"), site.dir.path().join("modprobe-was-run"));
    fs::create_dir(&bin).unwrap();
    let program = bin.join("modprobe");
    fs::write(&program, format!("#!/bin/sh\necho \"$@\" >>'{}'\n", mark.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (bin, mark)
}

fn modules() -> String {
    // Without modules in the kernel there is no such file.
    let all = fs::read_to_string("/proc/modules").unwrap_or_default();
    let names = all.lines().filter_map(|l| l.split(' ').next());
    names.map(|name| format!("{name}\n")).collect()
}

/// Runs every command that only looks, and compares everything below the site's directory, and the
/// modules, before and after each.
fn look(site: &Site, commands: &[Vec<&str>]) {
    let (bin, mark) = watched_modprobe(site);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    for args in commands {
        for json in [&[][..], &["--json"]] {
            let (files, loaded) = (tree(site.dir.path()), modules());
            let mut command = site.command(&[args, json].concat());
            // A temporary file that is gone again still changes the times of its directory.
            let out = command.env("PATH", &path).env("TMPDIR", std::env::temp_dir()).output().unwrap();
            let said = text(&out.stderr);
            assert!(out.status.code().is_some_and(|code| code < 100), "{args:?}: {} {said}", out.status);
            let after = tree(site.dir.path());
            let differ: Vec<_> =
                files.keys().chain(after.keys()).filter(|p| files.get(*p) != after.get(*p)).collect();
            assert!(differ.is_empty(), "{args:?}: {differ:?}\n{said}");
            assert!(!mark.exists(), "{args:?} ran modprobe {}", fs::read_to_string(&mark).unwrap());
            assert_eq!(modules(), loaded, "{args:?}");
        }
    }
}

/// On a machine where nothing was ever applied: not even the directories come into being.
#[test]
fn commands_that_look_make_no_file_and_load_no_module() {
    let test = "commands_that_look_make_no_file_and_load_no_module";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let spec = &site.path("plane.toml");
    // A disk without a choice of elevators, as every one above a device mapper: BFQ is not among
    // them.
    let other =
        fs::read_to_string(spec).unwrap().replace(&format!("/dev/{}", plane.device.name), "/dev/zram0");
    let (zram, domain) = (&site.write("zram.toml", &other), site.domain_of_a_file());
    let domain = domain.to_str().unwrap();
    let before = plane.snapshot();
    let contracts = site.dir.path().to_str().unwrap();
    let commands = [
        vec!["status"],
        // The specs are contracts here, and no service keeps them.
        vec!["contract", "show", "--contracts", contracts],
        vec!["check"],
        vec!["iod", "status"],
        vec!["lab", "status"],
        vec!["threads", "1"],
        vec!["simulate", "examples/flood.toml", "--for", "1s"],
        vec!["fleet", "examples/fleet/fleet.toml"],
        vec!["predict", spec, "--profile", PROFILE],
        vec!["predict", spec],
        vec!["predict", zram, "--profile", PROFILE],
        vec!["plan", spec, "--profile", PROFILE],
        vec!["plan", zram, "--profile", PROFILE],
        vec!["plan", spec, "--domain", "--profile", PROFILE],
        vec!["apply", plane.plan(), "--dry-run"],
        vec!["apply", spec, "--profile", PROFILE, "--dry-run"],
        vec!["apply", zram, "--profile", PROFILE, "--dry-run"],
        vec!["apply", domain, "--dry-run"],
        // Nothing was applied, so nothing is there to be changed.
        vec!["revert"],
    ];
    look(&site, &commands);
    assert!(!site.state_dir().exists() && !site.run_dir().exists());
    assert_eq!(differences(&before, &plane.snapshot()), [""; 0]);
}

/// With settings and an I/O domain in force.
#[test]
fn commands_that_look_leave_what_is_in_force() {
    let test = "commands_that_look_leave_what_is_in_force";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let domain = site.domain_of_a_file();
    site.ok(&["apply", domain.to_str().unwrap()]);
    site.ok(&["apply", plane.plan()]);
    let in_force = plane.snapshot();
    let journal = fs::metadata(site.state_dir().join("journal.json")).unwrap();
    assert_eq!(journal.permissions().mode() & 0o777, 0o600, "it names what root has set");
    let spec = site.dir.path().join("plane.toml");
    let contracts = site.dir.path().to_str().unwrap();
    let commands = [
        vec!["status"],
        vec!["contract", "show", "--contracts", contracts],
        vec!["iod", "status"],
        vec!["predict", spec.to_str().unwrap(), "--profile", PROFILE],
        vec!["apply", plane.plan(), "--dry-run"],
        vec!["apply", domain.to_str().unwrap(), "--dry-run"],
    ];
    look(&site, &commands);
    assert_eq!(differences(&in_force, &plane.snapshot()), [""; 0]);
    site.ok(&["revert"]);
    drop(plane);
    site.assert_clean();
}

/// What cannot be read is not absent: neither a plan nor an I/O domain.
#[test]
fn an_error_is_not_read_as_absence() {
    let test = "an_error_is_not_read_as_absence";
    if !has(test, &[Need::Program("strace")]) {
        return;
    }
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let before = plane.snapshot();
    site.ok(&["apply", site.domain_of_a_file().to_str().unwrap()]);
    site.ok(&["apply", plane.plan()]);
    let in_force = plane.snapshot();
    let calls = "openat,statx,newfstatat,lstat,stat,open";
    let state = site.state_dir();
    for (error, path) in [
        ("EACCES", state.clone()),
        ("EIO", state.clone()),
        // strace compares these as the program gives them: relative to the open directory.
        ("EIO", PathBuf::from("journal.json")),
        ("EIO", PathBuf::from("iod.lock")),
    ] {
        for args in [vec!["revert", "--stop-domain"], vec!["status"]] {
            let traced = |inject: &str| {
                let mut command = Command::new("strace");
                command.args(["-f", "-qq", "-o", "/dev/null", "-P"]).arg(&path);
                command.args(["-e", inject]).arg(env!("CARGO_BIN_EXE_rtvirtio")).args(&args);
                command.env("RTVIRTIO_STATE_DIR", &state).env("RTVIRTIO_RUN_DIR", site.run_dir());
                command.current_dir(rtvirtio_testkit::site::project()).output().unwrap()
            };
            let out = traced(&format!("inject={calls}:error={error}"));
            let said = text(&out.stdout) + &text(&out.stderr);
            assert!(!out.status.success(), "{args:?} with {error} at {}: {said}", path.display());
            for claim in
                ["everything was put back", "nothing to put back", "no plan is in force", "NOT RUNNING"]
            {
                assert!(!said.contains(claim), "{args:?} with {error} at {}: {said}", path.display());
            }
            // The part that could be reached may be back: all is applied anew, for the next one.
            let (_, now) = site.json(&["status"]);
            if now["domain"].is_null() {
                site.ok(&["apply", site.dir.path().join("file.toml").to_str().unwrap()]);
            }
            if now["knobs"].is_null() {
                site.ok(&["apply", plane.plan()]);
            }
            assert_eq!(differences(&in_force, &plane.snapshot()), [""; 0]);
        }
    }
    assert!(site.ok(&["revert"]).contains("everything was put back"));
    assert_eq!(differences(&before, &plane.snapshot()), [""; 0]);
    drop(plane);
    site.assert_clean();
}

/// A plan that sets nothing leaves nothing in force: no journal stands in the way of the next one.
#[test]
fn an_empty_plan_leaves_nothing_in_force() {
    let test = "an_empty_plan_leaves_nothing_in_force";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let before = plane.snapshot();
    let mut plan: serde_json::Value = serde_json::from_slice(&fs::read(plane.plan()).unwrap()).unwrap();
    plan["settings"] = serde_json::json!([]);
    let out = site.output(&["apply", &site.write("empty.json", &plan.to_string())]);
    let said = text(&out.stderr);
    assert!(out.status.success() && said.contains("nothing to set"), "{said}");
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    assert!(!site.state_dir().join("journal.json").exists());
    site.ok(&["apply", plane.plan()]);
    assert!(site.ok(&["revert"]).contains("everything was put back"));
    assert_eq!(differences(&before, &plane.snapshot()), [""; 0]);
    drop(plane);
    site.assert_clean();
}
