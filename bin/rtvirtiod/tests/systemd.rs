//! The service under a real systemd: the first process of a container that looks like this machine.

use std::fs;
use std::process::{Command, Stdio};

use rtvirtio_testkit::site::{program, project, text};
use rtvirtio_testkit::{Need, has};

const CHECK: &str = include_str!("systemd/check.sh");
const CHECK_UNIT: &str = include_str!("systemd/check.service");
const BOOT: &str = include_str!("systemd/boot.sh");

#[test]
fn the_service_starts_says_so_is_restarted_and_stops() {
    let test = "the_service_starts_says_so_is_restarted_and_stops";
    if !has(test, &[Need::Root, Need::Program("systemd-nspawn"), Need::Program("unshare")]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (files, mounts) = (dir.path().join("files"), dir.path().join("mounts"));
    fs::create_dir(&files).unwrap();
    fs::create_dir(&mounts).unwrap();
    for (name, content) in [("check.sh", CHECK), ("check.service", CHECK_UNIT)] {
        fs::write(files.join(name), content).unwrap();
    }
    let packaging = project().join("packaging");
    fs::copy(packaging.join("systemd/rtvirtiod.service"), files.join("rtvirtiod.service")).unwrap();
    fs::copy(packaging.join("sysusers/rtvirtio.conf"), files.join("rtvirtio.conf")).unwrap();
    for name in ["rtvirtio", "rtvirtiod"] {
        fs::copy(program(name), files.join(name)).unwrap();
    }
    let out = Command::new("timeout")
        .args(["--kill-after=10", "180", "unshare", "--mount", "sh", "-c", BOOT, "sh"])
        .args([&mounts, &files])
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
}
