use std::fs;

use super::*;
use crate::error::Kind;
use crate::fixtures::put;

/// Host below a root, with the threads 7 and 8 of a VM in the default group.
fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let (dir, root) = crate::fixtures::root();
    put(&root, "/proc/self/mountinfo", "40 31 0:40 / /sys/fs/resctrl rw - resctrl resctrl rw\n");
    put(&root, SHOWS_GROUP, "res:/\nmon:\n");
    for tid in [7, 8] {
        put(&root, format!("/proc/7/task/{tid}/cpu_resctrl_groups"), "res:/\nmon:\n");
    }
    files.iter().for_each(|(path, text)| put(&root, path, text));
    (dir, root)
}

/// Xeon with two sockets: eleven ways without gaps, of which devices fill two, percent in tens.
const INTEL: &[(&str, &str)] = &[
    ("/proc/cpuinfo", "vendor_id\t: GenuineIntel\n"),
    ("/sys/fs/resctrl/schemata", "    MB:0=100;1=100\n    L3:0=7ff;1=7ff\n"),
    ("/sys/fs/resctrl/info/MB/min_bandwidth", "10\n"),
    ("/sys/fs/resctrl/info/MB/bandwidth_gran", "10\n"),
    ("/sys/fs/resctrl/info/MB/num_closids", "8\n"),
    ("/sys/fs/resctrl/info/L3/cbm_mask", "7ff\n"),
    ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
    ("/sys/fs/resctrl/info/L3/shareable_bits", "600\n"),
    ("/sys/fs/resctrl/info/L3/sparse_masks", "0\n"),
    ("/sys/fs/resctrl/info/L3/num_closids", "16\n"),
    ("/sys/fs/resctrl/info/L3_MON/mon_features", "mbm_total_bytes\n"),
];
/// EPYC: sixteen ways, gaps allowed, 1/8 GB/s, slow memory, ways of devices off.
const AMD: &[(&str, &str)] = &[
    ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
    ("/sys/fs/resctrl/schemata", "    MB:0=2048\n  SMBA:0=2048\n    L3:0=ffff\n"),
    ("/sys/fs/resctrl/info/MB/min_bandwidth", "0\n"),
    ("/sys/fs/resctrl/info/MB/bandwidth_gran", "1\n"),
    ("/sys/fs/resctrl/info/SMBA/min_bandwidth", "0\n"),
    ("/sys/fs/resctrl/info/SMBA/bandwidth_gran", "1\n"),
    ("/sys/fs/resctrl/info/L3/cbm_mask", "ffff\n"),
    ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
    ("/sys/fs/resctrl/info/L3/shareable_bits", "0\n"),
    ("/sys/fs/resctrl/info/L3/sparse_masks", "1\n"),
    ("/sys/fs/resctrl/info/L3/io_alloc", "disabled\n"),
    ("/sys/fs/resctrl/info/L3/num_closids", "16\n"),
];
/// Arm server with MPAM: sixteen portions, percent in ones, one cache with the id 1.
const ARM: &[(&str, &str)] = &[
    ("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\n"),
    ("/sys/fs/resctrl/schemata", "    MB:1=100\n    L3:1=ffff\n"),
    ("/sys/fs/resctrl/info/MB/min_bandwidth", "1\n"),
    ("/sys/fs/resctrl/info/MB/bandwidth_gran", "1\n"),
    ("/sys/fs/resctrl/info/L3/cbm_mask", "ffff\n"),
    ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
    ("/sys/fs/resctrl/info/L3/shareable_bits", "0\n"),
    ("/sys/fs/resctrl/info/L3/sparse_masks", "1\n"),
];

/// Spec with VM `plc` and, where it is not empty, VM `web`.
fn spec(plc: &str, web: &str, section: &str) -> HostSpec {
    let vm = |name: &str, memory: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\ndomain = \"{name}\"\nmemory = {memory}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        )
    };
    let web = if web.is_empty() { String::new() } else { vm("web", web) };
    let text = format!("[device]\npath = \"/dev/sda\"\n{section}\n{}{web}", vm("plc", plc));
    HostSpec::parse("s.toml", &text).unwrap_or_else(|e| panic!("{e}"))
}

fn of(root: &Root, spec: &HostSpec) -> Result<Vec<Write>> {
    let tasks = BTreeMap::from([("plc", vec![(7, 7, 70), (7, 8, 80)])]);
    let resctrl = mounted(root)?;
    Ok(of_tasks(spec, &tasks, root, &resctrl)?.0)
}

/// `FILE VALUE`, below the mount point where it is there.
fn shown(writes: &[Write]) -> Vec<String> {
    let one = |write: &Write| {
        let path = &write.target.path;
        let file = path.strip_prefix(USUAL_MOUNT).unwrap_or(path).display();
        format!("{file} {}", write.target.form.text(&write.value).trim_end())
    };
    writes.iter().map(one).collect()
}

#[track_caller]
fn refused(root: &Root, (plc, web, section): (&str, &str, &str), kind: Kind, why: &str) {
    let error = of(root, &spec(plc, web, section)).unwrap_err();
    assert!(error.kind() == kind && error.to_string().contains(why), "{:?} {error}", error.kind());
}

