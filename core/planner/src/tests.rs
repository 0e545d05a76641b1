use proptest::prelude::*;
use rtvirtio_model::{
    Bfq, Config, DepthPoint, Elevator, GuestPoint, ModelKind, PROFILE_SCHEMA, Profile, VmConfig,
};
use rtvirtio_spec::{Device, LabKind, Spec, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile, Ratio};

use super::*;

fn point(depth: u32, iops: f64, us: [u64; 4]) -> DepthPoint {
    let [p50, p99, p9999, max] = us.map(Nanos::from_micros);
    DepthPoint { depth, iops: Iops(iops), spread: 0.02, n: 200_000, p50, p99, p9999, max }
}

/// Profile of a QLC drive behind one channel, and TCG guests that were measured alone.
pub(crate) fn profile() -> Profile {
    let read =
        vec![point(1, 9_300.0, [105, 150, 1_800, 5_000]), point(16, 15_500.0, [1_030, 1_200, 3_500, 8_000])];
    let read_bfq =
        vec![point(1, 9_000.0, [109, 160, 1_900, 5_000]), point(16, 14_800.0, [1_080, 1_300, 3_800, 8_000])];
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: "loop0".to_owned(),
        identity: None,
        size: Bytes(1 << 30),
        block: Bytes::from_kib(4),
        write: read.clone(),
        read,
        sync: Vec::new(),
        read_bfq,
        large: None,
        guest: Some(GuestPoint {
            kind: "qemu-tcg".to_owned(),
            point: point(1, 7_700.0, [130, 400, 3_800, 9_000]),
            cpu_per_request: 0.000_3,
        }),
        cpus: 2,
        kernel: "6.18".to_owned(),
        doubts: Vec::new(),
    }
}

pub(crate) fn task(name: &str, rate: f64, target_ms: Option<u64>) -> Task {
    let target = |ms| Target { percentile: Percentile::P9999, latency: Nanos::from_millis(ms) };
    Task { targets: target_ms.map(target).into_iter().collect(), ..Task::reads(name, Some(Iops(rate))) }
}

pub(crate) fn flood() -> Task {
    Task { rate: None, depth: 32, ..task("flood", 1.0, None) }
}

pub(crate) fn spec(kind: LabKind, vms: &[Vec<Task>]) -> Spec {
    let vm = |(i, tasks): (usize, &Vec<Task>)| Vm::of_lab(&format!("vm{i}"), kind, tasks.clone());
    Spec {
        device: Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) },
        vms: vms.iter().enumerate().map(vm).collect(),
    }
}

/// The paper's Fig. 7: 3 VMs, light and medium, targets 400/300, 800/500, 900/700 ms.
pub(crate) fn fig7() -> Spec {
    let vm = |l, m| vec![task("light", 100.0, Some(l)), task("medium", 500.0, Some(m))];
    spec(LabKind::Qemu, &[vm(400, 300), vm(800, 500), vm(900, 700)])
}

fn flooded() -> Spec {
    let vm = vec![task("light", 100.0, Some(12)), task("heavy", 1500.0, Some(12))];
    spec(LabKind::Process, &[vm.clone(), vm, vec![flood()]])
}

pub(crate) fn start(spec: &Spec) -> Config {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; spec.vms.len()] }
}

pub(crate) fn setting(knob: Knob, value: &str) -> Setting {
    Setting { knob, value: value.to_owned(), reason: String::new(), strength: Enforcement::Hint }
}

pub(crate) fn knobs(p: &Plan) -> Vec<&Knob> {
    p.settings.iter().map(|s| &s.knob).collect()
}

/// Feasible means: every target met with the safety margin, every rate kept.
fn assert_meets(p: &Plan, safety: f64) {
    assert!(p.feasible && p.infeasible.is_none(), "{p:?}");
    for t in &p.tasks {
        if let Some(target) = t.target_ns {
            assert!(t.forecast.latency_ns.0 as f64 <= target.0 as f64 * (1.0 - safety), "{t:?}");
            assert!(t.forecast.rate_kept >= 0.99, "{t:?}");
        }
    }
}

