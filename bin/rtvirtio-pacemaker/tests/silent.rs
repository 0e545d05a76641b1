//! The resource agent with a monitor that takes connections and never answers.

use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;

use rtvirtio_testkit::{LoopDevice, Need, has, skip, tempdir};

const TEST: &str = "a_silent_monitor_is_waited_for_within_the_calls_time";

/// Pacemaker kills a call at its timeout, and what it was about to say is lost.
#[test]
fn a_silent_monitor_is_waited_for_within_the_calls_time() {
    if !has(TEST, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
        return;
    }
    let dir = tempdir().unwrap();
    let file = dir.path().join("disk.img");
    fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let Some(disk) = LoopDevice::attach(&file) else { return skip(TEST, "no loop device can be made") };
    let qmp = dir.path().join("qmp");
    let _listener = UnixListener::bind(&qmp).unwrap();
    let spec = dir.path().join("plc.toml");
    let text = format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"plc\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"10/s\"\n",
        disk.0.display(),
        qmp.display()
    );
    fs::write(&spec, text).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_rtvirtio-pacemaker"))
        .args(["agent", "start", "--state-dir"])
        .arg(dir.path().join("state"))
        .arg("--run-dir")
        .arg(dir.path().join("run"))
        .env("OCF_RESKEY_spec", &spec)
        .env("OCF_RESOURCE_INSTANCE", "plc")
        .env("OCF_RESKEY_disk", "true")
        .env("OCF_RESKEY_CRM_meta_timeout", "3000")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    // Alone it would be asked for 5 s, again and again for 20.
    let waited = said.split_once("no answer within ").and_then(|(_, rest)| rest.split_once(" ms"));
    let waited = waited.and_then(|(ms, _)| ms.parse::<u64>().ok());
    assert!(waited.is_some_and(|ms| ms <= 2000), "{said}");
}
