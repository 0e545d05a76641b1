//! fio on the host: a real file, faults, cancelling, and the profile of a real loop device.

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    disk_dir, filled_disk, filled_file, loop_device, no_fio, no_loop, options, p99, set_elevator, skip, task,
    vm,
};
use rtvirtio_kernel::Claim;
use rtvirtio_measure::fio::JobFile;
use rtvirtio_measure::local::{Control, run_fio};
use rtvirtio_measure::profile::{DEPTHS, ProfileControl, ProfileOptions, load, measure, save};
use rtvirtio_measure::run::task_results;
use rtvirtio_measure::{MeasureError, Verdict};
use rtvirtio_spec::{Arrival, Op, Task};
use rtvirtio_testkit::HANG;
use rtvirtio_units::{Bytes, Nanos, Ratio};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Job of one reading task.
fn reads(rate: Option<f64>, file: &Path, dir: &Path, length: Duration) -> JobFile {
    JobFile::new(&vm(vec![task("t", Op::Read, rate, 1, Arrival::Closed)]), options(file, dir, length))
        .unwrap()
}

fn run(
    job: &JobFile,
    cgroup_procs: &[PathBuf],
    cancel: &AtomicBool,
) -> Result<rtvirtio_measure::fio::FioOutput, MeasureError> {
    let mut control = Control { cgroup_procs, cancel, grace: MS(20_000), on_tick: &mut |_| {} };
    run_fio(job, &mut control)
}

#[test]
fn every_kind_of_task_on_a_real_file() {
    let name = "every_kind_of_task_on_a_real_file";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let mixed = Op::Mixed { write_share: Ratio(0.3) };
    let mut light = task("light", Op::Read, Some(200.0), 1, Arrival::Closed);
    light.targets = p99(500);
    let vm = vm(vec![
        light,
        task("global", mixed, Some(100.0), 1, Arrival::Closed),
        task("deep", Op::Read, Some(300.0), 4, Arrival::Closed),
        task("open", Op::Read, Some(200.0), 8, Arrival::Open),
        task("flood", mixed, None, 2, Arrival::Closed),
    ]);
    let job = JobFile::new(&vm, options(&file, dir.path(), MS(2_000))).unwrap();
    let output = run(&job, &[], &AtomicBool::new(false)).unwrap();
    let results = task_results(&job, &output, &[]).unwrap();
    for r in &results {
        eprintln!(
            "{} n {} rate {} p50 {} p99.99 {} {:?} {}",
            r.task, r.n, r.achieved_rate, r.p50_ns, r.p9999_ns, r.verdict, r.why
        );
        assert!(r.p50_ns.0 > 0 && r.p50_ns <= r.p99_ns && r.p99_ns <= r.p9999_ns && r.p9999_ns <= r.max_ns);
    }
    for (r, n) in results.iter().zip([400u64, 200, 600, 400]) {
        // At most one sample per period of the measured part. The periods of an open loop's streams
        // are cut at both ends.
        let cut = if r.task == "open" { 8 } else { 0 };
        assert!(r.n > 0 && r.n <= n + cut, "{}: {} instead of {n}", r.task, r.n);
        assert!(r.achieved_rate.0 > 0.0, "{}", r.task);
    }
    // Whether the target is met depends on the machine; that the verdict follows from the
    // measurement does not.
    let light = &results[0];
    assert!(light.verdict.is_some());
    if light.p99_ns > Nanos::from_millis(500) {
        assert_eq!(light.verdict, Some(Verdict::Missed), "{}", light.why);
    }
    assert!(results[4].n > 0 && results[4].verdict.is_none());
}

#[test]
fn a_read_task_does_not_change_its_file_and_a_missing_file_is_not_made() {
    let name = "a_read_task_does_not_change_its_file_and_a_missing_file_is_not_made";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let before = std::fs::read(&file).unwrap();
    let deep = vm(vec![task("t", Op::Read, None, 4, Arrival::Closed)]);
    let job = JobFile::new(&deep, options(&file, dir.path(), MS(300))).unwrap();
    assert!(job.args().contains(&"--readonly".to_owned()));
    run(&job, &[], &AtomicBool::new(false)).unwrap();
    assert!(before == std::fs::read(&file).unwrap(), "the file changed");

    let missing = dir.path().join("nothing");
    for op in [Op::Read, Op::Write] {
        let vm = vm(vec![task("t", op, None, 1, Arrival::Closed)]);
        let job = JobFile::new(&vm, options(&missing, dir.path(), MS(300))).unwrap();
        let e = run(&job, &[], &AtomicBool::new(false)).unwrap_err();
        assert!(matches!(e, MeasureError::Fio { .. }), "{e}");
        assert!(!missing.exists(), "{op:?} made the file");
    }
}

