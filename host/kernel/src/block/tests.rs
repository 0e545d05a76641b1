use std::os::unix::fs::symlink;

use super::*;

struct Fixture {
    dir: tempfile::TempDir,
    root: Root,
}

impl Fixture {
    fn file(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// NVMe disk with one partition, laid out as in sysfs.
fn nvme() -> Fixture {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    let f = Fixture { dir, root };
    let disk = "sys/devices/pci/nvme0n1";
    f.file(&format!("{disk}/dev"), "259:0\n");
    f.file(&format!("{disk}/size"), "2048\n");
    f.file(&format!("{disk}/queue/rotational"), "0\n");
    f.file(&format!("{disk}/queue/scheduler"), "none mq-deadline [bfq]\n");
    f.file(&format!("{disk}/queue/iosched/slice_idle"), "8\n");
    f.file(&format!("{disk}/queue/iosched/timeout_sync"), "124\n");
    f.file(&format!("{disk}/nvme0n1p2/dev"), "259:2\n");
    f.file(&format!("{disk}/nvme0n1p2/partition"), "2\n");
    f.file(&format!("{disk}/nvme0n1p2/size"), "512\n");
    f.file("proc/self/mountinfo", "1 1 0:1 / /proc rw - proc proc rw\n");
    let at = |p: &str| f.dir.path().join(p);
    for d in ["sys/block", "sys/class/block", "dev/disk/by-id"] {
        fs::create_dir_all(at(d)).unwrap();
    }
    symlink("../devices/pci/nvme0n1", at("sys/block/nvme0n1")).unwrap();
    symlink("../../devices/pci/nvme0n1", at("sys/class/block/nvme0n1")).unwrap();
    symlink("../../devices/pci/nvme0n1/nvme0n1p2", at("sys/class/block/nvme0n1p2")).unwrap();
    symlink("../../nvme0n1", at("dev/disk/by-id/nvme-ACME")).unwrap();
    f
}

#[test]
fn every_way_to_name_a_disk_leads_to_it() {
    let f = nvme();
    for name in ["nvme0n1", "/dev/nvme0n1", "/dev/disk/by-id/nvme-ACME"] {
        let d = BlockDevice::find(&f.root, name).unwrap();
        assert_eq!((d.name.as_str(), d.dev.as_str(), d.partition), ("nvme0n1", "259:0", None), "{name}");
    }
    let d = BlockDevice::find(&f.root, "/dev/nvme0n1p2").unwrap();
    assert_eq!((d.name.as_str(), d.partition.as_deref()), ("nvme0n1", Some("nvme0n1p2")));
    assert_eq!((d.named_size(&f.root).unwrap(), d.size(&f.root).unwrap()), (256 << 10, 1 << 20));
}

#[test]
fn a_drive_is_known_by_its_wwid_or_serial_number() {
    let f = nvme();
    let disk = BlockDevice::find(&f.root, "nvme0n1").unwrap();
    assert_eq!(disk.identity(&f.root).unwrap(), None);
    f.file("sys/devices/pci/nvme0n1/wwid", "\n");
    f.file("sys/devices/pci/nvme0n1/serial", "  S123 \n");
    assert_eq!(disk.identity(&f.root).unwrap().as_deref(), Some("S123"), "an empty file says nothing");
    f.file("sys/devices/pci/nvme0n1/device/wwid", "nvme.1234-acme\n");
    assert_eq!(disk.identity(&f.root).unwrap().as_deref(), Some("nvme.1234-acme"));
}

#[test]
fn drives_of_one_model_have_the_same_facts() {
    let f = nvme();
    let disk = BlockDevice::find(&f.root, "nvme0n1").unwrap();
    let put = |file: &str, text: &str| f.file(&format!("sys/devices/pci/nvme0n1/{file}"), text);
    for (file, text) in [("rotational", "0"), ("logical_block_size", "512"), ("physical_block_size", "4096")]
    {
        put(&format!("queue/{file}"), text);
    }
    put("queue/write_cache", "write back\n");
    let bare = disk.drive_model(&f.root).unwrap();
    assert_eq!((bare.model, bare.firmware, bare.size), (None, None, 1 << 20));
    assert_eq!((bare.logical_block, bare.physical_block, bare.rotational), (512, 4096, false));
    assert_eq!(bare.write_cache.as_deref(), Some("write back"));
    // NVMe pads its texts; a virtio device's numeric vendor is no name.
    put("device/model", "ACME  FAST 1T                 \n");
    put("device/firmware_rev", "EDA7  \n");
    put("device/serial", "S123\n");
    put("device/vendor", "0x1af4\n");
    let drive = disk.drive_model(&f.root).unwrap();
    assert_eq!((drive.model.as_deref(), drive.firmware.as_deref()), (Some("ACME FAST 1T"), Some("EDA7")));
    assert!(!format!("{drive:?}").contains("S123"));
    put("device/vendor", "SEAGATE \n");
    assert_eq!(disk.drive_model(&f.root).unwrap().model.as_deref(), Some("SEAGATE ACME FAST 1T"));
}

#[test]
fn a_name_that_is_no_disk_is_refused() {
    let f = nvme();
    for (name, why) in
        [("/dev/sdz", "/sys/class/block/sdz"), ("/etc/passwd", "does not lie below /dev"), ("", "no name")]
    {
        let error = BlockDevice::find(&f.root, name).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("lsblk"), "{error}");
    }
    f.file("sys/devices/pci/nvme0n1/dev", "what\n");
    assert!(matches!(BlockDevice::find(&f.root, "nvme0n1"), Err(HostError::Form { .. })));
}

#[test]
fn elevator_and_tunables_are_read_and_written() {
    let f = nvme();
    let d = BlockDevice::find(&f.root, "nvme0n1").unwrap();
    assert_eq!(d.elevators(&f.root).unwrap().current, "bfq");
    assert_eq!(d.tunables(&f.root).unwrap()["timeout_sync"], "124");
    f.root.write(d.tunable("slice_idle"), "0").unwrap();
    assert_eq!(d.tunables(&f.root).unwrap()["slice_idle"], "0");
    d.set_elevator(&f.root, "mq-deadline").unwrap();
    assert_eq!(f.root.read(d.queue("scheduler")).unwrap(), "mq-deadline");
    assert_eq!(d.size(&f.root).unwrap(), 1 << 20);
}

#[test]
fn an_elevator_that_is_not_offered_names_the_remedy() {
    let f = nvme();
    let d = BlockDevice::find(&f.root, "nvme0n1").unwrap();
    f.file("sys/devices/pci/nvme0n1/queue/scheduler", "[none] mq-deadline\n");
    assert!(matches!(d.set_elevator(&f.root, "bfq"), Err(HostError::NoElevator { .. })));
    assert!(matches!(d.offers(&f.root, "cfq"), Err(HostError::NoElevator { .. })));
    f.file("sys/devices/pci/nvme0n1/queue/scheduler", "none\n");
    let error = d.offers(&f.root, "bfq").unwrap_err();
    assert!(matches!(&error, HostError::NoElevator { remedy, .. } if remedy.contains("limits")), "{error}");
    f.file("sys/devices/pci/nvme0n1/queue/scheduler", "none bfq\n");
    assert!(matches!(d.elevators(&f.root), Err(HostError::Form { .. })));
    assert!(f.root.write(d.tunable("no_such"), "0").unwrap_err().is_gone());
    f.file("sys/devices/pci/nvme0n1/size", "many\n");
    assert!(matches!(d.size(&f.root), Err(HostError::Form { .. })));
}

#[test]
fn disks_without_storage_are_left_out() {
    let f = nvme();
    for name in ["loop0", "loop1", "zram0", "ram0"] {
        f.file(&format!("sys/block/{name}/dev"), "7:0\n");
        f.file(&format!("sys/class/block/{name}/dev"), "7:0\n");
    }
    f.file("sys/block/loop1/loop/backing_file", "/x\n");
    let names: Vec<_> = BlockDevice::all(&f.root).unwrap().into_iter().map(|d| d.name).collect();
    assert_eq!(names, ["loop1", "nvme0n1"]);
    assert!(BlockDevice::all(&Root::new("/nonexistent")).is_err());
}
