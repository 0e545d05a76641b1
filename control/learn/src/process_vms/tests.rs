use std::fs;

use rtvirtio_spec::{Device, LabKind};

use super::*;
use crate::load::{Stream, spec};

const V1: &str = "38 31 0:35 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n";
const V2: &str = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

/// A machine with a disk of 100 MiB, on which this process has started at 77.
fn machine(mountinfo: &str) -> (tempfile::TempDir, Root) {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    file(&root, "/proc/self/mountinfo", mountinfo);
    if mountinfo == V1 {
        file(&root, "/sys/fs/cgroup/blkio/tasks", "");
    }
    file(&root, "/sys/block/sda/dev", "8:0\n");
    file(&root, "/sys/class/block/sda/dev", "8:0\n");
    file(&root, "/sys/block/sda/size", &format!("{}\n", (100 << 20) / 512));
    file(&root, "/sys/block/sda/queue/scheduler", "[none] bfq other\n");
    process(&root, std::process::id(), 77, 'S');
    (dir, root)
}

fn file(root: &Root, path: &str, text: &str) {
    let path = root.at(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn process(root: &Root, pid: u32, start: u64, state: char) {
    let zeroes = "0 ".repeat(17);
    let stat = format!("{pid} (rtvirtio) {state} 1 {zeroes}{start} {}", "0 ".repeat(30));
    file(root, &format!("/proc/{pid}/task/{pid}/stat"), &stat);
}

fn make(root: &Root, vms: usize) -> Result<ProcessVms, ProcessVmsError> {
    let device = BlockDevice::find(root, "sda").unwrap();
    ProcessVms::make(root.clone(), device, vms)
}

fn load(writes: f64) -> Spec {
    let stream = Stream { writes, ..Stream::paced(10.0) };
    spec(&[vec![stream.clone()], vec![stream]], Device::Path("/dev/sda".into()), LabKind::Process)
}

#[test]
fn each_vm_has_a_cgroup_and_a_part_until_all_is_removed() {
    let (_d, root) = machine(V1);
    let vms = make(&root, 3).unwrap();
    let parent = format!("/rtvirtio-learn-{}-77", std::process::id());
    let dir = root.at(format!("/sys/fs/cgroup/blkio{parent}"));
    assert!((0..3).all(|i| dir.join(format!("vm{i}")).is_dir()));
    let binding = vms.binding().unwrap();
    assert_eq!(binding.vms["vm2"].cgroup, Some(Path::new(&parent).join("vm2")));
    assert_eq!((binding.vms.len(), vms.vms(), vms.kind()), (3, 3, VmKind::Process));
    assert_eq!(vms.elevators().unwrap(), [Elevator::None, Elevator::Bfq]);
    let loads = vms.loads(&load(0.0)).unwrap();
    assert_eq!(loads.len(), 2);
    let Place::Host { cgroup_procs, target, region } = &loads[1].place else { panic!("on the host") };
    assert!(cgroup_procs[0].ends_with("vm1/cgroup.procs") && target == Path::new("/dev/sda"));
    assert_eq!(*region, Some(Region { offset: Bytes(33 << 20), size: Bytes(33 << 20) }));
    assert!(matches!(make(&root, 3), Err(ProcessVmsError::AlreadyThere(_))));
    assert!(dir.join("vm2").is_dir(), "a second attempt removes nothing of the first");
    vms.remove().unwrap();
    assert!(!dir.exists());
    drop(make(&root, 1).unwrap());
    assert!(!dir.exists());
}

#[test]
fn data_is_only_read() {
    let (_d, root) = machine(V1);
    let vms = make(&root, 2).unwrap();
    let refused = vms.loads(&load(0.3)).unwrap_err().to_string();
    assert!(refused.contains("vm0/t0 writes"), "{refused}");
}

#[test]
fn a_disk_too_small_is_refused_and_nothing_is_made() {
    let (_d, root) = machine(V1);
    assert!(matches!(make(&root, 7), Err(ProcessVmsError::TooSmall { vms: 7, .. })));
    assert_eq!(root.list("/sys/fs/cgroup/blkio").unwrap(), ["tasks"]);
}

#[test]
fn only_leftovers_of_processes_that_are_gone_are_removed() {
    let (_d, root) = machine(V1);
    process(&root, 5, 100, 'R');
    process(&root, 6, 100, 'Z');
    let names = ["5-100", "5-99", "6-100", "7-1-io", "x-1", "5"];
    for name in names {
        let dir = format!("/sys/fs/cgroup/blkio/rtvirtio-learn-{name}/vm0");
        fs::create_dir_all(root.at(dir)).unwrap();
    }
    fs::create_dir_all(root.at("/sys/fs/cgroup/blkio/rtvirtio-lab-9/vm0")).unwrap();
    let removed = remove_leftovers(&root).unwrap();
    let expected = ["/rtvirtio-learn-5-99", "/rtvirtio-learn-6-100", "/rtvirtio-learn-7-1-io"];
    assert_eq!(removed, expected.map(PathBuf::from), "another process has this id, a zombie, none");
    let left = root.list("/sys/fs/cgroup/blkio").unwrap();
    let kept = ["rtvirtio-lab-9", "rtvirtio-learn-5", "rtvirtio-learn-5-100", "rtvirtio-learn-x-1", "tasks"];
    assert_eq!(left, kept);
    assert!(remove_leftovers(&root).unwrap().is_empty());
    // The next start does the same.
    fs::create_dir_all(root.at("/sys/fs/cgroup/blkio/rtvirtio-learn-8-1/vm0")).unwrap();
    drop(make(&root, 1).unwrap());
    assert!(!root.at("/sys/fs/cgroup/blkio/rtvirtio-learn-8-1").exists());
}

#[test]
fn on_v2_the_controller_is_enabled_and_put_back() {
    let (_d, root) = machine(V2);
    let control = "/sys/fs/cgroup/cgroup.subtree_control";
    file(&root, "/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
    file(&root, control, "cpu\n");
    // Files that the kernel creates in a new group.
    let group = Group { pid: std::process::id(), start: 77, enables_io: true };
    let stack = Stack::find(&root, "sda").unwrap();
    let cgroups = Cgroups::detect(&root).unwrap();
    let own = format!("/sys/fs/cgroup{}/cgroup.subtree_control", group.path().display());
    file(&root, &own, "\n");
    let parts = parts(Path::new("/dev/sda"), Bytes(100 << 20), 2).unwrap();
    let vms = ProcessVms { root: root.clone(), cgroups, stack, group, parts, unseen: None };
    vms.make_cgroups().unwrap();
    assert_eq!((root.read(control).unwrap().as_str(), root.read(&own).unwrap().as_str()), ("+io", "+io"));
    fs::remove_file(root.at(&own)).unwrap();
    vms.remove().unwrap();
    assert_eq!(root.read(control).unwrap(), "-io");
    assert_eq!(root.list("/sys/fs/cgroup").unwrap(), ["cgroup.controllers", "cgroup.subtree_control"]);
    // A killed process left both behind: the group's name has its id.
    fs::create_dir_all(root.at("/sys/fs/cgroup/rtvirtio-learn-9-1-io/vm0")).unwrap();
    file(&root, control, "cpu io\n");
    remove_leftovers(&root).unwrap();
    assert_eq!(root.read(control).unwrap(), "-io");
    // A process that found the controller enabled leaves it enabled.
    fs::create_dir_all(root.at("/sys/fs/cgroup/rtvirtio-learn-9-1/vm0")).unwrap();
    file(&root, control, "cpu io\n");
    remove_leftovers(&root).unwrap();
    assert_eq!(root.read(control).unwrap(), "cpu io\n");
}

#[test]
fn a_name_comes_back() {
    for enables_io in [false, true] {
        let group = Group { pid: 12, start: 3456, enables_io };
        assert_eq!(Group::parse(group.path().file_name().unwrap().to_str().unwrap()), Some(group));
    }
    for name in ["rtvirtio-lab-1-2", "rtvirtio-learn-1", "rtvirtio-learn--1", "rtvirtio-learn-1-2-x"] {
        assert_eq!(Group::parse(name), None, "{name}");
    }
}
