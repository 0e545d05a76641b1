use std::fs;

use super::*;
use crate::test_root::TestRoot;

const MOUNT: &str = "/sys/fs/cgroup";
const GROUP: &str = "/machine.slice/plc.slice/plc.scope";

/// A group in two others; only the root gives the controller to those below.
fn host() -> TestRoot {
    let root = TestRoot::new(&[]);
    root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    root.put("/proc/sys/kernel/osrelease", "6.12.9\n");
    root.put(ONLINE, "0-3\n");
    root.put(&format!("{MOUNT}/cgroup.controllers"), "cpuset cpu\n");
    root.put(&format!("{MOUNT}/{EFFECTIVE}"), "0-3\n");
    root.put(&format!("{MOUNT}/{CONTROLLERS}"), "cpuset cpu\n");
    for (file, text) in [(EXCLUSIVE, "\n"), (KIND, "member\n"), (CONTROLLERS, "cpu\n")] {
        root.put(&format!("{MOUNT}/machine.slice/{file}"), text);
    }
    root.put(&format!("{MOUNT}/machine.slice/plc.slice/{CONTROLLERS}"), "\n");
    root.put(&format!("{MOUNT}{GROUP}/cgroup.procs"), "7\n");
    root
}

fn steps(root: &Root, wanted: &[(&str, &str)]) -> Result<Vec<String>, String> {
    let wanted: Vec<(&Path, BTreeSet<u32>)> =
        wanted.iter().map(|(group, cpus)| (Path::new(*group), text::cpu_list(cpus).unwrap())).collect();
    let wanted: Vec<(&Path, &BTreeSet<u32>)> = wanted.iter().map(|(group, cpus)| (*group, cpus)).collect();
    let steps = partition_steps(root, &wanted).map_err(|e| e.to_string())?;
    let shown = |step: PartitionStep| {
        let file = step.file.strip_prefix(MOUNT).unwrap().display().to_string();
        format!("{file} {} {:?}", step.value, step.created_by)
    };
    Ok(steps.into_iter().map(shown).collect())
}

/// Steps for the groups above, where files had the exclusive CPUs `before` our first write.
fn above(root: &Root, wanted: &[(&str, &str)], before: &[(&str, &str)]) -> Vec<String> {
    let cpus = |list: &str| text::cpu_list(list).unwrap();
    let file_of = |group: &str| file(Path::new(MOUNT), Path::new(group), EXCLUSIVE);
    let before: BTreeMap<PathBuf, BTreeSet<u32>> =
        before.iter().map(|(group, list)| (file_of(group), cpus(list))).collect();
    let lists: Vec<BTreeSet<u32>> = wanted.iter().map(|(_, list)| cpus(list)).collect();
    let wanted: Vec<(&Path, &BTreeSet<u32>)> =
        wanted.iter().map(|(group, _)| Path::new(*group)).zip(&lists).collect();
    let steps = ancestor_steps(root, &wanted, &before).unwrap();
    let shown =
        |step: PartitionStep| format!("{} {}", step.file.strip_prefix(MOUNT).unwrap().display(), step.value);
    steps.into_iter().map(shown).collect()
}

#[track_caller]
fn refused(root: &Root, cpus: &str, why: &str) {
    let error = steps(root, &[(GROUP, cpus)]).unwrap_err();
    assert!(error.contains(why) && error.contains("; "), "{error}");
}

#[test]
fn controllers_come_first_and_the_partition_last() {
    let root = host();
    let all = steps(&root, &[(GROUP, "2-3")]).unwrap();
    assert_eq!(
        all,
        [
            "machine.slice/cgroup.subtree_control +cpuset None",
            "machine.slice/plc.slice/cgroup.subtree_control +cpuset None",
            "machine.slice/cpuset.cpus.exclusive 2-3 None",
            "machine.slice/plc.slice/cpuset.cpus.exclusive 2-3 Some(0)",
            "machine.slice/plc.slice/plc.scope/cpuset.cpus.exclusive 2-3 Some(1)",
            "machine.slice/plc.slice/plc.scope/cpuset.cpus.partition root Some(1)",
        ]
    );
    assert!(steps(&root, &[]).unwrap().is_empty());
}

#[test]
fn groups_above_keep_what_they_have_and_get_what_all_below_need() {
    let root = host();
    root.put(&format!("{MOUNT}/machine.slice/{EXCLUSIVE}"), "1\n");
    root.put(&format!("{MOUNT}/machine.slice/hmi.scope/cgroup.procs"), "8\n");
    let all = steps(&root, &[(GROUP, "3"), ("/machine.slice/hmi.scope", "2")]).unwrap();
    assert!(all.contains(&"machine.slice/cpuset.cpus.exclusive 1-3 None".to_owned()), "{all:?}");
    assert!(all.contains(&"machine.slice/hmi.scope/cpuset.cpus.exclusive 2 Some(0)".to_owned()), "{all:?}");
    assert_eq!(all.iter().filter(|step| step.contains("subtree_control")).count(), 2, "{all:?}");
    assert!(all[all.len() - 2..].iter().all(|step| step.contains(KIND)), "{all:?}");
    let both = steps(&root, &[(GROUP, "2-3"), ("/machine.slice/hmi.scope", "2")]).unwrap_err();
    assert!(both.contains("CPU 2 would be in two partitions"), "{both}");
    let nested = steps(&root, &[(GROUP, "3"), ("/machine.slice", "2")]).unwrap_err();
    assert!(nested.contains("start each VM in a cgroup of its own"), "{nested}");
}