#[test]
fn fig7_misses_under_defaults_and_plans_feasibly() {
    let s = fig7();
    let options = PlanOptions::new(start(&s));
    let before = rtvirtio_model::model(ModelKind::Slice, None)
        .unwrap()
        .forecast(&profile(), &s, &options.start)
        .unwrap();
    assert!(before[1].latency_ns > Nanos::from_millis(300), "the default must miss for the case to be one");
    let p = plan(&s, &profile(), &options).unwrap();
    assert_meets(&p, 0.2);
    assert!(!p.settings.is_empty());
    assert!(p.settings.is_sorted_by_key(|s| s.knob.write_order()), "{:?}", p.settings);
    for setting in &p.settings {
        assert!(setting.reason.len() > 20, "{setting:?}");
        assert_eq!(setting.strength, Enforcement::Hint);
    }
    assert!(
        p.settings.iter().any(|x| x.reason.contains("without it vm") && x.reason.contains("ms")),
        "{:?}",
        p.settings
    );
}

#[test]
fn a_flood_is_capped_and_no_vm_with_a_target_is() {
    let s = flooded();
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert_meets(&p, 0.2);
    let caps: Vec<_> = p.settings.iter().filter(|x| matches!(x.knob, Knob::VmLimit { .. })).collect();
    assert_eq!(caps.len(), 1, "{:?}", p.settings);
    assert_eq!(caps[0].knob, Knob::VmLimit { vm: "vm2".to_owned(), limit: LimitKind::ReadIops });
    assert_eq!(caps[0].strength, Enforcement::Cap);
    assert!(caps[0].reason.contains("of its rate"), "{}", caps[0].reason);
    assert!(caps[0].value.parse::<u64>().unwrap() > 100);
    // The cap's reason states the cost for the capped VM.
    let all = throttled(&s, &profile(), &start(&s), &p.settings).unwrap();
    let [held] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((held.vm.as_str(), held.limit.0), ("vm2", caps[0].value.parse::<f64>().unwrap()));
    assert!(held.of.0 > held.limit.0 && !held.is_all_but_stopped(), "{held}");
    assert!(caps[0].reason.contains(&held.to_string()), "{}", caps[0].reason);
    let tight = Setting { value: "10".to_owned(), ..caps[0].clone() };
    let all = throttled(&s, &profile(), &start(&s), &[tight]).unwrap();
    assert!(all[0].is_all_but_stopped() && all[0].to_string().contains("so it loses 99."), "{}", all[0]);
    let loose = Setting { value: "max".to_owned(), ..caps[0].clone() };
    assert_eq!(throttled(&s, &profile(), &start(&s), &[loose]).unwrap(), []);
    // The cap is the loosest that suffices.
    let mut loose = s.clone();
    for vm in &mut loose.vms[..2] {
        for t in &mut vm.tasks {
            t.targets = vec![Target { percentile: Percentile::P9999, latency: Nanos::from_millis(40) }];
        }
    }
    let looser = plan(&loose, &profile(), &PlanOptions::new(start(&loose))).unwrap();
    let cap = |p: &Plan| {
        let c = p.config(&s, &start(&s)).unwrap();
        c.vms[2].cap.map_or(f64::INFINITY, |c| c.0)
    };
    assert!(cap(&looser) > cap(&p), "{} {}", cap(&looser), cap(&p));
    // A smaller margin leaves the flood more, and the targets are met all the same.
    let less = PlanOptions { enough: Some(Ratio(0.25)), ..PlanOptions::new(start(&s)) };
    let less = plan(&s, &profile(), &less).unwrap();
    assert_meets(&less, 0.2);
    assert!(cap(&less) > cap(&p), "{} {}", cap(&less), cap(&p));

    // Without caps nothing limits the flood to 12 ms: some VM is given up, and the plan says so.
    let mut options = PlanOptions::new(start(&s));
    options.space.caps = false;
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(!p.feasible);
    assert!(knobs(&p).iter().all(|k| !matches!(k, Knob::VmLimit { .. })));
}

