use proptest::prelude::*;
use rtvirtio_model::declared_shares;
use rtvirtio_spec::{Arrival, LabKind, Op, Spec, Task};
use rtvirtio_units::Iops;

use super::beyond;
use crate::evaluate::Problem;
use crate::tests::{flood, profile, spec, start, task};
use crate::{Knob, LimitKind, Plan, PlanOptions, plan};

/// VMs of one task each, by rate and target in ms.
fn vms(of: &[(f64, u64)]) -> Spec {
    let of = of.iter().map(|&(rate, target)| {
        vec![Task { depth: 4, arrival: Arrival::Open, ..task("a", rate, Some(target)) }]
    });
    spec(LabKind::Process, &of.collect::<Vec<_>>())
}

/// Planned cap of each VM, requests per second.
fn caps(s: &Spec, p: &Plan) -> Vec<Option<f64>> {
    p.config(s, &start(s)).unwrap().vms.iter().map(|vm| vm.cap.map(|c| c.0)).collect()
}

fn met(p: &Plan) -> Vec<bool> {
    let met = |t: &crate::TaskOutlook| {
        let target = t.target_ns.unwrap().0 as f64;
        t.forecast.latency_ns.0 as f64 <= 0.8 * target && t.forecast.rate_kept >= 0.99
    };
    p.tasks.iter().filter(|t| t.target_ns.is_some()).map(met).collect()
}

#[test]
fn the_least_urgent_is_held_down_to_what_is_left() {
    // 3 x 0.41 of the device.
    let s = vms(&[(6_000.0, 40), (6_000.0, 25), (6_000.0, 60)]);
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert_eq!(met(&p), [true, true, false], "{p:?}");
    let caps = caps(&s, &p);
    assert_eq!(caps[..2], [None, None]);
    // Left are 0.19 of the device, 2 800/s.
    assert!((300.0..2_800.0).contains(&caps[2].unwrap()), "{caps:?}");
    let why = p.infeasible.as_ref().unwrap();
    assert_eq!(why.sacrificed, ["vm2"]);
    let limit = p.settings.iter().find(|x| matches!(x.knob, Knob::VmLimit { .. })).unwrap();
    assert!(limit.reason.contains("vm2 is given up"), "{}", limit.reason);

    // Where limits may not be used, no VM is capped.
    let mut options = PlanOptions::new(start(&s));
    options.space.caps = false;
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(p.settings.iter().all(|x| !matches!(x.knob, Knob::VmLimit { .. })));
}

#[test]
fn a_target_that_cannot_be_met_takes_no_rate() {
    // The rates fit; the first target is below what the device alone does.
    let mut s = vms(&[(3_000.0, 1), (3_000.0, 40), (3_000.0, 40)]);
    s.vms[0].tasks[0].targets[0].latency.0 = 50_000;
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert!(!p.feasible);
    assert!(caps(&s, &p).iter().all(Option::is_none), "{:?}", p.settings);
}

#[test]
fn who_has_no_target_is_given_up_first() {
    let mut s = vms(&[(6_000.0, 25), (6_000.0, 40), (6_000.0, 1)]);
    s.vms[2].tasks[0].targets.clear();
    s.vms.push(s.vms[2].clone());
    s.vms[3].name = "vm3".to_owned();
    s.vms[3].tasks = vec![flood()];
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    let caps = caps(&s, &p);
    // No target is missed, so the plan needs no consent; the flood is capped as always.
    assert_eq!(met(&p), [true, true], "{p:?}");
    assert!(p.feasible && caps[..2] == [None, None], "{caps:?}");
    assert!(caps[2].is_some_and(|c| c < 6_000.0) && caps[3].is_some(), "{caps:?}");
}

#[test]
fn an_unreachable_target_does_not_keep_the_others_from_being_served() {
    let mut s = vms(&[(6_000.0, 40), (6_000.0, 1), (6_000.0, 60)]);
    s.vms[1].tasks[0].targets[0].latency.0 = 50_000;
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert_eq!(met(&p), [true, false, false], "{p:?}");
}

