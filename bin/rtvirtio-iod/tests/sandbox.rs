//! Confinement of a running I/O domain: every thread, as the kernel shows it.

mod common;

use std::collections::BTreeMap;

use common::{FLUSH, Iod, disk, read, request, two_disks, with_keys, write};
use rtvirtio_domain_client::{BlkRequest, Client, Options};

/// The values of these keys in `/proc`, of every thread.
fn threads(pid: u32, keys: &[&str]) -> BTreeMap<String, Vec<String>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of = |task: std::fs::DirEntry| {
        let status = match std::fs::read_to_string(task.path().join("status")) {
            Ok(status) => status,
            // A thread of a front end ends when that is silent.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return None,
            Err(e) => panic!("{e}"),
        };
        let value = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(&format!("{key}:")));
            line.unwrap_or_else(|| panic!("{key}: {status}")).trim().to_owned()
        };
        let name = format!("{} {}", value("Name"), task.file_name().to_string_lossy());
        Some((name, keys.iter().map(|k| value(k)).collect()))
    };
    tasks.filter_map(of).collect()
}

const KEYS: [&str; 6] = ["Seccomp", "NoNewPrivs", "CapEff", "CapPrm", "CapInh", "CapBnd"];
const NONE: &str = "0000000000000000";
/// `CAP_SYS_NICE` is number 23.
const NICE: &str = "0000000000800000";

/// The expected bounding set: without `CAP_SETPCAP` it cannot be emptied.
fn bounding(found: &str) -> &str {
    let ours = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = ours.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap().trim().to_owned();
    let setpcap = u64::from_str_radix(&effective, 16).unwrap() & 1 << 8 != 0;
    if setpcap { NONE } else { found }
}

#[test]
fn every_thread_is_confined_while_it_serves() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), &two_disks(dir.path(), 8, ""));
    let mut clients = ["a", "b"].map(|d| Client::connect(&dir.path().join(d), Options::default()).unwrap());
    for client in &mut clients {
        assert_eq!(request(client, &write(0, 4_096), Some(&[7; 4_096])).0, 0);
        // A flush makes the kernel start an io_uring worker.
        assert_eq!(request(client, &FLUSH, None).0, 0);
        assert_eq!(request(client, &read(0, 4_096), None), (0, vec![7; 4_096]));
    }
    let all = threads(iod.pid(), &KEYS);
    assert!(all.len() >= 5, "main, control, engine, front ends, and what starts their threads: {all:?}");
    for (name, found) in &all {
        assert_eq!(found[..5], ["2", "1", NONE, NONE, NONE], "{name}: {KEYS:?}");
        assert_eq!(found[5], bounding(&found[5]), "{name}");
    }
    drop(clients);
    let stderr = iod.end_well();
    let line = stderr.lines().find(|l| l.contains("sandbox: ")).unwrap();
    for layer in ["no new privileges", "seccomp", "no capabilities", "io_uring limited to what is used"] {
        assert!(line.contains(layer), "{line}");
    }
    // In force, or reported as missing.
    assert!(line.contains("landlock"), "{line}");
    for left in ["a", "b", "ctl"] {
        assert!(!dir.path().join(left).exists(), "{left} is removed at the end, from within the sandbox");
    }
}

/// One capability may stay, for the engine's thread only.
#[test]
fn passing_priorities_on_keeps_one_capability_for_one_thread() {
    let dir = disk(8);
    let nice = u64::from_str_radix(NICE, 16).unwrap();
    let ours = &threads(std::process::id(), &["CapPrm"]).into_values().next().unwrap()[0];
    if u64::from_str_radix(ours, 16).unwrap() & nice == 0 {
        let test = "passing_priorities_on_keeps_one_capability_for_one_thread";
        return rtvirtio_testkit::skip(test, "without CAP_SYS_NICE there is none to keep");
    }
    let config = two_disks(dir.path(), 8, "pass_priority = true\nfifo = 5");
    let config = with_keys(&config, "a", "guest_priority = { ceiling = \"real-time\" }\n");
    let iod = Iod::start(dir.path(), &config);
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    // Real-time, level 4.
    let urgent = BlkRequest { priority: 1 << 13 | 4, ..read(0, 4_096) };
    assert_eq!(request(&mut client, &urgent, None).0, 0);
    let all = threads(iod.pid(), &["CapEff", "Seccomp"]);
    for (name, found) in &all {
        let engine = name.starts_with("iod-d ") || name.starts_with("iou-wrk");
        assert_eq!(found[0], if engine { NICE } else { NONE }, "{name}");
        assert_eq!(found[1], "2", "{name}");
    }
    let (_, stderr) = iod.end();
    assert!(stderr.contains("CAP_SYS_NICE for the engine of d"), "{stderr}");
    assert!(!stderr.contains("not passed on"), "{stderr}");
}

#[test]
fn off_and_log_are_reported() {
    let dir = disk(8);
    for (mode, seccomp, words) in [("off", "0", "sandbox: off"), ("log", "2", "seccomp, which only logs")] {
        let config = format!("sandbox = \"{mode}\"\n{}", two_disks(dir.path(), 8, ""));
        let iod = Iod::start(dir.path(), &config);
        let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
        assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
        for (name, found) in threads(iod.pid(), &["Seccomp"]) {
            assert_eq!(found[0], seccomp, "{name} under {mode}");
        }
        drop(client);
        let stderr = iod.end_well();
        assert!(stderr.contains(words), "{mode}: {stderr}");
    }
}
