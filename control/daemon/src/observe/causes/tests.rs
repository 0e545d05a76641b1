use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_blame::{CauseKind, Faults, Limiter};
use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_spec::HostSpec;
use rtvirtio_vmm::threads::Named;

use super::*;
use crate::Contract;
use crate::observe::facts::DeviceInterval;
use crate::observe::judge_task;
use crate::observe::window::StoodStill;

const MS: u64 = 1_000_000;

fn vm() -> RunningVm {
    let text = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
        block = \"4KiB\"\nrate = \"100/s\"\ntarget = { percentile = \"p99\", latency = \"10ms\" }\n";
    let spec = HostSpec::parse("x.toml", text).unwrap();
    let mut contracts = Contract::of_spec(&spec, Path::new("x.toml"));
    RunningVm {
        contract: contracts.remove(0),
        processes: vec![ProcessId { pid: 7, start_time: 1 }],
        named: Named::default(),
        cpu: None,
    }
}

/// Reads so far: below 10 ms, and above.
fn stats(fast: u64, late: u64) -> DiskStats {
    let histogram = Histogram { boundaries: vec![MS, 10 * MS, 100 * MS], bins: vec![fast, 0, late, 0] };
    let ops = fast + late;
    DiskStats {
        id: "d".to_owned(),
        file: Some("/d".to_owned()),
        format: None,
        read_only: false,
        read: Counters {
            ops,
            bytes: ops * 4096,
            time_ns: fast * MS + late * 50 * MS,
            histogram: Some(histogram),
        },
        write: Counters::default(),
        flush: Counters::default(),
    }
}

fn member(name: &str, group: &str, tasks: &[Task]) -> DeviceMember {
    DeviceMember { name: name.to_owned(), group: group.into(), tasks: tasks.to_vec() }
}

/// Ten seconds of a device, with the VM in a cgroup of its own below a slice.
fn device(io: DeviceIo, moved: BTreeMap<String, Option<f64>>) -> DeviceInterval {
    let members = vec![member("plc", "/s/vm", &vm().contract.vm.tasks)];
    DeviceInterval { io, moved, seconds: 10.0, groups: BTreeMap::new(), members }
}

/// Facts of ten seconds in which nothing was unusual.
fn calm() -> IntervalFacts {
    let io = DeviceIo { reads: 1_000, read_time: Duration::from_millis(100), ..DeviceIo::default() };
    IntervalFacts {
        seconds: 10.0,
        ready: Some(BTreeMap::from([((7, 1), 5 * MS)])),
        quota: Some(Stops { count: 0, total: Nanos(0) }),
        stolen: Some(0.0),
        cpus: Some(2),
        own_cpus: Some(0.5),
        faults: Some(Faults { own: 0, host: 0, may_be_compressed: false }),
        limits: Some(Vec::new()),
        device: Some(Arc::new(device(io, BTreeMap::from([("plc".to_owned(), Some(0.0))])))),
        has_shares: true,
    }
}

fn watched() -> StoodStill {
    let none = Some(StallTotal { total: Nanos(0), count: 0 });
    StoodStill { host: none, disk: none }
}

/// A target over intervals of ten seconds, each with its reads and facts.
fn judged(intervals: &[(u64, u64, IntervalFacts)]) -> TargetObservation {
    let (vm, begin) = (vm(), Instant::now());
    let (mut window, mut sum) = (DiskWindow::default(), (0, 0));
    window.add(begin, stats(0, 0), StoodStill::default());
    for (i, (fast, late, facts)) in (1..).zip(intervals) {
        sum = (sum.0 + fast, sum.1 + late);
        let at = begin + Duration::from_secs(10 * i);
        window.add_with(at, stats(sum.0, sum.1), watched(), Some(Arc::new(facts.clone())));
    }
    let spec = &vm.contract.vm;
    let mut targets = judge_task(spec, &spec.tasks[0], &window);
    explain(&vm, &window, &mut targets);
    targets.remove(0)
}

fn kinds(target: &TargetObservation) -> Vec<CauseKind> {
    target.causes.iter().flatten().map(|cause| cause.kind).collect()
}