#[test]
fn groups_above_get_what_all_partitions_need_and_give_back_what_none_needs() {
    let root = host();
    let slice = "machine.slice/cpuset.cpus.exclusive";
    let inner = "machine.slice/plc.slice/cpuset.cpus.exclusive";
    let first = above(&root, &[(GROUP, "2-3")], &[]);
    assert_eq!(
        first,
        [
            "machine.slice/cgroup.subtree_control +cpuset".to_owned(),
            "machine.slice/plc.slice/cgroup.subtree_control +cpuset".to_owned(),
            format!("{slice} 2-3"),
            format!("{inner} 2-3"),
        ]
    );
    for group in ["machine.slice", "machine.slice/plc.slice"] {
        root.put(&format!("{MOUNT}/{group}/{CONTROLLERS}"), "cpuset\n");
        root.put(&format!("{MOUNT}/{group}/{EXCLUSIVE}"), "2-3\n");
    }
    root.put(&format!("{MOUNT}/machine.slice/hmi.scope/{PROCESSES}"), "8\n");
    // That the group is a partition already hinders no other one.
    root.put(&format!("{MOUNT}{GROUP}/{KIND}"), "root\n");
    let hmi = ("/machine.slice/hmi.scope", "1");
    let before = [("/machine.slice", ""), ("/machine.slice/plc.slice", "")];
    assert_eq!(above(&root, &[(GROUP, "2-3")], &before), Vec::<String>::new());
    assert_eq!(above(&root, &[(GROUP, "2-3"), hmi], &before), [format!("{slice} 1-3")]);
    root.put(&format!("{MOUNT}/machine.slice/{EXCLUSIVE}"), "1-3\n");
    // The innermost gives CPUs up first, and what was there before us stays.
    assert_eq!(above(&root, &[hmi], &before), [format!("{inner} "), format!("{slice} 1")]);
    let before = [("/machine.slice", "0"), ("/machine.slice/plc.slice", "")];
    assert_eq!(above(&root, &[hmi], &before), [format!("{slice} 0-1"), format!("{inner} ")]);
    fs::remove_dir_all(root.at(format!("{MOUNT}/machine.slice/plc.slice"))).unwrap();
    assert_eq!(above(&root, &[hmi], &before), [format!("{slice} 0-1")]);
}

#[test]
fn what_the_kernel_would_refuse_is_refused_with_a_remedy() {
    let root = host();
    refused(&root, "3-4", "CPU 4 is not online");
    refused(&root, "0-3", "no CPU would be left");
    root.put("/sys/devices/system/cpu/isolated", "3\n");
    refused(&root, "2-3", "CPU 3 is isolated already");
    root.put("/sys/devices/system/cpu/isolated", "\n");
    root.put(&format!("{MOUNT}/{EFFECTIVE}"), "0-2\n");
    refused(&root, "2-3", "CPU 3 is in another partition: / has 0-2");
    root.put(&format!("{MOUNT}/{EFFECTIVE}"), "0-3\n");
    root.put(&format!("{MOUNT}/system.slice/{EXCLUSIVE}"), "2\n");
    refused(&root, "2-3", "CPU 2 is exclusive to /sys/fs/cgroup/system.slice");
    root.put(&format!("{MOUNT}/system.slice/{EXCLUSIVE}"), "\n");
    root.put(&format!("{MOUNT}{GROUP}/{EXCLUSIVE}"), "\n");
    root.put(&format!("{MOUNT}{GROUP}/{KIND}"), "root\n");
    refused(&root, "2-3", "is a partition already");
    root.put(&format!("{MOUNT}{GROUP}/{KIND}"), "member\n");
    steps(&root, &[(GROUP, "2-3")]).unwrap();
    let whole = steps(&root, &[("/", "2-3")]).unwrap_err();
    assert!(whole.contains("root cgroup"), "{whole}");
}

#[test]
fn a_kernel_without_exclusive_cpus_is_named() {
    let root = host();
    fs::remove_file(root.at(format!("{MOUNT}/machine.slice/{EXCLUSIVE}"))).unwrap();
    refused(&root, "2-3", "comes with Linux 6.7, and this is 6.12");
    fs::remove_file(root.at(format!("{MOUNT}/machine.slice/{KIND}"))).unwrap();
    steps(&root, &[(GROUP, "2-3")]).unwrap();
    root.put("/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
    refused(&root, "2-3", "and this is 6.1");
    root.put(&format!("{MOUNT}/cgroup.controllers"), "cpu\n");
    refused(&root, "2-3", "cgroup_no_v1=cpuset");
    root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
    refused(&root, "2-3", "mount -t cgroup2");
}

#[test]
fn only_a_plain_root_is_a_partition() {
    let root = host();
    let fault = || partition_fault(&root, Path::new(GROUP)).unwrap();
    assert!(fault().unwrap().contains("has no cpuset.cpus.partition any more"));
    root.put(&format!("{MOUNT}{GROUP}/{KIND}"), "root\n");
    assert_eq!(fault(), None);
    let reason = "root invalid (Parent unable to distribute cpu downstream)";
    root.put(&format!("{MOUNT}{GROUP}/{KIND}"), &format!("{reason}\n"));
    assert_eq!(fault().unwrap(), format!("cpuset.cpus.partition shows `{reason}`"));
}
