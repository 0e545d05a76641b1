use std::path::PathBuf;

use proptest::prelude::*;
use rtvirtio_model::VmConfig;
use rtvirtio_spec::{Device, HostHandle, LabKind, Op, Task};
use rtvirtio_units::Ratio;

use super::*;
use crate::tests::setting;

fn spec() -> Spec {
    let task = |op| Task { op, ..Task::reads("t", None) };
    let vm = |name: &str, reach, op| Vm { reach, ..Vm::of_lab(name, LabKind::Qemu, vec![task(op)]) };
    let pid = Reach::Existing { host: HostHandle::Pid(1), agent: None, disk: None };
    Spec {
        device: Device::Path(PathBuf::from("/dev/sdz")),
        vms: vec![
            vm("reads", Reach::Lab(LabKind::Qemu), Op::Read),
            vm("writes", Reach::Lab(LabKind::Qemu), Op::Write),
            vm("both", pid, Op::Mixed { write_share: Ratio(0.3) }),
        ],
    }
}

fn config(elevator: Elevator) -> Config {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    Config { elevator, bfq: Bfq::default(), vms: vec![vm; 3] }
}

fn text(settings: &[Setting]) -> Vec<(Knob, &str)> {
    settings.iter().map(|s| (s.knob.clone(), s.value.as_str())).collect()
}

#[test]
fn values_are_in_the_kernels_units_and_in_order() {
    let start = config(Elevator::None);
    let mut end = config(Elevator::Bfq);
    end.bfq.slice_idle = Nanos::from_millis(2);
    end.bfq.max_budget = Some(Bytes::from_kib(512));
    end.bfq.low_latency = false;
    end.vms[1].weight = 700;
    end.vms[0].cap = Some(Iops(900.0));
    end.vms[2].cap = Some(Iops(1001.0));
    end.vms[1].guest_elevator = Elevator::MqDeadline;
    let vm = |v: &str| v.to_owned();
    let settings = settings_of(&spec(), &start, &end);
    assert_eq!(
        text(&settings),
        [
            (Knob::HostElevator, "bfq"),
            (Knob::HostBfq(BfqTunable::SliceIdle), "2"),
            (Knob::HostBfq(BfqTunable::LowLatency), "0"),
            (Knob::HostBfq(BfqTunable::MaxBudget), "1024"),
            (Knob::VmWeight { vm: vm("writes") }, "700"),
            (Knob::VmLimit { vm: vm("both"), limit: LimitKind::ReadIops }, "701"),
            (Knob::VmLimit { vm: vm("both"), limit: LimitKind::WriteIops }, "300"),
            (Knob::VmLimit { vm: vm("reads"), limit: LimitKind::ReadIops }, "900"),
            (Knob::GuestElevator { vm: vm("writes") }, "mq-deadline"),
        ]
    );
    assert_eq!(config_of(&spec(), &start, &settings).unwrap(), end);
    check_actable(&spec(), &Placements::default(), &start, &settings).unwrap();
}

#[test]
fn a_new_bfq_starts_from_the_kernels_defaults() {
    // Tunables read under another elevator are not those that BFQ starts with.
    let mut start = config(Elevator::None);
    start.bfq.timeout_sync = Nanos::from_millis(32);
    let mut end = start.clone();
    end.elevator = Elevator::Bfq;
    let settings = settings_of(&spec(), &start, &end);
    assert_eq!(
        text(&settings),
        [(Knob::HostElevator, "bfq"), (Knob::HostBfq(BfqTunable::TimeoutSync), "32")]
    );
}

#[test]
fn what_cannot_act_is_refused_with_the_reason() {
    let refused = |placements: &Placements, start: &Config, s: Vec<Setting>| {
        let e = check_actable(&spec(), placements, start, &s).unwrap_err();
        assert!(matches!(e, PlanError::CannotAct { .. }), "{e}");
        e.to_string()
    };
    let weight = || setting(Knob::VmWeight { vm: "reads".to_owned() }, "200");
    let (bfq, none) = (config(Elevator::Bfq), config(Elevator::None));
    assert!(refused(&Placements::shared(9), &bfq, vec![weight()]).contains("no I/O cgroup of its own"));
    assert!(refused(&Placements::default(), &none, vec![weight()]).contains("choose bfq"));
    let no_idle = setting(Knob::HostBfq(BfqTunable::SliceIdle), "0");
    assert!(refused(&Placements::default(), &bfq, vec![no_idle.clone(), weight()]).contains("slice_idle=0"));
    assert!(refused(&Placements::default(), &none, vec![no_idle]).contains("tunable of BFQ"));
    let guest = setting(Knob::GuestElevator { vm: "both".to_owned() }, "none");
    assert!(refused(&Placements::default(), &bfq, vec![guest]).contains("agent"));
    let tunable = Knob::GuestBfq { vm: "reads".to_owned(), tunable: BfqTunable::SliceIdle };
    assert!(refused(&Placements::default(), &bfq, vec![setting(tunable, "0")]).contains("guest's elevator"));
    let limit = Knob::VmLimit { vm: "reads".to_owned(), limit: LimitKind::ReadIops };
    assert!(refused(&Placements::shared(9), &bfq, vec![setting(limit, "5")]).contains("the cap on reads"));
}

