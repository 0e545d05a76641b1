use super::*;
use crate::test_root::TestRoot;

const V1: &str = "38 31 0:35 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n\
                  41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
const V2: &str = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";

fn fixture(mountinfo: &str) -> TestRoot {
    TestRoot::new(&[("/proc/self/mountinfo", mountinfo)])
}

#[test]
fn v1_is_found_with_its_files() {
    let root = fixture(V1);
    let c = Cgroups::detect(&root).unwrap();
    assert_eq!((c.hierarchy, c.mount.as_path()), (Hierarchy::V1, Path::new("/sys/fs/cgroup/blkio")));
    let vm = Path::new("/vm0");
    c.create(&root, vm).unwrap();
    root.put("/sys/fs/cgroup/blkio/vm0/blkio.bfq.weight", "100\n");
    assert!(!c.weight_file(&root, vm).unwrap().per_device, "a kernel before 5.4");
    root.put("/sys/fs/cgroup/blkio/vm0/blkio.bfq.weight_device", "default 100\n");
    let w = c.weight_file(&root, vm).unwrap();
    assert!(w.per_device && w.path.ends_with("vm0/blkio.bfq.weight_device"));
    let limit = c.limit_file(vm, Limit::ReadIops).unwrap();
    assert_eq!(limit, Path::new("/sys/fs/cgroup/blkio/vm0/blkio.throttle.read_iops_device"));
    assert!(c.io_to_enable(&root, vm).unwrap().is_empty());
}

