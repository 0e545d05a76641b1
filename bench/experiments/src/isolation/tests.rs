use rtvirtio_model::{Bfq, Config, DepthPoint, Elevator, PROFILE_SCHEMA, VmConfig};
use rtvirtio_planner::{Knob, LimitKind, Setting};
use rtvirtio_spec::Device;
use rtvirtio_units::{Bytes, Iops};

use super::modes::{Basis, VMS, settings};
use super::*;

fn profile() -> Profile {
    let point = |depth, iops: f64| DepthPoint {
        depth,
        iops: Iops(iops),
        spread: 0.0,
        n: 20_000,
        p50: Nanos(100_000),
        p99: Nanos(200_000),
        p9999: Nanos(400_000),
        max: Nanos(500_000),
    };
    let points = || vec![point(1, 9_000.0), point(4, 20_000.0), point(32, 40_000.0)];
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: "x".to_owned(),
        identity: None,
        size: Bytes(1 << 30),
        block: Bytes(4_096),
        read: points(),
        write: points(),
        sync: points(),
        read_bfq: Vec::new(),
        large: None,
        guest: None,
        cpus: 2,
        kernel: "x".to_owned(),
        doubts: Vec::new(),
    }
}

fn settings_of(mode: Mode, case: Case) -> Vec<(Knob, String)> {
    let profile = profile();
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    let baseline = Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; VMS] };
    let device = Device::Path("/dev/x".into());
    let elevators = [Elevator::None, Elevator::MqDeadline, Elevator::Bfq];
    let basis = Basis {
        profile: &profile,
        baseline: &baseline,
        device: &device,
        kind: LabKind::Process,
        elevators: &elevators,
    };
    let all = settings(mode, case, &basis).unwrap_or_else(|e| panic!("{mode:?} {case:?}: {e}"));
    all.into_iter().map(|Setting { knob, value, .. }| (knob, value)).collect()
}

fn run(case: Case, mode: Mode, bytes: &[f64], p99_ms: u64) -> IsolationRun {
    let vm = |bytes: &f64| VmOutcome {
        rate: *bytes / 4_096.0,
        bytes: *bytes,
        n: 1_000,
        p50_ns: Nanos(1),
        p99_ns: Nanos::from_millis(p99_ms),
    };
    let bursts_ns = if case == Case::Bursts { vec![Nanos(1_000_000), Nanos(3_000_000)] } else { Vec::new() };
    IsolationRun { round: 0, case, mode, vms: bytes.iter().map(vm).collect(), bursts_ns }
}

#[test]
fn every_mode_has_settings_for_every_case() {
    for mode in Mode::ALL {
        assert_eq!(mode.name().parse(), Ok(mode));
        for case in Case::ALL {
            let found = settings_of(mode, case);
            let set = found.iter().find(|(knob, _)| *knob == Knob::HostElevator);
            let elevator = set.map(|(_, value)| value.as_str());
            if let Some(needed) = mode.elevator() {
                assert_eq!(elevator, Some(needed.name()), "{mode:?} {case:?}");
            }
        }
    }
    assert!("cfq".parse::<Mode>().unwrap_err().contains("io-latency"));
}

