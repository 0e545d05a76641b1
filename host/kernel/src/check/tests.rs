use std::fs;

use super::*;
use crate::test_root::TestRoot;

fn finding(root: &Root, id: &str) -> Finding {
    check(root, Vec::new()).into_iter().find(|f| f.id == id).unwrap_or_else(|| panic!("no finding {id}"))
}

/// Host without anything to do.
fn good() -> TestRoot {
    TestRoot::new(&[
        ("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n"),
        ("/proc/sys/kernel/version", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (2024-02-01)\n"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "950000\n"),
        ("/proc/sys/kernel/sched_rt_period_us", "1000000\n"),
        ("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("/proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n"),
        ("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n"),
        ("/sys/fs/cgroup/cgroup.subtree_control", "io\n"),
        ("/sys/class/block/sda/size", "8\n"),
        ("/sys/block/sda/dev", "8:0\n"),
        ("/sys/block/sda/queue/scheduler", "none mq-deadline [bfq]\n"),
        ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
        ("/sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n"),
        ("/sys/devices/system/cpu/cpu0/cpuidle/state0/disable", "0\n"),
        ("/sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "2\n"),
        ("/sys/devices/system/cpu/cpu0/cpuidle/state0/name", "C1\n"),
        ("/dev/fuse", ""),
        ("/dev/loop-control", ""),
        ("/usr/bin/fio", ""),
        ("/usr/bin/qemu-system-x86_64", ""),
        ("/usr/sbin/losetup", ""),
    ])
}

#[test]
fn a_good_host_has_nothing_to_do() {
    let root = good();
    let extra = Finding::warn("kvm", "no KVM", "why", "remedy");
    let found = check(&root, vec![extra.clone()]);
    assert_eq!(found.last(), Some(&extra), "the caller's findings come last");
    let bad: Vec<_> = found.iter().filter(|f| f.level != Level::Ok && f.id != "kvm").collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert!(found.len() > 12);
}

#[test]
fn elevators_that_cannot_be_read_are_not_taken_for_a_kernel_without_bfq() {
    let root = good();
    let scheduler = "/sys/block/sda/queue/scheduler";
    root.put(scheduler, "[none] mq-deadline\n");
    assert_eq!(finding(&root, "bfq").level, Level::Fail);
    // A directory in the place of the file: EISDIR.
    fs::remove_file(root.at(scheduler)).unwrap();
    fs::create_dir(root.at(scheduler)).unwrap();
    let found = finding(&root, "bfq");
    assert!(found.level == Level::Warn && found.what.starts_with("not known"), "{found:?}");
}

#[test]
fn a_kernel_without_io_cost_is_named() {
    let root = good();
    let found = finding(&root, "io.cost");
    assert!(found.level == Level::Ok && found.what.contains("without CONFIG_BLK_CGROUP_IOCOST"), "{found:?}");
    root.put("/sys/fs/cgroup/io.cost.qos", "8:0 enable=0 ctrl=auto\n");
    assert_eq!(finding(&root, "io.cost").what, "io.cost is off");
}

#[test]
fn io_cost_is_a_fault_next_to_bfq_only() {
    let root = good();
    for (path, text) in [
        ("/sys/class/block/sdb/size", "8\n"),
        ("/sys/block/sdb/dev", "8:16\n"),
        ("/sys/block/sdb/queue/scheduler", "none mq-deadline [bfq]\n"),
        ("/sys/fs/cgroup/io.cost.qos", "8:0 enable=1 ctrl=auto\n8:16 enable=1 ctrl=auto\n"),
    ] {
        root.put(path, text);
    }
    let both = finding(&root, "io.cost");
    assert!(both.level == Level::Warn && both.what.contains("8:0, 8:16"), "{both:?}");
    assert!(both.remedy.contains("'8:0 enable=0'") && both.remedy.contains("'8:16 enable=0'"), "{both:?}");
    root.put("/sys/block/sda/queue/scheduler", "[none] mq-deadline bfq\n");
    let one = finding(&root, "io.cost");
    assert!(one.level == Level::Warn && !one.remedy.contains("8:0 "), "{one:?}");
    root.put("/sys/block/sdb/queue/scheduler", "none [mq-deadline] bfq\n");
    let none = finding(&root, "io.cost");
    assert_eq!((none.level, none.what.as_str()), (Level::Ok, "io.cost divides device 8:0, 8:16"));
}

#[test]
fn preempt_rt_is_seen_by_the_file_and_by_the_version() {
    let root = good();
    let of = |root: &Root| finding(root, "preempt_rt").what;
    assert_eq!(of(&root), "not a PREEMPT_RT kernel");
    root.put("/sys/kernel/realtime", "1\n");
    assert_eq!(of(&root), "PREEMPT_RT kernel");
    fs::remove_file(root.at("/sys/kernel/realtime")).unwrap();
    // Debian's 7.2.13 with PREEMPT_RT has no such file.
    root.put("/proc/sys/kernel/version", "#1 SMP PREEMPT_RT Debian 7.2.13-1 (2026-10-28)\n");
    assert_eq!(of(&root), "PREEMPT_RT kernel");
    fs::remove_file(root.at("/proc/sys/kernel/version")).unwrap();
    assert!(of(&root).starts_with("not known"), "{}", of(&root));
}

#[test]
fn each_fault_is_found_with_its_level_and_remedy() {
    let cases = [
        ("/proc/sys/kernel/osrelease", "4.9.0\n", "kernel", Level::Fail, "5.4"),
        ("/proc/sys/kernel/osrelease", "4.19.0\n", "kernel", Level::Warn, "5.4"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "0\n", "rt.throttling", Level::Warn, "sysctl"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "x\n", "rt.throttling", Level::Warn, "root"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "-1\n", "rt.throttling", Level::Warn, "sysctl"),
        ("/sys/devices/system/cpu/smt/active", "1\n", "cpu.smt", Level::Warn, "smt/control"),
        ("/proc/self/mountinfo", "1 1 0:1 / /p rw - proc proc rw\n", "cgroup.io", Level::Fail, "mount"),
        ("/sys/block/sda/queue/scheduler", "[none] mq-deadline\n", "bfq", Level::Fail, "CONFIG_IOSCHED_BFQ"),
        ("/sys/block/sda/queue/scheduler", "none bfq\n", "elevator.sda", Level::Warn, "root"),
        (
            "/sys/block/sda/queue/nr_requests",
            "2\n",
            "elevator.sda",
            Level::Warn,
            "64 > /sys/block/sda/queue/nr_requests",
        ),
        ("/sys/fs/cgroup/io.cost.qos", "8:0 enable=1 ctrl=auto\n", "io.cost", Level::Warn, "8:0 enable=0"),
        ("/sys/fs/cgroup/a/io.latency", "8:0 target=100\n", "io.latency", Level::Warn, "target=0"),
        (
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
            "powersave\n",
            "cpu.governor",
            Level::Warn,
            "cpupower",
        ),
        ("/sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "300\n", "cpu.idle", Level::Warn, "cpupower"),
    ];
    for (path, text, id, level, remedy) in cases {
        let root = good();
        root.put(path, text);
        let f = finding(&root, id);
        assert_eq!(f.level, level, "{f:?}");
        assert!(f.remedy.contains(remedy), "{f:?}");
    }
}

/// Linux 7.2: `sched_rt_runtime_us` is the whole period, and the fair server the only brake.
#[test]
fn a_limit_of_the_whole_period_stops_no_thread() {
    let root = good();
    root.put("/proc/sys/kernel/osrelease", "7.2.13-amd64\n");
    root.put("/proc/sys/kernel/sched_rt_runtime_us", "1000000\n");
    let f = finding(&root, "rt.throttling");
    assert!(f.level == Level::Ok && f.what.contains("off; the fair server alone keeps a share"), "{f:?}");
}

/// From Linux 6.12 on `sched_rt_runtime_us` stops a FIFO thread with CONFIG_RT_GROUP_SCHED only
/// (`update_curr_rt()`).
#[test]
fn a_limit_that_the_kernel_does_not_enforce_is_no_limit() {
    let root = good();
    let of = |root: &Root| {
        let f = finding(root, "rt.throttling");
        (f.level, f.what)
    };
    assert_eq!(of(&root), (Level::Ok, "real-time threads get 950000 us of each 1000000 us".to_owned()));
    root.put("/proc/sys/kernel/osrelease", "6.11.0\n");
    assert!(of(&root).1.starts_with("real-time threads get"));
    root.put("/proc/sys/kernel/osrelease", "6.12.0\n");
    let (level, what) = of(&root);
    assert!(level == Level::Ok && what.starts_with("off; the fair server alone keeps a share"), "{what}");
    assert!(what.ends_with("950000 us of each 1000000 us bound deadline reservations only"), "{what}");
    let server = "/sys/kernel/debug/sched/fair_server/cpu0";
    root.put(&format!("{server}/period"), "1000000000\n");
    root.put(&format!("{server}/runtime"), "0\n");
    let (level, what) = of(&root);
    assert!(level == Level::Warn && what.starts_with("off, and so is the fair server of a CPU"), "{what}");
    root.put("/proc/sys/kernel/sched_rt_runtime_us", "0\n");
    assert!(of(&root).1.contains("deadline threads get no time at all"));
    // CONFIG_RT_GROUP_SCHED.
    root.put("/proc/sys/kernel/sched_rt_runtime_us", "950000\n");
    let mount = "39 31 0:36 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    let mounts = fs::read_to_string(root.at("/proc/self/mountinfo")).unwrap();
    root.put("/proc/self/mountinfo", &(mounts + mount));
    assert!(of(&root).1.starts_with("off"), "groups without a budget");
    root.put("/sys/fs/cgroup/cpu/cpu.rt_runtime_us", "950000\n");
    assert_eq!(of(&root), (Level::Ok, "real-time threads get 950000 us of each 1000000 us".to_owned()));
}

#[test]
fn io_uring_that_is_switched_off_is_named() {
    let root = good();
    let path = "/proc/sys/kernel/io_uring_disabled";
    for (text, level, what) in [
        ("0\n", Level::Ok, "on for all"),
        ("1\n", Level::Warn, "CAP_SYS_ADMIN"),
        ("2\n", Level::Warn, "off for all"),
        ("x\n", Level::Warn, "not known"),
    ] {
        root.put(path, text);
        let f = finding(&root, "io_uring");
        assert!(f.level == level && f.what.contains(what), "{f:?}");
        assert_eq!(f.remedy.contains("sysctl kernel.io_uring_disabled=0"), ["1\n", "2\n"].contains(&text));
    }
    fs::remove_file(root.at(path)).unwrap();
    assert_eq!(finding(&root, "io_uring").level, Level::Ok);
}

#[test]
fn bfq_as_a_module_is_a_matter_of_loading_it() {
    let root = good();
    root.put("/sys/block/sda/queue/scheduler", "[none] mq-deadline\n");
    root.put("/lib/modules/6.1.0-18-amd64/modules.dep", "kernel/block/bfq.ko.xz:\n");
    let f = finding(&root, "bfq");
    assert_eq!((f.level, f.remedy.contains("modprobe bfq")), (Level::Warn, true));
}

#[test]
fn real_time_groups_are_reported() {
    let root = good();
    root.put("/proc/self/mountinfo", "1 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup c rw,cpu\n");
    root.put("/sys/fs/cgroup/cpu/cpu.rt_runtime_us", "950000\n");
    assert_eq!(finding(&root, "rt.group").level, Level::Warn);
}

#[test]
fn missing_tools_are_named_with_their_package() {
    let root = good();
    for (path, id, remedy) in [
        ("/dev/fuse", "fuse", "modprobe fuse"),
        ("/usr/bin/fio", "fio", "apt-get install fio"),
        ("/usr/bin/qemu-system-x86_64", "qemu", "qemu-system-x86"),
    ] {
        fs::remove_file(root.at(path)).unwrap();
        let f = finding(&root, id);
        assert_eq!((f.level, f.remedy.contains(remedy)), (Level::Warn, true), "{f:?}");
    }
}

#[test]
fn an_empty_root_gives_findings_and_no_panic() {
    let found = check(&TestRoot::new(&[]), Vec::new());
    assert!(found.iter().any(|f| f.level == Level::Fail));
    assert!(found.iter().all(|f| f.level == Level::Ok || !f.remedy.is_empty()));
}

#[test]
fn this_machine_can_be_checked() {
    let found = check(&Root::default(), Vec::new());
    assert_eq!(found.iter().find(|f| f.id == "kernel").unwrap().level, Level::Ok);
    assert!(found.iter().any(|f| f.id == "root"));
}

#[test]
fn memory_bandwidth_is_said_to_be_hidden_unmounted_or_counted() {
    let root = good();
    root.put("/proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu hypervisor\n");
    let hidden = finding(&root, "memory.bandwidth");
    assert!(hidden.level == Level::Ok && hidden.what.contains("hypervisor hides it"), "{hidden:?}");
    root.put("/proc/filesystems", "nodev\tresctrl\n");
    let unmounted = finding(&root, "memory.bandwidth");
    assert!(unmounted.level == Level::Warn && unmounted.remedy.contains("mount -t resctrl"), "{unmounted:?}");
    let mounts = fs::read_to_string(root.at("/proc/self/mountinfo")).unwrap();
    root.put("/proc/self/mountinfo", &(mounts + "40 31 0:40 / /sys/fs/resctrl rw - resctrl resctrl rw\n"));
    let broken = finding(&root, "memory.bandwidth");
    assert!(broken.level == Level::Warn && broken.what.contains("not known"), "{broken:?}");
    for (path, text) in [
        ("schemata", "MB:0=100\n"),
        ("info/L3_MON/mon_features", "mbm_total_bytes\n"),
        ("tasks", "1\n40\n"),
        ("mon_data/mon_L3_00/mbm_total_bytes", "5000000\n"),
        ("vm0/tasks", "41\n"),
        ("vm0/mon_data/mon_L3_00/mbm_total_bytes", "Unavailable\n"),
    ] {
        root.put(&format!("/sys/fs/resctrl/{path}"), text);
    }
    let counted = finding(&root, "memory.bandwidth");
    assert!(counted.what.contains("can be counted, and cannot be limited"), "{counted:?}");
    // A VM whose thread is in the default group, and one in a group of its own.
    for pid in [40, 41] {
        root.put(&format!("/proc/{pid}/comm"), "qemu-system-x86\n");
        let exe = root.at(format!("/proc/{pid}/exe"));
        std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64", exe).unwrap();
        root.put(&format!("/proc/{pid}/task/{pid}/comm"), "qemu-system-x86\n");
    }
    let seen = memory_traffic(&root, std::time::Duration::from_millis(1));
    let what: Vec<&str> = seen.iter().map(|f| f.what.as_str()).collect();
    assert_eq!(
        what,
        [
            "all threads in no other group: 0 MB/s, of it not counted to this node's memory",
            "vm0: not counted (Unavailable), of it not counted to this node's memory",
            "VM 40: not visible: its threads are in the default group of resctrl together with 1 of others; a group with its threads alone shows it",
            "VM 41: not counted: resctrl shows Unavailable",
        ]
    );
}

#[test]
fn a_partition_that_is_not_valid_is_named_and_so_is_a_kernel_without_them() {
    let root = good();
    let partition = || finding(&root, "cpu.partition");
    let none = partition();
    assert!(none.level == Level::Ok && none.what.contains("has no cpuset controller"), "{none:?}");
    root.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory\n");
    let old = partition();
    assert!(old.level == Level::Ok && old.what.contains("comes with Linux 6.7"), "{old:?}");
    let group = "/sys/fs/cgroup/machine.slice/plc.scope";
    root.put("/sys/fs/cgroup/machine.slice/cpuset.cpus.partition", "member\n");
    root.put("/sys/fs/cgroup/machine.slice/cpuset.cpus.exclusive", "2-3\n");
    root.put(&format!("{group}/cpuset.cpus.partition"), "root\n");
    assert_eq!(partition().what, "VMs can have partitions of CPUs");
    let reason = "root invalid (Parent unable to distribute cpu downstream)";
    root.put(&format!("{group}/cpuset.cpus.partition"), &format!("{reason}\n"));
    let invalid = partition();
    assert_eq!(invalid.level, Level::Warn);
    assert_eq!(invalid.what, format!("/machine.slice/plc.scope shows `{reason}`"));
    root.put("/proc/self/mountinfo", "damaged\n");
    assert!(partition().what.starts_with("not known: "), "{:?}", partition());
}
