//! A real guest says that something starts, and is measured by the product's own command.

use std::fs;

use rtvirtio_startup::StartMessage;
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{DiskRegion, QemuConfig, QemuGuest};
use rtvirtio_testkit::site::{Site, program, text, wait_for};
use rtvirtio_testkit::{HANG, Need, has};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::{PortState, StartPort};

/// Where the program is in the guest.
const PROGRAM: &str = "/usr/bin/rtvirtio-guest";
/// Bytes of the guest's disk, and how long its scheduler waits for a request, in ms.
const DISK: u64 = 64 << 20;
const SLICE_IDLE: &str = "/sys/block/vda/queue/iosched/slice_idle";

#[test]
fn a_guest_says_what_starts_and_how_long_it_takes_is_measured() {
    let test = "a_guest_says_what_starts_and_how_long_it_takes_is_measured";
    if !has(test, &[Need::Root, Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let image = image::ensure(&image::default_cache(), &|_| ()).unwrap();
    let run = site.dir.path().join("vms");
    // Not on tmpfs: the disk is opened for direct I/O.
    let disks = rtvirtio_testkit::disk_dir().unwrap();
    let disk = disks.path().join("disk");
    fs::write(&disk, vec![0; DISK as usize]).unwrap();
    let disk = DiskRegion { path: disk, offset: Bytes(0), size: Bytes(DISK) };
    let config = QemuConfig { start_port: true, ..QemuConfig::new("desk", image, disk, &run) };
    let mut vm = QemuGuest::start(&config).unwrap();
    vm.write_file(PROGRAM, &fs::read(program("rtvirtio-guest")).unwrap()).unwrap();
    assert!(vm.exec(&["chmod", "755", PROGRAM], HANG).unwrap().success());

    // Without a listener on the host the command runs all the same, and a message says so.
    let done = vm.exec(&[PROGRAM, "start", "sh", "-c", "exit 3"], HANG).unwrap();
    assert_eq!(done.code, Some(3));
    assert!(text(&done.stderr).contains("listens"), "{}", text(&done.stderr));

    waits_for_what_starts(&mut vm);

    let mut port = StartPort::new(&vm.handle().start_socket());
    wait_for("the port", || matches!(port.poll(&mut |_| {}), PortState::Connected));
    let mut words = Vec::new();
    let done = vm.exec(&[PROGRAM, "start", "--for", "60", "ionice"], HANG).unwrap();
    assert!(done.success() && done.stderr.is_empty(), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("realtime"), "its own class: {}", text(&done.stdout));
    wait_for("both words", || {
        port.poll(&mut |word| words.push(word));
        words.len() == 2
    });
    let StartMessage::Start { id, wanted } = words[0] else { panic!("{words:?}") };
    assert_eq!((wanted.0, words[1]), (60_000_000_000, StartMessage::End { id }));

    // The agent's channel is the command's now.
    vm.close_agent();
    let lines = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"desk\"\nqmp = '{}'\nagent = '{}'\ndisk = \"/dev/vda\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
        vm.handle().qmp_socket().display(),
        vm.handle().agent_socket().display()
    );
    let spec = site.write("desk.toml", &lines);
    let measure = ["measure", "start-up", "desk", "--spec", &spec, "--times", "2"];
    let (code, result) = site.json(&[&measure[..], &["--command", "sleep 0.3", "--say"]].concat());
    assert_eq!((code, result["starts"].as_array().unwrap().len()), (0, 2), "{result}");
    let summary = &result["summary"];
    assert_eq!(summary["n"], 2, "{result}");
    assert!(summary["min"].as_f64().unwrap() >= 0.27, "two ticks less at most: {result}");
    wait_for("its words", || {
        port.poll(&mut |word| words.push(word));
        words.len() == 6
    });
    // One that is not in time is a miss, one that fails an error with its reason.
    let (code, result) = site.json(&[&measure[..], &["--command", "sleep 60", "--limit", "1s"]].concat());
    assert_eq!((code, &result["starts"][0]["timed_out"]), (2, &true.into()), "{result}");
    let error = site.refused(&[&measure[..], &["--command", "echo why >&2; exit 9"]].concat());
    assert!(error.contains("ended with 9") && error.contains("why"), "{error}");
    vm.stop().unwrap();
    site.assert_clean();
}

/// The guest's own scheduler waits longer for what starts, and no longer than that: also after
/// signals, and after the next start where one was killed.
fn waits_for_what_starts(vm: &mut QemuGuest) {
    let mut sh = |script: &str| {
        let done = vm.exec(&["sh", "-c", script], HANG).unwrap();
        assert!(done.success(), "{script}: {}", text(&done.stderr));
        text(&done.stdout)
    };
    sh("echo bfq >/sys/block/vda/queue/scheduler");
    assert_eq!(sh(&format!("cat {SLICE_IDLE}")), "8\n");
    assert_eq!(sh(&format!("{PROGRAM} start cat {SLICE_IDLE}")), "25\n");
    assert_eq!(sh(&format!("{PROGRAM} start --slice-idle 0 cat {SLICE_IDLE}")), "8\n");
    assert_eq!(sh(&format!("cat {SLICE_IDLE}")), "8\n");
    for (signal, after) in [("TERM", "8\n"), ("HUP", "8\n"), ("KILL", "25\n")] {
        let left = sh(&format!(
            "{PROGRAM} start --for 600 sleep 1000 >/dev/null & p=$!; \
             until pidof sleep >/tmp/sleep; do :; done; kill -{signal} $p; wait $p; \
             [ {signal} = KILL ] || ! pidof sleep || exit 9; kill $(cat /tmp/sleep); cat {SLICE_IDLE}"
        ));
        assert_eq!(left, after, "after {signal}");
    }
    assert_eq!(sh(&format!("{PROGRAM} start cat {SLICE_IDLE}; cat {SLICE_IDLE}")), "25\n8\n");
    sh("! ls /run/rtvirtio-guest/slice_idle 2>/dev/null");
}