#[test]
fn what_is_said_of_an_overload_is_true() {
    let s = vms(&[(6_000.0, 40), (6_000.0, 25), (6_000.0, 60)]);
    let why = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap().infeasible.unwrap();
    assert!(why.reason.starts_with("the rates of the VMs with targets take 116 %"), "{}", why.reason);
    // Any two of them can be served while the third is capped.
    assert_eq!(why.conflict.len(), 3, "{why:?}");
    assert!(why.relaxation.is_empty());

    // The VM that exceeds the device has no target, so a longer target fits while it is capped.
    let mut s = vms(&[(3_000.0, 1), (14_000.0, 1)]);
    s.vms[0].tasks[0].targets[0].latency.0 = 50_000;
    s.vms[1].tasks[0].targets.clear();
    let why = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap().infeasible.unwrap();
    assert_eq!(why.conflict, ["vm0/a"]);
    assert!(!why.relaxation.is_empty() && !why.reason.contains("take"), "{why:?}");
}

#[test]
fn reads_and_writes_are_held_down_by_their_rates() {
    let mut s = vms(&[(6_000.0, 25), (5_900.0, 40), (6_000.0, 30)]);
    let writes = Task { op: Op::Write, rate: Some(Iops(100.0)), ..s.vms[1].tasks[0].clone() };
    s.vms[1].tasks.push(writes);
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    let limit = |kind| {
        let is = |k: &Knob| *k == Knob::VmLimit { vm: "vm1".to_owned(), limit: kind };
        p.settings.iter().find(|x| is(&x.knob)).unwrap().value.parse::<f64>().unwrap()
    };
    let (reads, writes) = (limit(LimitKind::ReadIops), limit(LimitKind::WriteIops));
    assert!(writes < 0.03 * reads && writes >= 1.0, "{reads} {writes}");
}

#[test]
fn one_that_is_too_much_is_passed_over() {
    let s = vms(&[(6_000.0, 20), (12_000.0, 30), (4_000.0, 40)]);
    let options = PlanOptions::new(start(&s));
    let problem = Problem::new(&s, &options);
    let shares = declared_shares(&profile(), &s, &start(&s)).unwrap();
    assert!((shares[0] - 6_000.0 / 14_800.0).abs() < 1e-9, "as BFQ lets through: {shares:?}");
    assert_eq!(beyond(&problem, &shares, 0.95), [1]);
    assert_eq!(beyond(&problem, &shares, 0.5), [1, 2]);
    assert_eq!(beyond(&problem, &shares, 0.3), [0, 1]);
    let p = plan(&s, &profile(), &options).unwrap();
    assert_eq!(met(&p), [true, false, true], "{p:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// With limits the most urgent VM is never worse off, and no VM is capped whose target is
    /// reported as met.
    #[test]
    fn limits_never_cost_the_more_urgent(of in proptest::collection::vec((2_000.0f64..12_000.0, 5u64..200), 2..5)) {
        let s = vms(&of);
        let with = PlanOptions::new(start(&s));
        let mut without = with.clone();
        without.space.caps = false;
        let (with, without) = (plan(&s, &profile(), &with).unwrap(), plan(&s, &profile(), &without).unwrap());
        let mut order: Vec<usize> = (0..of.len()).collect();
        order.sort_by_key(|&i| (of[i].1, i));
        let by_urgency = |p: &Plan| { let met = met(p); order.iter().map(|&i| met[i]).collect::<Vec<_>>() };
        prop_assert!(by_urgency(&with) >= by_urgency(&without), "{:?} {:?}", by_urgency(&with), by_urgency(&without));
        for ((met, cap), (rate, _)) in met(&with).into_iter().zip(caps(&s, &with)).zip(&of) {
            prop_assert!(!met || cap.is_none_or(|c| c >= *rate), "{:?}", with.settings);
        }
        prop_assert_eq!(with.feasible, without.feasible);
    }
}
