use rtvirtio_model::service;
use rtvirtio_spec::{LabKind, RequestLimit, Traffic, TrafficSpec, TrafficUnit};
use rtvirtio_traffic::{CURVE_SCHEMA, Outstanding, VictimRun};
use rtvirtio_units::Iops;

use super::*;
use crate::tests::{flood, profile, spec, task};

fn plan(spec: &Spec, actuator: Actuator) -> Result<NeighbourPlan, NeighbourError> {
    neighbours(spec, Some(&profile()), &NeighbourOptions { asked: &[], curve: None, actuator })
}

/// A victim of 100 requests per second, and a flood.
fn two(latency_ms: u64) -> Spec {
    spec(LabKind::Process, &[vec![task("cycle", 100.0, Some(latency_ms))], vec![flood()]])
}

#[test]
fn the_largest_limit_is_chosen_at_which_the_bound_holds() {
    let spec = two(20);
    let found = plan(&spec, Actuator::IoDomain).unwrap();
    let [limit] = &found.limits[..] else { panic!("{found:#?}") };
    assert_eq!((limit.direction, limit.given, limit.tspec.unit), (Direction::Read, false, Unit::Requests));
    let [victim] = &found.victims[..] else { panic!("{found:#?}") };
    let bound = victim.bound.unwrap();
    assert!(bound <= 0.02 && victim.alpha >= 100.0, "{victim:?}");
    // The formula, from the profile's own numbers.
    let disk = service(&profile()).unwrap();
    let (cost, stall) = (disk.read.occupancy, disk.stall.as_secs_f64());
    let whole = Service { alpha: 1.0, delta: stall + disk.read.alone - cost };
    let (rate, burst) = (limit.kept.rate * cost, limit.kept.burst * cost);
    let long = whole.left_by(&Arrival { rate, burst, peak: None }).unwrap();
    let mut expected = long.delta + cost / long.alpha;
    if let Some((peak, piece)) = limit.kept.peak {
        let short = whole.left_by(&Arrival { rate: peak * cost, burst: piece * cost, peak: None }).unwrap();
        expected = expected.min(short.delta + cost / short.alpha);
    }
    assert!((bound - expected).abs() < 1e-12, "{bound} {expected}");
    // A little more would be too much.
    let more = NeighbourLimit {
        kept: Arrival { rate: limit.kept.rate * 1.2, burst: limit.kept.burst * 1.2, peak: None },
        ..limit.clone()
    };
    let (rate, burst) = (more.kept.rate * cost, more.kept.burst * cost);
    let left = whole.left_by(&Arrival { rate, burst, peak: None });
    assert!(left.is_none_or(|left| left.delta + cost / left.alpha > 0.02), "{left:?}");
}

#[test]
fn a_regulator_with_a_larger_burst_gets_a_smaller_rate() {
    let spec = two(20);
    let rate = |actuator| plan(&spec, actuator).unwrap().limits[0].tspec.rate;
    assert!(rate(Actuator::IoDomain) > rate(Actuator::IoMax), "a slice of 100 ms comes at once");
    assert!(rate(Actuator::IoMax) >= 10, "the kernel bounds no smaller limit");
    for actuator in [Actuator::IoMax, Actuator::ThrottleV1] {
        let limit = &plan(&spec, actuator).unwrap().limits[0];
        assert_eq!(limit.tspec.rate as f64, limit.kept.rate, "what is said is what passes");
    }
    for (rate, said) in [(78.0, 70), (10.0, 10), (3.0, 10), (1_005.9, 1_000)] {
        assert_eq!(requests(Actuator::IoMax, rate, None).rate, said);
    }
    assert_eq!(requests(Actuator::IoDomain, 78.4, None).rate, 78, "it keeps any rate");
    let e = plan(&two(1), Actuator::IoMax).unwrap_err();
    assert!(e.is_infeasible() && e.to_string().contains(" 10/s"), "{e}");
    for other in [Actuator::TcHtb, Actuator::Resctrl, Actuator::Qos400] {
        let e = plan(&spec, other).unwrap_err();
        assert!(matches!(e, NeighbourError::NotOfDisks { .. }), "{e}");
    }
    // libvirt sets QEMU's throttle.
    for joins in [Actuator::Qemu, Actuator::Libvirt] {
        let e = plan(&spec, joins).unwrap_err();
        assert!(matches!(e, NeighbourError::Joins { .. }), "{e}");
    }
    let taken: Vec<Actuator> = Actuator::ALL.into_iter().filter(|a| check_actuator(*a).is_ok()).collect();
    assert_eq!(taken, [Actuator::IoDomain, Actuator::IoMax, Actuator::ThrottleV1]);
}

#[test]
fn what_cannot_be_held_is_refused_with_a_number() {
    let e = plan(&two(1), Actuator::IoDomain).unwrap_err();
    assert!(e.is_infeasible(), "{e}");
    let says = e.to_string();
    assert!(says.contains("latency ") && says.contains("asks for 100.0/s and 1.00 ms"), "{says}");
    let fast = spec(LabKind::Process, &[vec![task("cycle", 12_000.0, Some(50))], vec![flood()]]);
    let e = plan(&fast, Actuator::IoDomain).unwrap_err();
    assert!(e.to_string().contains("no bound of latency"), "more than one at a time can do: {e}");
}