#[test]
fn a_cap_that_starves_a_vm_with_targets_is_lifted() {
    let s = fig7();
    let mut from = start(&s);
    from.vms[0].cap = Some(Iops(300.0));
    let p = plan(&s, &profile(), &PlanOptions::new(from)).unwrap();
    assert_meets(&p, 0.2);
    let lifted = p.settings.iter().find(|x| matches!(x.knob, Knob::VmLimit { .. })).unwrap();
    assert_eq!(lifted.value, "max");
}

#[test]
fn an_infeasible_spec_names_conflict_and_a_relaxation_that_really_fits() {
    let mut s = fig7();
    // Below the guest's own noise floor.
    s.vms[0].tasks[0].targets =
        vec![Target { percentile: Percentile::P9999, latency: Nanos::from_micros(900) }];
    let options = PlanOptions::new(start(&s));
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(!p.feasible);
    let why = p.infeasible.unwrap();
    assert!(why.sacrificed.contains(&"vm0".to_owned()), "{why:?}");
    assert_eq!(why.conflict, ["vm0/light"], "it alone cannot be met");
    assert!(why.reason.contains("vm0/light"));
    assert!(!why.relaxation.is_empty());
    let mut relaxed = s.clone();
    for r in &why.relaxation {
        assert!(r.fits_ns > r.declared_ns);
        let vm = relaxed.vms.iter_mut().find(|v| v.name == r.vm).unwrap();
        let t = vm.tasks.iter_mut().find(|t| t.name == r.task).unwrap();
        t.targets = vec![Target { percentile: Percentile::P9999, latency: r.fits_ns }];
    }
    let again = plan(&relaxed, &profile(), &options).unwrap();
    assert!(again.feasible, "{:?} then {:?}", why, again.infeasible);
    assert_meets(&again, 0.2);
}

#[test]
fn the_compromise_serves_the_most_urgent_vm() {
    // 0.36 of the device each, next to a flood that may not be capped: the shares are short.
    let heavy = |t| vec![task("heavy", 3_300.0, Some(t))];
    let s = spec(LabKind::Process, &[heavy(900), heavy(150), heavy(800), vec![flood()]]);
    let mut options = PlanOptions::new(start(&s));
    options.space.caps = false;
    options.space.elevators = vec![Elevator::Bfq];
    options.space.slice_idle = vec![Nanos::from_millis(2), Nanos::from_millis(8)];
    let p = plan(&s, &profile(), &options).unwrap();
    let why = p.infeasible.as_ref().unwrap();
    assert!(!why.sacrificed.contains(&"vm1".to_owned()), "{why:?}");
    assert!(why.sacrificed.len() < 3 && why.conflict.len() > 1, "{why:?}");
    let urgent = &p.tasks[1];
    assert!(
        urgent.forecast.latency_ns.0 as f64 <= 0.8 * 150e6 && urgent.forecast.rate_kept >= 0.99,
        "{urgent:?}"
    );
    let weight = |vm: &str| {
        p.config(&s, &options.start).unwrap().vms[s.vms.iter().position(|v| v.name == vm).unwrap()].weight
    };
    assert!(weight("vm1") > weight("vm3"));
    // Weights differ, so raising must be off.
    assert!(p.settings.iter().any(|x| x.knob == Knob::HostBfq(BfqTunable::LowLatency) && x.value == "0"));
}

#[test]
fn rates_beyond_the_device_have_no_relaxation() {
    let s = spec(LabKind::Process, &vec![vec![task("a", 9_000.0, Some(500))]; 4]);
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert!(p.evaluated < PlanOptions::new(start(&s)).budget);
    let why = p.infeasible.unwrap();
    assert!(why.relaxation.is_empty());
    assert!(why.reason.contains("lower the declared rates"), "{}", why.reason);
    assert!(!why.conflict.is_empty());
}