#[test]
fn on_intel_a_vm_has_ways_and_percent_and_others_leave_its_own() {
    let (_dir, root) = host(INTEL);
    let plain = of(&root, &spec("{ ways = 2, bandwidth = \"45%\" }", "", "")).unwrap();
    assert_eq!(
        shown(&plain),
        [
            "rtvirtio-plc present",
            "rtvirtio-plc/schemata L3:0=180;1=180",
            "rtvirtio-plc/schemata MB:0=40;1=40",
            "/proc/7/task/7/cpu_resctrl_groups /rtvirtio-plc",
            "/proc/7/task/8/cpu_resctrl_groups /rtvirtio-plc",
        ]
    );
    assert_eq!(plain[1].created_by, Some(0));
    // Own ways from the lower end: the rest may have no gap. The other VM gets others.
    let both = of(&root, &spec("{ ways = 3, own = true }", "{ ways = 8 }", "")).unwrap();
    let both = shown(&both);
    assert!(both.contains(&"rtvirtio-plc/schemata L3:0=7;1=7".to_owned()), "{both:?}");
    assert!(both.contains(&"rtvirtio-web/schemata L3:0=7f8;1=7f8".to_owned()), "{both:?}");
    assert_eq!(both.last().unwrap(), "schemata L3:0=7f8;1=7f8");
    let counted = of(&root, &spec("{ monitor = true }", "", "")).unwrap();
    assert_eq!(shown(&counted)[0], "mon_groups/rtvirtio-plc present");
    assert_eq!(shown(&counted).len(), 3);
}

#[test]
fn on_amd_rates_are_eighths_and_devices_have_ways() {
    let (_dir, root) = host(AMD);
    let section = "[memory]\ndevice_ways = 2";
    let wanted =
        spec("{ ways = \"0xf00f\", bandwidth = \"2GB/s\", slow_bandwidth = \"1GB/s\" }", "", section);
    let writes = of(&root, &wanted).unwrap();
    let all = shown(&writes);
    assert_eq!(
        all[1..4],
        [
            "rtvirtio-plc/schemata L3:0=f00f",
            "rtvirtio-plc/schemata MB:0=16",
            "rtvirtio-plc/schemata SMBA:0=8",
        ]
    );
    assert_eq!(all[6..], ["info/L3/io_alloc 1", "info/L3/io_alloc_cbm 0=c000"]);
    assert_eq!(writes[7].created_by, Some(6));
    put(&root, "/sys/fs/resctrl/info/L3/io_alloc", "enabled\n");
    put(&root, "/sys/fs/resctrl/info/L3/io_alloc_cbm", "0=0003\n");
    assert_eq!(of(&root, &wanted).unwrap()[7].created_by, None);
    // Ways that devices have already are no VM's own.
    let own = shown(&of(&root, &spec("{ ways = 2, own = true }", "", "")).unwrap());
    assert_eq!(own[1], "rtvirtio-plc/schemata L3:0=c");
    put(&root, "/proc/self/mountinfo", "40 31 0:40 / /sys/fs/resctrl rw - resctrl resctrl rw,mba_MBps\n");
    let mib = shown(&of(&root, &spec("{ bandwidth = \"2GiB/s\" }", "", "")).unwrap());
    assert_eq!(mib[1], "rtvirtio-plc/schemata MB:0=2048");
    refused(&root, ("{ bandwidth = \"40%\" }", "", ""), Kind::Argument, "write bandwidth = \"8GB/s\"");
}

#[test]
fn on_arm_percent_are_a_cap_of_each_domain() {
    let (_dir, root) = host(ARM);
    let all = shown(&of(&root, &spec("{ ways = 4, bandwidth = \"33%\" }", "", "")).unwrap());
    assert_eq!(all[1..3], ["rtvirtio-plc/schemata L3:1=f000", "rtvirtio-plc/schemata MB:1=33"]);
    refused(&root, ("{ bandwidth = \"2GB/s\" }", "", ""), Kind::Argument, "write bandwidth = \"40%\"");
    refused(&root, ("{ ways = 4 }", "", "[memory]\ndevice_ways = 2"), Kind::System, "gives devices no ways");
    refused(&root, ("{ slow_bandwidth = \"2GB/s\" }", "", ""), Kind::System, "no info/SMBA");
    refused(&root, ("{ monitor = true }", "", ""), Kind::System, "does not count");
}

