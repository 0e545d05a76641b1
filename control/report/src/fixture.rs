//! Realistic inputs for the tests: the paper's Fig. 7 case under default BFQ and under a plan.

use rtvirtio_measure::{HostFacts, RESULT_SCHEMA, ResultFile, Run, TaskResult, Verdict, VmKind};
use rtvirtio_model::{DepthPoint, Forecast, GuestPoint, ModelKind, PROFILE_SCHEMA, Profile, Side, Term};
use rtvirtio_planner::TaskOutlook;
use rtvirtio_planner::{BfqTunable, Enforcement, Infeasible, Knob, LimitKind, Plan, Relaxation, Setting};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};

fn us(v: u64) -> Nanos {
    Nanos::from_micros(v)
}

fn task(
    vm: &str,
    name: &str,
    target_ms: u64,
    rate: f64,
    p9999_us: u64,
    predicted_us: Option<u64>,
) -> TaskResult {
    let n = (rate * 60.0) as u64;
    let max = p9999_us + p9999_us / 5;
    let tail = if n < 10_000 { max } else { p9999_us };
    let target = Nanos::from_millis(target_ms);
    let verdict = if us(tail) > target {
        Verdict::Missed
    } else if n >= 29_956 {
        Verdict::Met
    } else {
        Verdict::Unproven
    };
    TaskResult {
        vm: vm.into(),
        task: name.into(),
        percentile: Percentile::P9999,
        target_ns: Some(target),
        declared_rate: Some(Iops(rate)),
        achieved_rate: Iops(rate * if verdict == Verdict::Missed { 0.983 } else { 0.9998 }),
        n,
        p50_ns: us(180),
        p99_ns: us(p9999_us / 6),
        p9999_ns: us(tail),
        p9999_excl_host_stalls_ns: None,
        p9999_placebo_ns: None,
        max_ns: us(max),
        fio_p9999_ns: us(p9999_us / 2),
        at_target_ns: None,
        fio_cpus: 0.05,
        tail: None,
        predicted_ns: predicted_us.map(us),
        causes: None,
        causes_unread: Vec::new(),
        exceedances: 0,
        flow: None,
        why: match verdict {
            Verdict::Met => format!("0 of {n} above {target}"),
            Verdict::Missed => {
                format!("14 of {n} above {target}; {} instead of {}", Iops(rate * 0.983), Iops(rate))
            }
            Verdict::Unproven => format!("0 of {n} above {target}; p99.99 needs 29956 samples"),
        },
        verdict: Some(verdict),
    }
}

const TASKS: [(&str, &str, u64, f64, u64, u64, u64); 6] = [
    ("vm1", "light", 400, 100.0, 523_000, 12_400, 18_000),
    ("vm1", "medium", 300, 500.0, 412_000, 21_900, 24_000),
    ("vm2", "light", 800, 100.0, 690_000, 14_100, 23_000),
    ("vm2", "medium", 500, 500.0, 871_000, 5_200, 31_000),
    ("vm3", "light", 900, 100.0, 238_000, 9_800, 29_000),
    ("vm3", "medium", 700, 500.0, 902_000, 39_700, 37_500),
];

/// Six tasks: default BFQ misses, the plan does not.
pub(crate) fn result() -> ResultFile {
    let run = |scheme: &str, planned: bool| Run {
        scheme: scheme.into(),
        kind: VmKind::Qemu,
        seconds: 60.0,
        noise: None,
        disk: None,
        tasks: TASKS
            .iter()
            .map(|t| {
                if planned {
                    task(t.0, t.1, t.2, t.3, t.5, Some(t.6))
                } else {
                    task(t.0, t.1, t.2, t.3, t.4, Some(t.4 * 3 / 2))
                }
            })
            .collect(),
    };
    ResultFile {
        schema: RESULT_SCHEMA.into(),
        host: HostFacts {
            kernel: "6.18.0".into(),
            cpus: 2,
            vmm: "QEMU 7.2.22".into(),
            accelerator: "tcg".into(),
            device: "loop3 (twin qlc-nvme)".into(),
        },
        runs: vec![run("default-bfq", false), run("slice", true)],
    }
}

/// 64 VMs with three tasks each, names of the longest allowed form.
pub(crate) fn many() -> ResultFile {
    let mut r = result();
    for (i, run) in r.runs.iter_mut().enumerate() {
        run.tasks = (0..192u64)
            .map(|k| {
                let vm = format!("production-database-replica-{:04}", k / 3);
                let tail = if i == 0 { 40_000 + k * 7_919 % 900_000 } else { 5_000 + k * 31 };
                task(&vm, ["light", "medium", "heavy"][(k % 3) as usize], 300 + k, 525.0, tail, Some(30_000))
            })
            .collect();
    }
    r
}

