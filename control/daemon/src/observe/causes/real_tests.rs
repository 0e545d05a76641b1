//! Causes that the sampler names of a real QEMU on a real disk.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rtvirtio_blame::CauseKind;
use rtvirtio_kernel::cgroup::Limit as CgroupLimit;
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, ProcessId, Root};
use rtvirtio_spec::HostSpec;
use rtvirtio_testkit::{HANG, LoopDevice, Machine, Need, has, skip, unique};
use rtvirtio_vmm::Qmp;
use rtvirtio_vmm::threads::Named;
use rtvirtio_workflow::Dirs;
use serde_json::json;

use crate::Contract;
use crate::linux::RunningVm;
use crate::observe::coverage::Coverage;
use crate::observe::limiters::tests::Group;
use crate::observe::{Sampler, TargetObservation};

/// Reads of one burst, each of 4 KiB: more than a second of each limit.
const READS: u64 = 120;

/// Sends reads through the emulated disk, and waits until they are done.
fn read(qmp: &mut Qmp) {
    let reads = |qmp: &mut Qmp| qmp.disk_stats().unwrap().iter().map(|disk| disk.read.ops).sum::<u64>();
    let wanted = reads(qmp) + READS;
    for n in 0..READS {
        let command = format!("qemu-io d \"aio_read -q {} 4k\"", (n % 20) << 20);
        qmp.execute("human-monitor-command", Some(json!({ "command-line": command }))).unwrap();
    }
    let begin = Instant::now();
    while reads(qmp) < wanted {
        assert!(begin.elapsed() < HANG, "{} of {wanted}", reads(qmp));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A VM on a loop device whose reads are held to a limit: of its cgroup, or of QEMU.
fn held_by(test: &str, is_of_qemu: bool) -> Option<TargetObservation> {
    let (root, dir) = (Root::default(), rtvirtio_testkit::tempdir().unwrap());
    let cgroups = match Cgroups::detect(&root) {
        Ok(cgroups) => cgroups,
        Err(e) => {
            skip(test, &e.to_string());
            return None;
        }
    };
    let file = dir.path().join("disk.img");
    fs::File::create(&file).unwrap().set_len(20 << 20).unwrap();
    let Some(disk) = LoopDevice::attach(&file) else {
        skip(test, "losetup");
        return None;
    };
    let (device, path) = (BlockDevice::find(&root, &disk.0).unwrap(), disk.0.display());
    let group = Group { cgroups, path: Path::new("/").join(format!("rtvirtio-{}", unique("causes"))) };
    group.cgroups.create(&root, &group.path).unwrap();
    let mut drive = format!("file={path},format=raw,if=none,id=d,cache=none");
    if is_of_qemu {
        drive += ",throttling.iops-total=50";
    } else {
        let limit = match group.cgroups.hierarchy {
            Hierarchy::V1 => format!("{} 50", device.dev),
            Hierarchy::V2 => format!("{} riops=50", device.dev),
        };
        root.write(group.cgroups.limit_file(&group.path, CgroupLimit::ReadIops).unwrap(), &limit).unwrap();
    }
    let options = [["-drive", &drive], ["-device", "virtio-blk-pci,id=disk,drive=d"]];
    let machine = Machine::start(dir.path(), &unique("causes"), &options.concat());
    group.cgroups.attach(&root, &group.path, machine.pid()).unwrap();
    let text = format!(
        "[device]\npath = \"{path}\"\n[[vm]]\nname = \"plc\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"200/s\"\ntarget = {{ percentile = \"p50\", latency = \"20ms\" }}\n",
        machine.qmp().display()
    );
    let spec = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
    let contract = Contract::of_spec(&spec, Path::new("x.toml")).remove(0);
    let processes = vec![ProcessId::find(machine.pid()).unwrap().unwrap()];
    let vms = [Arc::new(RunningVm { contract, processes, named: Named::default(), cpu: None })];
    let coverage = Coverage::scan(&vms, &root, Instant::now() + HANG);
    assert!(coverage.covers(&vms[0], Some(&path.to_string()), Instant::now()), "{coverage:?}");
    let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
    let mut sampler = Sampler::new(dirs, false, false).with_coverage(Arc::new(Mutex::new(coverage)));
    let begin = Instant::now();
    let found = loop {
        // A monitor has one client at a time.
        read(&mut Qmp::connect(machine.qmp(), HANG).unwrap());
        let mut seen = sampler.sample(&vms);
        let of = seen.vms.remove("plc").unwrap();
        // A busy machine may take longer than the limit.
        match of.targets.into_iter().find(|target| target.causes.as_ref().is_some_and(|all| !all.is_empty()))
        {
            Some(target) => break target,
            None => assert!(begin.elapsed() < HANG, "{:?}", of.limiters),
        }
    };
    drop(machine);
    drop(group);
    Some(found)
}

#[test]
fn throttling_of_a_real_qemu_and_a_limit_of_a_real_cgroup_are_told_from_each_other() {
    let test = "throttling_of_a_real_qemu_and_a_limit_of_a_real_cgroup_are_told_from_each_other";
    if !has(test, &[Need::Root, Need::QEMU, Need::Path("/dev/loop-control", "no loop devices")]) {
        return;
    }
    for (is_of_qemu, kind) in [(true, CauseKind::QemuThrottle), (false, CauseKind::KernelLimit)] {
        let Some(target) = held_by(test, is_of_qemu) else { return };
        let kinds: BTreeSet<String> =
            target.causes.iter().flatten().map(|cause| format!("{:?}", cause.kind)).collect();
        assert_eq!(kinds, BTreeSet::from([format!("{kind:?}")]), "{target:?}");
        let unread = |name: &str| target.causes_unread.iter().any(|one| one == name);
        assert!(!unread("its limits") && !unread("use of the device"), "{target:?}");
    }
}
