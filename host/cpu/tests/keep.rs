//! Settings of threads that appear later, and budgets that are split again: pure, over simulated
//! threads.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use rtvirtio_apply::{Form, Target, Write};
use rtvirtio_cpu::{
    Ask, Backend, Contract, CpuError, Level, Order, Probe, UrgencyRange, resplit, take_in, with_levels,
};
use rtvirtio_kernel::sched::{Policy, Reservation};
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::{Role, Thread};

fn thread(tid: u32, role: Role, reservation: Option<u64>) -> Thread {
    let period = 20_000_000;
    Thread {
        pid: 7,
        tid,
        role,
        policy: Some(if reservation.is_some() { Policy::Deadline } else { Policy::Other }),
        reservation: reservation.map(|runtime| Reservation { runtime, deadline: period, period }),
        reset_on_fork: Some(false),
        affinity: "0-1".to_owned(),
        ..Thread::default()
    }
}

fn probe(hierarchy: Hierarchy) -> Probe {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let (mount, kind, option) = match hierarchy {
        Hierarchy::V1 => ("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu"),
        Hierarchy::V2 => ("/sys/fs/cgroup", "cgroup2", "rw"),
    };
    put("proc/self/mountinfo", &format!("38 31 0:35 / {mount} rw - {kind} {kind} {option}\n"));
    put("sys/fs/cgroup/cgroup.controllers", "cpu\n");
    let cgroups = Cgroups::detect_cpu(&Root::new(dir.path())).unwrap();
    assert_eq!(cgroups.hierarchy, hierarchy);
    Probe { found: Vec::new(), missing: Vec::new(), cpus: 2, cgroups: Some(cgroups) }
}

fn ask<'a>(threads: &'a [Thread], order: Order, used: &'a [(u32, Duration)]) -> Ask<'a> {
    let contract = Contract::new(Nanos::from_millis(4), Nanos::from_millis(20)).unwrap();
    Ask { vm: "plc", threads, contract, order, level: Level::ALONE, used }
}

fn values(writes: &[rtvirtio_apply::Write]) -> Vec<(String, String)> {
    writes.iter().map(|w| (w.target.path.display().to_string(), w.value.clone())).collect()
}

#[test]
fn a_new_thread_gets_what_its_role_asks_for() {
    let new = [
        thread(30, Role::Vcpu(vec![1]), None),
        thread(31, Role::AioWorker, None),
        thread(32, Role::Vhost, None),
    ];
    let of = |backend, order, hierarchy| {
        values(&take_in(&probe(hierarchy), backend, None, &ask(&new, order, &[])).writes)
    };
    let moved = |tid: u32| (format!("/proc/7/task/{tid}/cgroup"), "/rtvirtio-plc".to_owned());
    let fifo = |tid: u32, priority: u32| {
        (format!("/proc/7/task/{tid}/sched"), format!("fifo {priority} reset-on-fork"))
    };
    // All go to the group; services before vCPUs; an ordinary worker stays so.
    let expected = vec![moved(30), moved(31), moved(32), fifo(32, 98), fifo(30, 97)];
    assert_eq!(of(Backend::RtGroup, Order::Rt, Hierarchy::V1), expected);
    assert_eq!(of(Backend::Throttle, Order::Rt, Hierarchy::V2), [fifo(32, 49), fifo(30, 48)]);
    // A cap holds ordinary threads; on v2 all of the unit's are in it from their start.
    assert_eq!(of(Backend::CpuMax, Order::Contract, Hierarchy::V1), [moved(30), moved(31), moved(32)]);
    assert_eq!(of(Backend::CpuMax, Order::Contract, Hierarchy::V2), []);
}

