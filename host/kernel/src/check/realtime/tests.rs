use std::fs;

use super::*;
use crate::Level;
use crate::test_root::TestRoot;

fn host() -> TestRoot {
    TestRoot::new(&[
        ("/proc/sys/kernel/osrelease", "6.12.9-amd64\n"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "950000\n"),
        ("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
    ])
}

fn finding(root: &Root, id: &str) -> Finding {
    let mut found = Vec::new();
    check(root, &mut found);
    found.into_iter().find(|f| f.id == id).unwrap()
}

#[test]
fn the_fair_servers_share_is_read_or_known_by_version() {
    let root = host();
    assert_eq!(fair_server(&root).unwrap(), Some(DEFAULT_SHARE));
    assert!(finding(&root, "rt.fair_server").what.contains("by default 5 %"));
    for (cpu, runtime) in [("cpu0", "50000000"), ("cpu1", "100000000")] {
        root.put(&format!("{SERVERS}/{cpu}/runtime"), runtime);
        root.put(&format!("{SERVERS}/{cpu}/period"), "1000000000\n");
    }
    assert_eq!(fair_server(&root).unwrap(), Some(0.1));
    assert_eq!(finding(&root, "rt.fair_server").level, Level::Ok);
    root.put(&format!("{SERVERS}/cpu1/runtime"), "0\n");
    let off = finding(&root, "rt.fair_server");
    assert!(off.level == Level::Warn && off.what.contains("off on cpu1") && off.remedy.contains("50000000"));
    assert_eq!(least_fair_server(&root).unwrap(), Some(0.0));
    root.put("/sys/devices/system/cpu/isolated", "1\n");
    assert_eq!(least_fair_server(&root).unwrap(), Some(0.05), "isolated CPUs are for pinned threads");
    root.put("/sys/devices/system/cpu/isolated", "0-1\n");
    assert_eq!(least_fair_server(&root).unwrap(), Some(0.0), "all are isolated");
}

#[test]
fn without_fair_server_and_throttling_nothing_saves_the_shell() {
    let root = host();
    root.put("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
    assert_eq!(fair_server(&root).unwrap(), None);
    assert_eq!(finding(&root, "rt.fair_server").level, Level::Ok);
    root.put("/proc/sys/kernel/sched_rt_runtime_us", "-1\n");
    let none = finding(&root, "rt.fair_server");
    assert!(none.level == Level::Warn && none.remedy.contains("sched_rt_runtime_us=950000"), "{none:?}");
}

/// Linux 7.2 has the whole period as its default: that is no throttling.
#[test]
fn a_limit_of_the_whole_period_is_none() {
    let root = host();
    root.put("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
    for (runtime, level) in [("950000", Level::Ok), ("1000000", Level::Warn), ("1000001", Level::Warn)] {
        root.put("/proc/sys/kernel/sched_rt_runtime_us", runtime);
        root.put("/proc/sys/kernel/sched_rt_period_us", "1000000\n");
        assert_eq!(finding(&root, "rt.fair_server").level, level, "{runtime}");
    }
    assert!(!is_unthrottled(0, 0) && is_unthrottled(-1, 1_000_000));
}

/// CPUs without a tick: there the fair server should be off, and being off is no fault.
#[test]
fn the_fair_server_on_cpus_without_a_tick_is_reported() {
    let root = host();
    let all = |root: &Root| {
        let mut found = Vec::new();
        check(root, &mut found);
        found
    };
    for none in [None, Some(""), Some("(null)\n")] {
        if let Some(text) = none {
            root.put("/sys/devices/system/cpu/nohz_full", text);
        }
        assert!(all(&root).iter().all(|f| f.id != "rt.nohz_full"), "{none:?}");
    }
    root.put("/sys/devices/system/cpu/nohz_full", "1\n");
    let hidden = finding(&root, "rt.nohz_full");
    assert!(hidden.level == Level::Warn && hidden.remedy.contains("debugfs"), "{hidden:?}");
    for cpu in ["cpu0", "cpu1"] {
        root.put(&format!("{SERVERS}/{cpu}/runtime"), "50000000\n");
        root.put(&format!("{SERVERS}/{cpu}/period"), "1000000000\n");
    }
    let on = finding(&root, "rt.nohz_full");
    assert!(
        on.level == Level::Warn && on.what.ends_with("on on cpu1") && on.remedy.contains("echo 0"),
        "{on:?}"
    );
    root.put(&format!("{SERVERS}/cpu1/runtime"), "0\n");
    assert_eq!(finding(&root, "rt.nohz_full").level, Level::Ok);
    assert_eq!(finding(&root, "rt.fair_server").level, Level::Ok);
    root.put(&format!("{SERVERS}/cpu0/runtime"), "0\n");
    let off = finding(&root, "rt.fair_server");
    assert!(off.level == Level::Warn && off.what.ends_with("off on cpu0"), "{off:?}");
    root.put("/proc/sys/kernel/osrelease", "6.1.0\n");
    assert_eq!(finding(&root, "rt.nohz_full").level, Level::Ok);
}

#[test]
fn polling_before_a_halt_is_reported_when_it_is_long() {
    let root = host();
    let file = "/sys/module/kvm/parameters/halt_poll_ns";
    assert!(finding(&root, "kvm.halt_poll").what.contains("not loaded"));
    root.put(file, "10000\n");
    assert_eq!(finding(&root, "kvm.halt_poll").level, Level::Ok);
    root.put(file, "200000\n");
    let long = finding(&root, "kvm.halt_poll");
    assert!(long.level == Level::Warn && long.what.contains("200 us") && long.remedy.contains("echo 0 >"));
}

#[test]
fn a_server_that_is_off_gives_no_group_a_budget() {
    let root = host();
    assert_eq!(finding(&root, "rt.hcbs").level, Level::Ok);
    root.put("/sys/fs/cgroup/cgroup.procs", "1\n");
    root.put("/sys/fs/cgroup/vms.slice/cpu.rt.max", "max 100000\n");
    assert!(finding(&root, "rt.hcbs").what.contains("groups have cpu.rt.max"));
    root.put("/sys/fs/cgroup/cpu.rt.max", "max 100000\n");
    let off = finding(&root, "rt.hcbs");
    assert!(off.level == Level::Warn && off.remedy.contains("950000 1000000"), "{off:?}");
    root.put("/sys/fs/cgroup/cpu.rt.max", "95000 100000\n");
    assert_eq!(finding(&root, "rt.hcbs").level, Level::Ok);
}

fn vm(root: &TestRoot, locked_kb: u32) {
    // As with `-name process=plc`.
    root.put("/proc/42/comm", "plc\n");
    let _ = std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64 (deleted)", root.at("/proc/42/exe"));
    root.put("/proc/42/status", &format!("VmLck:\t{locked_kb} kB\nVmRSS:\t102400 kB\n"));
    root.put(
        "/proc/42/limits",
        "Max locked memory         8388608              8388608              bytes\n",
    );
    root.put("/proc/43/comm", "qemu-system-x86\n");
    let _ = std::os::unix::fs::symlink("/usr/bin/bash", root.at("/proc/43/exe"));
    root.put("/proc/43/status", "VmLck:\t0 kB\nVmRSS:\t102400 kB\n");
}

#[test]
fn memory_that_is_not_locked_is_reported_of_each_vm() {
    let root = host();
    vm(&root, 0);
    let found = vms(&root);
    assert_eq!(found.len(), 1, "bash is no VM: {found:?}");
    let reported = &found[0];
    assert_eq!((reported.id.as_str(), reported.level), ("vm.memlock.42", Level::Warn));
    assert!(reported.what.contains("0 MiB of 100 MiB") && reported.what.contains("8388608"), "{reported:?}");
    assert!(reported.remedy.contains("mem-lock=on"));
    vm(&root, 102_400);
    assert_eq!(vms(&root)[0].level, Level::Ok);
    fs::remove_file(root.at("/proc/42/status")).unwrap();
    assert!(vms(&root).is_empty(), "it has ended");
}

#[test]
fn an_open_qcow2_image_is_reported_and_a_raw_one_is_not() {
    let root = host();
    vm(&root, 102_400);
    let image = root.at("/disk.img");
    fs::write(&image, b"raw bytes").unwrap();
    fs::create_dir_all(root.at("/proc/42/fd")).unwrap();
    std::os::unix::fs::symlink(&image, root.at("/proc/42/fd/7")).unwrap();
    std::os::unix::fs::symlink("/nowhere", root.at("/proc/42/fd/8")).unwrap();
    assert_eq!(vms(&root).len(), 1);
    fs::write(&image, b"QFI\xfb\0\0\0\x03").unwrap();
    let found = vms(&root);
    assert_eq!((found.len(), found[1].id.as_str(), found[1].level), (2, "vm.qcow2.42", Level::Warn));
    assert!(found[1].what.contains("disk.img") && found[1].remedy.contains("qemu-img convert"));
}

/// Missing in the list it would look as if its memory were locked, and its images raw.
#[test]
fn a_vm_that_cannot_be_read_is_named() {
    let root = host();
    vm(&root, 102_400);
    root.put("/proc/42/cmdline", "qemu-system-x86_64\0-name\0guest=plc\0");
    // Neither is as the kernel has it, so that root cannot read it either.
    fs::remove_file(root.at("/proc/42/status")).unwrap();
    fs::create_dir(root.at("/proc/42/status")).unwrap();
    root.put("/proc/42/fd", "");
    let unknown = |found: &[Finding], id: &str, file: &str| {
        let one = found.iter().find(|f| f.id == id).unwrap_or_else(|| panic!("no {id}: {found:?}"));
        assert!(one.level == Level::Warn && one.remedy.contains("root"), "{one:?}");
        assert!(one.what.starts_with("not known for VM 42 (plc): ") && one.what.contains(file), "{one:?}");
    };
    let found = vms(&root);
    unknown(&found, "vm.memlock.42", "/proc/42/status");
    unknown(&found, "vm.qcow2.42", "/proc/42/fd");
    assert_eq!(found.len(), 2, "{found:?}");
    // A link to itself: root cannot open it either.
    fs::remove_file(root.at("/proc/42/fd")).unwrap();
    let image = root.at("/disk.img");
    std::os::unix::fs::symlink(&image, &image).unwrap();
    fs::create_dir_all(root.at("/proc/42/fd")).unwrap();
    std::os::unix::fs::symlink(&image, root.at("/proc/42/fd/7")).unwrap();
    unknown(&vms(&root), "vm.qcow2.42", "disk.img");
    let other = root.at("/other.img");
    fs::write(&other, b"QFI\xfb\0\0\0\x03").unwrap();
    std::os::unix::fs::symlink(&other, root.at("/proc/42/fd/9")).unwrap();
    let found = vms(&root);
    let both = found.iter().find(|f| f.id == "vm.qcow2.42").unwrap();
    assert!(both.what.contains("other.img; of another file it is not known: "), "{both:?}");
}

#[test]
fn what_cannot_be_read_is_not_taken_for_off() {
    let root = host();
    // A directory in the place of a file: EISDIR.
    for file in ["/sys/module/kvm/parameters/halt_poll_ns", "/proc/self/mountinfo"] {
        let _ = std::fs::remove_file(root.at(file));
        std::fs::create_dir_all(root.at(file)).unwrap();
    }
    root.put(&format!("{SERVERS}/cpu0/period"), "1000000000\n");
    std::fs::create_dir_all(root.at(format!("{SERVERS}/cpu0/runtime"))).unwrap();
    for id in ["kvm.halt_poll", "rt.hcbs", "rt.fair_server"] {
        let found = finding(&root, id);
        assert!(found.level == Level::Warn && found.what.contains("not known"), "{found:?}");
    }
    assert!(fair_server(&root).is_err() && least_fair_server(&root).is_err());
}