#[test]
fn settings_follow_weights_and_strength() {
    let vm = |n: usize| format!("vm{n}");
    let value = |all: &[(Knob, String)], knob: Knob| {
        all.iter().find(|(k, _)| *k == knob).map(|(_, value)| value.parse::<u64>().unwrap())
    };
    let limit = |n: usize, limit| Knob::VmLimit { vm: vm(n), limit };
    let weighted = settings_of(Mode::IoMax, Case::Weights);
    // 40 000/s by shares of 1, 2, 4 and 8, in tens.
    let limits = [0, 1, 2, 3].map(|n| value(&weighted, limit(n, LimitKind::ReadIops)));
    assert_eq!(limits, [Some(2_660), Some(5_330), Some(10_660), Some(21_330)]);
    let strong = settings_of(Mode::IoMax, Case::Strong);
    assert_eq!(value(&strong, limit(0, LimitKind::ReadIops)), None);
    assert_eq!(value(&strong, limit(3, LimitKind::ReadIops)), Some(2_660));
    let sizes = settings_of(Mode::IoMax, Case::Sizes);
    assert_eq!(value(&sizes, limit(3, LimitKind::ReadBps)), Some(10_000 * 4_096));
    let mixed = settings_of(Mode::IoMax, Case::Mixed);
    assert!(value(&mixed, limit(1, LimitKind::ReadIops)).is_some());
    assert!(value(&mixed, limit(2, LimitKind::WriteIops)).is_some());

    let targets = [Case::Weak, Case::Medium, Case::Strong]
        .map(|case| value(&settings_of(Mode::IoLatency, case), Knob::VmIoLatency { vm: vm(0) }));
    assert_eq!(targets, [Some(1_600), Some(600), Some(240)]);
    let bfq = settings_of(Mode::Bfq, Case::Strong);
    assert_eq!(value(&bfq, Knob::VmWeight { vm: vm(0) }), Some(1_000));
    for mode in [Mode::IoCost, Mode::IoCostShipped] {
        let all = settings_of(mode, Case::Strong);
        assert_eq!(value(&all, Knob::VmIoWeight { vm: vm(0) }), Some(1_000));
        let of_io_cost = all.iter().filter(|(knob, _)| matches!(knob, Knob::HostIoCost(_))).count();
        assert_eq!(of_io_cost, if mode == Mode::IoCost { 2 } else { 1 });
    }
    assert!(!settings_of(Mode::KernelPlan, Case::Weak).is_empty(), "a plan for a target of 4 ms");
}

#[test]
fn shares_are_fair_by_their_weights() {
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    assert!(near(run(Case::Equal, Mode::Bfq, &[5.0; 4], 1).jain(), 1.0));
    assert!(near(run(Case::Equal, Mode::Bfq, &[8.0, 0.0, 0.0, 0.0], 1).jain(), 0.25));
    assert!(near(run(Case::Weights, Mode::Bfq, &[1.0, 2.0, 4.0, 8.0], 1).jain(), 1.0));
    assert!(run(Case::Weights, Mode::Bfq, &[5.0; 4], 1).jain() < 0.7);
    assert!(near(run(Case::Equal, Mode::Bfq, &[0.0; 4], 1).jain(), 0.0));
}

#[test]
fn claims_have_no_limits_and_modes_left_out_are_named() {
    let mut runs = Vec::new();
    for case in Case::ALL {
        let vms = vec![1_000.0; case.loads().len()];
        runs.push(run(case, Mode::Plain, &vms, 2));
        let half: Vec<f64> = vms.iter().map(|bytes| bytes / 2.0).collect();
        runs.push(run(case, Mode::Bfq, &half, 5));
    }
    let data = IsolationData {
        schema: IsolationData::FORM.to_owned(),
        host: HostFacts {
            kernel: String::new(),
            cpus: 1,
            vmm: "none".to_owned(),
            accelerator: "none".to_owned(),
            device: String::new(),
        },
        command: String::new(),
        generated: String::new(),
        profile: profile(),
        runs,
        skipped: [Case::Equal, Case::Weak]
            .map(|case| Skipped { mode: Mode::IoCost, case, why: "no cgroup v2".to_owned() })
            .to_vec(),
    };
    let claims = data.claims();
    assert!(claims.iter().all(|claim| claim.met && !claim.has_limit()));
    let of = |id: &str| claims.iter().find(|claim| claim.id == id).unwrap_or_else(|| panic!("no {id}")).value;
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
    near(of("isolation.D1.bfq.p99_over_none"), 2.5);
    near(of("isolation.D1.bfq.rate_over_none"), 0.5);
    near(of("isolation.D2.none.jain.equal"), 1.0);
    near(of("isolation.D3.bfq.p99_ms"), 5.0);
    near(of("isolation.D3.bfq.use_over_none"), 0.5);
    near(of("isolation.D4.bfq.burst_ms"), 2.0);
    let report = data.report().unwrap();
    let left_out = "io-cost was left out of equal, weak: no cgroup v2";
    assert!(report.text.contains(left_out), "{}", report.text);
    assert_eq!(report.sections.iter().map(|section| section.plots.len()).sum::<usize>(), 4);
    let json = serde_json::to_string(&data).unwrap();
    assert_eq!(crate::saved::from_json::<IsolationData>(&json).unwrap(), data);
}