#[test]
fn a_split_that_hardly_moves_is_not_written() {
    let threads = [
        thread(7, Role::Emulator, Some(2_000_000)),
        thread(8, Role::Vcpu(vec![0]), Some(3_000_000)),
        thread(9, Role::Vcpu(vec![1]), Some(3_000_000)),
    ];
    let of = |a: u64, b: u64| {
        let used = [(7, a), (8, b), (9, b)].map(|(tid, ms)| (tid, Duration::from_millis(ms)));
        values(&resplit(&probe(Hierarchy::V2), &both(), &ask(&threads, Order::Contract, &used)).writes)
    };
    assert_eq!(of(24, 38), []);
    let writes = of(0, 100);
    // Threads that give up runtime come first.
    assert_eq!(writes.len(), 3);
    assert!(writes[0].0.contains("/7/sched") && writes[1].0.contains("/8/sched"), "{writes:?}");
    // On one CPU at a time, no thread gets more than the VM's budget there.
    let alone = [thread(8, Role::Vcpu(vec![0]), Some(3_900_000))];
    let used = [(8, Duration::from_secs(1))];
    let most = values(&resplit(&probe(Hierarchy::V2), &both(), &ask(&alone, Order::Contract, &used)).writes);
    assert!(most.iter().all(|(_, value)| runtime(value) <= 4_000_000), "{most:?}");
}

/// CPUs of the test hosts.
fn both() -> BTreeSet<u32> {
    BTreeSet::from([0, 1])
}

fn runtime(value: &str) -> u64 {
    value.strip_prefix("deadline ").unwrap().split('/').next().unwrap().parse().unwrap()
}

proptest! {
    /// The parts never exceed the budget: neither at the end nor between two writes.
    #[test]
    fn parts_never_pass_the_budget_on_the_way(
        rounds in prop::collection::vec(prop::collection::vec(0..1000u64, 1..6), 1..8),
    ) {
        let (total, probe) = (2 * 4_000_000, probe(Hierarchy::V2));
        let mut parts: Vec<Option<u64>> = Vec::new();
        for round in rounds {
            // Threads come and go.
            parts.resize(round.len(), None);
            let threads: Vec<Thread> = (0..).zip(&parts).map(|(i, p)| thread(100 + i, Role::Vcpu(vec![i]), *p)).collect();
            let used: Vec<_> = (100..).zip(&round).map(|(tid, ms)| (tid, Duration::from_millis(*ms))).collect();
            for write in resplit(&probe, &both(), &ask(&threads, Order::Contract, &used)).writes {
                let tid: usize = write.target.path.to_str().unwrap().split('/').nth(4).unwrap().parse().unwrap();
                parts[tid - 100] = Some(runtime(&write.value));
                prop_assert!(parts.iter().flatten().sum::<u64>() <= total, "{parts:?}");
            }
            prop_assert!(parts.iter().all(Option::is_some));
        }
    }
}

fn range(ceiling: Option<u32>, floor: u32) -> UrgencyRange {
    UrgencyRange { ceiling, floor, budget: Nanos::from_millis(500), reports: true, interrupts: false }
}