#[test]
fn a_target_that_is_met_has_no_causes_and_a_missed_one_without_evidence_none_seen() {
    let met = judged(&[(1_000, 0, calm())]);
    assert_eq!((met.verdict, &met.causes), (Verdict::Met, &None));
    let missed = judged(&[(500, 500, calm())]);
    assert_eq!((missed.verdict, missed.causes.as_deref()), (Verdict::Missed, Some(&[][..])));
    assert!(missed.causes_unread.is_empty(), "{missed:?}");
    let faults = Some(Faults { own: 200, host: 200, may_be_compressed: false });
    let paged = judged(&[(500, 500, IntervalFacts { faults, ..calm() })]);
    assert_eq!(kinds(&paged), [CauseKind::Paging]);
    // A thirtieth of the time of 32 CPUs may be all of the one that the VM needs.
    let stolen =
        judged(&[(500, 500, IntervalFacts { faults, stolen: Some(0.03), cpus: Some(32), ..calm() })]);
    assert_eq!(kinds(&stolen), []);
}

#[test]
fn facts_of_the_intervals_with_late_requests_count_alone() {
    let throttled = IntervalFacts { quota: Some(Stops { count: 90, total: Nanos(5_000 * MS) }), ..calm() };
    // Half of an interval of ten in a window of 100 s.
    let mut all: Vec<(u64, u64, IntervalFacts)> = (0..9).map(|_| (1_000, 0, calm())).collect();
    all.insert(4, (500, 500, throttled));
    let target = judged(&all);
    assert_eq!((target.verdict, kinds(&target)), (Verdict::Missed, vec![CauseKind::CpuQuota]));
    assert!(target.causes.unwrap()[0].evidence.contains("50 % of the time"));
    // Stops at another time delayed none.
    let quiet = IntervalFacts { quota: Some(Stops { count: 90, total: Nanos(5_000 * MS) }), ..calm() };
    let target = judged(&[(1_000, 0, quiet), (500, 500, calm()), (1_000, 0, calm())]);
    assert_eq!((target.verdict, kinds(&target)), (Verdict::Missed, vec![]));
}

#[test]
fn a_fact_that_one_interval_lacks_names_nothing_and_is_told() {
    let throttled = IntervalFacts { quota: Some(Stops { count: 90, total: Nanos(5_000 * MS) }), ..calm() };
    let unread = IntervalFacts { quota: None, device: None, ..calm() };
    let target = judged(&[(500, 500, throttled), (500, 500, unread)]);
    assert_eq!(kinds(&target), []);
    assert_eq!(target.causes_unread, ["its CPU quota", "use of the device"]);
    let target = judged(&[(500, 500, IntervalFacts::default())]);
    assert_eq!(target.causes_unread.len(), 6, "{target:?}");
}

#[test]
fn limits_are_compared_with_what_the_disk_completed() {
    let limit = |by, value| IntervalLimit {
        by,
        name: "of it".to_owned(),
        value,
        dimension: Dimension { reads: true, writes: true, bytes: false },
        cgroup: (by == Limiter::Kernel).then(|| "/s/vm".into()),
    };
    let with = |all: &[IntervalLimit]| IntervalFacts { limits: Some(all.to_vec()), ..calm() };
    // 80/s of 100/s that are declared.
    let of = |all: &[IntervalLimit]| kinds(&judged(&[(300, 500, with(all))]));
    assert_eq!(of(&[limit(Limiter::Qemu, 80.0)]), [CauseKind::QemuThrottle]);
    assert_eq!(of(&[limit(Limiter::Kernel, 81.0), limit(Limiter::Qemu, 200.0)]), [CauseKind::KernelLimit]);
    assert_eq!(of(&[limit(Limiter::Kernel, 99.0)]), []);
    // 150/s where 100/s are declared, and 150/s allowed.
    let over = judged(&[(500, 1_000, with(&[limit(Limiter::Kernel, 150.0)]))]);
    assert_eq!(kinds(&over), [CauseKind::Load]);
    let changed = judged(&[(300, 500, with(&[limit(Limiter::Qemu, 80.0)])), (300, 500, with(&[]))]);
    assert_eq!((kinds(&changed), changed.causes_unread), (vec![], vec!["its limits".to_owned()]));
}

