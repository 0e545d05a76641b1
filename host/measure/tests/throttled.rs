//! Tasks under a limit of the host.

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use common::{filled_disk, loop_device, no_fio, no_loop, options, skip, sysfs, task, vm};
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_measure::fio::{JobFile, JobOptions};
use rtvirtio_measure::local::{Control, run_fio};
use rtvirtio_measure::run::task_results;
use rtvirtio_spec::{Arrival, Op};
use rtvirtio_testkit::HANG;

/// A real limit of a VM's cgroup: however long the measurement, a task above the limit gets the
/// limit's rate, and not the rate of the warm-up's backlog.
#[test]
fn a_throttled_task_has_the_rate_of_its_limit() {
    let name = "a_throttled_task_has_the_rate_of_its_limit";
    if let Some(reason) = no_fio().or(no_loop()) {
        return skip(name, reason);
    }
    let root = Root::default();
    let Some(cgroups) = Cgroups::detect(&root).ok().filter(|c| c.hierarchy == Hierarchy::V1) else {
        return skip(name, "the block I/O controller is not one of cgroup v1");
    };
    let (dir, file) = filled_disk();
    let device = loop_device(&file);
    let dev = std::fs::read_to_string(sysfs(&device).join("dev")).unwrap();
    let group = Group::new(&cgroups, name);
    std::fs::write(group.dir.join("blkio.throttle.read_iops_device"), format!("{} 50", dev.trim())).unwrap();
    let vm = vm(vec![task("held", Op::Read, Some(200.0), 1, Arrival::Closed)]);
    let mut of_lengths = Vec::new();
    for seconds in [2u64, 6] {
        let options = JobOptions {
            warmup: Duration::from_secs(2),
            ..options(&device.0, dir.path(), Duration::from_secs(seconds))
        };
        let job = JobFile::new(&vm, options).unwrap();
        let (procs, cancel) = ([group.dir.join("cgroup.procs")], AtomicBool::new(false));
        let mut control =
            Control { cgroup_procs: &procs, cancel: &cancel, grace: HANG, on_tick: &mut |_| {} };
        let output = run_fio(&job, &mut control).unwrap();
        let result = &task_results(&job, &output, &[]).unwrap()[0];
        eprintln!("{seconds} s: {} of 200/s under a limit of 50/s", result.achieved_rate);
        of_lengths.push(result.achieved_rate.0);
    }
    // Never more than the limit and a slice of it; it would be zero if only requests that were due
    // after the warm-up counted.
    assert!(of_lengths.iter().all(|rate| *rate > 0.0 && *rate < 100.0), "{of_lengths:?}");
}

/// A cgroup of our own, removed when dropped.
struct Group {
    dir: PathBuf,
    cgroups: Cgroups,
    path: PathBuf,
}

impl Group {
    fn new(cgroups: &Cgroups, name: &str) -> Self {
        let path = Path::new("/").join(rtvirtio_testkit::unique(name));
        let root = Root::default();
        cgroups.create(&root, &path).unwrap();
        Self { dir: cgroups.dir(&path).unwrap(), cgroups: cgroups.clone(), path }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.cgroups.remove(&Root::default(), &self.path);
    }
}
