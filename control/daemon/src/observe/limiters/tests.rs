//! What limiters of a real disk and a real QEMU show of a load that is known to the request.

use std::fs;
use std::time::Duration;

use rtvirtio_kernel::{Hierarchy, ProcessId};
use rtvirtio_spec::HostSpec;
use rtvirtio_testkit::{HANG, LoopDevice, Machine, Need, has, skip, unique};
use rtvirtio_vmm::Qmp;
use rtvirtio_vmm::threads::Named;
use serde_json::json;

use super::*;
use crate::Contract;

/// Reads of one burst, each of 4 KiB.
const READS: u64 = 20;

/// A cgroup, removed when its VM has gone.
pub(in crate::observe) struct Group {
    pub cgroups: Cgroups,
    pub path: PathBuf,
}

impl Drop for Group {
    fn drop(&mut self) {
        let begin = Instant::now();
        // The kernel may still be about to notice that its process has ended.
        while self.cgroups.remove(&Root::default(), &self.path).is_err() && begin.elapsed() < HANG {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Sends reads through the emulated disk, and waits until they are done.
fn read(qmp: &mut Qmp) {
    let reads = |qmp: &mut Qmp| qmp.disk_stats().unwrap().iter().map(|disk| disk.read.ops).sum::<u64>();
    let wanted = reads(qmp) + READS;
    for n in 0..READS {
        // Apart from each other, so that the kernel makes one request of each.
        let command = format!("qemu-io d \"aio_read -q {} 4k\"", n << 20);
        qmp.execute("human-monitor-command", Some(json!({ "command-line": command }))).unwrap();
    }
    let begin = Instant::now();
    while reads(qmp) < wanted {
        assert!(begin.elapsed() < HANG, "{} of {wanted}", reads(qmp));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_a_known_load_used_of_blk_throttle_and_qemus_throttling() {
    let test = "what_a_known_load_used_of_blk_throttle_and_qemus_throttling";
    if !has(test, &[Need::Root, Need::QEMU, Need::Path("/dev/loop-control", "no loop devices")]) {
        return;
    }
    let (root, dir) = (Root::default(), rtvirtio_testkit::tempdir().unwrap());
    let cgroups = match Cgroups::detect(&root) {
        Ok(cgroups) => cgroups,
        Err(e) => return skip(test, &e.to_string()),
    };
    let file = dir.path().join("disk.img");
    fs::File::create(&file).unwrap().set_len(READS << 20).unwrap();
    let Some(disk) = LoopDevice::attach(&file) else { return skip(test, "losetup") };
    let (device, path) = (BlockDevice::find(&root, &disk.0).unwrap(), disk.0.display());
    let group = Group { cgroups, path: Path::new("/").join(format!("rtvirtio-{}", unique("limits"))) };
    group.cgroups.create(&root, &group.path).unwrap();
    let limit = match group.cgroups.hierarchy {
        Hierarchy::V1 => format!("{} 200", device.dev),
        Hierarchy::V2 => format!("{} riops=200", device.dev),
    };
    root.write(group.cgroups.limit_file(&group.path, Limit::ReadIops).unwrap(), &limit).unwrap();
    let drive = format!("file={path},format=raw,if=none,id=d,cache=none");
    let options = [
        ["-drive", &format!("{drive},throttling.iops-total=300")],
        ["-device", "virtio-blk-pci,id=disk,drive=d"],
    ];
    let machine = Machine::start(dir.path(), &unique("limits"), &options.concat());
    group.cgroups.attach(&root, &group.path, machine.pid()).unwrap();
    let text = format!(
        "[device]\npath = \"{path}\"\n[[vm]]\nname = \"plc\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
        machine.qmp().display()
    );
    let spec = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
    let contract = Contract::of_spec(&spec, Path::new("x.toml")).remove(0);
    let processes = vec![ProcessId::find(machine.pid()).unwrap().unwrap()];
    let vm = RunningVm { contract, processes, named: Named::default(), cpu: None };
    let mut qmp = Qmp::connect(machine.qmp(), HANG).unwrap();
    let mut counters = LimiterCounters::default();
    let begin = Instant::now();
    let mut look = |qmp: &mut Qmp, seconds: u64| {
        let (drives, disks) = (qmp.query_drives().unwrap(), qmp.disk_stats().unwrap());
        let looked = LimiterInput { vm: &vm, drives: &drives, disks: &disks, domain: &[] };
        let at = begin + Duration::from_secs(seconds);
        let all = counters.sample(&looked, &VmObservation::default(), &root, at);
        let name = format!("{} for {path} in {}", Limit::ReadIops.key(), group.path.display());
        let of = |kind, name: &str| {
            let found: Vec<_> = all.iter().filter(|one| one.kind == kind).collect();
            assert!(found.len() == 1 && found[0].name == name, "{name}: {all:#?}");
            // Neither of the two counts what it has held up, and both say so.
            assert!(found[0].hits_per_s.is_none() && found[0].unseen.is_some());
            (found[0].limit.unwrap(), found[0].used)
        };
        (of(LimiterKind::BlkThrottle, &name), of(LimiterKind::QemuThrottle, "iops-total of d"))
    };
    // What came before the first look is not known to be of any interval.
    read(&mut qmp);
    assert_eq!(look(&mut qmp, 0), ((200.0, None), (300.0, None)));
    // What the firmware or QEMU itself reads besides is one or two requests.
    let ((limit, of_group), of_drive) = look(&mut qmp, 1);
    let is_rest = |rate: Option<f64>| rate.is_some_and(|rate| rate <= 2.01);
    assert_eq!((limit, of_drive.0), (200.0, 300.0));
    assert!(is_rest(of_group) && is_rest(of_drive.1), "at rest: {of_group:?} {of_drive:?}");
    let used = READS as f64;
    let mut in_seconds = |from: u64, seconds: u64| {
        read(&mut qmp);
        let ((limit, of_group), of_drive) = look(&mut qmp, from + seconds);
        assert_eq!((limit, of_drive.0), (200.0, 300.0), "in {seconds} s");
        for rate in [of_group, of_drive.1] {
            let more = rate.unwrap() * seconds as f64 - used;
            assert!((-0.01..=2.01).contains(&more), "{more} more in {seconds} s");
        }
    };
    in_seconds(1, 1);
    in_seconds(2, 4);
    drop(machine);
    drop(group);
}

/// A VM whose disk does not exist.
fn vm() -> RunningVm {
    let text = "[device]\npath = \"/dev/no-such-disk\"\n[[vm]]\nname = \"plc\"\npid = 7\n\
                [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
    let spec = HostSpec::parse("test", text).unwrap();
    let contract = Contract::of_spec(&spec, Path::new("x.toml")).remove(0);
    let processes = vec![ProcessId { pid: 7, start_time: 1 }];
    RunningVm { contract, processes, named: Named::default(), cpu: None }
}

#[test]
fn what_a_limit_by_size_counts_is_not_known() {
    let vm = vm();
    let of = |iops_size| {
        let limits = ThrottleLimits { iops: 100, bps: 5_000_000, iops_size, ..ThrottleLimits::default() };
        let drives = [Drive { name: "d".to_owned(), limits: vec![limits], ..Drive::default() }];
        let looked = LimiterInput { vm: &vm, drives: &drives, disks: &[], domain: &[] };
        let all = LimiterCounters::default().drives(&looked, Some(1.0));
        all.iter().map(|one| one.dimension.is_some()).collect::<Vec<_>>()
    };
    assert_eq!((of(0), of(4096)), (vec![true, true], vec![false, true]));
}

#[test]
fn limits_that_cannot_be_looked_at_are_said() {
    let vm = vm();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    let put = |path: &str, text: &str| {
        let path = root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let said = |vm: &RunningVm| -> Vec<String> {
        let all = LimiterCounters::default().groups(vm, &root, Some(1.0));
        all.into_iter().map(|one| format!("{}: {}", one.name, one.unseen.unwrap())).collect()
    };
    assert!(said(&vm)[0].starts_with("limits of its cgroup: "), "{:?}", said(&vm));
    put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/cgroup.controllers", "io\n");
    assert!(said(&vm).is_empty(), "it has ended");
    put("/proc/7/cgroup", "0::/vm\n");
    assert!(said(&vm)[0].starts_with("limits for /dev/no-such-disk: "), "{:?}", said(&vm));
}
