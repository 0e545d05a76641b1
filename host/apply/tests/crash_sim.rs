//! Processes killed at every point, over a directory that answers like a kernel; and random plans
//! killed at random points.

mod support;

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use proptest::prelude::*;
use rtvirtio_apply::points::Points;
use rtvirtio_apply::{Fate, HostFiles as _, OnConflict, Outcome};
use rtvirtio_planner::{BfqTunable, Knob, LimitKind, Plan};
use support::child::{act, sweep};
use support::sim::SimKernel;
use support::{Case, Sim, assert_same, full_plan, io_cost, limit, plan, weight};

#[test]
#[ignore = "the process that the crash tests start and kill"]
fn crash_child() {
    support::child::main();
}

const GROUPS: [&str; 5] = ["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2", "/other"];

fn lab(v2: bool, elevator: &str, plan: Plan) -> Sim {
    let mut lab = Sim::new().with_disk(v2, &GROUPS, elevator).with_guests(&["mq-deadline", "bfq", "none"]);
    lab.case.plan = plan;
    lab
}

fn write(lab: &Sim, path: &str, value: &str) {
    lab.kernel.write(Path::new(path), value).unwrap();
}

#[test]
fn v1_killed_at_every_point_from_another_elevator() {
    let lab = lab(false, "mq-deadline", full_plan(true));
    write(&lab, "/sys/block/loop0/queue/iosched/read_expire", "780");
    write(&lab, "/sys/block/loop0/queue/nr_requests", "100");
    write(&lab, "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device", "259:1 40");
    write(&lab, "/sys/fs/cgroup/blkio/lab/vm2/blkio.throttle.read_iops_device", "7:0 77");
    let (apply, revert) = sweep(&lab.case, &lab.dirs());
    println!("points: apply {apply}, revert {revert}; 0 differences");
    assert!(apply > 30 && revert > 20, "{apply} {revert}");
}

#[test]
fn v1_killed_at_every_point_with_bfq_tuned_before() {
    let lab = lab(false, "bfq", full_plan(true));
    write(&lab, "/sys/block/loop0/queue/iosched/slice_idle_us", "1500");
    write(&lab, "/sys/block/loop0/queue/iosched/timeout_sync", "60");
    write(&lab, "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device", "200");
    write(&lab, "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device", "259:1 40");
    write(&lab, "/sys/fs/cgroup/blkio/lab/vm1/blkio.bfq.weight_device", "7:0 55");
    sweep(&lab.case, &lab.dirs());
}

/// The queue's `async_depth`, which each elevator resets, a write of `nr_requests` scales, and
/// `none` does not take: killed at every point, on the host and in guests.
#[test]
fn async_depth_of_a_queue_is_put_back_at_every_point() {
    for (start, other) in [("mq-deadline", "bfq"), ("bfq", "none"), ("none", "bfq")] {
        let mut settings = vec![(Knob::HostElevator, other)];
        for n in 0..3 {
            settings.push((Knob::GuestElevator { vm: format!("vm{n}") }, "kyber"));
        }
        let lab = lab(false, start, plan(&settings));
        lab.kernel.with_async_depth("loop0");
        for n in 0..3 {
            SimKernel::new(lab.case.guests.as_ref().unwrap().join(format!("vm{n}"))).with_async_depth("vda");
        }
        write(&lab, "/sys/block/loop0/queue/nr_requests", "100");
        if start != "none" {
            write(&lab, "/sys/block/loop0/queue/async_depth", "9");
        }
        sweep(&lab.case, &lab.dirs());
    }
}

/// Both elevators and both values of a knob with a side effect, in the direction that is harder to
/// put back.
#[test]
fn v1_killed_at_every_point_leaving_bfq_and_leaving_strict_mode() {
    let away =
        lab(false, "bfq", plan(&[(Knob::HostElevator, "none"), (limit(0, LimitKind::ReadBps), "4096")]));
    write(&away, "/sys/block/loop0/queue/iosched/slice_idle_us", "2500");
    write(&away, "/sys/fs/cgroup/blkio/other/blkio.bfq.weight_device", "7:0 900");
    write(&away, "/sys/fs/cgroup/blkio/other/blkio.bfq.weight_device", "259:1 30");
    sweep(&away.case, &away.dirs());

    let strict = Knob::HostBfq(BfqTunable::StrictGuarantees);
    let idle = Knob::HostBfq(BfqTunable::SliceIdle);
    for settings in [vec![(strict.clone(), "0"), (idle, "3")], vec![(strict, "0")]] {
        let lax = lab(false, "bfq", plan(&settings));
        write(&lax, "/sys/block/loop0/queue/iosched/strict_guarantees", "1");
        write(&lax, "/sys/block/loop0/queue/iosched/slice_idle_us", "1500");
        sweep(&lax.case, &lax.dirs());
    }
}

