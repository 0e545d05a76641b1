use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// Block devices as sysfs shows them.
struct Sysfs {
    dir: tempfile::TempDir,
    root: Root,
}

impl Sysfs {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let sysfs = Self { dir, root };
        sysfs.file("proc/self/mountinfo", "1 1 0:1 / /proc rw - proc proc rw\n");
        fs::create_dir_all(sysfs.at("sys/class/block")).unwrap();
        sysfs
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        self.dir.path().join(path)
    }

    fn file(&self, path: &str, text: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), text).unwrap();
    }

    /// Adds a device; `scheduler` is the content of its file, if it has one.
    fn device(&self, name: &str, dev: &str, scheduler: Option<&str>) {
        self.device_at("virtual/block", name, dev, scheduler);
    }

    fn device_at(&self, bus: &str, name: &str, dev: &str, scheduler: Option<&str>) {
        if !dev.is_empty() {
            self.file(&format!("sys/devices/{bus}/{name}/dev"), dev);
        }
        self.file(&format!("sys/devices/{bus}/{name}/queue/nr_requests"), "128\n");
        if let Some(text) = scheduler {
            self.file(&format!("sys/devices/{bus}/{name}/queue/scheduler"), text);
        }
        fs::create_dir_all(self.at("sys/block")).unwrap();
        symlink(format!("../devices/{bus}/{name}"), self.at(&format!("sys/block/{name}"))).unwrap();
        symlink(format!("../../devices/{bus}/{name}"), self.at(&format!("sys/class/block/{name}"))).unwrap();
    }

    /// Adds a partition of a device of `virtual/block`.
    fn partition(&self, disk: &str, name: &str, dev: &str) {
        let dir = format!("sys/devices/virtual/block/{disk}/{name}");
        self.file(&format!("{dir}/dev"), dev);
        self.file(&format!("{dir}/partition"), "1\n");
        let link = self.at(&format!("sys/class/block/{name}"));
        symlink(format!("../../devices/virtual/block/{disk}/{name}"), link).unwrap();
    }

    fn below(&self, device: &str, slave: &str) {
        let dir = format!("sys/devices/virtual/block/{device}/slaves");
        fs::create_dir_all(self.at(&dir)).unwrap();
        symlink(format!("../../../../../class/block/{slave}"), self.at(&format!("{dir}/{slave}"))).unwrap();
    }

    fn stack(&self, name: &str) -> Stack {
        Stack::find(&self.root, name).unwrap()
    }
}

fn disks(stack: &Stack) -> Vec<(&str, &str)> {
    stack.disks.iter().map(|d| (d.name.as_str(), d.dev.as_str())).collect()
}

/// An LVM volume over RAID 1 over a disk and a partition, on a kernel that has no scheduler file
/// for bio-based devices.
fn lvm_over_raid() -> Sysfs {
    let sysfs = Sysfs::new();
    sysfs.device("sda", "8:0", Some("none mq-deadline [bfq]\n"));
    sysfs.device("sdb", "8:16", Some("[none] bfq kyber\n"));
    sysfs.partition("sdb", "sdb1", "8:17");
    sysfs.device("md0", "9:0", None);
    sysfs.file("sys/devices/virtual/block/md0/md/level", "raid1\n");
    sysfs.below("md0", "sda");
    sysfs.below("md0", "sdb1");
    sysfs.device("dm-3", "252:3", None);
    sysfs.file("sys/devices/virtual/block/dm-3/dm/uuid", "LVM-abc\n");
    sysfs.below("dm-3", "md0");
    sysfs
}

#[test]
fn a_stack_is_followed_to_the_disks_that_schedule() {
    let sysfs = lvm_over_raid();
    let stack = sysfs.stack("dm-3");
    assert_eq!(stack.device.dev, "252:3");
    assert_eq!(disks(&stack), [("sda", "8:0"), ("sdb", "8:16")]);
    assert!(!stack.is_plain());
    let notes = stack.notes_on_settings();
    assert_eq!(
        notes,
        [
            "dm-3 passes requests on: I/O scheduler and weights act on sda, sdb below it, limits on dm-3 itself"
        ]
    );
    // An elevator that only one of the disks offers is not on offer.
    assert_eq!(stack.offered(&sysfs.root).unwrap(), ["none", "bfq"]);
    stack.offers(&sysfs.root, "bfq").unwrap();
    assert!(stack.offers(&sysfs.root, "kyber").is_err());
}

#[test]
fn a_queue_that_says_a_bare_none_passes_requests_on() {
    let sysfs = lvm_over_raid();
    for device in ["md0", "dm-3"] {
        sysfs.file(&format!("sys/devices/virtual/block/{device}/queue/scheduler"), "none\n");
    }
    assert_eq!(disks(&sysfs.stack("dm-3")), [("sda", "8:0"), ("sdb", "8:16")]);
}

#[test]
fn a_disk_below_two_ways_counts_once() {
    let sysfs = lvm_over_raid();
    sysfs.below("dm-3", "sda");
    assert_eq!(disks(&sysfs.stack("dm-3")), [("sda", "8:0"), ("sdb", "8:16")]);
}

