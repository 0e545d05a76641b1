use super::*;
use crate::test_root::TestRoot;

const STAT: &str = "4242 (CPU 0/) KVM) S 1 4242 4242 0 -1 4194368 99 0 0 0 150 50 0 0 -98 0 9 0 6868646 3133440 417 \
                    18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 97 1 0 0 0 0 0 0 0 0 0 0 0\n";

#[test]
fn a_stat_line_is_read_field_by_field() {
    let stat = parse_stat(STAT).unwrap();
    assert_eq!((stat.comm.as_str(), stat.state, stat.parent, stat.kernel), ("CPU 0/) KVM", 'S', 1, false));
    assert_eq!((stat.start, stat.priority, stat.policy), (6_868_646, 97, Some(Policy::Fifo)));
    assert_eq!((stat.nice, stat.cpu_time), (0, Duration::from_secs(2)));
    let kernel = parse_stat(&STAT.replace(" 4194368 ", " 2129984 ")).unwrap();
    assert!(kernel.kernel);
    for cut in [0, 10, 60, 140] {
        assert_eq!(parse_stat(&STAT[..cut]), None, "{cut}");
    }
}

#[test]
fn the_other_files_are_read() {
    let root = TestRoot::new(&[]);
    root.put("/proc/5/task/6/status", "Name:\tx\nCpus_allowed_list:\t0-1,3\n");
    root.put("/proc/5/task/6/cgroup", "3:cpu,cpuacct:/vm:0\n1:name=systemd:/a\n0::/b.scope\n");
    root.put("/proc/5/task/6/stat", STAT);
    assert_eq!(affinity(&root, 5, 6).unwrap(), "0-1,3");
    let all = cgroups(&root, 5, 6).unwrap();
    assert!(all[0].has("cpu") && all[0].path.ends_with("vm:0") && all[2].controllers.is_empty(), "{all:?}");
    assert_eq!(cpu_time(&root, 5, 6).unwrap(), Duration::from_secs(2));
    root.put("/proc/5/task/6/schedstat", "1234567 10 3\n");
    assert_eq!(cpu_time(&root, 5, 6).unwrap(), Duration::from_nanos(1_234_567));
    assert_eq!(tids(&root, 5).unwrap(), [6]);
}

#[test]
fn a_thread_that_ended_is_gone_and_another_form_is_reported() {
    let root = TestRoot::new(&[]);
    assert!(stat(&root, 5, 6).unwrap_err().is_gone());
    assert!(tids(&root, 5).unwrap_err().is_gone() && cgroups(&root, 5, 6).unwrap_err().is_gone());
    root.put("/proc/5/task/6/stat", "not a stat\n");
    let error = stat(&root, 5, 6).unwrap_err();
    assert!(!error.is_gone() && error.to_string().contains("/proc/5/task/6/stat"), "{error}");
    root.put("/proc/5/task/6/cgroup", "nonsense\n");
    assert!(cgroups(&root, 5, 6).is_err());
}

#[test]
fn this_process_is_understood() {
    let root = Root::default();
    let pid = std::process::id();
    let stat = stat(&root, pid, pid).unwrap();
    assert!(!stat.kernel && stat.policy.is_some() && stat.start > 0);
    assert!(!cgroups(&root, pid, pid).unwrap().is_empty());
    assert!(crate::text::cpu_list(&affinity(&root, pid, pid).unwrap()).is_some());
}