#[test]
fn v2_killed_at_every_point() {
    for elevator in ["none", "bfq"] {
        let lab = lab(true, elevator, full_plan(true));
        let before = lab.snapshot();
        assert!(!before.keys().any(|p| p.ends_with("io.max")), "the io controller is off at first");
        sweep(&lab.case, &lab.dirs());
    }
}

/// From BFQ, from a device that io.cost was never set up for, and from one with values of its own.
#[test]
fn io_cost_is_put_back_at_every_point() {
    for (elevator, before) in [
        ("bfq", ""),
        ("none", ""),
        ("mq-deadline", "7:0 enable=0 rpct=50 rlat=7 wpct=1.25 wlat=8 min=1 max=10000"),
    ] {
        let mut settings = vec![(Knob::HostElevator, if elevator == "bfq" { "none" } else { elevator })];
        settings.extend(io_cost());
        settings.push((limit(1, LimitKind::ReadIops), "500"));
        let lab = lab(true, elevator, plan(&settings));
        let root = "/sys/fs/cgroup";
        if before.is_empty() {
            write(&lab, "/sys/block/loop0/queue/wbt_lat_usec", "1500");
        } else {
            write(&lab, &format!("{root}/io.cost.qos"), before);
            let model = "7:0 rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6";
            write(&lab, &format!("{root}/io.cost.model"), model);
            for group in ["", "/lab"] {
                write(&lab, &format!("{root}{group}/cgroup.subtree_control"), "+io");
            }
            write(&lab, &format!("{root}/lab/vm1/io.weight"), "7:0 77");
        }
        let (apply, revert) = sweep(&lab.case, &lab.dirs());
        println!("{elevator}: points: apply {apply}, revert {revert}; 0 differences");
    }
}

/// With no targets before, and with another program's.
#[test]
fn io_latency_is_put_back_at_every_point() {
    for before in [None, Some("7:0 target=77")] {
        let of = |n: usize| Knob::VmIoLatency { vm: format!("vm{n}") };
        let settings = [(Knob::HostElevator, "none"), (of(0), "20000"), (of(1), "max"), (of(2), "50000")];
        let lab = lab(true, "bfq", plan(&settings));
        if let Some(before) = before {
            for group in ["", "/lab"] {
                write(&lab, &format!("/sys/fs/cgroup{group}/cgroup.subtree_control"), "+io");
            }
            write(&lab, "/sys/fs/cgroup/lab/vm1/io.latency", before);
        }
        let (apply, revert) = sweep(&lab.case, &lab.dirs());
        println!("points: apply {apply}, revert {revert}; 0 differences");
    }
}

/// BFQ is not put back next to io.cost that another program has set up meanwhile.
#[test]
fn bfq_stays_away_while_another_programs_io_cost_is_on() {
    let settings = [vec![(Knob::HostElevator, "none")], io_cost()].concat();
    for enable in [1, 0] {
        let lab = lab(true, "bfq", plan(&settings));
        let before = lab.snapshot();
        assert!(cut_at(&lab.case, "apply", 0));
        let theirs = format!("7:0 enable={enable} rpct=0 rlat=5 wpct=0 wlat=5 min=100 max=100");
        write(&lab, "/sys/fs/cgroup/io.cost.qos", &theirs);
        let has_bfq = || lab.kernel.get("/sys/block/loop0/queue/scheduler").contains("[bfq]");
        for _ in 0..2 {
            let reverted = lab.revert(OnConflict::Report);
            let by = |o: &Outcome| matches!(&o.fate, Fate::Blocked { by } if by.contains("io.cost.qos"));
            let is_held = reverted.outcomes.iter().any(|o| o.path.ends_with("scheduler") && by(o));
            assert!(!reverted.done && is_held == (enable == 1), "{}", reverted.summary());
            assert_eq!(has_bfq(), enable == 0);
        }
        assert!(lab.revert(OnConflict::Force).done && has_bfq());
        assert_same(&before, &lab.snapshot(), "put back by force");
    }
}

fn cut() {
    panic::resume_unwind(Box::new("cut"));
}

/// Runs an action that may be killed; `true` when it ran to its end.
fn cut_at(case: &Case, action: &str, at: u64) -> bool {
    let points = Points::new(at, cut);
    match panic::catch_unwind(AssertUnwindSafe(|| act(case, action, &points))) {
        Ok(result) => {
            result.unwrap();
            true
        }
        Err(payload) => {
            assert_eq!(payload.downcast_ref(), Some(&"cut"), "a panic of the code itself");
            false
        }
    }
}

