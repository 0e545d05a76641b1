//! Groups of resctrl over a simulated kernel: ways and bandwidth of a VM, killed at every point.

mod support;

use std::path::Path;

use rtvirtio_apply::{Fate, Form, HostFiles as _, KnobState, OnConflict, Silent, Target, Write};
use rtvirtio_kernel::sched::Attr;
use support::child::sweep;
use support::resctrl::RESCTRL;
use support::{Sim, assert_same};

const GROUP: &str = "/sys/fs/resctrl/rtvirtio-vm";

#[test]
#[ignore = "the process that the crash tests start and kill"]
fn crash_child() {
    support::child::main();
}

fn task(pid: u32, tid: u32) -> Write {
    let target = Target::resctrl_task(pid, tid, 1000 + u64::from(tid), Path::new(RESCTRL));
    Write::new(format!("group of thread {tid}"), target, "/rtvirtio-vm")
}

fn line(dir: &str, resource: &str, value: &str) -> Write {
    let form = Form::Schemata { resource: resource.to_owned() };
    Write::new(resource, Target::host(Path::new(dir).join("schemata"), form), value)
}

/// A group with ways of its own, which the default group gives up, and ways of devices.
fn writes(ways: &str) -> Vec<Write> {
    let form = Form::ResctrlGroup { processes: vec![7, 20] };
    let mut all = vec![Write::new("group", Target::host(GROUP, form), "present")];
    all.push(Write { created_by: Some(0), ..line(GROUP, "L3", ways) });
    all.push(Write { created_by: Some(0), ..line(GROUP, "MB", "0=40;1=40") });
    all.extend([task(7, 7), task(7, 8), task(20, 20), line(RESCTRL, "L3", "0=f;1=f")]);
    let info = Path::new(RESCTRL).join("info/L3");
    let by = Some(all.len());
    all.push(Write::new("devices", Target::host(info.join("io_alloc"), Form::IoAlloc), "enabled"));
    let ways = Write::new("ways", Target::host(info.join("io_alloc_cbm"), Form::IoAllocWays), "0=c;1=c");
    all.push(Write { created_by: by, ..ways });
    all
}

fn sim() -> Sim {
    let mut sim = Sim::new();
    sim.kernel.resctrl();
    for (pid, tid) in [(7, 7), (7, 8), (20, 20), (30, 30)] {
        sim.kernel.thread(pid, tid, &Attr::other(0), "/");
        sim.kernel.resctrl_task(pid, tid, "/");
    }
    sim.case.cpu = writes("0=f0;1=f0");
    sim
}

impl Sim {
    fn tasks(&self) -> String {
        self.kernel.read(&Path::new(GROUP).join("tasks")).unwrap()
    }
}

#[test]
fn a_group_with_ways_killed_at_every_point() {
    let sim = sim();
    let (apply, revert) = sweep(&sim.case, &sim.dirs());
    println!("points: apply {apply}, revert {revert}; 0 differences");
    assert!(apply > 20 && revert > 10, "{apply} {revert}");
}

#[test]
fn what_another_program_changes_is_drift_and_its_thread_keeps_the_group() {
    let sim = sim();
    let before = sim.snapshot();
    sim.apply().unwrap();
    assert_eq!(sim.tasks(), "7\n8\n20\n");
    let group = sim.kernel.get(Path::new(GROUP).join("schemata"));
    assert!(group.contains("MB:0=40;1=40") && group.contains("L3:0=f0;1=f0"), "{group}");
    assert!(sim.kernel.get("/sys/fs/resctrl/schemata").contains("L3:0=f;1=f\n"));
    let drifted = || {
        let knobs = sim.status().unwrap().knobs;
        let changed = |state: &KnobState| matches!(state, KnobState::Changed { .. });
        knobs.into_iter().filter(|knob| changed(&knob.state)).map(|knob| knob.knob).collect::<Vec<_>>()
    };
    assert!(drifted().is_empty());
    let schemata = Path::new(GROUP).join("schemata");
    sim.kernel.write(&schemata, "MB:0=90;1=40\n").unwrap();
    sim.kernel.write(&Path::new(RESCTRL).join("tasks"), "8").unwrap();
    assert_eq!(drifted(), ["MB"], "a thread with its old value is not another program's");
    sim.kernel.write(&schemata, "MB:0=40;1=40\n").unwrap();

    // A thread of another process, and one that the VM has started meanwhile.
    sim.kernel.write(&Path::new(GROUP).join("tasks"), "30").unwrap();
    sim.kernel.thread(7, 31, &Attr::other(0), "/");
    sim.kernel.resctrl_task(7, 31, "/rtvirtio-vm");
    let reverted = sim.revert(OnConflict::Report);
    let conflict = Fate::Conflict { found: "present, with thread 30 of process 30".to_owned() };
    assert!(!reverted.done && reverted.outcomes.iter().any(|o| o.fate == conflict), "{reverted:#?}");
    sim.kernel.write(&Path::new(RESCTRL).join("tasks"), "30").unwrap();
    assert!(sim.revert(OnConflict::Report).done);
    assert!(sim.kernel.get("/proc/7/task/31/cpu_resctrl_groups").starts_with("res:/\n"));
    sim.kernel.end(7, 31);
    std::fs::remove_dir_all(sim.kernel.at("/proc/31")).unwrap();
    assert_same(&before, &sim.snapshot(), "put back");
}

#[test]
fn a_refusal_has_the_reason_of_resctrl_and_undoes_the_rest() {
    let mut sim = sim();
    sim.case.cpu = writes("0=5;1=f0");
    let error = sim.apply().unwrap_err().to_string();
    assert!(error.contains("resctrl: The mask 5 has non-consecutive 1-bits"), "{error}");
    assert!(error.ends_with("everything was put back") && !sim.kernel.at(GROUP).exists(), "{error}");
    sim.case.cpu = writes("0=f0;1=f0");
    for other in ["one", "two"] {
        sim.kernel.make_dir(&Path::new(RESCTRL).join(other)).unwrap();
    }
    let error = sim.apply().unwrap_err().to_string();
    assert!(error.contains("resctrl: Out of CLOSIDs"), "{error}");
}

/// A thread of the kernel that came later, and one that was started in the group.
#[test]
fn threads_that_come_later_are_taken_in_and_go_back_to_the_default_group() {
    let sim = sim();
    sim.apply().unwrap();
    for (pid, group) in [(20, "/"), (7, "/rtvirtio-vm")] {
        sim.kernel.thread(pid, pid + 20, &Attr::other(0), "/");
        sim.kernel.resctrl_task(pid, pid + 20, group);
    }
    let late = [task(20, 40), task(7, 27)];
    let amended = sim.session().amend(&late, &sim.machine(), &mut Silent).unwrap();
    assert_eq!((amended.written.len(), amended.failed.len()), (1, 0), "{amended:?}");
    assert!(sim.tasks().contains("40\n") && sim.tasks().contains("27\n"));
    let reverted = sim.revert(OnConflict::Report);
    assert!(reverted.done, "{}", reverted.summary());
    for file in ["/proc/20/task/40", "/proc/7/task/27"] {
        assert!(sim.kernel.get(Path::new(file).join("cpu_resctrl_groups")).starts_with("res:/\n"), "{file}");
    }
}
