use rtvirtio_spec::{LabKind, Op, Target};
use rtvirtio_units::{Nanos, Percentile, Ratio};

use super::*;
use crate::tests::{flood, profile, setting as set, spec, start, task};
use crate::{Placements, config_of};

#[test]
fn targets_are_the_shortest_of_each_direction() {
    let of = |op, percentile, ms| {
        let target = Target { percentile: Percentile(percentile), latency: Nanos::from_millis(ms) };
        rtvirtio_spec::Task { op, targets: vec![target], ..task("t", 100.0, None) }
    };
    let mixed = Op::Mixed { write_share: Ratio(0.3) };
    let tasks = vec![of(Op::Read, 99.99, 20), of(mixed, 99.0, 50), of(Op::Read, 99.9999, 5), flood()];
    let found = io_cost_targets(&spec(LabKind::Process, &[tasks]));
    assert_eq!((found.rpct, found.rlat), (Hundredths(9_999), 5_000));
    assert_eq!((found.wpct, found.wlat), (Hundredths(9_900), 50_000));
    for percent in [50.0, 95.0, 99.0, 99.9, 99.95, 99.99] {
        let found = io_cost_targets(&spec(LabKind::Process, &[vec![of(Op::Write, percent, 7)]]));
        assert_eq!(found.wpct.to_string(), format!("{percent:.2}"));
        // Reads have no target, and a period of the same length.
        assert_eq!((found.rpct, found.rlat), (Hundredths(0), 7_000));
    }
    let none = io_cost_targets(&spec(LabKind::Process, &[vec![flood()]]));
    assert_eq!((none.rpct, none.rlat, none.wpct, none.wlat), (Hundredths(0), 25_000, Hundredths(0), 25_000));
}

#[test]
fn weights_are_the_parts_of_the_device() {
    // 15 500/s in all: 1 550/s are a tenth, and the flood gets the rest of seven tenths.
    let vm = |rate| vec![task("t", rate, Some(20))];
    let three = spec(LabKind::Process, &[vm(1_550.0), vm(3_100.0), vec![flood()]]);
    assert_eq!(io_cost_weights(&three, &profile(), &start(&three)).unwrap(), [100, 200, 700]);
    // More than the device carries: in proportion, and the flood keeps a little.
    let much = spec(LabKind::Process, &[vm(15_500.0), vm(31_000.0), vec![flood()]]);
    assert_eq!(io_cost_weights(&much, &profile(), &start(&much)).unwrap(), [332, 664, 3]);
    let little = spec(LabKind::Process, &[vm(0.01), vm(3_100.0)]);
    assert_eq!(io_cost_weights(&little, &profile(), &start(&little)).unwrap()[0], 1);
}

#[test]
fn a_plan_turns_io_cost_on_and_predicts_nothing() {
    let spec = spec(LabKind::Process, &[vec![task("t", 1_550.0, Some(20))], vec![flood()]]);
    let options = PlanOptions::new(start(&spec));
    let plan = io_cost_plan(&spec, &profile(), &options).unwrap();
    let settings: Vec<_> = plan.settings.iter().map(|s| (&s.knob, s.value.as_str())).collect();
    let weight = |vm: &str| Knob::VmIoWeight { vm: vm.to_owned() };
    let (model, qos) = (Knob::HostIoCost(IoCostFile::Model), Knob::HostIoCost(IoCostFile::Qos));
    assert_eq!(
        settings,
        [
            (&Knob::HostElevator, "none"),
            (
                &model,
                "ctrl=user model=linear rbps=63488000 rseqiops=15500 rrandiops=15500 wbps=63488000 \
                      wseqiops=15500 wrandiops=15500"
            ),
            (&qos, "enable=1 ctrl=user rpct=99.99 rlat=20000 wpct=0.00 wlat=20000 min=50.00 max=150.00"),
            (&weight("vm0"), "100"),
            (&weight("vm1"), "900"),
        ]
    );
    assert!(plan.settings.is_sorted_by_key(|s| s.knob.write_order()));
    assert!(!plan.feasible && plan.tasks.is_empty() && !plan.is_predicted());
    assert!(plan.infeasible.unwrap().reason.starts_with("not predicted"));

    let reads = Profile { write: Vec::new(), ..profile() };
    let plan = io_cost_plan(&spec, &reads, &options).unwrap();
    assert!(plan.settings[1].reason.contains("writes were not measured"));
    // VMs in one cgroup have no weights.
    let shared = PlanOptions { placements: Placements::shared(2), ..options };
    let error = io_cost_plan(&spec, &profile(), &shared).unwrap_err().to_string();
    assert!(error.contains("io.weight of vm0") && error.contains("cgroup of its own"), "{error}");
}

/// While io.cost is on, the plan of a search predicts nothing either.
#[test]
fn nothing_is_predicted_while_io_cost_is_on() {
    let spec = spec(LabKind::Process, &[vec![task("t", 100.0, Some(400))]]);
    let options = PlanOptions::new(start(&spec));
    let off = crate::plan(&spec, &profile(), &options).unwrap();
    assert!(off.feasible && off.is_predicted());
    let placements = Placements::default().under_io_cost(true);
    let under = PlanOptions { placements, ..options.clone() };
    let on = crate::plan(&spec, &profile(), &under).unwrap();
    assert!(!on.feasible && !on.is_predicted());
    assert!(on.infeasible.unwrap().reason.starts_with("not predicted: io.cost"));
    assert!(on.tasks.iter().all(|task| task.not_predicted.is_some()));
    // Nor is a target said not to fit.
    let mut short = spec;
    short.vms[0].tasks[0].targets[0].latency = Nanos(1);
    let without = crate::plan(&short, &profile(), &options).unwrap().infeasible.unwrap();
    assert!(!without.reason.starts_with("not predicted"), "{without:?}");
    let found = crate::plan(&short, &profile(), &under).unwrap().infeasible.unwrap();
    assert!(found.reason.starts_with("not predicted") && found.relaxation.is_empty(), "{found:?}");
    assert!(found.conflict.is_empty() && found.sacrificed.is_empty(), "{found:?}");
}

#[test]
fn what_cannot_act_is_refused() {
    let spec = spec(LabKind::Process, &[vec![task("t", 100.0, Some(20))], vec![flood()]]);
    let start = start(&spec);
    let error =
        |s: Setting| check_actable(&spec, &Placements::default(), &start, &[s]).unwrap_err().to_string();
    let qos = Knob::HostIoCost(IoCostFile::Qos);
    let says = error(set(qos.clone(), "enable=1 ctrl=auto"));
    assert!(says.contains("BFQ divides the device too") && says.contains("none"), "{says}");
    assert!(error(set(qos.clone(), "enable=yes")).contains("`enable=yes` is not valid"));
    assert!(error(set(Knob::VmIoWeight { vm: "vm0".into() }, "10001")).contains("from 1 to 10000"));
    assert!(error(set(Knob::VmIoWeight { vm: "vm9".into() }, "1")).contains("no VM `vm9`"));
    // Switching it off goes with any elevator.
    check_actable(&spec, &Placements::default(), &start, &[set(qos, "enable=0 ctrl=auto")]).unwrap();
    // The models know nothing of it.
    let weight = set(Knob::VmIoWeight { vm: "vm0".into() }, "500");
    assert_eq!(config_of(&spec, &start, &[weight]).unwrap(), start);
}
