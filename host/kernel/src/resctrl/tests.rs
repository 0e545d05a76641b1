use std::fs;

use super::*;
use crate::test_root::TestRoot;

const MOUNT: &str = "40 31 0:40 / /sys/fs/resctrl rw,relatime - resctrl resctrl rw\n";

/// Host with two Intel sockets, with memory bandwidth in percent and counters.
fn intel() -> TestRoot {
    TestRoot::new(&[
        ("/proc/self/mountinfo", MOUNT),
        ("/proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu rdt_a mba\n"),
        ("/sys/fs/resctrl/schemata", "    MB:0=100;1=100\n    L3:0=7ff;1=7ff\n"),
        ("/sys/fs/resctrl/info/MB/min_bandwidth", "10\n"),
        ("/sys/fs/resctrl/info/MB/bandwidth_gran", "10\n"),
        ("/sys/fs/resctrl/info/L3/cbm_mask", "7ff\n"),
        ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
        ("/sys/fs/resctrl/info/L3/shareable_bits", "600\n"),
        ("/sys/fs/resctrl/info/L3_MON/mon_features", "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"),
        ("/sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "1000\n"),
        ("/sys/fs/resctrl/mon_data/mon_L3_01/mbm_total_bytes", "500\n"),
        ("/sys/fs/resctrl/mon_data/mon_L3_00/mbm_local_bytes", "900\n"),
        ("/sys/fs/resctrl/mon_data/mon_L3_01/mbm_local_bytes", "Unavailable\n"),
        ("/sys/fs/resctrl/vm0/mon_data/mon_L3_00/mbm_total_bytes", "77\n"),
        ("/sys/fs/resctrl/vm0/mon_data/mon_L3_00/mbm_local_bytes", "7\n"),
        ("/sys/fs/resctrl/vm0/mon_groups/io/mon_data/mon_L3_00/mbm_total_bytes", "5\n"),
        ("/sys/fs/resctrl/vm0/mon_groups/io/mon_data/mon_L3_00/mbm_local_bytes", "Unassigned\n"),
    ])
}

fn mounted(root: &Root) -> Resctrl {
    match find(root).unwrap() {
        Offer::Mounted(found) => found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_intel_host_has_percents_ways_and_counters() {
    let root = intel();
    let found = mounted(&root);
    assert_eq!(found.maker, Maker::Intel);
    let memory = MemoryBandwidth { least: 10, step: 10, most: 100, in_mib: false, domains: vec![0, 1] };
    assert_eq!(found.memory, Some(memory));
    let (sparse, cdp, devices) = (false, false, None);
    let (shareable, domains) = (0x600, vec![0, 1]);
    let cache = CacheWays { all: 0x7ff, least: 1, shareable, domains, sparse, cdp, devices };
    assert_eq!(found.cache, Some(cache));
    assert_eq!((found.slow_memory.as_ref(), found.classes), (None, None));
    assert!(found.counts_bandwidth());
    let counters = found.counters(&root).unwrap();
    let names: Vec<&str> = counters.iter().map(|c| c.group.as_str()).collect();
    assert_eq!(names, ["", "vm0", "vm0/mon_groups/io"]);
    assert_eq!(counters[0].total, Some(Counter::Bytes(1_500)));
    assert_eq!(counters[0].local, Some(Counter::No("Unavailable".to_owned())), "one domain shows no number");
    assert_eq!(counters[2].local, Some(Counter::No("Unassigned".to_owned())));
}

#[test]
fn an_amd_host_counts_in_eighths_of_a_gigabyte() {
    let root = TestRoot::new(&[
        ("/proc/self/mountinfo", MOUNT),
        ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
        ("/sys/fs/resctrl/schemata", "    MB:0=2048;1=2048;2=2048;3=2048\n  SMBA:0=2048\n    L3:0=ffff\n"),
        ("/sys/fs/resctrl/info/MB/min_bandwidth", "1\n"),
        ("/sys/fs/resctrl/info/MB/bandwidth_gran", "1\n"),
    ]);
    let found = mounted(&root);
    assert_eq!((found.maker, found.memory.as_ref().unwrap().most), (Maker::Amd, 2_048));
    assert_eq!(found.memory.unwrap().domains, [0, 1, 2, 3]);
    assert_eq!((found.cache, found.features.len()), (None, 0));
}

#[test]
fn mpam_is_seen_as_resctrl_and_may_lack_memory_bandwidth() {
    let root = TestRoot::new(&[
        ("/proc/self/mountinfo", MOUNT),
        ("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\n"),
        ("/sys/fs/resctrl/schemata", "    L3:1=ffff\n"),
        ("/sys/fs/resctrl/info/L3/cbm_mask", "ffff\n"),
        ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
        ("/sys/fs/resctrl/info/L3/shareable_bits", "0\n"),
    ]);
    let found = mounted(&root);
    assert_eq!((found.maker, found.memory.is_none(), found.cache.is_some()), (Maker::Arm, true, true));
    assert!(!found.counts_bandwidth());
}

#[test]
fn mebibytes_are_seen_by_the_mount_option() {
    let root = intel();
    root.put("/proc/self/mountinfo", &MOUNT.replace("resctrl rw\n", "resctrl rw,mba_MBps\n"));
    assert!(mounted(&root).memory.unwrap().in_mib);
}

#[test]
fn what_is_not_there_is_told_from_what_is_not_mounted() {
    let other = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let root = TestRoot::new(&[("/proc/self/mountinfo", other)]);
    assert_eq!(find(&root).unwrap(), Offer::Absent);
    root.put("/proc/filesystems", "nodev\tsysfs\nnodev\tresctrl\n\text4\n");
    assert_eq!(find(&root).unwrap(), Offer::NotMounted);
}

#[test]
fn an_error_is_not_absence() {
    let root = intel();
    root.put("/sys/fs/resctrl/info/MB/min_bandwidth", "ten\n");
    assert!(matches!(find(&root), Err(HostError::Form { .. })));
    fs::remove_file(root.at("/sys/fs/resctrl/info/MB/min_bandwidth")).unwrap();
    assert!(matches!(find(&root), Err(HostError::Read { .. })));
    fs::remove_file(root.at("/proc/self/mountinfo")).unwrap();
    assert!(find(&root).is_err());
}

#[test]
fn a_rate_needs_two_numbers() {
    let bytes = |n| Some(Counter::Bytes(n));
    let no = Some(Counter::No("Unavailable".to_owned()));
    let second = Duration::from_secs(2);
    assert_eq!(rate(bytes(100).as_ref(), bytes(300).as_ref(), second), Some(100.0));
    assert_eq!(rate(bytes(300).as_ref(), bytes(100).as_ref(), second), None);
    assert_eq!(rate(no.as_ref(), bytes(1).as_ref(), second), None);
    assert_eq!(rate(None, bytes(1).as_ref(), second), None);
}

#[test]
fn schemata_of_other_forms_are_refused() {
    assert_eq!(schema("MB:0=100\n", "MB", 10), Some(vec![(0, 100)]));
    assert_eq!(schema("L3:0=f\n", "MB", 10), Some(Vec::new()));
    for bad in ["MB:0\n", "MB:a=1\n", "MB:0=x\n"] {
        assert_eq!(schema(bad, "MB", 10), None, "{bad}");
    }
}

/// AMD host with counters and two VMs: one in a group of its own, one in the default group.
fn amd_with_vms() -> TestRoot {
    TestRoot::new(&[
        ("/proc/self/mountinfo", MOUNT),
        ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
        ("/sys/fs/resctrl/schemata", "    MB:0=2048\n"),
        ("/sys/fs/resctrl/info/L3_MON/mon_features", "mbm_total_bytes\n"),
        ("/sys/fs/resctrl/tasks", "1\n2\n30\n31\n"),
        ("/sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "900\n"),
        ("/sys/fs/resctrl/vm0/tasks", "10\n11\n12\n"),
        ("/sys/fs/resctrl/vm0/mon_data/mon_L3_00/mbm_total_bytes", "1000\n"),
        ("/sys/fs/resctrl/vm0/mon_groups/io/tasks", "12\n"),
        ("/sys/fs/resctrl/vm0/mon_groups/io/mon_data/mon_L3_00/mbm_total_bytes", "400\n"),
    ])
}

#[test]
fn a_vm_with_groups_of_its_own_is_counted_once() {
    let root = amd_with_vms();
    let resctrl = uncounted(&root).unwrap().unwrap();
    let before = MemoryLook::now(&root, &resctrl).unwrap();
    root.put("/sys/fs/resctrl/vm0/mon_data/mon_L3_00/mbm_total_bytes", "5000\n");
    root.put("/sys/fs/resctrl/vm0/mon_groups/io/mon_data/mon_L3_00/mbm_total_bytes", "1400\n");
    std::thread::sleep(Duration::from_millis(5));
    let after = MemoryLook::now(&root, &resctrl).unwrap();
    let seconds = after.at.duration_since(before.at).as_secs_f64();
    let rate = |threads: &[u32]| after.rate_since(&before, &threads.iter().copied().collect());
    // Bytes of the inner group are part of the outer one's.
    assert!((rate(&[10, 11, 12]).unwrap() * seconds - 4_000.0).abs() < 1e-6);
    assert!((rate(&[12]).unwrap() * seconds - 1_000.0).abs() < 1e-6);
    for (threads, says) in [
        (&[30, 31][..], "the default group of resctrl together with 2 of others"),
        (&[10, 11], "vm0 of resctrl together with 1 of others"),
        (&[99], "no threads"),
    ] {
        let why = rate(threads).unwrap_err();
        assert!(why.contains(says), "{why}");
    }
    root.put("/sys/fs/resctrl/vm0/mon_data/mon_L3_00/mbm_total_bytes", "Unassigned\n");
    let unassigned = MemoryLook::now(&root, &resctrl).unwrap();
    let why = unassigned.rate_since(&after, &[10, 11, 12].into()).unwrap_err();
    assert!(why.contains("Unassigned"), "{why}");
}

#[test]
fn where_nothing_is_counted_the_reason_is_said() {
    let other = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    let guest = "processor\t: 0\nflags\t\t: fpu hypervisor lm\n";
    let root = TestRoot::new(&[("/proc/self/mountinfo", other), ("/proc/cpuinfo", guest)]);
    let why = uncounted(&root).unwrap().unwrap_err();
    assert!(why.contains("its hypervisor hides it"), "{why}");
    root.put("/proc/filesystems", "nodev\tresctrl\n");
    assert!(uncounted(&root).unwrap().unwrap_err().contains("mount -t resctrl"));
    let root = intel();
    fs::remove_file(root.at("/sys/fs/resctrl/info/L3_MON/mon_features")).unwrap();
    assert!(uncounted(&root).unwrap().unwrap_err().contains("does not count"));
}

/// EPYC with ways for devices and slow memory, two groups of other programs, one of them exclusive.
#[test]
fn groups_of_others_have_their_ways_and_devices_too() {
    let root = TestRoot::new(&[
        ("/proc/self/mountinfo", MOUNT),
        ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
        ("/sys/fs/resctrl/schemata", "    MB:0=2048;1=2048\n  SMBA:0=2048;1=2048\n    L3:0=ffff;1=ffff\n"),
        ("/sys/fs/resctrl/info/L3/cbm_mask", "ffff\n"),
        ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
        ("/sys/fs/resctrl/info/L3/shareable_bits", "0\n"),
        ("/sys/fs/resctrl/info/L3/sparse_masks", "1\n"),
        ("/sys/fs/resctrl/info/L3/num_closids", "16\n"),
        ("/sys/fs/resctrl/info/L3/io_alloc", "enabled\n"),
        ("/sys/fs/resctrl/info/L3/io_alloc_cbm", "0=c000;1=8000\n"),
        ("/sys/fs/resctrl/info/SMBA/min_bandwidth", "0\n"),
        ("/sys/fs/resctrl/info/SMBA/bandwidth_gran", "1\n"),
        ("/sys/fs/resctrl/info/SMBA/num_closids", "15\n"),
        ("/sys/fs/resctrl/info/last_cmd_status", "ok\n"),
        ("/sys/fs/resctrl/db/schemata", "    L3:0=0003;1=000c\n"),
        ("/sys/fs/resctrl/db/mode", "exclusive\n"),
        ("/sys/fs/resctrl/web/schemata", "    L3:0=00f0;1=00f0\n"),
        ("/sys/fs/resctrl/web/mode", "shareable\n"),
    ]);
    let found = mounted(&root);
    let cache = found.cache.as_ref().unwrap();
    assert_eq!((cache.sparse, cache.cdp, cache.devices, found.classes), (true, false, Some(true), Some(15)));
    assert_eq!((found.slow_memory.as_ref().unwrap().most, found.memory.as_ref()), (2_048, None));
    let groups = found.control_groups(&root).unwrap();
    let shown: Vec<_> = groups.iter().map(|g| (g.name.as_str(), g.ways, g.exclusive)).collect();
    assert_eq!(shown, [("db", 0xf, true), ("web", 0xf0, false)]);
    assert_eq!(found.device_ways(&root).unwrap(), 0xc000);
    root.put("/sys/fs/resctrl/web/schemata", "    L3:0=00f0;1\n");
    assert!(found.control_groups(&root).is_err(), "an error is not the absence of ways");
}

#[test]
fn code_and_data_have_ways_of_their_own_with_cdp() {
    let mount = MOUNT.replace("resctrl rw\n", "resctrl rw,cdp\n");
    let root = TestRoot::new(&[
        ("/proc/self/mountinfo", mount.as_str()),
        ("/sys/fs/resctrl/schemata", "L3DATA:0=7ff\nL3CODE:0=7ff\n"),
        ("/sys/fs/resctrl/info/L3CODE/cbm_mask", "7ff\n"),
        ("/sys/fs/resctrl/info/L3CODE/min_cbm_bits", "2\n"),
        ("/sys/fs/resctrl/info/L3CODE/shareable_bits", "600\n"),
        ("/sys/fs/resctrl/info/L3CODE/num_closids", "8\n"),
        ("/sys/fs/resctrl/db/schemata", "L3DATA:0=600\nL3CODE:0=001\n"),
    ]);
    let found = mounted(&root);
    let cache = found.cache.as_ref().unwrap();
    assert_eq!((cache.resources(), cache.least, cache.sparse), (&["L3CODE", "L3DATA"][..], 2, false));
    assert_eq!(found.control_groups(&root).unwrap()[0].ways, 0x601);
}

#[test]
fn a_task_is_in_one_group_and_a_line_has_one_form() {
    for (text, group) in [
        ("res:/\nmon:\n", "/"),
        ("res:\nmon:\n", "/"),
        ("res:/\nmon:io\n", "/mon_groups/io"),
        ("res:vm0\nmon:\n", "/vm0"),
        ("res:vm0\nmon:io\n", "/vm0/mon_groups/io"),
    ] {
        assert_eq!(task_group(text).as_deref(), Some(group), "{text}");
    }
    assert_eq!(task_group("res:/\n"), None);
    let file = "    MB:0= 40;1=100\n    L3:0=007FF;1=00000\n";
    assert_eq!(line_values(file, "L3").as_deref(), Some("0=7ff;1=0"));
    assert_eq!(line_values(file, "MB").as_deref(), Some("0=40;1=100"));
    assert_eq!(line_values("0=00f;1=00f\n", "").as_deref(), Some("0=f;1=f"));
    assert_eq!((line_values(file, "L2"), line_values("MB:0=x\n", "MB")), (None, None));
}