#[test]
fn with_cdp_code_and_data_get_the_same_ways() {
    let of_code = |(path, text): &(&str, &'static str)| (path.replace("info/L3/", "info/L3CODE/"), *text);
    let files: Vec<(String, &str)> = INTEL.iter().map(of_code).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    let (_dir, root) = host(&files);
    let both = "    MB:0=100;1=100\nL3DATA:0=7ff;1=7ff\nL3CODE:0=7ff;1=7ff\n";
    put(&root, "/sys/fs/resctrl/schemata", both);
    let all = shown(&of(&root, &spec("{ ways = 3, own = true }", "", "")).unwrap());
    assert_eq!(all[1..3], ["rtvirtio-plc/schemata L3CODE:0=7;1=7", "rtvirtio-plc/schemata L3DATA:0=7;1=7"]);
    assert_eq!(all[5..], ["schemata L3CODE:0=7f8;1=7f8", "schemata L3DATA:0=7f8;1=7f8"]);
}

#[test]
fn ways_and_groups_that_do_not_fit_are_refused() {
    let (_dir, root) = host(INTEL);
    for (plc, web, why) in [
        ("{ ways = \"5\" }", "", "sparse_masks is 0"),
        ("{ ways = \"0x1800\" }", "", "more than the cache has, 7ff"),
        ("{ ways = 12 }", "", "no 12 adjacent ways"),
        ("{ ways = 6, own = true }", "{ ways = 6, own = true }", "no 6 adjacent ways"),
        ("{ ways = \"0x3\", own = true }", "{ ways = \"0x6\" }", "ways 2 of 6 are of another group"),
        ("{ ways = \"0x18\", own = true }", "", "would leave 7e7 to all others"),
        ("{ bandwidth = \"5%\" }", "", "less than this CPU can limit to: 10 %"),
    ] {
        refused(&root, (plc, web, ""), Kind::Infeasible, why);
    }
    put(&root, "/sys/fs/resctrl/info/L3/min_cbm_bits", "2\n");
    refused(&root, ("{ ways = \"1\" }", "", ""), Kind::Infeasible, "at least 2 adjacent ones");
    put(&root, "/sys/fs/resctrl/db/schemata", "    L3:0=00f;1=00f\n");
    put(&root, "/sys/fs/resctrl/db/mode", "exclusive\n");
    refused(&root, ("{ ways = \"c\" }", "", ""), Kind::Infeasible, "ways c of c are of another group");
    put(&root, "/sys/fs/resctrl/db/mode", "shareable\n");
    of(&root, &spec("{ ways = \"c\" }", "", "")).unwrap();
    refused(&root, ("{ ways = \"c\", own = true }", "", ""), Kind::Infeasible, "are of another group");
    put(&root, "/sys/fs/resctrl/info/MB/num_closids", "2\n");
    refused(&root, ("{ ways = 2 }", "", ""), Kind::Infeasible, "num_closids is 2");
    of(&root, &spec("{ monitor = true }", "", "")).unwrap();
}

#[test]
fn a_group_of_another_program_is_left_to_it() {
    let (_dir, root) = host(INTEL);
    let wanted = ("{ ways = 2 }", "", "");
    put(&root, "/proc/7/task/8/cpu_resctrl_groups", "res:qemu-1-plc-vcpus_0-1\nmon:\n");
    refused(&root, wanted, Kind::InForce, "thread 8 is in group /qemu-1-plc-vcpus_0-1");
    refused(&root, wanted, Kind::InForce, "`virsh edit plc`");
    put(&root, "/proc/7/task/8/cpu_resctrl_groups", "res:/\nmon:io\n");
    refused(&root, wanted, Kind::InForce, "in group /mon_groups/io");
    // A thread that has ended is in none.
    fs::remove_dir_all(root.at("/proc/7/task/8")).unwrap();
    of(&root, &spec(wanted.0, "", "")).unwrap();
    put(&root, "/sys/fs/resctrl/rtvirtio-plc/schemata", "    L3:0=1;1=1\n");
    refused(&root, wanted, Kind::InForce, "there is a group /sys/fs/resctrl/rtvirtio-plc already");
}

#[test]
fn without_resctrl_the_remedy_is_named() {
    let (_dir, root) = host(INTEL);
    fs::remove_file(root.at(SHOWS_GROUP)).unwrap();
    refused(&root, ("{ ways = 2 }", "", ""), Kind::System, "does not show the group of a thread");
    put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    refused(&root, ("{ ways = 2 }", "", ""), Kind::System, "not visible");
    put(&root, "/proc/filesystems", "nodev\tresctrl\n");
    refused(&root, ("{ ways = 2 }", "", ""), Kind::System, "mount -t resctrl resctrl /sys/fs/resctrl");
}

#[test]
fn only_threads_of_the_default_group_are_taken_in_later() {
    let (_dir, root) = host(INTEL);
    let wanted = spec("{ ways = 2 }", "", "");
    let late = || late_tasks(&root, &wanted.vms()[0], &[(7, 7, 70), (7, 8, 80)]).unwrap();
    assert!(late().is_empty(), "there is no group yet");
    put(&root, "/sys/fs/resctrl/rtvirtio-plc/tasks", "");
    put(&root, "/proc/7/task/7/cpu_resctrl_groups", "res:rtvirtio-plc\nmon:\n");
    assert_eq!(shown(&late()), ["/proc/7/task/8/cpu_resctrl_groups /rtvirtio-plc"]);
    put(&root, "/proc/7/task/8/cpu_resctrl_groups", "res:other\nmon:\n");
    assert!(late().is_empty(), "another program's");
}