#[test]
fn a_host_without_bfq_can_be_planned_for() {
    let s = fig7();
    let mut from = start(&s);
    from.elevator = Elevator::None;
    let p = plan(&s, &profile(), &PlanOptions::new(from.clone())).unwrap();
    assert_eq!(p.config(&s, &from).unwrap().vms.len(), 3);
}

#[test]
fn the_same_input_gives_the_same_plan() {
    for s in [fig7(), flooded()] {
        let options = PlanOptions::new(start(&s));
        let text = |p: Plan| serde_json::to_string(&p).unwrap();
        assert_eq!(
            text(plan(&s, &profile(), &options).unwrap()),
            text(plan(&s, &profile(), &options).unwrap())
        );
    }
}

#[test]
fn a_plan_survives_its_file() {
    let s = flooded();
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    let back: Plan = serde_json::from_str(&serde_json::to_string(&p).unwrap()).unwrap();
    assert_eq!(back, p);
}

#[test]
fn without_targets_there_is_nothing_to_do() {
    let s = spec(LabKind::Process, &[vec![flood()], vec![task("a", 100.0, None)]]);
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    assert!(p.feasible && p.settings.is_empty() && p.tasks.iter().all(|t| t.margin_ns.is_none()));
}

#[test]
fn shared_cgroups_leave_weights_and_caps_alone() {
    let s = flooded();
    let mut options = PlanOptions::new(start(&s));
    options.placements = Placements::shared(s.vms.len());
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(knobs(&p).iter().all(|k| !matches!(k, Knob::VmWeight { .. } | Knob::VmLimit { .. })));
}

#[test]
fn sixty_four_vms_and_a_small_budget() {
    let vm =
        |t| vec![task("light", 20.0, Some(t)), task("medium", 40.0, Some(t)), task("heavy", 60.0, Some(t))];
    let s = spec(LabKind::Process, &(0..64).map(|i| vm(100 + 10 * i)).collect::<Vec<_>>());
    let begun = std::time::Instant::now();
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    println!("64 VMs x 3 tasks: {:?}, {} evaluated", begun.elapsed(), p.evaluated);
    assert_meets(&p, 0.2);
    let mut options = PlanOptions::new(start(&s));
    options.budget = 10;
    assert!(plan(&s, &profile(), &options).unwrap().evaluated <= 10);

    let s = spec(
        LabKind::Process,
        &vec![
            vec![task("a", 100.0, Some(300)), task("b", 500.0, Some(300)), task("c", 1500.0, Some(300))];
            4
        ],
    );
    let begun = std::time::Instant::now();
    let p = plan(&s, &profile(), &PlanOptions::new(start(&s))).unwrap();
    println!("4 VMs x 3 tasks: {:?}, {} evaluated", begun.elapsed(), p.evaluated);
    assert_meets(&p, 0.2);
}

#[test]
fn options_that_contradict_themselves_are_refused() {
    let s = fig7();
    let mut options = PlanOptions::new(start(&s));
    options.safety = Ratio(1.0);
    assert!(matches!(plan(&s, &profile(), &options), Err(PlanError::BadOptions(_))));
    options = PlanOptions { enough: Some(Ratio(1.0)), ..PlanOptions::new(start(&s)) };
    assert!(matches!(plan(&s, &profile(), &options), Err(PlanError::BadOptions(_))));
    let mut options = PlanOptions::new(start(&s));
    options.start.vms.pop();
    assert!(matches!(plan(&s, &profile(), &options), Err(PlanError::Model(_))));
}

