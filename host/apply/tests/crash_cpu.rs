//! CPU settings killed at every point: a cgroup of ours with its budgets, threads moved into it,
//! policies and priorities. Over a simulated kernel, and over the real one with the threads of a
//! real QEMU.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Fate, Form, Observer, OnConflict, Step, Target, Write};
use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_kernel::{Cgroups, Hierarchy, Root, task};
use rtvirtio_planner::Knob;
use rtvirtio_testkit::{Need, has, skip};
use support::child::{sweep, whole};
use support::sim::SimKernel;
use support::tasks::{self, CPU, VMS};
use support::{Case, Sim, assert_same, plan};

#[test]
#[ignore = "the process that the crash tests start and kill"]
fn crash_child() {
    support::child::main();
}

/// Writes of a contract: a cgroup with a budget, all threads in it, services before vCPUs.
fn writes(mount: &Path, group: &str, home: &Path, cap: bool, threads: &[(u32, u32, u64)]) -> Vec<Write> {
    let files = if cap {
        [("cpu.cfs_period_us", "20000"), ("cpu.cfs_quota_us", "8000")]
    } else {
        [("cpu.rt_period_us", "20000"), ("cpu.rt_runtime_us", "4000")]
    };
    let mut writes = tasks::group(&mount.join(group), home, "other nice 0", &files);
    for &(pid, tid, start) in threads {
        let target = Target::thread_cgroup(pid, tid, start, "cpu", mount);
        writes.push(Write::new("cgroup of a thread", target, format!("/{group}")));
    }
    for (i, &(pid, tid, start)) in threads.iter().enumerate().filter(|_| !cap) {
        let attr = Attr::fifo(if i == 0 { 98 } else { 97 });
        writes.push(Write::new("policy", Target::scheduling(pid, tid, start), attr.to_string()));
    }
    writes
}

fn sim(cap: bool) -> Sim {
    let mut sim = Sim::new().with_disk(false, &["/lab"], "none").with_cpu();
    sim.kernel.thread(7, 7, &Attr::other(-2), "/vms");
    let batch = Attr { policy: Policy::Batch, slice: 3_000_000, ..Attr::other(5) };
    sim.kernel.thread(7, 8, &batch, "/vms");
    sim.kernel.thread(7, 9, &Attr::other(0), "/");
    // In the root cgroup: a helper that the kernel runs for the VM.
    sim.kernel.thread(20, 20, &Attr::other(0), "/");
    let threads = [(7, 7, 1007), (7, 8, 1008), (7, 9, 1009), (20, 20, 1020)];
    // A block knob too: both kinds share one journal.
    sim.case.plan = plan(&[(Knob::HostElevator, "bfq")]);
    sim.case.vms = 0;
    sim.case.cpu = writes(Path::new(CPU), "rtvirtio-vm", Path::new(VMS), cap, &threads);
    sim
}

#[test]
fn a_budget_with_priorities_killed_at_every_point() {
    let sim = sim(false);
    let (apply, revert) = sweep(&sim.case, &sim.dirs());
    println!("points: apply {apply}, revert {revert}; 0 differences");
    assert!(apply > 30 && revert > 25, "{apply} {revert}");
}

#[test]
fn a_cap_killed_at_every_point() {
    let sim = sim(true);
    sweep(&sim.case, &sim.dirs());
}

/// A worker that a real-time thread started meanwhile is in no journal: it must leave the cgroup,
/// or the cgroup would stay.
#[test]
fn threads_that_were_started_in_the_group_go_home_ordinary() {
    let sim = sim(false);
    whole(&sim.case, "apply").unwrap();
    assert_eq!(sim.kernel.policy(8).unwrap(), Attr::fifo(97));
    sim.kernel.thread(7, 30, &Attr { reset_on_fork: false, ..Attr::fifo(98) }, "/rtvirtio-vm");
    whole(&sim.case, "revert").unwrap();
    assert_eq!(sim.kernel.policy(30).unwrap(), Attr::other(0));
    assert!(sim.kernel.get("/proc/7/task/30/cgroup").contains(":/vms\n"));
    assert!(!sim.kernel.at(Path::new(CPU).join("rtvirtio-vm")).exists());
}

/// Threads may end at any moment: before the capture, between capture and write, and before the
/// revert.
#[test]
fn threads_that_end_are_no_error() {
    let sim = sim(false);
    sim.kernel.end(7, 9);
    whole(&sim.case, "apply").unwrap();
    sim.kernel.end(7, 8);
    // The thread id is reused by another thread, which keeps its policy.
    sim.kernel.thread(7, 8, &Attr::other(3), "/vms");
    sim.kernel.put("/proc/7/task/8/start", "5000\n");
    whole(&sim.case, "revert").unwrap();
    assert_eq!(sim.kernel.policy(8).unwrap(), Attr::other(3));
    assert_eq!(sim.kernel.policy(7).unwrap(), Attr::other(-2));
    assert!(!sim.kernel.at(Path::new(CPU).join("rtvirtio-vm")).exists());
}

