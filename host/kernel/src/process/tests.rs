use super::*;
use crate::test_root::TestRoot;

const STAT: &str = "5 (x) S 1 5 5 0 -1 4194368 99 0 0 0 150 50 0 0 20 0 9 0 6868646 3133440 417 \
                    18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0\n";

#[test]
fn a_child_is_seen_stopped_and_reaped() {
    #[expect(clippy::zombie_processes, reason = "`stop` reaps it, which is what is tested")]
    let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let id = ProcessId::find(child.id()).unwrap().unwrap();
    assert!(id.is_alive());
    id.stop(Duration::from_secs(2));
    assert!(!id.is_alive());
    assert!(ProcessId::find(child.id()).unwrap().is_none());
}

#[test]
fn a_reused_id_is_another_process() {
    let me = ProcessId::find(std::process::id()).unwrap().unwrap();
    let other = ProcessId { start_time: me.start_time + 1, ..me };
    assert!(!other.is_alive());
    other.signal(Signal::KILL);
}

#[test]
fn the_files_of_a_process_are_read() {
    let root = TestRoot::new(&[]);
    root.put("/proc/5/status", "Tgid:\t4\nVmLck:\t    2048 kB\nVmRSS:\t    8192 kB\n");
    root.put("/proc/5/comm", "kvm-nx-lpage-recovery-4242\n");
    root.put("/proc/5/cgroup", "3:cpu,cpuacct:/vm:0\n0::/b.scope\n");
    assert_eq!(pids(&root).unwrap(), [5]);
    assert_eq!(of_thread(&root, 5).unwrap(), 4);
    assert_eq!(locked_memory(&root, 5).unwrap(), (2 << 20, 8 << 20));
    assert_eq!(name(&root, 5).unwrap(), "kvm-nx-lpage-recovery-4242");
    assert!(cgroups(&root, 5).unwrap()[0].has("cpu"));
    assert!(cpu_time(&root, 5).unwrap_err().is_gone());
    root.put("/proc/5/stat", STAT);
    assert_eq!(cpu_time(&root, 5).unwrap(), Duration::from_secs(2));
    root.put("/proc/5/limits", "Max locked memory         8388608              unlimited            bytes\n");
    assert_eq!(memlock_limit(&root, Some(5)).unwrap().as_deref(), Some("8388608"));
    root.put("/proc/5/limits", "\n");
    assert_eq!(memlock_limit(&root, Some(5)).unwrap(), None);
}

#[test]
fn the_last_task_created_changes_with_each_one() {
    let root = TestRoot::new(&[]);
    assert!(last_created(&root).is_err(), "not known is no number");
    root.put("/proc/loadavg", "0.42 1.00 0.11 3/227 4711\n");
    assert_eq!(last_created(&root).unwrap(), 4711);
    root.put("/proc/loadavg", "0.42 1.00\n");
    assert!(last_created(&root).is_err());
    let before = last_created(&Root::default()).unwrap();
    std::thread::spawn(|| ()).join().unwrap();
    assert_ne!(last_created(&Root::default()).unwrap(), before, "a thread is one too");
}

#[test]
fn descriptors_name_their_files() {
    let root = TestRoot::new(&[]);
    root.put("/proc/5/fdinfo/7", "pos:\t0\n");
    fs::create_dir_all(root.at("/proc/5/fd")).unwrap();
    std::os::unix::fs::symlink("/dev/sda", root.at("/proc/5/fd/7")).unwrap();
    let [one] = descriptors(&root, 5).unwrap()[..] else { panic!("one descriptor") };
    assert_eq!(one.link(), Path::new("/proc/5/fd/7"));
    assert_eq!(one.target(&root).unwrap(), Path::new("/dev/sda"));
    assert_eq!(one.info(&root).unwrap(), "pos:\t0\n");
    assert!(descriptors(&root, 6).unwrap_err().is_gone());
}

#[test]
fn a_program_is_known_by_its_executable_and_not_by_its_name() {
    let root = TestRoot::new(&[]);
    root.put("/proc/5/comm", "rtvirtio-iod\n");
    root.put("/proc/5/status", "Uid:\t0\t0\t0\t0\n");
    let is_one = |link: &str| {
        let exe = root.at("/proc/5/exe");
        let _ = fs::remove_file(&exe);
        std::os::unix::fs::symlink(link, exe).unwrap();
        is_of_root(&root, 5, "rtvirtio-iod").unwrap()
    };
    assert!(!is_of_root(&root, 5, "rtvirtio-iod").unwrap(), "a thread of the kernel has no executable");
    assert!(is_one("/usr/bin/rtvirtio-iod") && is_one("/opt/rtvirtio-iod (deleted)"));
    assert!(is_one("/nix/store/q/bin/.rtvirtio-iod-wrapped"));
    assert!(!is_one("/usr/bin/qemu-system-x86_64") && !is_one("/rtvirtio-iod/sh"));
    assert_eq!(program_or_name(&root, 5).unwrap().as_deref(), Some("sh"), "the name is not asked");
    assert!(!is_one("/opt/vmm (deleted)"));
    assert_eq!(executable(&root, 5).unwrap().as_deref(), Some(Path::new("/opt/vmm")));
    root.put("/proc/5/status", "Uid:\t0\t64055\t0\t0\n");
    assert!(!is_one("/usr/bin/rtvirtio-iod"), "another user's");
    root.put("/proc/5/status", "\n");
    assert!(is_of_root(&root, 5, "rtvirtio-iod").is_err(), "not known is not another");
}

#[test]
fn this_process_has_memory() {
    assert!(locked_memory(&Root::default(), std::process::id()).unwrap().1 > 0);
}

#[test]
fn the_peer_of_a_client_is_the_listener() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("s");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let stream = UnixStream::connect(&path).unwrap();
    assert_eq!(peer(&stream).unwrap(), Some(std::process::id()));
}

#[test]
fn how_a_file_is_open_is_read_from_its_flags() {
    let root = TestRoot::new(&[]);
    fs::create_dir_all(root.at("/proc/5/fd")).unwrap();
    std::os::unix::fs::symlink("/x", root.at("/proc/5/fd/7")).unwrap();
    let [one] = descriptors(&root, 5).unwrap()[..] else { panic!("one descriptor") };
    let locks = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:9978033 100 101\n\
                 lock:\t2: OFDLCK ADVISORY  WRITE -1 fe:00:9978033 201 EOF\n\
                 lock:\t3: POSIX  ADVISORY  WRITE 77 fe:00:9978033 5 9\n";
    root.put("/proc/5/fdinfo/7", &format!("pos:\t0\nflags:\t02100002\nmnt_id:\t27\n{locks}"));
    assert_eq!(one.mode(&root).unwrap(), OpenMode { writes: true, direct: false });
    assert_eq!(one.file_locks(&root).unwrap(), [(100, 101), (201, u64::MAX)]);
    let flags = libc::O_DIRECT;
    root.put("/proc/5/fdinfo/7", &format!("flags:\t{flags:o}\n"));
    assert_eq!(one.mode(&root).unwrap(), OpenMode { writes: false, direct: true });
    assert_eq!(one.file_locks(&root).unwrap(), []);
    root.put("/proc/5/fdinfo/7", "pos:\t0\n");
    assert!(one.mode(&root).is_err(), "not known is not read-only");
}
