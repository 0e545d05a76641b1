use std::fs;

use rtvirtio_model::{Bfq, Elevator, VmConfig};
use rtvirtio_spec::Spec;
use rtvirtio_testkit::{HANG, Machine, Need, has};
use rtvirtio_vmm::Qmp;

use super::*;
use crate::fixtures::{READS, spec};

struct Host {
    dir: tempfile::TempDir,
    root: Root,
    spec: Spec,
    stack: Stack,
}

fn stack_of(name: &str, dev: &str, below: &[(&str, &str)]) -> Stack {
    let disk =
        |name: &str, dev: &str| BlockDevice { name: name.to_owned(), dev: dev.to_owned(), partition: None };
    let disks = below.iter().map(|(name, dev)| disk(name, dev)).collect();
    Stack { device: disk(name, dev), disks, notes: Vec::new() }
}

const DEV: &str = "8:16";

impl Host {
    /// A host with cgroup v2, and VMs `plc`, of 100 reads of 4 KiB a second, and `db`, of 20.
    fn new() -> Self {
        let (dir, root) = crate::fixtures::root();
        let text = "[device]\npath = \"/dev/sdb\"\n\
             [[vm]]\nname = \"plc\"\npid = 100\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\n\
             [[vm]]\nname = \"db\"\npid = 200\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"16KiB\"\nrate = \"20/s\"\n";
        let spec = rtvirtio_spec::parse("test.toml", text).unwrap();
        let stack = stack_of("sdb", DEV, &[("sdb", DEV)]);
        let host = Self { dir, root, spec, stack };
        host.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        host.put("/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
        host
    }

    fn put(&self, path: &str, text: &str) {
        crate::fixtures::put(&self.root, path, text);
    }

    fn set(&self, cgroup: &str, file: &str, text: &str) {
        self.put(&format!("/sys/fs/cgroup{cgroup}/{file}"), text);
    }

    fn config() -> Config {
        let vm =
            VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
        Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; 2] }
    }

    fn placed<'a>(&'a self, cgroups: [&'a str; 2]) -> Vec<Placed<'a>> {
        let place = |(vm, cgroup)| Placed {
            vm,
            cgroup: Path::new(cgroup),
            drives: None,
            pids: Ok(Vec::new()),
            has_cap: false,
            uncovered: Vec::new(),
        };
        self.spec.vms.iter().zip(cgroups).map(place).collect()
    }

    fn survey(&self, cgroups: [&str; 2]) -> (Vec<String>, Placements) {
        for cgroup in cgroups {
            fs::create_dir_all(self.root.at(format!("/sys/fs/cgroup{cgroup}"))).unwrap();
        }
        let placed = self.placed(cgroups);
        self.survey_of(&placed)
    }

    fn survey_of(&self, placed: &[Placed<'_>]) -> (Vec<String>, Placements) {
        let (io, cpu) = (Cgroups::detect(&self.root).unwrap(), Cgroups::detect_cpu(&self.root).unwrap());
        let at = Survey {
            root: &self.root,
            io: &io,
            cpu: Some(&cpu),
            names: &["/dev/sdb".into()],
            stack: &self.stack,
        };
        let found = survey(&at, placed).unwrap();
        (found.list.iter().map(ToString::to_string).collect(), found.placements)
    }
}

const SLICE: [&str; 2] = ["/machine.slice/plc.scope", "/machine.slice/db.scope"];

#[test]
fn a_limit_above_the_vms_is_named_and_shared() {
    let host = Host::new();
    let (list, placements) = host.survey(SLICE);
    assert!(list.is_empty() && placements.ceiling(0).is_none(), "{list:?}");
    host.set("/machine.slice", "io.max", "8:16 rbps=max wbps=max riops=30 wiops=5\n");
    let (list, placements) = host.survey(SLICE);
    assert_eq!(
        list,
        [
            "plc: limited to 30/s by /machine.slice (io.max), together with db",
            "db: limited to 30/s by /machine.slice (io.max), together with plc",
        ]
    );
    // Both want more than half of it.
    assert_eq!([0, 1].map(|vm| placements.ceiling(vm).unwrap().0), [15.0, 15.0]);
    // Of a larger one the other leaves what it does not declare.
    host.set("/machine.slice", "io.max", "8:16 rbps=max wbps=max riops=90 wiops=5\n");
    assert_eq!([0, 1].map(|vm| host.survey(SLICE).1.ceiling(vm).unwrap().0), [70.0, 45.0]);
    // Bytes are requests of the VM's size, and the least limit counts.
    host.set("/machine.slice/db.scope", "io.max", "8:16 rbps=163840 wbps=max riops=max wiops=max\n");
    let (list, placements) = host.survey(SLICE);
    assert!(
        list.contains(&"db: limited to 160KiB/s by /machine.slice/db.scope (io.max)".to_owned()),
        "{list:?}"
    );
    assert_eq!([0, 1].map(|vm| placements.ceiling(vm).unwrap().0), [70.0, 10.0]);
}

/// Groups as KubeVirt's pods have, and machine.slice divided for real-time VMs.
#[test]
fn vms_of_different_parents_have_no_weights_that_compare() {
    let host = Host::new();
    let apart = ["/machine.slice/rt.slice/plc.scope", "/machine.slice/nort.slice/db.scope"];
    host.set("/machine.slice/rt.slice", "io.bfq.weight", "default 300\n");
    let (list, placements) = host.survey(apart);
    assert_eq!(list.len(), 1);
    assert!(
        list[0].contains("plc (/machine.slice/rt.slice/plc.scope), db (/machine.slice/nort.slice/db.scope)")
    );
    assert!(
        list[0].contains("weights compare only cgroups with one parent") && list[0].contains("machine.slice")
    );
    assert!(!placements.any_weights_compare() && placements.limits_act(0) && placements.limits_act(1));
    let placed = host.placed(apart);
    let shares = shares_in_force(&placed, &placements, &Host::config()).unwrap().to_string();
    assert!(shares.ends_with("plc 75 %, db 25 %"), "{shares}");
    let siblings = host.survey(SLICE).1;
    assert!(siblings.any_weights_compare() && shares_in_force(&placed, &siblings, &Host::config()).is_none());
}

#[test]
fn where_nothing_can_act_the_remedy_is_named() {
    let host = Host::new();
    let (list, placements) = host.survey(["/machine.slice/plc.scope", "/"]);
    assert!(
        list[0].starts_with("db: is in the root cgroup: no weights or limits can act; start it in"),
        "{list:?}"
    );
    assert_eq!([0, 1].map(|vm| placements.limits_act(vm)), [true, false]);
    let (list, placements) = host.survey(["/user.slice/session-1.scope", "/user.slice/session-1.scope"]);
    assert!(list[0].starts_with("plc: shares the cgroup /user.slice/session-1.scope with db"), "{list:?}");
    assert_eq!((list.len(), [0, 1].map(|vm| placements.limits_act(vm))), (2, [false, false]));
}

/// A limit of a disk below the device holds its requests too; of several disks each has a part.
#[test]
fn limits_of_the_disks_below_are_named() {
    let mut host = Host::new();
    host.set("/machine.slice/plc.scope", "io.max", "8:0 rbps=max wbps=max riops=20 wiops=max\n");
    assert!(host.survey(SLICE).0.is_empty());
    host.stack = stack_of("dm-0", DEV, &[("sda", "8:0")]);
    let (list, placements) = host.survey(SLICE);
    assert_eq!(list, ["plc: limited to 20/s by /machine.slice/plc.scope (io.max of sda)"]);
    assert_eq!(placements.ceiling(0).map(|c| c.0), Some(20.0));
    host.stack = stack_of("md0", DEV, &[("sda", "8:0"), ("sdb", "8:32")]);
    let (list, placements) = host.survey(SLICE);
    assert!(list.len() == 1 && list[0].contains("(io.max of sda) limits the part"), "{list:?}");
    assert!(placements.ceiling(0).is_none());
}

/// libvirt's layout on cgroup v2: the limits that it sets are those of a group below the scope.
#[test]
fn limits_below_the_scope_and_of_cpu_time_are_named() {
    let host = Host::new();
    let inner = "/machine.slice/plc.scope/libvirt";
    let task = |tid: u32, name: &str, cgroup: &str| {
        for dir in [format!("/proc/100/task/{tid}"), format!("/proc/{tid}")] {
            let tail = "S 1 1 1 0 -1 64 0 0 0 0 5 5 0 0 20 0 1 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0";
            host.put(&format!("{dir}/stat"), &format!("{tid} ({name}) {tail}\n"));
            host.put(&format!("{dir}/status"), "Cpus_allowed_list:\t0-1\n");
            host.put(&format!("{dir}/cgroup"), &format!("0::{inner}/{cgroup}\n"));
        }
    };
    task(100, "qemu-system-x86", "emulator");
    task(101, "CPU 0/KVM", "vcpu0");
    host.set(inner, "io.max", "8:16 rbps=max wbps=max riops=40 wiops=max\n");
    host.set("/machine.slice", "cpu.max", "50000 100000\n");
    host.set("/machine.slice/plc.scope", "cpu.max", "max 100000\n");
    host.set(&format!("{inner}/vcpu0"), "cpu.max", "20000 100000\n");
    let mut placed = host.placed(SLICE);
    placed[0].pids = Ok(vec![100]);
    let (list, placements) = host.survey_of(&placed);
    let expected = [
        "plc: its threads get at most 50000 us of CPU time in 100000 us (0.50 CPUs) by /machine.slice (cpu.max): waits for a CPU are not in \
         the predictions",
        "plc: vcpu 0 gets at most 20000 us of CPU time in 100000 us (0.20 CPUs) by /machine.slice/plc.scope/libvirt/vcpu0 (cpu.max): waits for \
         a CPU are not in the predictions",
        "plc: limited to 40/s by /machine.slice/plc.scope/libvirt (io.max)",
    ];
    assert_eq!(list, expected);
    assert_eq!(placements.ceiling(0).map(|c| c.0), Some(40.0));
    // The contract of the spec is none of these.
    let mut vm = host.spec.vms[0].clone();
    vm.cpu.need = Some(rtvirtio_spec::CpuNeed::Contract {
        budget: rtvirtio_units::Nanos::from_millis(4),
        period: rtvirtio_units::Nanos::from_millis(20),
    });
    host.set("/machine.slice/plc.scope", "cpu.max", "4000 20000\n");
    placed[0].vm = &vm;
    assert!(!host.survey_of(&placed).0.iter().any(|l| l.contains("plc.scope (cpu.max)")));
}

#[test]
fn what_is_not_counted_is_named_once() {
    let host = Host::new();
    host.set("", "io.cost.qos", "8:16 enable=1 ctrl=auto\n");
    host.set("/machine.slice", "io.weight", "default 300\n");
    host.set("/machine.slice/other.scope", "io.latency", "8:16 target=10000\n");
    let (list, placements) = host.survey(SLICE);
    assert_eq!(list.len(), 3, "{list:?}");
    assert!(placements.is_under_io_cost(), "so nothing is predicted");
    assert!(list.iter().any(|l| l.starts_with("io.cost is enabled on the device (enable=1")));
    assert!(list.iter().any(|l| l.starts_with("/machine.slice has io.weight 300")));
    assert!(list.iter().any(|l| l.starts_with("/machine.slice/other.scope has io.latency (target=10000)")));
}

/// Images for a VM's two disks.
fn images(host: &Host) -> [String; 2] {
    ["disk.img", "other.img"].map(|name| {
        let path = host.dir.path().join(name);
        fs::write(&path, vec![0; 1 << 20]).unwrap();
        path.display().to_string()
    })
}

/// Controls on a device where `plc` has this monitor.
fn survey_of_monitor(host: &Host, socket: &Path, device: &str) -> Controls {
    let mut placed = host.placed(SLICE);
    let drives = Qmp::connect(socket, HANG).and_then(|mut qmp| qmp.query_drives());
    placed[0].drives = Some(drives.map_err(|e| e.to_string()));
    let (io, names) = (&Cgroups::detect(&host.root).unwrap(), &[PathBuf::from(device)]);
    let (root, stack) = (&Root::default(), &stack_of("none", "0:0", &[]));
    super::survey(&Survey { root, io, cpu: None, names, stack }, &placed).unwrap()
}

/// A real QEMU with its own throttling.
#[test]
fn qemus_own_throttling_is_a_limit() {
    if !has("qemus_own_throttling_is_a_limit", &[Need::QEMU]) {
        return;
    }
    let host = Host::new();
    let [disk, other] = images(&host);
    let drive = format!("file={disk},format=raw,if=none,id=d0,throttling.iops-total=50");
    let file = format!("driver=raw,node-name=r1,file.driver=file,file.filename={other}");
    let options = [
        ["-drive", &drive],
        ["-device", "virtio-blk-pci,drive=d0,id=disk0,request-merging=off"],
        ["-object", "throttle-group,id=slow,x-bps-read=40960"],
        ["-blockdev", &file],
        ["-blockdev", "driver=throttle,node-name=t1,throttle-group=slow,file=r1"],
        ["-device", "virtio-blk-pci,drive=t1,id=disk1"],
    ];
    let machine = Machine::start(host.dir.path(), "throttled", &options.concat());
    let socket = machine.qmp().to_owned();
    let survey = |device: &str| survey_of_monitor(&host, &socket, device);
    for (device, ceiling, text) in [
        (&disk, 50.0, "limited to 50/s by QEMU's own throttling of drive d0 (iops-total=50)"),
        (&other, 10.0, "limited to 40KiB/s by QEMU's own throttling of drive disk1 (bps-read=40960)"),
    ] {
        let found = survey(device);
        let of_qemu: Vec<&Control> =
            found.list.iter().filter(|c| c.kind == ControlKind::QemuThrottle).collect();
        assert_eq!(of_qemu.iter().map(|c| c.to_string()).collect::<Vec<_>>(), [format!("plc: {text}")]);
        assert_eq!(found.placements.ceiling(0).map(|c| c.0), Some(ceiling));
        // Without an agent the tasks run past it.
        assert_eq!(bypassed(&found, |_| false), []);
        let past = bypassed(&found, |name| name == "plc");
        assert!(past.len() == 1 && past[0].text.contains("past QEMU"), "{past:?}");
    }
    // Of two disks neither of which lies on the device none is taken for the VM's.
    assert!(survey("/dev/null").placements.ceiling(0).is_none());
    drop(machine);
    // A monitor that does not answer is no absence of throttling.
    let found = survey(&disk);
    assert!(
        found.list[0].text.starts_with("whether QEMU throttles its drives is not known"),
        "{:?}",
        found.list
    );
}

/// A throttle that lets bursts through, shared by two drives of which one joins requests.
#[test]
fn qemus_throttling_counts_as_what_it_lets_through() {
    if !has("qemus_throttling_counts_as_what_it_lets_through", &[Need::QEMU]) {
        return;
    }
    let mut host = Host::new();
    let [disk, other] = images(&host);
    let throttle = "throttling.iops-read=50,throttling.iops-read-max=2000,throttling.iops-read-max-length=60,throttling.group=gg";
    let drives = [
        format!("file={disk},format=raw,if=none,id=d0,{throttle}"),
        format!("file={other},format=raw,if=none,id=d1,{throttle}"),
    ];
    let options = [
        ["-drive", &drives[0]],
        ["-device", "virtio-blk-pci,drive=d0,id=disk0,request-merging=off"],
        ["-drive", &drives[1]],
        ["-device", "virtio-blk-pci,drive=d1,id=disk1"],
    ];
    let machine = Machine::start(host.dir.path(), "bursts", &options.concat());
    let survey = |host: &Host, device: &str| {
        let found = survey_of_monitor(host, machine.qmp(), device);
        let text = found.list.iter().find(|c| c.kind == ControlKind::QemuThrottle).unwrap().text.clone();
        (text, found.placements)
    };
    // Of a neighbour the burst counts.
    let (text, placements) = survey(&host, &disk);
    assert_eq!(placements.ceiling(0).map(|c| c.0), Some(2000.0));
    let limits = "iops-read=50 iops-read-max=2000 iops-read-max-length=60";
    assert!(
        text.starts_with("limited to 50/s by QEMU's own throttling of drive d0") && text.contains(limits),
        "{text}"
    );
    assert!(
        text.contains("shares with drive d1")
            && text.ends_with("and to 2000/s in a burst, as which it counts"),
        "{text}"
    );
    // Of one that joins requests no number of requests does.
    let (text, placements) = survey(&host, &other);
    assert_eq!(placements.ceiling(0), None);
    assert!(text.contains("shares with drive d0") && text.contains("request-merging=off"), "{text}");
    // To a VM with a target it gives its average, and that is what to raise.
    let task = format!("{READS}rate = \"100/s\"\ntarget = {{ percentile = \"p99\", latency = \"1s\" }}");
    host.spec.vms[0].tasks = spec("name = \"a\"\npid = 1", &task).vms()[0].tasks.clone();
    for file in [&disk, &other] {
        let (_, placements) = survey(&host, file);
        assert_eq!(placements.ceiling(0).map(|c| c.0), Some(50.0));
        assert!(
            placements.ceiling_by(0).starts_with("raise `iops-read` of drive d"),
            "{}",
            placements.ceiling_by(0)
        );
    }
}

/// Write-back of the page cache is in no VM's cgroup.
#[test]
fn limits_on_writes_that_escape_are_not_counted() {
    let host = Host::new();
    host.set("/machine.slice/plc.scope", "io.max", "8:16 rbps=max wbps=max riops=max wiops=20\n");
    let mut placed = host.placed(SLICE);
    let writes = spec("name = \"plc\"\npid = 100", "op = \"write\"\nblock = \"4KiB\"");
    let vm = writes.vms()[0].clone();
    placed[0].vm = &vm;
    let (list, placements) = host.survey_of(&placed);
    assert!(list[0].starts_with("plc: limited to 20/s") && placements.limits_act(0), "{list:?}");
    placed[0].uncovered = vec![Uncovered {
        vm: "plc".to_owned(),
        kind: crate::uncovered::UncoveredKind::WriteBack,
        disk: None,
        text: "it goes through the page cache".to_owned(),
    }];
    let (list, placements) = host.survey_of(&placed);
    assert!(list.contains(&"plc: it goes through the page cache".to_owned()), "{list:?}");
    assert!(list.iter().any(|l| l.contains("limits its writes to 20 and does not act on them")), "{list:?}");
    assert_eq!(
        (placements.ceiling(0), placements.limits_act(0), placements.limits_act(1)),
        (None, false, true)
    );
    assert!(!placements.weights_compare(0) && !placements.weights_compare(1));
}