#[test]
fn v2_is_found_and_says_where_io_is_missing() {
    let root = fixture(V2);
    root.put("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    root.put("/sys/fs/cgroup/cgroup.subtree_control", "cpu io\n");
    root.put("/sys/fs/cgroup/machine.slice/cgroup.subtree_control", "\n");
    let c = Cgroups::detect(&root).unwrap();
    let vm = Path::new("/machine.slice/vm0.scope");
    let missing = c.io_to_enable(&root, vm).unwrap();
    assert_eq!(missing, [Path::new("/sys/fs/cgroup/machine.slice/cgroup.subtree_control")]);
    assert!(c.weight_file(&root, vm).unwrap().path.ends_with("vm0.scope/io.bfq.weight"));
    assert!(c.limit_file(vm, Limit::WriteBps).unwrap().ends_with("vm0.scope/io.max"));
}

#[test]
fn no_io_controller_names_the_remedy() {
    let root = fixture("1 1 0:1 / /proc rw - proc proc rw\n");
    assert!(matches!(Cgroups::detect(&root), Err(HostError::NoIoController { .. })));
    let root = fixture(V2);
    root.put("/sys/fs/cgroup/cgroup.controllers", "hugetlb\n");
    let error = Cgroups::detect(&root).unwrap_err().to_string();
    assert!(error.contains("offers only `hugetlb`") && error.contains("cgroup_no_v1"), "{error}");
}

#[test]
fn the_memory_controller_is_found_on_both_versions_or_not_there() {
    let root = fixture("39 31 0:36 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
    let found = Cgroups::detect_memory(&root).unwrap().unwrap();
    assert_eq!((found.hierarchy, found.mount.as_path()), (Hierarchy::V1, Path::new("/sys/fs/cgroup/memory")));
    let root = fixture(V2);
    root.put("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    root.put("/sys/fs/cgroup/cgroup.subtree_control", "cpu io\n");
    root.put("/sys/fs/cgroup/lab/cgroup.subtree_control", "io\n");
    let found = Cgroups::detect_memory(&root).unwrap().unwrap();
    let missing = found.to_enable(&root, Path::new("/lab/vm"), "memory").unwrap();
    let files = ["/sys/fs/cgroup/cgroup.subtree_control", "/sys/fs/cgroup/lab/cgroup.subtree_control"];
    assert_eq!((found.hierarchy, missing), (Hierarchy::V2, files.map(PathBuf::from).to_vec()));
    root.put("/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
    assert_eq!(Cgroups::detect_memory(&root).unwrap(), None);
    let root = fixture("1 1 0:1 / /proc rw - proc proc rw\n");
    assert_eq!(Cgroups::detect_memory(&root).unwrap(), None);
}

#[test]
fn paths_cannot_leave_the_hierarchy() {
    let root = fixture("38 31 0:35 /docker/x /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n");
    let c = Cgroups::detect(&root).unwrap();
    assert!(matches!(c.dir(Path::new("/docker/x/../y")), Err(HostError::BadCgroup { .. })));
    assert!(matches!(c.dir(Path::new("/other")), Err(HostError::BadCgroup { .. })));
    assert_eq!(c.dir(Path::new("/docker/x/vm")).unwrap(), Path::new("/sys/fs/cgroup/blkio/vm"));
    assert!(Cgroups::is_root(Path::new("/")));
    assert!(!Cgroups::is_root(Path::new("/a")));
}

#[test]
fn groups_and_processes() {
    let root = fixture(V1);
    let c = Cgroups::detect(&root).unwrap();
    let vm = Path::new("/lab/vm0");
    c.create(&root, vm).unwrap();
    assert!(c.attach(&root, vm, 7).unwrap_err().is_gone(), "no cgroup.procs in a plain directory");
    root.put("/sys/fs/cgroup/blkio/lab/cgroup.procs", "");
    root.put("/sys/fs/cgroup/blkio/lab/vm0/cgroup.procs", "9\n7\n");
    assert_eq!(c.pids(&root, Path::new("/lab")).unwrap(), [7, 9]);
    assert_eq!(c.all_dirs(&root).unwrap().len(), 3);
    c.attach(&root, vm, 12).unwrap();
    assert_eq!(c.pids(&root, vm).unwrap(), [12]);
    root.put("/sys/fs/cgroup/blkio/lab/vm0/cgroup.procs", "what\n");
    assert!(matches!(c.pids(&root, vm), Err(HostError::Form { .. })));
    assert!(c.pids(&root, Path::new("/none")).unwrap_err().is_gone());
    assert!(matches!(
        c.remove(&root, Path::new("/none")),
        Err(HostError::Directory { action: "remove", .. })
    ));
    c.create(&root, Path::new("/empty")).unwrap();
    c.remove(&root, Path::new("/empty")).unwrap();
}

#[test]
fn the_group_of_a_process() {
    let root = fixture(V1);
    let c = Cgroups::detect(&root).unwrap();
    root.put("/proc/5/cgroup", "8:pids:/\n7:cpu,blkio:/machine.slice/a:b\n0::/u\n");
    assert_eq!(c.of_pid(&root, 5).unwrap(), Path::new("/machine.slice/a:b"));
    assert!(c.of_pid(&root, 6).unwrap_err().is_gone());
    root.put("/proc/7/cgroup", "0::/u\n");
    assert!(matches!(c.of_pid(&root, 7), Err(HostError::Form { .. })));
    let v2 = Cgroups { hierarchy: Hierarchy::V2, ..c };
    assert_eq!(v2.of_pid(&root, 5).unwrap(), Path::new("/u"));
}

#[test]
fn the_group_of_a_whole_vm() {
    for (thread, vm) in [
        (
            "/machine.slice/machine-qemu\\x2d1.scope/libvirt/emulator",
            "/machine.slice/machine-qemu\\x2d1.scope",
        ),
        ("/user.slice/user@0.service/app.slice/q.scope", "/user.slice/user@0.service/app.slice/q.scope"),
        ("/lab/vm0", "/lab/vm0"),
        // Without systemd.
        ("/machine/qemu-1-plc.libvirt-qemu/vcpu0", "/machine/qemu-1-plc.libvirt-qemu"),
        ("/machine/qemu-1-plc.libvirt-qemu/libvirt/iothread12", "/machine/qemu-1-plc.libvirt-qemu"),
        ("/lab/vcpus", "/lab/vcpus"),
    ] {
        assert_eq!(Cgroups::unit_of(Path::new(thread)), Path::new(vm));
    }
}

/// A cgroup of the real hierarchy, with one inside; both are removed, also when a test fails.
struct Real(PathBuf);

impl Drop for Real {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0.join("inner"));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn processes_of_a_vm_whose_threads_have_cgroups_of_their_own_are_found() {
    let test = "processes_of_a_vm_whose_threads_have_cgroups_of_their_own_are_found";
    let root = Root::default();
    let mount = mounts(&root).unwrap().into_iter().find(|m| m.fs == "cgroup2" && m.root == Path::new("/"));
    let Some(mount) = mount else { return rtvirtio_testkit::skip(test, "no cgroup v2 is mounted") };
    if !rustix::process::geteuid().is_root() {
        return rtvirtio_testkit::skip(test, "needs root");
    }
    let name = format!("rtvirtio-test-{}", std::process::id());
    let made = Real(mount.point.join(&name));
    fs::create_dir_all(made.0.join("inner")).unwrap();
    fs::write(made.0.join("inner/cgroup.type"), "threaded").unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let cgroups = Cgroups {
        hierarchy: Hierarchy::V2,
        mount: mount.point,
        mount_root: PathBuf::from("/"),
        controller: "io",
    };
    let vm = Path::new("/").join(&name);
    let moved = cgroups.attach(&root, &vm, child.id());
    let found = moved.and_then(|()| cgroups.pids(&root, &vm));
    let inner = cgroups.pids(&root, &vm.join("inner"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found.unwrap(), [child.id()]);
    assert!(inner.unwrap_err().is_unsupported());
}