#[test]
fn a_disk_and_its_partition_are_plain() {
    let sysfs = lvm_over_raid();
    let stack = sysfs.stack("sda");
    assert!(stack.is_plain() && stack.notes_on_settings().is_empty());
    let stack = sysfs.stack("/dev/sdb1");
    assert!(stack.is_plain());
    assert_eq!(stack.notes_on_settings(), ["sdb1 is a partition: settings act on the whole disk sdb"]);
}

#[test]
fn the_head_of_nvme_multipath_leads_to_its_hidden_paths() {
    let by_name = Sysfs::new();
    by_name.device("nvme0n1", "259:0", None);
    by_name.device("nvme0c0n1", "", Some("[none] bfq\n"));
    by_name.device("nvme0c1n1", "", Some("[none] bfq\n"));
    // Another subsystem, and another namespace.
    by_name.device("nvme1c0n1", "", Some("[none] bfq\n"));
    by_name.device("nvme0c0n2", "", Some("[none] bfq\n"));
    let linked = Sysfs::new();
    linked.device("nvme0n1", "259:0", None);
    linked.device("nvme0c0n1", "", Some("[none] bfq\n"));
    linked.device("nvme0c1n1", "", Some("[none] bfq\n"));
    let dir = linked.at("sys/devices/virtual/block/nvme0n1/multipath");
    fs::create_dir_all(&dir).unwrap();
    for path in ["nvme0c0n1", "nvme0c1n1"] {
        symlink(format!("../../{path}"), dir.join(path)).unwrap();
    }
    for sysfs in [by_name, linked] {
        let stack = sysfs.stack("nvme0n1");
        assert_eq!(disks(&stack), [("nvme0c0n1", ""), ("nvme0c1n1", "")]);
        assert!(stack.disks.iter().all(BlockDevice::is_hidden));
        let notes = stack.notes_on_settings().join("\n");
        assert!(notes.contains("no cgroup can have a weight"), "{notes}");
    }
}

#[test]
fn where_no_disk_is_seen_there_is_no_choice() {
    let sysfs = Sysfs::new();
    for (name, words) in
        [("zram0", "memory"), ("zd16", "ZFS"), ("drbd0", "DRBD"), ("pmem0", "does not name what is below")]
    {
        sysfs.device(name, "250:0", None);
        let stack = sysfs.stack(name);
        assert!(stack.disks.is_empty(), "{name}");
        let notes = stack.notes_on_settings().join("\n");
        assert!(notes.contains(words) && notes.contains("only limits can act"), "{notes}");
        assert_eq!(stack.offered(&sysfs.root).unwrap(), ["none"]);
        let elevators = stack.device.elevators(&sysfs.root).unwrap();
        assert_eq!((elevators.current.as_str(), elevators.available.len()), ("none", 1));
        let error = stack.offers(&sysfs.root, "bfq").unwrap_err().to_string();
        assert!(error.contains("use limits"), "{error}");
    }
}

#[test]
fn what_weakens_weights_below_is_named() {
    let sysfs = lvm_over_raid();
    sysfs.file("sys/devices/virtual/block/dm-3/dm/uuid", "CRYPT-LUKS2-abc-vault\n");
    sysfs.file("sys/devices/virtual/block/md0/md/level", "raid5\n");
    let notes = sysfs.stack("dm-3").notes.join("\n");
    assert!(notes.contains("dm-3 is encrypted") && notes.contains("md0 is raid5"), "{notes}");
}

#[test]
fn a_disk_of_another_host_is_named() {
    let sysfs = Sysfs::new();
    sysfs.device("rbd0", "250:0", Some("[none] bfq\n"));
    sysfs.device("sda", "8:0", Some("[none] bfq\n"));
    sysfs.device_at("platform/host3/session1/target3:0:0/block", "sdc", "8:32", Some("[none] bfq\n"));
    for (name, remote) in [("rbd0", true), ("sdc", true), ("sda", false)] {
        let notes = sysfs.stack(name).notes.join("\n");
        assert_eq!(notes.contains("a disk of another host"), remote, "{name}: {notes}");
    }
}

#[test]
fn an_error_below_is_not_absence() {
    let sysfs = lvm_over_raid();
    // A directory in place of the file: reading it fails with another error than ENOENT.
    fs::create_dir_all(sysfs.at("sys/devices/virtual/block/md0/queue/scheduler")).unwrap();
    assert!(Stack::find(&sysfs.root, "dm-3").is_err());
}

#[test]
fn a_stacked_device_is_known_by_its_uuid() {
    let sysfs = lvm_over_raid();
    let identity = |name: &str| sysfs.stack(name).device.identity(&sysfs.root).unwrap();
    assert_eq!(identity("dm-3").as_deref(), Some("dm-uuid-LVM-abc"));
    assert_eq!(identity("md0"), None);
    sysfs.file("sys/devices/virtual/block/md0/md/uuid", "0123-4567\n");
    assert_eq!(identity("md0").as_deref(), Some("md-uuid-0123-4567"));
}
