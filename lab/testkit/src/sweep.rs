//! Removal of leftovers of tests whose process has ended: killed tests cannot remove them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::HANG;
use crate::owner::Owner;

/// First letters of the names of programs that tests start: only these are killed for their command
/// line or open files.
const PROGRAMS: [&str; 4] = ["rtvirtio", "qemu-system-", "fio", "sleep"];
/// Interval of checks for a change that happens by itself.
const PAUSE: Duration = Duration::from_millis(10);

/// Removes leftovers of dead tests, once in this process. Everything that makes something for a
/// test calls it: [`crate::tempdir`], [`crate::unique`], [`crate::has`], [`crate::Machine`],
/// [`crate::site::Site`].
///
/// Things of living processes are left alone, and so are those without a name of a test. Two sweeps
/// at once do each other no harm. A failed removal, without root for instance, is ignored.
pub fn sweep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        directories(&places()).iter().for_each(|dir| remove_site(dir));
        groups().iter().filter(|group| is_of_the_dead(group)).for_each(|group| remove_group(group));
        for group in domain_groups().iter().filter(|g| owner(g).is_some_and(Owner::is_gone)) {
            remove_group(group);
            // The last one's parent is removed too, unless VMs of others are below it.
            group.parent().into_iter().for_each(remove_empty_group);
        }
    });
}

/// Directories in which tests make their own.
fn places() -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = ["/tmp", "/var/tmp", "/dev/shm"].map(PathBuf::from).into();
    places.push(std::env::temp_dir());
    places.sort();
    places.dedup();
    places
}

/// Directories and files of tests whose process is gone.
fn directories(places: &[PathBuf]) -> Vec<PathBuf> {
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().flatten();
    entries.map(|e| e.path()).filter(|path| is_of_the_dead(path)).collect()
}

fn is_of_the_dead(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).filter(|n| n.starts_with("rtvirtio-"));
    name.and_then(Owner::from_name).is_some_and(Owner::is_gone)
}

/// Removes a directory or a file, and all uses of it on the machine: settings, processes, loop
/// devices, mounts.
fn remove_site(dir: &Path) {
    put_back(dir);
    end_processes(dir);
    detach_loops(dir);
    unmount(dir);
    let _ = if dir.is_dir() { fs::remove_dir_all(dir) } else { fs::remove_file(dir) };
}

/// Reverts settings and removes labs by the programs, as dropping a site does.
fn put_back(dir: &Path) {
    let run_dir = dir.join("run");
    if dir.join("state").exists() {
        run("rtvirtio", &["revert", "--force", "--stop-domain", "--quiet"], dir, &run_dir);
    }
    if run_dir.exists() {
        run("rtvirtio-lab", &["down", "--quiet"], dir, &run_dir);
    }
}