#[test]
fn urgency_journals_every_level_of_vcpus_and_of_nothing_else() {
    let threads = [thread(7, Role::Emulator, None), thread(9, Role::Vcpu(vec![0]), None)];
    let probe = probe(Hierarchy::V1);
    let writes = |order, backend| take_in(&probe, backend, None, &ask(&threads, order, &[])).writes;
    let mut rt = writes(Order::Rt, Backend::RtGroup);
    let with = |backend, range: &UrgencyRange, writes: &mut Vec<Write>| {
        with_levels(&Root::default(), "plc", &threads, backend, range, writes)
    };
    assert_eq!(with(Backend::RtGroup, &range(None, 0), &mut rt).unwrap(), Some(97));
    let levelled: Vec<_> = rt.iter().filter(|w| !w.levels.is_empty()).collect();
    let [vcpu] = levelled.as_slice() else { panic!("{} writes with levels", levelled.len()) };
    assert!(vcpu.target.path.starts_with("/proc/7/task/9"));
    // An ordinary thread, and FIFO and RR of each priority.
    assert_eq!(vcpu.levels.len(), 1 + 2 * 97);
    assert_eq!(vcpu.levels[0], "other nice 0 reset-on-fork");
    assert!(vcpu.levels.contains(&vcpu.value) && vcpu.levels.contains(&"rr 97 reset-on-fork".to_owned()));

    let mut some = writes(Order::Rt, Backend::Throttle);
    assert_eq!(with(Backend::Throttle, &range(Some(20), 10), &mut some).unwrap(), Some(20));
    let levels = &some.iter().find(|w| !w.levels.is_empty()).unwrap().levels;
    assert_eq!((levels.len(), levels[0].as_str()), (2 * 11, "fifo 10 reset-on-fork"));

    // Threads that serve a vCPU stay above it by the contract; the other mechanisms have no levels.
    let mut low = writes(Order::Contract, Backend::RtGroup);
    assert_eq!(with(Backend::RtGroup, &range(None, 0), &mut low).unwrap(), Some(1));
    for (backend, range) in [
        (Backend::RtGroup, range(Some(2), 0)),
        (Backend::RtGroup, range(None, 1)),
        (Backend::Deadline, range(None, 0)),
        (Backend::CpuMax, range(None, 0)),
    ] {
        let error = with(backend, &range, &mut low).unwrap_err();
        assert!(matches!(error, CpuError::CannotHold { .. }), "{error}");
    }
}

/// VM of a manager on v1, and VM in a unit on v2: the group that has the budget has a weight.
#[test]
fn urgency_journals_the_weights_that_a_vm_may_have_at_its_floor() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    let threads = [thread(9, Role::Vcpu(vec![0]), None)];
    let of = |backend, budget: &str, range_floor| {
        let mut writes =
            take_in(&probe(Hierarchy::V1), Backend::RtGroup, None, &ask(&threads, Order::Rt, &[])).writes;
        let target = Target::host(Path::new("/cpu/vm").join(budget), Form::Plain);
        writes.push(Write::new("budget", target, "4000"));
        with_levels(&root, "plc", &threads, backend, &range(None, range_floor), &mut writes).unwrap();
        let (vcpu, weight) = writes
            .into_iter()
            .filter(|w| !w.levels.is_empty())
            .partition::<Vec<_>, _>(|w| w.target.form == Form::Scheduling);
        (vcpu[0].levels.iter().filter(|level| level.starts_with("other")).count(), weight)
    };
    fs::create_dir_all(root.at("/cpu/vm")).unwrap();
    // Without the file there is no weight to move.
    assert!(of(Backend::RtGroup, "cpu.rt_runtime_us", 0).1.is_empty());
    for (file, budget, backend, own) in [
        ("cpu.shares", "cpu.rt_runtime_us", Backend::RtGroup, 2048.0),
        ("cpu.weight", "cpu.rt.max", Backend::Hcbs, 100.0),
    ] {
        fs::write(root.at(format!("/cpu/vm/{file}")), format!("{own}\n")).unwrap();
        let (ordinary, weights) = of(backend, budget, 0);
        assert_eq!((ordinary, weights.len()), (1, 1));
        let weight = &weights[0];
        assert_eq!(weight.target.path, Path::new("/cpu/vm").join(file));
        assert_eq!((&weight.knob, &weight.value), (&format!("{file} of plc"), &format!("{own}")));
        let levels: Vec<f64> = weight.levels.iter().map(|level| level.parse().unwrap()).collect();
        assert!(levels.is_sorted_by(|a, b| a > b) && levels[0] < own, "{levels:?}");
        assert!(*levels.last().unwrap() <= own / 31.0, "{levels:?}");
    }
    // With a real-time floor no weight is needed.
    assert!(of(Backend::RtGroup, "cpu.rt_runtime_us", 5).1.is_empty());
    // Without a group of its own, the VM's weight is that of its threads.
    assert_eq!(of(Backend::Throttle, "none", 0).0, 20);
}