#[test]
fn a_limit_of_a_slice_is_judged_by_all_vms_below_it() {
    let slice = IntervalLimit {
        by: Limiter::Kernel,
        name: "riops for /dev/sdz in /s".to_owned(),
        value: 150.0,
        dimension: Dimension { reads: true, writes: false, bytes: false },
        cgroup: Some("/s".into()),
    };
    // Late for a CPU or for the slice's limit; 80/s of 100/s that are declared.
    let of = |groups: &[(&str, u64)], also: Option<DeviceMember>| {
        let groups = groups.iter().map(|(group, n)| {
            let io = IoCounters { reads: 10 * n, ..IoCounters::default() };
            (PathBuf::from(group), io)
        });
        let calm = calm();
        let mut used = calm.device.as_deref().unwrap().clone();
        used.groups = groups.collect();
        used.members.extend(also);
        let (limits, device) = (Some(vec![slice.clone()]), Some(Arc::new(used)));
        let ready = Some(BTreeMap::from([((7, 1), 5_000 * MS)]));
        let target = judged(&[(300, 500, IntervalFacts { limits, device, ready, ..calm })]);
        (kinds(&target), target.causes_unread)
    };
    let bulk = |rate: f64| {
        let mut task = vm().contract.vm.tasks.remove(0);
        task.rate = Some(rtvirtio_units::Iops(rate));
        Some(member("bulk", "/s/bulk", &[task]))
    };
    let full = [("/s", 150), ("/s/vm", 80), ("/s/bulk", 70)];
    let limited = (vec![CauseKind::KernelLimit], vec![]);
    assert_eq!(of(&full, bulk(90.0)), limited, "170/s at least are asked for");
    assert_eq!(of(&full, None), limited, "a program without a contract takes the rest");
    let room = [("/s", 90), ("/s/vm", 80), ("/s/bulk", 10)];
    assert_eq!(of(&room, bulk(90.0)), (vec![CauseKind::CpuOthers], vec![]));
    // What the slice holds back is not known by this VM's requests alone.
    assert_eq!(of(&[("/s/vm", 80)], bulk(90.0)), (vec![], vec!["its limits".to_owned()]));
    let unclear = [("/s", 140), ("/s/vm", 80), ("/s/bulk", 40)];
    let unread = vec!["what others ask of its limit".to_owned()];
    assert_eq!(of(&unclear, bulk(20.0)), (vec![CauseKind::KernelLimit], vec![]), "100/s, 40/s and 20/s");
    let unclear = [("/s", 140), ("/s/vm", 90), ("/s/bulk", 30)];
    assert_eq!(of(&unclear, bulk(20.0)), (vec![], unread), "what a program asks for besides is not known");
}

#[test]
fn users_of_the_device_are_named_where_all_are_counted() {
    let flood = |has_shares, bulk| {
        let io = DeviceIo {
            reads: 10_000,
            read_bytes: 10_000 * 4096,
            read_time: Duration::from_secs(500),
            ..DeviceIo::default()
        };
        let moved = BTreeMap::from([("plc".to_owned(), Some(4_096_000.0)), ("bulk".to_owned(), bulk)]);
        IntervalFacts { device: Some(Arc::new(device(io, moved))), has_shares, ..calm() }
    };
    let bulk = Some(36_864_000.0);
    let target = judged(&[(100, 900, flood(true, bulk))]);
    assert_eq!(kinds(&target), [CauseKind::Neighbour]);
    assert!(target.causes.unwrap()[0].evidence.contains("bulk"));
    for facts in [flood(false, bulk), flood(true, None)] {
        let target = judged(&[(100, 900, facts)]);
        let unread = ["who uses the device", "BFQ's idling"].map(str::to_owned).to_vec();
        assert_eq!((kinds(&target), target.causes_unread), (vec![], unread));
    }
}

#[test]
fn what_waited_in_one_interval_is_no_load_above_the_declaration_in_the_next() {
    let alone = || {
        let io = DeviceIo {
            reads: 10_000,
            read_bytes: 10_000 * 4096,
            read_time: Duration::from_secs(500),
            ..DeviceIo::default()
        };
        let moved = BTreeMap::from([("plc".to_owned(), Some(40_960_000.0))]);
        IntervalFacts { device: Some(Arc::new(device(io, moved))), ..calm() }
    };
    // 100/s are declared: 70/s, then 130/s; and a rest of the guest, then 200/s.
    for counts in [[(700, 0), (300, 1_000)], [(0, 0), (0, 2_000)]] {
        let [(then, _), (n, late)] = counts;
        let later = judged(&[(then, 0, calm()), (n, late, alone())]);
        assert_eq!(kinds(&later), [], "{counts:?}");
    }
    let kept = judged(&[(700, 0, calm()), (0, 1_000, alone())]);
    assert_eq!(kinds(&kept), [CauseKind::Device]);
    let more = judged(&[(1_000, 0, calm()), (1_000, 2_000, alone())]);
    assert_eq!(kinds(&more), [CauseKind::Load]);
}