/// Runs a program of the workspace on the directories of a dead test, if it is built.
fn run(program: &str, args: &[&str], dir: &Path, run_dir: &Path) {
    let Some(path) = crate::site::find_program(program) else { return };
    let child = Command::new(path)
        .args(args)
        .env("RTVIRTIO_RUN_DIR", run_dir)
        .env("RTVIRTIO_STATE_DIR", dir.join("state"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    if let Ok(mut child) = child {
        let ended = eventually(|| !matches!(child.try_wait(), Ok(None)));
        if !ended {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits for a condition; `false` when it counts as hung.
fn eventually(mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > HANG {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

/// Kills the processes that a test started on a directory. Each is checked again once its pidfd is
/// open, so that no other process with the same id is killed.
fn end_processes(dir: &Path) {
    let devices = loops(dir);
    let has_open = |pid: u32| {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut files = entries.filter_map(|e| fs::read_link(e.path()).ok());
        files.any(|file| file.starts_with(dir) || devices.contains(&file))
    };
    let uses = |pid: u32| {
        let file = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let ours = PROGRAMS.iter().any(|p| file("comm").starts_with(p.as_bytes()));
        // Every program of a site has the directory in its environment, and passes it on.
        names(&file("environ"), dir) || ours && (names(&file("cmdline"), dir) || has_open(pid))
    };
    kill_while(|| pids().into_iter().filter(|pid| uses(*pid)).collect());
}

/// Whether a NUL-separated list names a directory.
fn names(list: &[u8], dir: &Path) -> bool {
    dir.to_str().is_some_and(|dir| String::from_utf8_lossy(list).contains(dir))
}

fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id()).collect()
}

/// Kills the listed processes until none is listed.
fn kill_while(list: impl Fn() -> Vec<u32>) {
    eventually(|| {
        let first = list();
        for pid in &first {
            let id = i32::try_from(*pid).ok().and_then(Pid::from_raw);
            let Some(Ok(fd)) = id.map(|id| pidfd_open(id, PidfdFlags::empty())) else { continue };
            if list().contains(pid) {
                let _ = pidfd_send_signal(&fd, Signal::KILL);
            }
        }
        first.is_empty()
    });
}

/// The loop devices whose file lies below a directory.
fn loops(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let ours = entries.filter(|e| {
        let file = fs::read_to_string(e.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(file.trim_end()).starts_with(dir)
    });
    ours.map(|e| Path::new("/dev").join(e.file_name())).collect()
}

/// Detaches the loop devices whose file lies below a directory.
fn detach_loops(dir: &Path) {
    for device in loops(dir) {
        // A loop device keeps its queue's settings, which the next user may not expect.
        let queue = Path::new("/sys/block").join(device.file_name().unwrap_or_default()).join("queue");
        let _ = fs::write(queue.join("scheduler"), "none");
        let detach = Command::new("losetup").arg("--detach").arg(&device).stderr(Stdio::null()).spawn();
        let _ = detach.and_then(|mut losetup| losetup.wait());
    }
}

/// Unmounts all mounts below a directory, the innermost first.
fn unmount(dir: &Path) {
    let list = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = list.lines().filter_map(|l| l.split(' ').nth(4)).map(Path::new);
    let mut ours: Vec<_> = points.filter(|point| point.starts_with(dir)).collect();
    ours.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    for point in ours {
        let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
    }
}

/// The cgroups directly below the root of each hierarchy.
fn groups() -> Vec<PathBuf> {
    let list = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // After the dash come type, source and options (proc_pid_mountinfo(5)).
    let is_cgroup = |line: &&str| line.split(" - ").nth(1).is_some_and(|tail| tail.starts_with("cgroup"));
    let roots = list.lines().filter(is_cgroup).filter_map(|l| l.split(' ').nth(4));
    let entries = roots.filter_map(|root| fs::read_dir(root).ok()).flatten().flatten();
    entries.map(|e| e.path()).filter(|path| path.is_dir()).collect()
}

/// Parent groups of libvirt's VMs, where it runs without systemd.
pub(crate) fn groups_of_machines() -> Vec<PathBuf> {
    groups().into_iter().filter(|group| group.file_name().is_some_and(|name| name == "machine")).collect()
}

/// The groups of all VMs of libvirt: `machine/qemu-ID-NAME.libvirt-qemu`.
pub(crate) fn domain_groups() -> Vec<PathBuf> {
    let entries =
        groups_of_machines().into_iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    entries.map(|e| e.path()).filter(|path| path.is_dir()).collect()
}

/// The test that named the VM of a group.
fn owner(group: &Path) -> Option<Owner> {
    Owner::from_name(group.file_name()?.to_str()?)
}

/// Whether this process named the VM of a group.
pub(crate) fn is_ours(group: &Path) -> bool {
    owner(group) == Some(Owner::this())
}

/// Kills the processes of a test's cgroup, and removes it. Its real-time budget is set to 0 first:
/// the kernel counts that of a removed group for a while.
pub(crate) fn remove_group(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let members = || {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != std::process::id()).collect()
    };
    kill_while(members);
    let _ = fs::write(group.join("cpu.rt_runtime_us"), "0");
    // Exiting threads keep it busy for a moment.
    eventually(|| fs::remove_dir(group).is_ok() || !group.exists());
}

/// Removes an empty cgroup, with its real-time budget.
pub(crate) fn remove_empty_group(group: &Path) {
    let mut below = fs::read_dir(group).into_iter().flatten().flatten();
    let has_groups = below.any(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    let members = fs::read_to_string(group.join("cgroup.procs"));
    if !has_groups && members.is_ok_and(|m| m.trim().is_empty()) {
        remove_group(group);
    }
}

/// Removes the cgroup of a VM's CPU contract, if a failed test left one.
pub fn remove_vm_group(vm: &str) {
    assert!(Owner::from_name(vm).is_some(), "{vm} is no name of `unique`");
    let name = format!("rtvirtio-{vm}");
    let ours = |group: &PathBuf| group.file_name().is_some_and(|n| n == name.as_str());
    groups().into_iter().filter(ours).for_each(|group| remove_group(&group));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::start_of;
    use crate::{ChildGuard, Need, has};

    /// Starts a process; the directory in its environment lets a sweep kill it too.
    fn sleeper(dir: &Path) -> ChildGuard {
        ChildGuard(Command::new("sleep").arg("600").env("RTVIRTIO_RUN_DIR", dir).spawn().unwrap())
    }

    /// A process in place of a test, and the name that such a test would give.
    struct Mortal {
        _process: ChildGuard,
        name: String,
    }

    impl Mortal {
        fn new(place: &Path) -> Self {
            let child = sleeper(place);
            let pid = child.id();
            let start = start_of(pid).unwrap();
            Self { _process: child, name: format!("rtvirtio-test-{pid}-{start}-x") }
        }
    }

    #[test]
    fn directories_of_the_dead_are_found_and_no_others() {
        let place = crate::tempdir().unwrap();
        let all = [place.path().to_owned()];
        let owner = Mortal::new(place.path());
        let dir = place.path().join(&owner.name);
        fs::create_dir(&dir).unwrap();
        for name in ["rtvirtio-test-x", "something-test-1-1", &crate::unique("rtvirtio")] {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        assert!(directories(&all).is_empty(), "its process runs");
        drop(owner);
        assert_eq!(directories(&all), [dir]);
    }

    #[test]
    fn a_dead_tests_process_goes_with_its_directory() {
        let place = crate::tempdir().unwrap();
        let dir = place.path().join("rtvirtio-test-1-1-x");
        fs::create_dir(&dir).unwrap();
        let (mut ours, mut other) = (sleeper(&dir.join("run")), sleeper(place.path()));
        remove_site(&dir);
        assert!(ours.wait().unwrap().code().is_none(), "killed");
        assert!(other.try_wait().unwrap().is_none(), "another's is left alone");
        assert!(!dir.exists());
    }

    #[test]
    fn a_dead_tests_cgroup_is_removed_with_its_processes() {
        let test = "a_dead_tests_cgroup_is_removed_with_its_processes";
        if !has(test, &[Need::Root]) {
            return;
        }
        let roots = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];
        let Some(root) = roots.iter().find(|r| Path::new(r).join("cgroup.procs").exists()) else {
            return crate::skip(test, "no cgroups");
        };
        let place = crate::tempdir().unwrap();
        let owner = Mortal::new(place.path());
        let group = Path::new(root).join(&owner.name);
        fs::create_dir_all(group.join("below")).unwrap();
        let mut member = sleeper(place.path());
        fs::write(group.join("below/cgroup.procs"), member.id().to_string()).unwrap();
        assert!(groups().contains(&group) && !is_of_the_dead(&group));
        drop(owner);
        assert!(is_of_the_dead(&group));
        remove_group(&group);
        assert!(!group.exists());
        assert!(member.wait().unwrap().code().is_none(), "killed");
    }
}
