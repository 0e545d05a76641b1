//! The service and the I/O domain under a real systemd, which is the first process of a container
//! that looks like this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rtvirtio_testkit::site::{program, project, text};
use rtvirtio_testkit::{Need, has, skip};

const CHECK: &str = include_str!("systemd/check.sh");
const CHECK_DISKS: &str = include_str!("systemd/disks.sh");
const CHECK_UNIT: &str = include_str!("systemd/check.service");
const BOOT: &str = include_str!("systemd/boot.sh");

/// Where systemd keeps the cgroups of its units: cgroup v2, or on hosts with v1 both of these.
const HIERARCHIES: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"];

/// A cgroup in each of them, removed with all below it.
struct Cgroups(Vec<PathBuf>);

impl Cgroups {
    fn new() -> Self {
        let is_there = |dir: &&&str| Path::new(dir).join("cgroup.procs").exists();
        let name = rtvirtio_testkit::unique("systemd");
        let dirs: Vec<PathBuf> =
            HIERARCHIES.iter().filter(is_there).map(|dir| Path::new(dir).join(&name)).collect();
        dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        Self(dirs)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for dir in &self.0 {
            let _ = Command::new("find")
                .arg(dir)
                .args(["-depth", "-type", "d", "-exec", "rmdir", "{}", ";"])
                .status();
        }
    }
}

#[test]
fn the_service_starts_says_so_is_restarted_and_stops() {
    let test = "the_service_starts_says_so_is_restarted_and_stops";
    let programs = ["systemd-nspawn", "unshare", "curl"].map(Need::Program);
    if !has(test, &[&[Need::Root, Need::QEMU][..], &programs].concat()) {
        return;
    }
    let cgroups = Cgroups::new();
    if cgroups.0.is_empty() {
        return skip(test, "no hierarchy of cgroups that systemd could use is mounted");
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (files, mounts) = (dir.path().join("files"), dir.path().join("mounts"));
    fs::create_dir(&files).unwrap();
    fs::create_dir(&mounts).unwrap();
    for (name, content) in [("check.sh", CHECK), ("disks.sh", CHECK_DISKS), ("check.service", CHECK_UNIT)] {
        fs::write(files.join(name), content).unwrap();
    }
    let packaging = project().join("packaging");
    for unit in ["rtvirtiod.service", "rtvirtio-iod.service", "rtvirtio-iod@.service"] {
        fs::copy(packaging.join("systemd").join(unit), files.join(unit)).unwrap();
    }
    fs::copy(packaging.join("sysusers/rtvirtio.conf"), files.join("rtvirtio.conf")).unwrap();
    for name in ["rtvirtio", "rtvirtiod", "rtvirtio-iod"] {
        fs::copy(program(name), files.join(name)).unwrap();
    }
    let out = Command::new("timeout")
        .args(["--kill-after=10", "180", "unshare", "--mount", "sh", "-c", BOOT, "sh"])
        .args([&mounts, &files])
        .args(&cgroups.0)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let checked = fs::read_to_string(files.join("output")).unwrap_or_default();
    assert!(
        checked.contains("all is as it should be"),
        "{checked}\n{:?}\n{}{}",
        out.status,
        text(&out.stdout),
        text(&out.stderr)
    );
    let left = cgroups.0.clone();
    drop(cgroups);
    assert!(left.iter().all(|dir| !dir.exists()), "{left:?}");
}