/// Ends a thread right after the old values were captured.
struct EndsOne<'a>(&'a SimKernel);

impl Observer for EndsOne<'_> {
    fn step(&mut self, step: Step) {
        if step == Step::Journaled {
            self.0.end(7, 8);
        }
    }
}

#[test]
fn a_thread_that_ends_between_capture_and_write_is_left_out() {
    let sim = sim(false);
    sim.session().apply(&sim.case.cpu, &sim.machine(), &mut EndsOne(&sim.kernel)).unwrap();
    assert_eq!(sim.kernel.policy(9).unwrap(), Attr::fifo(97));
    let reverted = sim.revert(OnConflict::Report);
    let gone = reverted.outcomes.iter().filter(|o| matches!(o.fate, Fate::Gone { .. })).count();
    assert!(reverted.done && gone == 2, "{reverted:#?}");
    assert_eq!(sim.kernel.policy(9).unwrap(), Attr::other(0));
}

#[test]
fn a_thread_that_another_program_changed_is_left_to_it() {
    let sim = sim(false);
    whole(&sim.case, "apply").unwrap();
    sim.kernel.set_policy(7, &Attr::fifo(50)).unwrap();
    let reverted = sim.revert(OnConflict::Report);
    let conflict = Fate::Conflict { found: "fifo 50 reset-on-fork".to_owned() };
    assert!(reverted.outcomes.iter().any(|o| o.fate == conflict), "{reverted:#?}");
    // A real-time thread cannot leave the cgroup, so the cgroup stays; all others have left.
    assert_eq!(sim.kernel.policy(7).unwrap(), Attr::fifo(50));
    let group = Path::new(CPU).join("rtvirtio-vm");
    assert_eq!(sim.kernel.tasks(&group).unwrap(), "7\n");
    assert_eq!(sim.kernel.get(group.join("cpu.rt_runtime_us")).trim(), "4000");
    let failed = reverted.outcomes.iter().find(|o| matches!(o.fate, Fate::Failed { .. }));
    assert!(failed.is_none(), "{failed:?}");
    let forced = sim.revert(OnConflict::Force);
    assert!(forced.done, "{}", forced.summary());
    assert_eq!(sim.kernel.policy(7).unwrap(), Attr::other(-2));
    assert!(!sim.kernel.at(&group).exists());
}

#[test]
fn a_changed_thread_that_is_accepted_keeps_its_policy_and_its_group() {
    let sim = sim(false);
    whole(&sim.case, "apply").unwrap();
    sim.kernel.set_policy(7, &Attr::fifo(50)).unwrap();
    let accepted = sim.revert(OnConflict::Accept);
    assert!(accepted.done, "{}", accepted.summary());
    assert_eq!(sim.kernel.policy(7).unwrap(), Attr::fifo(50));
    assert_eq!(sim.kernel.tasks(&Path::new(CPU).join("rtvirtio-vm")).unwrap(), "7\n");
    assert_eq!(sim.kernel.policy(8).unwrap().policy, Policy::Batch);
}

#[test]
fn a_changed_thread_whose_old_group_takes_it_goes_home_as_it_is() {
    let sim = sim(false);
    whole(&sim.case, "apply").unwrap();
    // Its old cgroup, the root, has a budget.
    sim.kernel.set_policy(9, &Attr::fifo(50)).unwrap();
    // Another thread was moved by another program, and is in no cgroup of ours.
    sim.kernel.set_policy(7, &Attr::other(0)).unwrap();
    sim.kernel.attach(Path::new(CPU), "7").unwrap();
    let accepted = sim.revert(OnConflict::Accept);
    assert!(accepted.done, "{}", accepted.summary());
    assert_eq!(sim.kernel.policy(9).unwrap(), Attr::fifo(50));
    assert!(sim.kernel.get("/proc/7/task/9/cgroup").contains(":/\n"));
    assert!(!sim.kernel.at(Path::new(CPU).join("rtvirtio-vm")).exists());
}