/// Every configuration of a tiny space, weights on every level for every VM.
fn exhaustive(s: &Spec, options: &PlanOptions) -> bool {
    let model = rtvirtio_model::model(options.model, None).unwrap();
    let (space, mut found) = (&options.space, false);
    let levels = space.weights.len().pow(u32::try_from(s.vms.len()).unwrap());
    for &elevator in &space.elevators {
        for &slice_idle in &space.slice_idle {
            for &timeout_sync in &space.timeout_sync {
                for low_latency in [true, false] {
                    for mut code in 0..levels {
                        let bfq = Bfq { slice_idle, timeout_sync, low_latency, ..Bfq::default() };
                        let mut c = Config { elevator, bfq, vms: options.start.vms.clone() };
                        for vm in &mut c.vms {
                            vm.weight = space.weights[code % space.weights.len()];
                            code /= space.weights.len();
                        }
                        let Ok(f) = model.forecast(&profile(), s, &c) else { continue };
                        found |= s.tasks().zip(&f).all(|((_, t), f)| {
                            t.tightest_target().is_none_or(|t| {
                                f.latency_ns.0 as f64 <= t.latency.0 as f64 * (1.0 - options.safety.0)
                                    && f.rate_kept >= 0.99
                            })
                        });
                    }
                }
            }
        }
    }
    found
}

fn tiny_space(no_idling: bool) -> Space {
    let ms = Nanos::from_millis;
    Space {
        elevators: vec![Elevator::Bfq],
        slice_idle: if no_idling { vec![ms(0), ms(2), ms(8)] } else { vec![ms(2), ms(8)] },
        timeout_sync: vec![ms(32), ms(124)],
        max_budget: Vec::new(),
        weights: vec![50, 100, 300, 700],
        caps: false,
        guests: false,
        ..Space::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn feasible_whenever_exhaustive_search_is(rates in proptest::collection::vec((50.0f64..3_000.0, 20u64..2_000), 2..4),
                                              flooding in any::<bool>(), no_idling in any::<bool>(), qemu in any::<bool>()) {
        let mut vms: Vec<_> = rates.iter().map(|&(r, t)| vec![task("a", r, Some(t))]).collect();
        if flooding {
            vms.push(vec![flood()]);
        }
        let s = spec(if qemu { LabKind::Qemu } else { LabKind::Process }, &vms);
        let mut options = PlanOptions::new(start(&s));
        options.space = tiny_space(no_idling);
        let p = plan(&s, &profile(), &options).unwrap();
        if exhaustive(&s, &options) {
            prop_assert!(p.feasible, "{:?}", p.infeasible);
        }
        if let Some(why) = p.infeasible {
            prop_assert!(!why.sacrificed.is_empty() && !why.conflict.is_empty());
        }
    }
}

#[test]
fn every_target_of_a_task_counts() {
    let at = |p: f64, ms: u64| Target { percentile: Percentile(p), latency: Nanos::from_millis(ms) };
    let with = |targets: Vec<Target>| {
        let mut t = task("t", 200.0, None);
        t.targets = targets;
        spec(LabKind::Process, &[vec![t], vec![flood()]])
    };
    let (profile, options) = (profile(), PlanOptions::new(start(&with(Vec::new()))));
    let plan_of = |targets: Vec<Target>| plan(&with(targets), &profile, &options).unwrap();
    let good = plan_of(vec![at(99.0, 20), at(99.99, 60)]);
    assert!(good.feasible, "{:?}", good.infeasible);
    let rows: Vec<_> = good.tasks.iter().map(|t| (t.task.as_str(), t.percentile.0, t.target_ns)).collect();
    assert_eq!(
        rows,
        [
            ("t", 99.0, Some(Nanos::from_millis(20))),
            ("t", 99.99, Some(Nanos::from_millis(60))),
            ("flood", 99.99, None)
        ]
    );
    // Half of the requests may be that fast; the slowest of 10 000 is not.
    let bad = plan_of(vec![at(50.0, 3), at(99.99, 3)]);
    let infeasible = bad.infeasible.unwrap();
    assert!(!bad.feasible && infeasible.conflict == ["vm0/t p99.99"], "{infeasible:?}");
    let relaxed: Vec<_> = infeasible.relaxation.iter().map(|r| (r.percentile.0, r.declared_ns)).collect();
    assert_eq!(relaxed, [(99.99, Nanos::from_millis(3))], "{infeasible:?}");
}