fn elevator() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["none", "mq-deadline", "kyber", "bfq"])
}

fn settings() -> impl Strategy<Value = Vec<(Knob, String)>> {
    let tunable = |t, max: u64| (0..=max).prop_map(move |v| (Knob::HostBfq(t), v.to_string()));
    let limits = [LimitKind::ReadBps, LimitKind::WriteBps, LimitKind::ReadIops, LimitKind::WriteIops];
    let value = prop_oneof![Just("max".to_owned()), (1..1_000_000u64).prop_map(|v| v.to_string())];
    let one = prop_oneof![
        tunable(BfqTunable::SliceIdle, 20),
        tunable(BfqTunable::TimeoutSync, 300),
        tunable(BfqTunable::LowLatency, 1),
        tunable(BfqTunable::MaxBudget, 4096),
        tunable(BfqTunable::StrictGuarantees, 1),
        (0..3usize, 1..=1000u64).prop_map(|(vm, w)| (weight(vm), w.to_string())),
        (0..3usize, prop::sample::select(limits.to_vec()), value).prop_map(|(vm, k, v)| (limit(vm, k), v)),
        (0..3usize, elevator())
            .prop_map(|(vm, e)| (Knob::GuestElevator { vm: format!("vm{vm}") }, e.to_owned())),
    ];
    prop::collection::vec(one, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_plan_cut_anywhere_is_put_back_to_the_byte(
        v2: bool,
        start in elevator(),
        chosen in prop::option::of(elevator()),
        settings in settings(),
        idle_us in 0..20_000u64,
        strict in 0..2u64,
        nr in 4..512u64,
        default in 1..=1000u64,
        own in prop::option::of(1..=1000u64),
        other in prop::option::of(1..=1000u64),
        cuts in (1..80u64, prop::collection::vec(1..60u64, 0..3)),
    ) {
        // BFQ's knobs act only under BFQ; all others go with any elevator.
        let bfq = chosen.unwrap_or(start) == "bfq";
        let mut unique: Vec<(Knob, String)> = chosen.map(|e| (Knob::HostElevator, e.to_owned())).into_iter().collect();
        for (knob, value) in settings {
            let fits = bfq || !matches!(knob, Knob::HostBfq(_) | Knob::VmWeight { .. });
            if fits && !unique.iter().any(|(k, _)| *k == knob) {
                unique.push((knob, value));
            }
        }
        let borrowed: Vec<_> = unique.iter().map(|(k, v)| (k.clone(), v.as_str())).collect();
        let lab = lab(v2, start, plan(&borrowed));
        write(&lab, "/sys/block/loop0/queue/nr_requests", &nr.to_string());
        if start == "bfq" {
            write(&lab, "/sys/block/loop0/queue/iosched/strict_guarantees", &strict.to_string());
            write(&lab, "/sys/block/loop0/queue/iosched/slice_idle_us", &idle_us.to_string());
        }
        if !v2 {
            let file = "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device";
            write(&lab, file, &default.to_string());
            if let (Some(own), true) = (own, start == "bfq") {
                write(&lab, file, &format!("7:0 {own}"));
            }
            if let Some(other) = other {
                write(&lab, file, &format!("259:1 {other}"));
            }
        }
        let before = lab.snapshot();
        let (apply, reverts) = cuts;
        cut_at(&lab.case, "apply", apply);
        for at in reverts {
            cut_at(&lab.case, "revert", at);
        }
        prop_assert!(cut_at(&lab.case, "revert", 0));
        assert_same(&before, &lab.snapshot(), "cut and put back");
    }
}

/// Found by the property test: a plan that writes the `slice_idle` that is shown, where the file in
/// us holds a fraction more.
#[test]
fn a_fraction_of_slice_idle_survives_a_plan_that_leaves_it() {
    for cut in 1..12 {
        let settings =
            [(Knob::HostBfq(BfqTunable::StrictGuarantees), "0"), (Knob::HostBfq(BfqTunable::SliceIdle), "4")];
        let lab = lab(false, "bfq", plan(&settings));
        write(&lab, "/sys/block/loop0/queue/iosched/strict_guarantees", "1");
        write(&lab, "/sys/block/loop0/queue/iosched/slice_idle_us", "4001");
        let before = lab.snapshot();
        cut_at(&lab.case, "apply", cut);
        assert!(cut_at(&lab.case, "revert", 0));
        assert_same(&before, &lab.snapshot(), &format!("cut at {cut} and put back"));
    }
}