/// Processes of fio for this directory: their command line contains the job's path.
fn processes_of(dir: &Path) -> Vec<PathBuf> {
    let needle = dir.join("job.fio").display().to_string();
    std::fs::read_dir("/proc")
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| {
            std::fs::read(p.join("cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).contains(&needle))
        })
        .collect()
}

/// Number of their threads: one per task in addition to fio's own two.
fn threads_of(dir: &Path) -> usize {
    let count = |p: PathBuf| std::fs::read_dir(p.join("task")).map_or(0, Iterator::count);
    processes_of(dir).into_iter().map(count).sum()
}

#[test]
fn cancel_ends_fio_and_all_its_tasks() {
    let name = "cancel_ends_fio_and_all_its_tasks";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let tasks: Vec<Task> =
        ["a", "b"].iter().map(|n| task(n, Op::Read, Some(50.0), 1, Arrival::Closed)).collect();
    let job = JobFile::new(&vm(tasks), options(&file, dir.path(), HANG * 4)).unwrap();
    let cancel = AtomicBool::new(false);
    let mut most = 0;
    let start = Instant::now();
    let mut on_tick = |elapsed: Duration| {
        most = most.max(threads_of(dir.path()));
        // Not before both tasks have been started.
        if most >= 4 || elapsed > HANG {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let mut control =
        Control { cgroup_procs: &[], cancel: &cancel, grace: MS(20_000), on_tick: &mut on_tick };
    let e = run_fio(&job, &mut control).unwrap_err();
    assert!(matches!(e, MeasureError::Cancelled), "{e}");
    assert!(most >= 4, "fio started a thread per task: {most}");
    assert_eq!(processes_of(dir.path()).len(), 0);
    assert!(start.elapsed() < HANG * 2);
}

/// Killed with SIGKILL, this process cannot end fio; the kernel's parent-death signal does.
#[test]
fn fio_and_all_its_tasks_die_with_us() {
    const CHILD: &str = "RTVIRTIO_MEASURE_TEST_CHILD";
    let name = "fio_and_all_its_tasks_die_with_us";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let job_in = |dir: &Path| {
        let file = dir.join("disk");
        filled_file(&file, 8);
        reads(Some(50.0), &file, dir, HANG * 2)
    };
    if let Some(dir) = std::env::var_os(CHILD) {
        let _ = run(&job_in(Path::new(&dir)), &[], &AtomicBool::new(false));
        return;
    }
    let dir = disk_dir();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(CHILD, dir.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let wait_for = |n: std::ops::RangeInclusive<usize>| {
        // The count that ended the wait: fio's threads come and go while it starts, so the next
        // count may differ.
        let start = Instant::now();
        loop {
            let now = threads_of(dir.path());
            if n.contains(&now) || start.elapsed() > HANG {
                return now;
            }
            std::thread::sleep(MS(20));
        }
    };
    let running = wait_for(3..=9);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(running >= 3, "fio's two threads and its task: {running}");
    assert_eq!(wait_for(0..=0), 0);
}

/// A sleep calibration that a busy machine disturbs makes fio spin. The preloaded object avoids it,
/// which is visible: it sets the timer slack, which every task's thread inherits.
#[test]
fn fio_does_not_calibrate_its_sleeps() {
    let name = "fio_does_not_calibrate_its_sleeps";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let job = |length| reads(Some(100.0), &file, dir.path(), length);
    let output = run(&job(MS(300)), &[], &AtomicBool::new(false)).unwrap();
    assert_eq!(output.stderr, "", "ld.so names an object that it cannot load");
    let slack = |thread: &std::fs::DirEntry| {
        std::fs::read_to_string(Path::new("/proc").join(thread.file_name()).join("timerslack_ns"))
    };
    let mut seen = Vec::new();
    let cancel = AtomicBool::new(false);
    let mut on_tick = |elapsed: Duration| {
        let threads =
            processes_of(dir.path()).into_iter().filter_map(|p| std::fs::read_dir(p.join("task")).ok());
        let slacks: Vec<String> = threads.flatten().flatten().filter_map(|t| slack(&t).ok()).collect();
        if slacks.len() >= 3 {
            seen = slacks;
        }
        // While fio starts it still has the timer slack of this process.
        let is_set = !seen.is_empty() && seen.iter().all(|s| s.trim() == "1");
        cancel.store(is_set || elapsed > HANG, Ordering::Relaxed);
    };
    let mut control =
        Control { cgroup_procs: &[], cancel: &cancel, grace: MS(20_000), on_tick: &mut on_tick };
    let stopped = run_fio(&job(HANG * 2), &mut control).unwrap_err();
    assert!(matches!(stopped, MeasureError::Cancelled), "{stopped}");
    assert!(!seen.is_empty() && seen.iter().all(|s| s.trim() == "1"), "{seen:?}");
}

#[test]
fn a_run_that_does_not_end_is_killed() {
    let name = "a_run_that_does_not_end_is_killed";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    // Long enough to be found and stopped on a busy machine.
    let job = reads(Some(50.0), &file, dir.path(), MS(5_000));
    // fio is stopped, as if hung; it must be killed although a stopped process does not handle
    // SIGTERM.
    let mut stopped = false;
    let mut on_tick = |_| {
        if !stopped {
            for process in processes_of(dir.path()) {
                let Ok(pid) = process.file_name().unwrap().to_string_lossy().parse() else { continue };
                // SAFETY: plain system call on a process that this test started: its command line
                // holds our own directory.
                unsafe { libc::kill(pid, libc::SIGSTOP) };
                stopped = true;
            }
        }
    };
    let cancel = AtomicBool::new(false);
    let mut control = Control { cgroup_procs: &[], cancel: &cancel, grace: MS(500), on_tick: &mut on_tick };
    let e = run_fio(&job, &mut control).unwrap_err();
    assert!(matches!(e, MeasureError::TimedOut { .. }), "{e}");
    assert_eq!(processes_of(dir.path()).len(), 0);
}

#[test]
fn a_cgroup_that_is_gone_is_named() {
    let dir = disk_dir();
    let file = dir.path().join("disk");
    let job = reads(None, &file, dir.path(), MS(100));
    let gone = dir.path().join("vm0/cgroup.procs");
    let e = run(&job, std::slice::from_ref(&gone), &AtomicBool::new(false)).unwrap_err();
    assert!(e.to_string().contains(&gone.display().to_string()), "{e}");
}

/// A cgroup of our own; removed when dropped.
struct Cgroup(PathBuf);

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn fio_is_in_its_cgroup_before_it_starts() {
    let name = "fio_is_in_its_cgroup_before_it_starts";
    if let Some(reason) = no_fio() {
        return skip(name, reason);
    }
    let group = format!("rtvirtio-{}", rtvirtio_testkit::unique("measure"));
    let roots = ["/sys/fs/cgroup/blkio", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let Some(cgroup) = roots.iter().filter(|r| Path::new(r).join("cgroup.procs").exists()).find_map(|r| {
        let path = Path::new(r).join(&group);
        std::fs::create_dir(&path).ok().map(|()| Cgroup(path))
    }) else {
        return skip(name, "no cgroup can be made: root is needed");
    };
    let (dir, file) = filled_disk();
    let job = reads(Some(50.0), &file, dir.path(), HANG * 2);
    let procs = cgroup.0.join("cgroup.procs");
    let mut inside = 0;
    let cancel = AtomicBool::new(false);
    let mut on_tick = |elapsed: Duration| {
        inside = inside.max(std::fs::read_to_string(&procs).unwrap().lines().count());
        cancel.store(inside > 0 || elapsed > HANG, Ordering::Relaxed);
    };
    let files = [procs.clone()];
    let mut control =
        Control { cgroup_procs: &files, cancel: &cancel, grace: MS(20_000), on_tick: &mut on_tick };
    assert!(matches!(run_fio(&job, &mut control), Err(MeasureError::Cancelled)));
    assert_eq!(inside, 1, "fio, with its tasks as threads");
}

#[test]
fn profile_of_a_loop_device() {
    let name = "profile_of_a_loop_device";
    if let Some(reason) = no_fio().or(no_loop()) {
        return skip(name, reason);
    }
    let dir = disk_dir();
    let file = dir.path().join("disk");
    filled_file(&file, 64);
    let device = loop_device(&file);
    let mut set: Vec<String> = Vec::new();
    let mut set_elevator = |e: &str| {
        set.push(e.to_owned());
        set_elevator(&device, e).map_err(Into::into)
    };
    let mut steps = Vec::new();
    let mut progress = |done, total, label: &str| {
        assert!(done <= total && !label.is_empty());
        steps.push(done);
    };
    let cancel = AtomicBool::new(false);
    let claim = Claim::take(&device.0, &[]).unwrap();
    let mut control = ProfileControl {
        set_elevator: &mut set_elevator,
        claim: Some(&claim),
        progress: &mut progress,
        cancel: &cancel,
    };
    let mut options = ProfileOptions::new(device.0.clone(), Bytes(64 << 20), dir.path().to_owned());
    options.budget = Duration::from_secs(24);
    let start = Instant::now();
    let profile = measure(&options, &mut control).unwrap();
    eprintln!("{:?} for {}", start.elapsed(), serde_json::to_string(&profile).unwrap());
    assert!(start.elapsed() < options.budget + Duration::from_secs(20));
    assert_eq!(set[..3], ["none", "bfq", "none"]);
    assert!(steps.windows(2).all(|w| w[0] <= w[1]) && steps.last() == Some(&24_000));
    for series in [&profile.read, &profile.read_bfq, &profile.write] {
        assert_eq!(series.iter().map(|p| p.depth).collect::<Vec<_>>(), DEPTHS);
        for p in series {
            assert!(p.iops.0 > 0.0 && p.n > 0 && p.p50.0 > 0 && p.p50 <= p.p99 && p.p9999 <= p.max, "{p:?}");
        }
    }
    let [sync] = profile.sync.as_slice() else { panic!("{:?}", profile.sync) };
    assert!(sync.depth == 1 && sync.iops.0 > 0.0 && sync.n > 0 && sync.p50 <= sync.max, "{sync:?}");
    let large = profile.large.as_ref().unwrap();
    assert_eq!(large.block, Bytes(128 << 10));
    for series in [&large.read, &large.write] {
        assert_eq!(series.iter().map(|p| p.depth).collect::<Vec<_>>(), [1, 32]);
        assert!(series.iter().all(|p| p.iops.0 > 0.0 && p.n > 0), "{series:?}");
    }
    assert_eq!(Path::new("/dev").join(&profile.device), device.0);
    let path = dir.path().join("profile.json");
    save(&profile, &path).unwrap();
    assert_eq!(load(&path).unwrap(), profile);
}

#[test]
fn profile_without_writes_leaves_the_device_alone_and_cancels() {
    let name = "profile_without_writes_leaves_the_device_alone_and_cancels";
    if let Some(reason) = no_fio().or(no_loop()) {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let before = std::fs::read(&file).unwrap();
    let device = loop_device(&file);
    let cancel = AtomicBool::new(false);
    let mut progress = |done, _, _: &str| cancel.store(done >= 8, Ordering::Relaxed);
    let mut set_elevator = |e: &str| set_elevator(&device, e).map_err(Into::into);
    let mut control = ProfileControl {
        set_elevator: &mut set_elevator,
        claim: None,
        progress: &mut progress,
        cancel: &cancel,
    };
    let mut options = ProfileOptions::new(device.0.clone(), Bytes(8 << 20), dir.path().to_owned());
    options.budget = Duration::from_secs(12);
    let e = measure(&options, &mut control).unwrap_err();
    assert!(matches!(e, MeasureError::Cancelled), "{e}");
    assert!(before == std::fs::read(&file).unwrap(), "the device changed");
    assert_eq!(processes_of(dir.path()).len(), 0);

    let mut refuse = |_: &str| Err("read-only file system".into());
    let mut control = ProfileControl {
        set_elevator: &mut refuse,
        claim: None,
        progress: &mut |_, _, _| {},
        cancel: &cancel,
    };
    let e = measure(&options, &mut control).unwrap_err();
    assert_eq!(e.to_string(), "cannot set elevator none: read-only file system");
}

#[test]
fn only_the_device_that_is_claimed_is_written() {
    let name = "only_the_device_that_is_claimed_is_written";
    if let Some(reason) = no_loop() {
        return skip(name, reason);
    }
    let (dir, file) = filled_disk();
    let device = loop_device(&file);
    let other = dir.path().join("other");
    filled_file(&other, 1);
    let claim = Claim::take(&other, &[]).unwrap();
    let mut set_elevator = |_: &str| panic!("nothing may be touched");
    let cancel = AtomicBool::new(false);
    let mut control = ProfileControl {
        set_elevator: &mut set_elevator,
        claim: Some(&claim),
        progress: &mut |_, _, _| {},
        cancel: &cancel,
    };
    let options = ProfileOptions::new(device.0.clone(), Bytes(8 << 20), dir.path().to_owned());
    let e = measure(&options, &mut control).unwrap_err();
    assert!(e.to_string().contains("the claim is on another device"), "{e}");
}
