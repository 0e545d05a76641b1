use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::*;

fn sleeper() -> Command {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null());
    command
}

fn session_of(pid: u32) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the name in parentheses: state, ppid, pgrp, session (proc_pid_stat(5)).
    let rest = stat.rsplit_once(')').unwrap().1;
    rest.split_whitespace().nth(3).unwrap().parse().unwrap()
}

#[test]
fn child_of_a_worker_thread_outlives_the_thread_and_has_its_own_session() {
    let worker = thread::spawn(|| spawn(sleeper(), Vec::new(), Lifetime::WithParent).unwrap());
    let mut child = worker.join().unwrap();
    // The signal of a thread that ended would have arrived by now.
    thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none(), "the child died with the thread that asked for it");
    assert_eq!(session_of(child.id()), i32::try_from(child.id()).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn child_is_killed_with_its_parent() {
    const ROLE: &str = "RTVIRTIO_TEST_SPAWN_THEN_DIE";
    if std::env::var_os(ROLE).is_some() {
        // In the parent: start a child, print its pid, and be killed.
        let mut child = spawn(sleeper(), Vec::new(), Lifetime::WithParent).unwrap();
        println!("\nchild={}", child.id());
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        // Not reached.
        child.wait().unwrap();
    }
    let me = std::env::current_exe().unwrap();
    let out = Command::new(me)
        .args(["--exact", "spawn::tests::child_is_killed_with_its_parent", "--nocapture"])
        .env(ROLE, "1")
        .output()
        .unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let pid = text.lines().find_map(|l| l.strip_prefix("child=")).expect(&text).to_owned();
    let start = Instant::now();
    let alive =
        |pid: &str| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "));
    while alive(&pid) {
        assert!(start.elapsed() < rtvirtio_testkit::HANG, "child {pid} outlived its parent");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Directory for a child cgroup that this user may make, on v2 or in a v1 hierarchy.
fn cgroup_root() -> Option<PathBuf> {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/blkio"]
        .iter()
        .map(PathBuf::from)
        .find(|p| p.join("cgroup.procs").exists())
}

struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn child_is_in_its_cgroup_before_its_first_instruction() {
    let name = "child_is_in_its_cgroup_before_its_first_instruction";
    let skip = |reason: String| rtvirtio_testkit::skip(name, &reason);
    let Some(root) = cgroup_root() else { return skip("no cgroup file system".into()) };
    let group = Group(root.join(format!("rtvirtio-{}", rtvirtio_testkit::unique("spawn"))));
    if let Err(e) = fs::create_dir(&group.0) {
        return skip(format!("{}: {e}", group.0.display()));
    }
    let procs = fs::OpenOptions::new().write(true).open(group.0.join("cgroup.procs")).unwrap();
    let mut command = Command::new("cat");
    command.arg("/proc/self/cgroup").stdout(Stdio::piped());
    let child = spawn(command, vec![procs], Lifetime::WithParent).unwrap();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains(group.0.file_name().unwrap().to_str().unwrap()), "{text}");
}

#[test]
fn vanished_cgroup_is_an_error_and_nothing_runs() {
    // A file that refuses the write, as the procs file of a removed group does.
    let read_only = File::open("/dev/null").unwrap();
    assert!(spawn(sleeper(), vec![read_only], Lifetime::WithParent).is_err());
}

#[test]
fn child_is_in_the_network_namespace_of_its_caller() {
    if !rtvirtio_testkit::has(
        "child_is_in_the_network_namespace_of_its_caller",
        &[rtvirtio_testkit::Need::Root],
    ) {
        return;
    }
    let child_namespace = || {
        let mut child = spawn(sleeper(), Vec::new(), Lifetime::WithParent).unwrap();
        let namespace = fs::read_link(format!("/proc/{}/ns/net", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        namespace
    };
    // Starts the forking thread, if no other test has.
    let outer = child_namespace();
    assert_eq!(outer, fs::read_link(NAMESPACE).unwrap());
    let worker = thread::spawn(move || {
        // SAFETY: only the network namespace of this thread changes.
        let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(done, 0);
        (fs::read_link(NAMESPACE).unwrap(), child_namespace())
    });
    let (own, child) = worker.join().unwrap();
    assert_eq!(own, child);
    assert_ne!(own, outer);
}