#[test]
fn bad_values_name_the_knob_the_value_and_what_is_allowed() {
    let start = config(Elevator::Bfq);
    let error = |s: Setting| config_of(&spec(), &start, &[s]).unwrap_err().to_string();
    assert_eq!(
        error(setting(Knob::HostElevator, "cfq")),
        "the host's elevator: value `cfq` is not valid; expected one of none, mq-deadline, kyber, bfq"
    );
    for (knob, value) in [
        (Knob::VmWeight { vm: "reads".to_owned() }, "0"),
        (Knob::VmWeight { vm: "reads".to_owned() }, "1001"),
        (Knob::HostBfq(BfqTunable::LowLatency), "2"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "8ms"),
        (Knob::HostBfq(BfqTunable::MaxBudget), "99999999999"),
        (Knob::VmLimit { vm: "reads".to_owned(), limit: LimitKind::ReadIops }, "-1"),
        (Knob::VmLimit { vm: "reads".to_owned(), limit: LimitKind::ReadBps }, "1000"),
    ] {
        let e = error(setting(knob, value));
        assert!(e.contains(&format!("`{value}`")), "{e}");
    }
    assert!(error(setting(Knob::VmWeight { vm: "gone".to_owned() }, "5")).contains("no VM `gone`"));
}

fn any_config() -> impl Strategy<Value = Config> {
    let elevator = || {
        proptest::sample::select(vec![Elevator::None, Elevator::MqDeadline, Elevator::Kyber, Elevator::Bfq])
    };
    let bfq = || {
        (0u64..50, 1u64..500, any::<bool>(), proptest::option::of(1u64..100_000), any::<bool>()).prop_map(
            |(si, ts, low_latency, sectors, strict_guarantees)| Bfq {
                slice_idle: Nanos::from_millis(si),
                timeout_sync: Nanos::from_millis(ts),
                low_latency,
                max_budget: sectors.map(|s| Bytes(s * SECTOR)),
                strict_guarantees,
            },
        )
    };
    let vm = (1u32..=1000, proptest::option::of(2u32..100_000), elevator(), bfq()).prop_map(
        |(weight, cap, guest_elevator, guest_bfq)| VmConfig {
            weight,
            cap: cap.map(|c| Iops(f64::from(c))),
            guest_elevator,
            guest_bfq,
        },
    );
    (elevator(), bfq(), proptest::collection::vec(vm, 3)).prop_map(|(elevator, bfq, vms)| Config {
        elevator,
        bfq,
        vms,
    })
}

/// Settings contain no tunables of an elevator that is not in force.
fn in_force(mut c: Config) -> Config {
    if c.elevator != Elevator::Bfq {
        c.bfq = Bfq::default();
    }
    for vm in &mut c.vms {
        if vm.guest_elevator != Elevator::Bfq {
            vm.guest_bfq = Bfq::default();
        }
    }
    c
}

proptest! {
    #[test]
    fn settings_lead_from_any_configuration_to_any_other(start in any_config(), end in any_config()) {
        let settings = settings_of(&spec(), &start, &end);
        let reached = config_of(&spec(), &start, &settings).unwrap();
        prop_assert_eq!(in_force(reached), in_force(end.clone()));
        prop_assert!(settings_of(&spec(), &end, &end).is_empty());
    }
}

#[test]
fn parts_of_a_cap_are_what_the_kernel_holds_where_the_cap_is() {
    let vm = &spec().vms[2];
    let parts = |cap: f64| limits(vm, Some(Iops(cap))).into_iter().map(|(_, value)| value);
    assert!(parts(100.0).eq(["70", "30"]));
    assert!(parts(20.0).eq(["10", "10"]));
    assert!(parts(10.0).eq(["7", "3"]));
    assert!(parts(101.0).eq(["71", "30"]));
}