#[test]
fn alpha_and_delta_of_a_vm_are_held_without_a_target() {
    let spec = spec(LabKind::Process, &[vec![flood()], vec![flood()]]);
    let name = spec.vms[0].name.clone();
    let asked = [AskedService { vm: name.clone(), service: ServiceTarget { alpha: 4_000.0, delta: 0.03 } }];
    let options = NeighbourOptions { asked: &asked, curve: None, actuator: Actuator::IoDomain };
    let found = neighbours(&spec, Some(&profile()), &options).unwrap();
    assert_eq!((found.victims.len(), &found.victims[0].vm), (1, &name));
    assert!(found.victims[0].alpha >= 4_000.0 && found.victims[0].bound.unwrap() <= 0.03, "{found:#?}");
    let e = neighbours(&spec, Some(&profile()), &NeighbourOptions { asked: &[], ..options }).unwrap_err();
    assert_eq!(e, NeighbourError::NoVictim);
    let nobody = [AskedService { vm: "nobody".to_owned(), ..asked[0].clone() }];
    let options = NeighbourOptions { asked: &nobody, curve: None, actuator: Actuator::IoDomain };
    assert!(matches!(neighbours(&two(20), Some(&profile()), &options), Err(NeighbourError::NoSuchVm { .. })));
}

#[test]
fn a_limit_of_the_spec_stays_and_two_neighbours_share_what_is_left() {
    let mut spec =
        spec(LabKind::Process, &[vec![task("cycle", 100.0, Some(20))], vec![flood()], vec![flood()]]);
    let both = plan(&spec, Actuator::IoDomain).unwrap();
    assert_eq!(both.limits[0].tspec, both.limits[1].tspec);
    let given = TrafficSpec { burst: Some(4), ..TrafficSpec::new(TrafficUnit::Requests, 50) };
    spec.vms[1].traffic = Traffic { read: Some(given), ..Traffic::default() };
    let one = plan(&spec, Actuator::IoDomain).unwrap();
    assert_eq!((one.limits[0].given, one.limits[0].tspec.rate), (true, 50));
    assert!(one.limits[1].tspec.rate > both.limits[1].tspec.rate);
    // Of bytes and requests together the tighter one counts.
    for (bytes, unit) in [(1 << 40, Unit::Requests), (4_096, Unit::Bytes)] {
        let requests = Some(RequestLimit { rate: 50, burst: None });
        let both = TrafficSpec { requests, ..TrafficSpec::new(TrafficUnit::Bytes, bytes) };
        spec.vms[1].traffic = Traffic { read: Some(both), ..Traffic::default() };
        let both = plan(&spec, Actuator::IoDomain).unwrap();
        assert_eq!((both.limits[0].given, both.limits[0].tspec.unit), (true, unit));
    }
    spec.vms[1].traffic = Traffic { read: Some(given), ..Traffic::default() };
    spec.vms[2].traffic = Traffic { read: Some(given), ..Traffic::default() };
    assert_eq!(plan(&spec, Actuator::IoDomain).unwrap_err(), NeighbourError::NoNeighbour);
}

#[test]
fn load_without_a_bound_leaves_nothing_to_another_target() {
    let spec = spec(
        LabKind::Process,
        &[
            vec![task("cycle", 100.0, Some(20))],
            vec![Task { rate: None, ..task("free", 1.0, Some(50)) }],
            vec![flood()],
        ],
    );
    let e = plan(&spec, Actuator::IoDomain).unwrap_err();
    assert!(matches!(e, NeighbourError::Unpaced { .. }), "{e}");
    let mut mixed = two(20);
    mixed.vms[0].tasks.push(flood());
    let e = plan(&mixed, Actuator::IoDomain).unwrap_err();
    assert!(matches!(e, NeighbourError::Mixed { .. }), "{e}");
}

#[test]
fn a_measured_curve_decides_for_its_own_traffic_only() {
    let run = |rate: Option<f64>, alpha: f64, neighbour: f64, delta: f64| VictimRun {
        limit: rate.map(|rate| Arrival { rate, burst: 1.0 + rate / 100.0, peak: None }),
        neighbour,
        service: Service { alpha, delta },
    };
    let curve = VictimCurve {
        schema: CURVE_SCHEMA.to_owned(),
        direction: Direction::Read,
        block: 4_096,
        outstanding: Outstanding { victim: 1, neighbour: 32 },
        oldest_first: false,
        runs: vec![
            run(None, 1_000.0, 0.0, 0.002),
            run(Some(800.0), 190.0, 790.0, 0.05),
            run(Some(400.0), 590.0, 400.0, 0.009),
            run(Some(200.0), 800.0, 200.0, 0.006),
        ],
    };
    let with = |spec: &Spec| {
        let options = NeighbourOptions { asked: &[], curve: Some(&curve), actuator: Actuator::IoDomain };
        neighbours(spec, None, &options)
    };
    let found = with(&two(40)).unwrap();
    let (limit, victim) = (&found.limits[0], &found.victims[0]);
    assert_eq!(found.basis, "curve");
    assert!((200..800).contains(&limit.tspec.rate), "{found:#?}");
    assert!(victim.bound.unwrap() <= 0.04 && victim.expected.unwrap().alpha >= 100.0, "{found:#?}");
    assert!(with(&two(1)).unwrap_err().is_infeasible());
    let mut large = two(40);
    large.vms[1].tasks[0].block = Bytes::from_kib(128);
    let e = with(&large).unwrap_err();
    assert!(e.to_string().contains("4096 bytes"), "{e}");
    let mut deep = two(40);
    deep.vms[0].tasks[0].rate = Some(Iops(100.0));
    deep.vms[0].tasks[0].depth = 8;
    assert!(matches!(with(&deep), Err(NeighbourError::OtherCurve { .. })));
}
