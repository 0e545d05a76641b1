//! What is installed beside the program: the unit, and the hooks of libvirt and Proxmox VE.

mod common;

use std::fs;
use std::process::{Command, Stdio};

use common::{Rig, output_text};
use rtvirtio_testkit::site::{program, project};
use rtvirtio_testkit::{Need, has};

#[test]
fn the_unit_is_understood_and_little_exposed() {
    let test = "the_unit_is_understood_and_little_exposed";
    if !has(test, &[Need::Program("systemd-analyze")]) {
        return;
    }
    let rig = Rig::new();
    let unit = fs::read_to_string(project().join("packaging/systemd/rtvirtiod.service")).unwrap();
    // The program and its manual are not installed here.
    let unit = unit
        .replace("/usr/bin/rtvirtiod", program("rtvirtiod").to_str().unwrap())
        .replace("man:rtvirtiod(8) ", "");
    let file = rig.site.dir.path().join("rtvirtiod.service");
    fs::write(&file, unit).unwrap();
    let analyze = |args: &[&str]| Command::new("systemd-analyze").args(args).arg(&file).output().unwrap();
    let out = analyze(&["verify", "--man=no"]);
    assert!(out.status.success() && out.stderr.is_empty(), "{}", output_text(&out));
    // In tenths: 5.0 of 10.
    let out = analyze(&["security", "--offline=true", "--threshold=50"]);
    assert!(out.status.success(), "{}", output_text(&out));
}

#[test]
fn hooks_end_with_0_whatever_happens() {
    if !has("hooks_end_with_0_whatever_happens", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    let hook = |rig: &Rig, file: &str, args: &[&str]| {
        let out = Command::new("sh")
            .arg(project().join("packaging").join(file))
            .args(args)
            .env("RTVIRTIO_RUN_DIR", rig.site.run_dir())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(
            out.status.success() && output_text(&out).is_empty(),
            "{file} {args:?}: {}",
            output_text(&out)
        );
    };
    let all = |rig: &Rig| {
        for event in
            ["prepare", "start", "started", "stopped", "release", "reconnect", "migrate", "restore", ""]
        {
            hook(rig, "libvirt/rtvirtio", &["plc", event, "begin", "-"]);
        }
        for event in ["pre-start", "post-start", "pre-stop", "post-stop"] {
            hook(rig, "proxmox/rtvirtio-hook.sh", &["100", event]);
        }
    };
    // Without a service, with one, and with a socket that nothing serves any more.
    all(&rig);
    rig.start(&[]);
    all(&rig);
    rig.kill();
    assert!(rig.socket().exists());
    all(&rig);
}
