use std::fs;

use super::*;

struct Host {
    _dir: tempfile::TempDir,
    root: Root,
}

const V2: &str = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const V1: &str = "38 31 0:35 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n";

impl Host {
    fn new(mountinfo: &str) -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let host = Self { root: Root::new(dir.path()), _dir: dir };
        host.put("/proc/self/mountinfo", mountinfo);
        host.put("/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
        host
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn cgroups(&self) -> Cgroups {
        Cgroups::detect(&self.root).unwrap()
    }
}

const VM: &str = "/machine.slice/plc.scope";

fn named(limits: &[SetLimit]) -> Vec<String> {
    limits
        .iter()
        .map(|l| format!("{} {} {} {}", l.cgroup.display(), l.file, l.limit.key(), l.value))
        .collect()
}

#[test]
fn on_v2_the_limits_of_all_cgroups_above_count() {
    let host = Host::new(V2);
    let c = "/sys/fs/cgroup";
    host.put(&format!("{c}/machine.slice/io.max"), "8:16 rbps=max wbps=max riops=30 wiops=max\n");
    host.put(
        &format!("{c}{VM}/io.max"),
        "8:0 rbps=1 wbps=1 riops=1 wiops=1\n8:16 rbps=1000 wbps=max riops=max wiops=70\n",
    );
    let found = host.cgroups().limits_on_path(&host.root, Path::new(VM), "8:16").unwrap();
    let expected = [
        "/machine.slice/plc.scope io.max rbps 1000",
        "/machine.slice/plc.scope io.max wiops 70",
        "/machine.slice io.max riops 30",
    ];
    assert_eq!(named(&found), expected);
    assert!(host.cgroups().limits_on_path(&host.root, Path::new(VM), "8:32").unwrap().is_empty());
    // A limit that is not understood is not taken for none.
    host.put(&format!("{c}/machine.slice/io.max"), "8:16 riops=many\n");
    let error = host.cgroups().limits_on_path(&host.root, Path::new(VM), "8:16").unwrap_err();
    assert!(error.to_string().contains("machine.slice/io.max"), "{error}");
}

#[test]
fn on_v1_only_a_groups_own_limit_counts() {
    let host = Host::new(V1);
    let c = "/sys/fs/cgroup/blkio";
    host.put(&format!("{c}/machine.slice/blkio.throttle.read_iops_device"), "8:16 30\n");
    host.put(&format!("{c}{VM}/blkio.throttle.read_iops_device"), "8:16 50\n");
    host.put(&format!("{c}{VM}/blkio.throttle.write_iops_device"), "");
    let found = host.cgroups().limits_on_path(&host.root, Path::new(VM), "8:16").unwrap();
    assert_eq!(named(&found), ["/machine.slice/plc.scope blkio.throttle.read_iops_device riops 50"]);
}

#[test]
fn cpu_time_is_limited_by_all_cgroups_above() {
    let host = Host::new(V2);
    let c = "/sys/fs/cgroup";
    host.put(&format!("{c}/machine.slice/cpu.max"), "20000 100000\n");
    host.put(&format!("{c}{VM}/cpu.max"), "max 100000\n");
    host.put(&format!("{c}{VM}/vcpu0/cpu.max"), "90000 100000\n");
    let of = |host: &Host, cgroup: &str| -> Vec<String> {
        let cpu = Cgroups::detect_cpu(&host.root).unwrap();
        let found = cpu.cpu_limits_on_path(&host.root, Path::new(cgroup)).unwrap();
        found.iter().map(|l| format!("{} {} {:.1}", l.cgroup.display(), l.file, l.cpus())).collect()
    };
    let slice = "/machine.slice cpu.max 0.2";
    assert_eq!(of(&host, &format!("{VM}/vcpu0")), ["/machine.slice/plc.scope/vcpu0 cpu.max 0.9", slice]);
    assert_eq!(of(&host, VM), [slice]);
    host.put(&format!("{c}{VM}/cpu.max"), "much\n");
    let cpu = Cgroups::detect_cpu(&host.root).unwrap();
    assert!(cpu.cpu_limits_on_path(&host.root, Path::new(VM)).is_err());
    // On v1 too, unlike limits of I/O.
    let host = Host::new("38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
    let c = "/sys/fs/cgroup/cpu";
    for (cgroup, quota) in [("/machine.slice", "20000"), (VM, "-1")] {
        host.put(&format!("{c}{cgroup}/cpu.cfs_quota_us"), &format!("{quota}\n"));
        host.put(&format!("{c}{cgroup}/cpu.cfs_period_us"), "100000\n");
    }
    assert_eq!(of(&host, VM), ["/machine.slice cpu.cfs_quota_us 0.2"]);
    // The cgroup that a container sees as its root is a cgroup like others.
    let host = Host::new("38 31 0:35 /docker/a1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    host.put("/sys/fs/cgroup/cpu.max", "20000 100000\n");
    host.put("/sys/fs/cgroup/io.max", "8:16 rbps=max wbps=max riops=30 wiops=max\n");
    assert_eq!(of(&host, "/docker/a1/vm"), ["/docker/a1 cpu.max 0.2"]);
    let limits = host.cgroups().limits_on_path(&host.root, Path::new("/docker/a1/vm"), "8:16").unwrap();
    assert_eq!(named(&limits), ["/docker/a1 io.max riops 30"]);
}

#[test]
fn weights_have_a_path_too() {
    let host = Host::new(V2);
    let c = "/sys/fs/cgroup";
    host.put(&format!("{c}/machine.slice/io.bfq.weight"), "default 100\n8:16 400\n");
    host.put(&format!("{c}{VM}/io.bfq.weight"), "default 50\n");
    let cgroups = host.cgroups();
    let path = cgroups.path_of(Path::new(VM));
    assert_eq!(path, [Path::new("/machine.slice"), Path::new(VM)]);
    let weights: Vec<u32> =
        path.iter().map(|cgroup| cgroups.weight_of(&host.root, cgroup, "8:16").unwrap()).collect();
    assert_eq!(weights, [400, 50]);
    assert_eq!(cgroups.weight_of(&host.root, Path::new("/none"), "8:16").unwrap(), 100);
    assert!(cgroups.path_of(Path::new("/")).is_empty() && !cgroups.hides_parents());
    // In a container only a part of the hierarchy is visible.
    let host = Host::new("38 31 0:35 /docker/a1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    let cgroups = host.cgroups();
    assert_eq!(cgroups.path_of(Path::new("/docker/a1/vm")), [Path::new("/docker/a1/vm")]);
    assert!(cgroups.hides_parents());
}

#[test]
fn what_the_models_do_not_know_is_found() {
    let host = Host::new(V2);
    let c = "/sys/fs/cgroup";
    host.put(&format!("{c}/io.cost.qos"), "8:16 enable=1 ctrl=auto rpct=0.00\n8:0 enable=1 ctrl=auto\n");
    host.put(&format!("{c}/machine.slice/io.weight"), "default 300\n");
    host.put(&format!("{c}{VM}/io.weight"), "default 100\n8:16 50\n");
    host.put(&format!("{c}/machine.slice/db.scope/io.latency"), "8:16 target=10000\n");
    host.put(&format!("{c}/system.slice/web.service/io.latency"), "8:16 target=10000\n");
    let all = |dev: &str| -> Vec<String> {
        let found = host.cgroups().other_controls(&host.root, Path::new(VM), dev).unwrap();
        found.iter().map(|o| format!("{} {} {}", o.cgroup.display(), o.file, o.value)).collect()
    };
    let expected = [
        "/ io.cost.qos enable=1 ctrl=auto rpct=0.00",
        "/machine.slice io.weight 300",
        "/machine.slice/plc.scope io.weight 50",
        "/machine.slice/db.scope io.latency target=10000",
    ];
    assert_eq!(all("8:16"), expected);
    host.put(&format!("{c}/io.cost.qos"), "8:16 enable=0 ctrl=auto\n");
    assert_eq!(all("8:16"), expected[3..]);
    assert!(all("8:32").is_empty());
}