/// A plan with settings of every kind.
pub(crate) fn plan() -> Plan {
    let set = |knob, value: &str, reason: &str, strength| Setting {
        knob,
        value: value.into(),
        reason: reason.into(),
        strength,
    };
    let term =
        |side, name: &'static str, v| Term { side, name: name.into(), latency_ns: us(v), statistic: None };
    let mut settings = vec![
        set(Knob::HostElevator, "bfq", "Weights between VMs act only under BFQ.", Enforcement::Hint),
        set(
            Knob::HostBfq(BfqTunable::SliceIdle),
            "0",
            "Three VMs are busy at once, so BFQ would leave the device idle for up to 8 ms at every switch; \
             that alone is more than half of the default tail.",
            Enforcement::Hint,
        ),
        set(
            Knob::HostBfq(BfqTunable::LowLatency),
            "0",
            "No queue may be raised over a declared one.",
            Enforcement::Hint,
        ),
    ];
    for (vm, weight) in [("vm1", "700"), ("vm2", "300"), ("vm3", "100")] {
        let reason = format!("{vm}'s tightest target asks for this share of the device's service.");
        settings.push(set(Knob::VmWeight { vm: vm.into() }, weight, &reason, Enforcement::Hint));
    }
    settings.push(set(
        Knob::VmLimit { vm: "vm3".into(), limit: LimitKind::ReadIops },
        "660",
        "Ten per cent above its declared rate: a fault in it cannot take the others' service.",
        Enforcement::Cap,
    ));
    settings.push(set(
        Knob::GuestElevator { vm: "vm1".into() },
        "none",
        "One scheduler is enough.",
        Enforcement::Hint,
    ));
    Plan {
        scheme: "slice".into(),
        model: ModelKind::Slice,
        settings,
        tasks: TASKS
            .iter()
            .map(|t| TaskOutlook {
                vm: t.0.into(),
                task: t.1.into(),
                percentile: Percentile::P9999,
                target_ns: Some(Nanos::from_millis(t.2)),
                forecast: Forecast {
                    latency_ns: us(t.6),
                    rate_kept: 1.0,
                    terms: vec![
                        term(Side::Guest, "vmm", t.6 / 10),
                        term(Side::Guest, "own-service", t.6 / 5),
                        term(Side::Host, "other-vms", t.6 / 2),
                        term(Side::Host, "device", t.6 - t.6 / 10 - t.6 / 5 - t.6 / 2),
                    ],
                    upper: None,
                },
                margin_ns: Some((t.2 * 1_000_000) as i64 - (t.6 * 1_000) as i64),
                cpu: None,
                cpu_wait: None,
                cpu_unknown: None,
                not_predicted: None,
            })
            .collect(),
        feasible: true,
        infeasible: None,
        evaluated: 1_284,
    }
}

/// Plan of `plan` with two targets that do not fit.
pub(crate) fn infeasible_plan() -> Plan {
    let mut p = plan();
    p.feasible = false;
    p.tasks[5].margin_ns = Some(-12_000_000);
    p.infeasible = Some(Infeasible {
        sacrificed: vec!["vm3".into()],
        conflict: vec!["vm3/medium".into(), "vm1/medium".into()],
        relaxation: vec![Relaxation {
            vm: "vm3".into(),
            task: "medium".into(),
            percentile: Percentile::P9999,
            declared_ns: Nanos::from_millis(10),
            fits_ns: Nanos::from_millis(22),
        }],
        reason: "The device serves 15 500 requests a second and 18 000 are declared.".into(),
    });
    p
}

/// A measured profile with one doubt.
pub(crate) fn profile() -> Profile {
    let point = |depth: u32, iops: f64| DepthPoint {
        depth,
        iops: Iops(iops),
        spread: 0.021,
        n: 40_000,
        p50: us(100 + 60 * u64::from(depth - 1)),
        p99: us(140 + 66 * u64::from(depth - 1)),
        p9999: us(1_800 + 90 * u64::from(depth - 1)),
        max: us(2_900 + 110 * u64::from(depth - 1)),
    };
    let depths = [(1, 9_400.0), (2, 13_100.0), (4, 15_000.0), (8, 15_400.0), (16, 15_500.0), (32, 15_500.0)];
    Profile {
        schema: PROFILE_SCHEMA.into(),
        device: "loop3".into(),
        identity: None,
        size: Bytes::from_kib(1 << 20),
        block: Bytes::from_kib(4),
        read: depths.iter().map(|&(d, i)| point(d, i)).collect(),
        write: vec![point(1, 8_000.0)],
        sync: vec![point(1, 420.0)],
        read_bfq: depths.iter().map(|&(d, i)| point(d, i * 0.86)).collect(),
        large: None,
        guest: Some(GuestPoint {
            kind: "qemu-tcg".into(),
            point: point(1, 3_900.0),
            cpu_per_request: 121e-6,
        }),
        cpus: 2,
        kernel: "6.18.0".into(),
        doubts: vec![
            "throughput at depth 32 is not above depth 16: the device, or this machine, is saturated".into(),
        ],
    }
}