/// Budget of a cgroup that a manager keeps: a thread of the VM that is about to end does not block
/// it, and a thread that is not ours does.
#[test]
fn a_budget_is_taken_from_threads_that_end() {
    let mut sim = sim(false);
    let budget = Path::new(CPU).join("vms/cpu.rt_runtime_us");
    sim.case.cpu = vec![Write::new("budget", Target::host(budget.clone(), Form::Plain), "4000")];
    sim.case.cpu.extend([7, 8].map(|tid| tasks::policy(7, tid, &Attr::fifo(97))));
    whole(&sim.case, "apply").unwrap();
    assert_eq!(sim.kernel.get(&budget).trim(), "4000");
    for tid in [7, 8] {
        sim.kernel.ending(7, tid);
    }
    sim.kernel.thread(30, 30, &Attr::fifo(50), "/vms");
    let held = sim.revert(OnConflict::Force);
    assert!(
        !held.done && held.summary().contains("while thread 30 in it is real-time"),
        "{}",
        held.summary()
    );
    sim.kernel.set_policy(30, &Attr::other(0)).unwrap();
    let reverted = sim.revert(OnConflict::Report);
    assert!(reverted.done, "{}", reverted.summary());
    assert_eq!(sim.kernel.get(&budget).trim(), "0");
}

/// A policy that the kernel refuses undoes the group and the moves before it.
#[test]
fn a_refused_policy_undoes_the_rest() {
    let sim = sim(false);
    let before = sim.snapshot();
    let mut case = sim.case.clone();
    // Without the budget SCHED_FIFO in the new group is EPERM.
    case.cpu.retain(|w| w.knob != "cpu.rt_runtime_us");
    let error = whole(&case, "apply").unwrap_err().to_string();
    assert!(error.contains("fifo 98") && error.ends_with("everything was put back"), "{error}");
    assert_same(&before, &sim.snapshot(), "refused");
}

/// A QEMU in its firmware, with a vCPU and an I/O thread.
struct Qemu {
    machine: rtvirtio_testkit::Machine,
    _dir: tempfile::TempDir,
    mount: PathBuf,
    group: String,
}

impl Qemu {
    fn start(test: &str) -> Option<Self> {
        if !has(test, &[Need::Root, Need::QEMU]) {
            return None;
        }
        let cpu = Cgroups::detect_cpu(&Root::default()).inspect_err(|e| skip(test, &e.to_string())).ok()?;
        if cpu.hierarchy != Hierarchy::V1 {
            skip(test, "the cpu controller is on cgroup v2");
            return None;
        }
        if !cpu.mount.join("cpu.rt_runtime_us").exists() {
            skip(test, "no RT_GROUP_SCHED");
            return None;
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let machine =
            rtvirtio_testkit::Machine::start(dir.path(), "vm", &["-S", "-object", "iothread,id=io0"]);
        let group = format!("rtvirtio-{}", rtvirtio_testkit::unique(test));
        let qemu = Self { machine, _dir: dir, mount: cpu.mount, group };
        let start = Instant::now();
        while qemu.threads().len() < 4 {
            assert!(start.elapsed() < rtvirtio_testkit::HANG, "QEMU did not start its threads");
            thread::sleep(Duration::from_millis(20));
        }
        Some(qemu)
    }

    fn threads(&self) -> Vec<(u32, u32, u64)> {
        let (root, pid) = (Root::default(), self.machine.pid());
        let tids = task::tids(&root, pid).unwrap_or_default();
        tids.iter().filter_map(|t| Some((pid, *t, task::stat(&root, pid, *t).ok()?.start))).collect()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.machine.kill();
        let _ = fs::remove_dir(self.mount.join(&self.group));
    }
}

#[test]
fn the_threads_of_a_real_qemu_killed_at_every_point() {
    let test = "the_threads_of_a_real_qemu_killed_at_every_point";
    let Some(qemu) = Qemu::start(test) else { return };
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let threads = qemu.threads();
    let case = Case {
        root: "/".into(),
        cpu: writes(&qemu.mount, &qemu.group, &qemu.mount, false, &threads),
        threads_of: Some(qemu.machine.pid()),
        ..Case::new(dir.path())
    };
    let group = qemu.mount.join(&qemu.group);
    whole(&case, "apply").unwrap();
    assert_eq!(fs::read_to_string(group.join("cpu.rt_runtime_us")).unwrap(), "4000\n");
    assert_eq!(sched::get(threads[0].1).unwrap(), Attr::fifo(98));
    assert_eq!(fs::read_to_string(group.join("tasks")).unwrap().lines().count(), threads.len());
    whole(&case, "revert").unwrap();
    assert!(!group.exists());
    let (apply, revert) = sweep(&case, &[]);
    println!("points: apply {apply}, revert {revert}; 0 differences");
    assert!(apply > 25 && revert > 20 && !group.exists(), "{apply} {revert}");
}
