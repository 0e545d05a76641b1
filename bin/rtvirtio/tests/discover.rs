//! `rtvirtio discover` next to real QEMUs.

use rtvirtio_testkit::Machine;
use rtvirtio_testkit::site::{Site, text};
use rtvirtio_testkit::{Need, has};
use rtvirtio_vmm::Qmp;
use serde_json::Value;

fn of_pid(found: &Value, pid: u32) -> Value {
    let vms = found["vms"].as_array().unwrap();
    vms.iter().find(|vm| vm["pid"] == pid).cloned().unwrap_or_else(|| panic!("no {pid} in {found:#}"))
}

#[test]
fn a_running_qemu_is_found_with_its_disk_and_left_as_it_is() {
    if !has("a_running_qemu_is_found_with_its_disk_and_left_as_it_is", &[Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let image = site.dir.path().join("d,isk.raw");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d0", image.display().to_string().replace(',', ",,"));
    let options = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0,id=disk0"];
    let name = rtvirtio_testkit::unique("plc");
    let machine = Machine::start(site.dir.path(), &name, &options);
    let (code, found) = site.json(&["discover"]);
    assert_eq!(code, 0);
    assert_eq!(found["schema"], "rtvirtio.discovery.v1");
    let vm = of_pid(&found, machine.pid());
    assert_eq!((&vm["name"], &vm["vmm"]), (&name.into(), &"qemu".into()), "{vm:#}");
    assert_eq!(vm["reach"]["qmp"], machine.qmp().to_str().unwrap(), "{vm:#}");
    assert_eq!(vm["disks"][0]["path"], image.to_str().unwrap(), "{vm:#}");
    assert_eq!(vm["disks"][0]["writes"], true, "{vm:#}");
    assert!(vm["disks"][0]["activity"].is_null(), "it was not observed: {vm:#}");
    assert!(found["observed_ns"].is_null());

    let (code, found) = site.json(&["discover", "--observe", "1s"]);
    assert_eq!(code, 0);
    let vm = of_pid(&found, machine.pid());
    assert_eq!(vm["disks"][0]["activity"]["source"], "qemu", "{vm:#}");
    let mut qmp = Qmp::connect(machine.qmp(), rtvirtio_testkit::HANG).unwrap();
    let histograms = qmp.disk_stats().unwrap().into_iter().filter_map(|d| d.read.histogram);
    assert_eq!(histograms.count(), 0, "what was set in QEMU is removed");
}

#[test]
fn a_histogram_that_was_there_stays() {
    if !has("a_histogram_that_was_there_stays", &[Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let image = site.dir.path().join("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d0", image.display());
    let options = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0,id=disk0"];
    let machine = Machine::start(site.dir.path(), "plc", &options);
    let connect = || Qmp::connect(machine.qmp(), rtvirtio_testkit::HANG).unwrap();
    let id = connect().disk_stats().unwrap()[0].id.clone();
    connect().set_latency_histogram(&id, &[1000, 2000]).unwrap();
    let (code, _) = site.json(&["discover", "--observe", "1s"]);
    assert_eq!(code, 0);
    let kept = connect().disk_stats().unwrap()[0].read.histogram.clone().unwrap();
    assert_eq!(kept.boundaries, [1000, 2000]);
}

#[test]
fn a_taken_monitor_is_reported() {
    if !has("a_taken_monitor_is_reported", &[Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let machine = Machine::start(site.dir.path(), "plc", &[]);
    let _taken = Qmp::connect(machine.qmp(), rtvirtio_testkit::HANG).unwrap();
    let out = site.output(&["discover", "--observe", "1s"]);
    let said = text(&out.stderr);
    assert!(said.contains("plc") && said.contains("another program may hold the socket"), "{said}");
}

#[test]
fn a_file_is_not_overwritten() {
    let site = Site::new();
    let out = site.dir.path().join("plant.toml");
    std::fs::write(&out, "mine").unwrap();
    let path = out.to_str().unwrap();
    let refused = site.output(&["discover", "-o", path]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("--force"), "{}", text(&refused.stderr));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "mine");
    site.ok(&["discover", "-o", path, "--force"]);
    assert!(std::fs::read_to_string(&out).unwrap().starts_with("# Written by `rtvirtio discover`"));
}
