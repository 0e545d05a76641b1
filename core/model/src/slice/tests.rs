use proptest::prelude::*;
use rtvirtio_spec::{Burst, LabKind, Op, Spec, Task};
use rtvirtio_units::{Bytes, Iops, Nanos, Ratio};

use super::*;
use crate::testkit::{config, disk, flood, flooded, paper_mix, point, quick, spec, task, twin, with_guest};
use crate::types::{Bfq, LargeRequests};

fn run(p: &Profile, s: &Spec, c: &Config) -> Vec<Forecast> {
    Slice.forecast(p, s, c).unwrap()
}

fn ms(f: &Forecast) -> f64 {
    f.latency_ns.as_millis_f64()
}

fn worst(f: &[Forecast]) -> f64 {
    f.iter().map(ms).fold(0.0, f64::max)
}

fn least(f: &[Forecast]) -> f64 {
    f.iter().map(ms).fold(f64::INFINITY, f64::min)
}

/// Facts: a measurement on the device, and the band in which the prediction must lie.
#[test]
fn twin_four_busy_vms() {
    let s = paper_mix(LabKind::Process, 4);
    // Measured 250 to 1400 ms.
    let f = run(&twin(), &s, &config(&s, Elevator::Bfq, Bfq::default()));
    assert!((1400.0..3.0 * 1400.0).contains(&worst(&f)), "{}", worst(&f));
    assert!(f.iter().all(|f| f.rate_kept > 0.99));
    // Measured 2 to 12 ms.
    let f = run(&twin(), &s, &config(&s, Elevator::Bfq, Bfq { slice_idle: Nanos(0), ..Bfq::default() }));
    assert!(least(&f) > 2.0 && worst(&f) < 36.0, "{} {}", least(&f), worst(&f));
    assert!(f.iter().all(|f| f.rate_kept > 0.99));
}

#[test]
fn fig7_under_defaults() {
    // Worst task of a run of 10 to 60 s, over 12 runs: process VMs 735 to 1979 ms, QEMU guests 249
    // to 1280 ms.
    for kind in [LabKind::Process, LabKind::Qemu] {
        let mix = || vec![task("light", 100.0, 400), task("medium", 500.0, 300)];
        let s = spec(kind, &[mix(), mix(), mix()]);
        let f = run(&twin(), &s, &config(&s, Elevator::Bfq, Bfq::default()));
        assert!((1280.0..3.0 * 1280.0).contains(&worst(&f)), "{kind:?} {}", worst(&f));
    }
}

#[test]
fn twin_weights() {
    // Weights 700/300/100/50, slice_idle 2 ms, timeout_sync 32 ms: measured 84 ms for the
    // first, 3100 ms for the last.
    let s = paper_mix(LabKind::Process, 4);
    let bfq =
        Bfq { slice_idle: Nanos::from_millis(2), timeout_sync: Nanos::from_millis(32), ..Bfq::default() };
    let mut c = config(&s, Elevator::Bfq, bfq);
    for (vm, w) in c.vms.iter_mut().zip([700, 300, 100, 50]) {
        vm.weight = w;
    }
    let f = run(&twin(), &s, &c);
    assert!((84.0..5.0 * 84.0).contains(&worst(&f[..3])), "{}", worst(&f[..3]));
    assert!((3100.0..3.0 * 3100.0).contains(&worst(&f[9..])), "{}", worst(&f[9..]));
}

#[test]
fn twin_flood() {
    let s = flooded(LabKind::Process, 32);
    // Measured 700 to 2300 ms.
    let f = run(&twin(), &s, &config(&s, Elevator::Bfq, Bfq::default()));
    assert!((2000.0..).contains(&worst(&f[..9])), "{}", worst(&f[..9]));
    assert!(f[0].rate_kept > 0.99 && ms(&f[0]) < 3.0 * 2300.0, "{:?}", f[0]);
    // Measured about 4 ms from fio's start, but the 1500/s task got 400/s: its tail from the
    // intended start is unbounded.
    let f = run(&twin(), &s, &config(&s, Elevator::Bfq, Bfq { slice_idle: Nanos(0), ..Bfq::default() }));
    let got = 1500.0 * f[2].rate_kept;
    assert!((300.0..500.0).contains(&got), "{got}");
    assert!(ms(&f[2]) > 10_000.0);
    assert!((4.0..20.0).contains(&ms(&f[0])) && f[0].rate_kept > 0.99, "{:?}", f[0]);
}

/// A task of 1500/s next to a flood of 32 in flight under a limit, with BFQ that does not idle.
fn with_a_flood(cap: f64) -> Forecast {
    let s = spec(LabKind::Process, &[vec![task("heavy", 1500.0, 5)], vec![flood(32)]]);
    let mut c = config(&s, Elevator::Bfq, quick());
    c.vms[1].cap = Some(Iops(cap));
    run(&twin(), &s, &c).swap_remove(0)
}

#[test]
fn a_limit_lets_through_what_it_allows_for_a_tenth_of_a_second_at_once() {
    // Next to a flood of 32 held to 682/s, with BFQ and with none, measured 3.3 to 3.6 ms (n = 6);
    // held to 200/s 1.3 to 2.0 ms (n = 3).
    let others = |cap: f64| {
        let f = with_a_flood(cap);
        f.terms.iter().find(|t| t.name == "other-vms").unwrap().latency_ns.as_millis_f64()
    };
    assert!((2.0..3.0).contains(&others(682.0)), "{}", others(682.0));
    assert!((1.2..1.6).contains(&others(200.0)), "{}", others(200.0));
}

#[test]
fn a_loose_limit_lets_the_flood_go_unchecked_for_a_part_of_every_tenth() {
    // Next to a flood of 32 held to 9552/s a task of 1500/s measured 45 ms less the host's stalls
    // (n = 2), and kept its rate.
    let loose = with_a_flood(9552.0);
    assert!((40.0..60.0).contains(&ms(&loose)) && loose.rate_kept > 0.99, "{loose:?}");
    // Requests that fit into the depth of the queue are never unchecked.
    let tight = with_a_flood(300.0);
    assert!(tight.terms.iter().all(|t| t.name != "catch-up" || t.latency_ns.0 == 0), "{tight:?}");
    // Nor is anything worse than no limit at all.
    let free = with_a_flood(1e6);
    let mut before = 0.0;
    for cap in (1..40).map(|i| 500.0 * f64::from(i)) {
        let f = with_a_flood(cap);
        assert!(ms(&f) >= before && ms(&f) <= ms(&free), "{cap}: {f:?}");
        before = ms(&f);
    }
}

#[test]
fn kyber_lets_writes_pass_one_by_one_while_reads_are_slow() {
    // 12 tasks that write 30 % of their requests, next to a flood of 32 held to 8749/s, n = 4: 39/s
    // measured 19 to 28 ms, 196/s 29 to 41, 589/s 50 to 57; all kept their rates.
    let case = |writes: f64, cap: f64, elevator| {
        let mixed = |rate: f64| {
            let write_share = Ratio(writes);
            let op = if writes > 0.0 { Op::Mixed { write_share } } else { Op::Read };
            Task { op, ..task("t", rate, 300) }
        };
        let vm = || vec![mixed(39.0), mixed(196.0), mixed(589.0)];
        let s = spec(LabKind::Process, &[vm(), vm(), vm(), vm(), vec![flood(32)]]);
        let mut c = config(&s, elevator, Bfq::default());
        c.vms[4].cap = Some(Iops(cap));
        run(&twin(), &s, &c)
    };
    let kyber = case(0.3, 8749.0, Elevator::Kyber);
    for (f, measured) in kyber.iter().zip([28.0, 41.0, 57.0]) {
        assert!((0.9 * measured..3.0 * measured).contains(&ms(f)) && f.rate_kept > 0.99, "{measured}: {f:?}");
    }
    let none = case(0.3, 8749.0, Elevator::None);
    assert!(ms(&kyber[0]) > ms(&none[0]) + 15.0, "{:?}", none[0]);
    // Reads are not throttled, and nothing is while reads are within 2 ms.
    assert_eq!(
        case(0.0, 8749.0, Elevator::Kyber)[0].latency_ns,
        case(0.0, 8749.0, Elevator::None)[0].latency_ns
    );
    assert_eq!(
        case(0.3, 200.0, Elevator::Kyber)[0].latency_ns,
        case(0.3, 200.0, Elevator::None)[0].latency_ns
    );
    // A flood without a limit never pauses: about 450 of the 989 writes per second pass.
    let free = case(0.3, 1e6, Elevator::Kyber);
    assert!(free[2].rate_kept < 0.5 * case(0.3, 1e6, Elevator::None)[2].rate_kept, "{:?}", free[2]);
}

#[test]
fn disk_facts() {
    let s = paper_mix(LabKind::Process, 4);
    // Measured 0.3 to 2.4 ms with none, and with BFQ without idling and raising.
    for c in [config(&s, Elevator::None, Bfq::default()), config(&s, Elevator::Bfq, quick())] {
        let f = run(&disk(), &s, &c);
        assert!(least(&f) > 0.3 && worst(&f) < 7.2, "{} {}", least(&f), worst(&f));
        assert!(f.iter().all(|f| f.rate_kept > 0.99));
    }
    // Measured 80 to 2120 ms under defaults.
    let f = run(&disk(), &s, &config(&s, Elevator::Bfq, Bfq::default()));
    assert!((2000.0..3.0 * 2120.0).contains(&worst(&f)), "{}", worst(&f));

    let s = flooded(LabKind::Process, 32);
    // Measured 0.6 to 2.3 ms with none next to the flood, rates kept.
    let f = run(&disk(), &s, &config(&s, Elevator::None, Bfq::default()));
    assert!(least(&f[..9]) > 0.6 && worst(&f[..9]) < 6.9, "{} {}", least(&f[..9]), worst(&f[..9]));
    assert!(f[..9].iter().all(|f| f.rate_kept > 0.99));
    // Default BFQ: up to 1736 ms, and one VM lost a third of its rate.
    let f = run(&disk(), &s, &config(&s, Elevator::Bfq, Bfq::default()));
    assert!(worst(&f[..9]) > 1700.0);
    assert!(f[2].rate_kept < 0.99);
}

#[test]
fn a_full_virtual_disk_has_a_tail_that_one_request_never_shows() {
    let disk = Profile {
        read: vec![
            point(1, 18_000.0, [50, 105, 830, 1_050]),
            point(32, 58_900.0, [519, 1_016, 4_387, 4_387]),
        ],
        sync: Vec::new(),
        read_bfq: Vec::new(),
        ..disk()
    };
    let s = spec(LabKind::Process, &[vec![task("heavy", 1500.0, 5)], vec![flood(32)]]);
    for elevator in [Elevator::None, Elevator::Bfq] {
        let with = |cap: Option<f64>| {
            let mut c = config(&s, elevator, quick());
            c.vms[1].cap = cap.map(Iops);
            ms(&run(&disk, &s, &c)[0])
        };
        // Measured next to 70 000/s: 4.2 to 9.4 ms, less the host's stalls the same (n = 7).
        assert!((4.2..9.4).contains(&with(None)), "{}", with(None));
        // Held to 3000/s: 0.8 to 2.0 ms (n = 3; 0.8 to 1.0 less these), to 280/s 0.3 to 1.4 (n = 3;
        // 0.3 to 0.6).
        assert!((0.8..3.0).contains(&with(Some(3_000.0))), "{}", with(Some(3_000.0)));
        assert!((0.3..1.8).contains(&with(Some(280.0))), "{}", with(Some(280.0)));
    }
    // While BFQ idles they wait for slices, not among each other.
    let idling = config(&s, Elevator::Bfq, Bfq::default());
    assert!(ms(&run(&disk, &s, &idling)[0]) > 100.0);
}

#[test]
fn loaded_cpus_raise_the_guest_floor() {
    // Four TCG guests at 525/s each use 93 % of two cores: measured 15 to 45 ms at p99.99.
    let p = with_guest(disk(), "qemu-tcg", [130, 400, 2_000, 8_000], 0.93 * 2.0 / (4.0 * 525.0));
    let s = spec(LabKind::Qemu, &vec![vec![task("a", 525.0, 300)]; 4]);
    let f = run(&p, &s, &config(&s, Elevator::None, Bfq::default()));
    assert!((15.0..90.0).contains(&worst(&f)), "{}", worst(&f));
    // Four at 2100/s do not fit.
    let s = spec(LabKind::Qemu, &vec![vec![task("a", 2100.0, 300)]; 4]);
    let f = run(&p, &s, &config(&s, Elevator::None, Bfq::default()));
    assert!(f[0].rate_kept < 0.35, "{}", f[0].rate_kept);
}

#[test]
fn a_closed_loop_is_no_faster_than_its_round_trip() {
    // 200 us in the guest: at most 5000/s at depth 1, whatever the device can do.
    let p = with_guest(disk(), "qemu-kvm", [200, 400, 2_000, 8_000], 1e-6);
    let s = spec(LabKind::Qemu, &[vec![task("a", 10_000.0, 300)]]);
    let f = run(&p, &s, &config(&s, Elevator::None, Bfq::default()));
    assert!((f[0].rate_kept - 0.5).abs() < 1e-9, "{}", f[0].rate_kept);
}

#[test]
fn a_cap_on_the_flood_restores_tail_and_rate() {
    let s = flooded(LabKind::Process, 32);
    let mut c = config(&s, Elevator::Bfq, quick());
    let free = run(&twin(), &s, &c);
    c.vms[3].cap = Some(Iops(2000.0));
    let capped = run(&twin(), &s, &c);
    assert!(free[2].rate_kept < 0.5 && capped[2].rate_kept > 0.99);
    assert!(worst(&capped[..9]) < 20.0, "{}", worst(&capped[..9]));
    // A cap above what the flood reaches holds nothing.
    c.vms[3].cap = Some(Iops(100_000.0));
    let loose = run(&twin(), &s, &c);
    assert_eq!(loose[2].rate_kept.to_bits(), free[2].rate_kept.to_bits());
}

#[test]
fn what_the_rates_leave_is_shared_by_the_floods() {
    let mut s = flooded(LabKind::Process, 32);
    let c = config(&s, Elevator::None, Bfq::default());
    let spare = crate::spare_rates(&twin(), &s, &c).unwrap();
    assert!(spare[0].is_none());
    // 15500/s less 3 x 2100/s.
    assert!((spare[3].unwrap().0 - 9_200.0).abs() < 1e-6);
    s.vms[0].tasks.push(flood(1));
    assert!((crate::spare_rates(&twin(), &s, &c).unwrap()[3].unwrap().0 - 4_600.0).abs() < 1e-6);
}

#[test]
fn a_cap_below_the_declared_rate_loses_it() {
    let s = paper_mix(LabKind::Process, 2);
    let mut c = config(&s, Elevator::None, Bfq::default());
    c.vms[0].cap = Some(Iops(1050.0));
    let f = run(&twin(), &s, &c);
    assert!((f[0].rate_kept - 0.5).abs() < 1e-9);
    assert!(ms(&f[0]) >= 30_000.0);
    assert!(f[3].rate_kept > 0.99);
}

#[test]
fn a_vm_below_its_rates_comes_as_a_held_flood() {
    // 32 in flight at 8000/s, held to 2000/s: as a flood that is held to that, not as requests that
    // come one by one.
    let mut s = spec(LabKind::Process, &[vec![task("light", 100.0, 50)], vec![task("deep", 8_000.0, 50)]]);
    s.vms[1].tasks[0].depth = 32;
    let mut as_flood = s.clone();
    as_flood.vms[1].tasks[0].rate = None;
    for bfq in [Bfq { slice_idle: Nanos(0), ..Bfq::default() }, Bfq::default()] {
        let mut c = config(&s, Elevator::Bfq, bfq);
        c.vms[1].cap = Some(Iops(2_000.0));
        let (held, flooding) = (run(&twin(), &s, &c), run(&twin(), &as_flood, &c));
        let off = ms(&held[0]) / ms(&flooding[0]);
        assert!((0.5..2.0).contains(&off), "{} {}", ms(&held[0]), ms(&flooding[0]));
        assert!(held[0].rate_kept > 0.99 && (held[1].rate_kept - 0.25).abs() < 1e-9, "{held:?}");
    }
}

#[test]
fn a_qemu_guest_is_one_queue() {
    // With one queue per VM a waiting request waits for one slice per other VM, not one per task.
    let (p, q) = (paper_mix(LabKind::Process, 3), paper_mix(LabKind::Qemu, 3));
    let profile = with_guest(twin(), "qemu-kvm", [140, 300, 2_000, 8_000], 1e-6);
    let process = run(&profile, &p, &config(&p, Elevator::Bfq, Bfq::default()));
    let qemu = run(&profile, &q, &config(&q, Elevator::Bfq, Bfq::default()));
    assert!(worst(&qemu) < worst(&process));
}

#[test]
fn guest_bfq_with_raising_holds_tasks_back() {
    let s = paper_mix(LabKind::Qemu, 1);
    let profile = with_guest(twin(), "qemu-kvm", [140, 300, 2_000, 8_000], 1e-6);
    let mut c = config(&s, Elevator::None, Bfq::default());
    let none = run(&profile, &s, &c);
    c.vms[0].guest_elevator = Elevator::Bfq;
    let bfq = run(&profile, &s, &c);
    assert!(ms(&bfq[0]) > ms(&none[0]) + 100.0);
    c.vms[0].guest_bfq = quick();
    assert_eq!(run(&profile, &s, &c)[0].latency_ns, none[0].latency_ns);
}

#[test]
fn mq_deadline_lets_a_read_wait_for_a_batch_of_writes() {
    let mut s = paper_mix(LabKind::Process, 2);
    for t in &mut s.vms[1].tasks {
        t.op = Op::Write;
    }
    s.vms[1].tasks[2].depth = 16;
    let none = run(&twin(), &s, &config(&s, Elevator::None, Bfq::default()));
    let deadline = run(&twin(), &s, &config(&s, Elevator::MqDeadline, Bfq::default()));
    assert!(deadline[0].latency_ns > none[0].latency_ns);
}

#[test]
fn a_profile_without_reads_is_refused_with_the_remedy() {
    let s = paper_mix(LabKind::Process, 2);
    let mut p = twin();
    p.read.clear();
    let e = Slice.forecast(&p, &s, &config(&s, Elevator::None, Bfq::default())).unwrap_err();
    assert!(matches!(e, ModelError::BadProfile { .. }), "{e}");
    let mut c = config(&s, Elevator::None, Bfq::default());
    c.vms.pop();
    let bad = |c: &Config| match Slice.forecast(&twin(), &s, c) {
        Err(ModelError::BadConfig(what)) => what,
        other => panic!("{other:?}"),
    };
    bad(&c);
    c = config(&s, Elevator::None, Bfq::default());
    c.vms[1].weight = 0;
    assert!(bad(&c).contains("vm1"));
}

/// The twin, with larger requests measured too.
fn measured() -> Profile {
    let large = LargeRequests {
        block: Bytes::from_kib(128),
        read: vec![
            point(1, 4_300.0, [229, 300, 2_000, 5_000]),
            point(32, 5_300.0, [6_000, 7_000, 9_000, 9_500]),
        ],
        write: vec![
            point(1, 4_300.0, [229, 300, 2_000, 5_000]),
            point(32, 4_300.0, [7_400, 8_000, 50_000, 60_000]),
        ],
    };
    Profile { large: Some(large), ..twin() }
}

fn any_bfq() -> impl Strategy<Value = Bfq> {
    (0u64..20, 1u64..300, any::<bool>(), proptest::option::of(1u64..20_000), any::<bool>()).prop_map(
        |(si, ts, low_latency, budget, strict_guarantees)| Bfq {
            slice_idle: Nanos::from_millis(si),
            timeout_sync: Nanos::from_millis(ts),
            low_latency,
            max_budget: budget.map(Bytes::from_kib),
            strict_guarantees,
        },
    )
}

fn any_elevator() -> impl Strategy<Value = Elevator> {
    prop_oneof![
        Just(Elevator::None),
        Just(Elevator::MqDeadline),
        Just(Elevator::Kyber),
        Just(Elevator::Bfq),
        Just(Elevator::Bfq),
    ]
}

fn any_spec() -> impl Strategy<Value = Spec> {
    let one = (1.0f64..5_000.0, 1u32..64, 0u32..9, 0u32..10).prop_map(|(rate, depth, shift, what)| {
        let mut t = if what == 0 || what == 7 { flood(depth) } else { task("t", rate, 300) };
        if what == 7 {
            t.burst = Some(Burst::Busy(Nanos::from_millis(200)));
        }
        if what == 1 {
            t.op = Op::Write;
            t.depth = depth;
        }
        if what == 2 {
            t.op = Op::Mixed { write_share: Ratio(0.3) };
        }
        t.block = Bytes(4096 << shift);
        t
    });
    let kind = prop_oneof![Just(LabKind::Process), Just(LabKind::Qemu)];
    (kind, proptest::collection::vec(proptest::collection::vec(one, 1..4), 1..6))
        .prop_map(|(k, v)| spec(k, &v))
}

fn any_case() -> impl Strategy<Value = (Spec, Config)> {
    (any_spec(), any_elevator(), any_bfq(), proptest::collection::vec(1u32..=1000, 6)).prop_map(
        |(s, e, b, w)| {
            let mut c = config(&s, e, b);
            for (vm, w) in c.vms.iter_mut().zip(w) {
                vm.weight = w;
            }
            (s, c)
        },
    )
}

/// Latency may not fall, nor the kept rate rise, from `better` to `worse` (rounding of a nanosecond
/// per term aside).
fn no_better(better: &Forecast, worse: &Forecast) -> Result<(), TestCaseError> {
    prop_assert!(worse.latency_ns.0 + 20 >= better.latency_ns.0, "{better:?} then {worse:?}");
    prop_assert!(worse.rate_kept <= better.rate_kept + 1e-9, "{better:?} then {worse:?}");
    Ok(())
}

proptest! {
    #[test]
    fn terms_sum_to_the_total_and_stay_finite((s, c) in any_case()) {
        for f in run(&measured(), &s, &c) {
            prop_assert_eq!(f.latency_ns.0, f.terms.iter().map(|t| t.latency_ns.0).sum::<u64>());
            prop_assert!(f.latency_ns.0 > 0 && f.latency_ns.0 < 1_000_000_000_000_000);
            prop_assert!((0.0..=1.0).contains(&f.rate_kept));
        }
    }

    #[test]
    fn a_search_is_reported_what_a_forecast_says((s, c) in any_case(), cap in proptest::option::of(10.0f64..20_000.0)) {
        let mut c = c;
        c.vms[0].cap = cap.map(Iops);
        let search = SliceSearch::new(&measured(), &s).unwrap().briefs(&c).unwrap();
        let whole = run(&measured(), &s, &c);
        let same = |f: &Forecast| Brief { latency_ns: f.latency_ns, rate_kept: f.rate_kept };
        prop_assert_eq!(search, whole.iter().map(same).collect::<Vec<_>>());
    }

    #[test]
    fn more_load_elsewhere_never_helps((s, mut c) in any_case(), factor in 1.0f64..4.0, cap in proptest::option::of(10.0f64..20_000.0)) {
        // With a fixed budget a faster queue uses it up sooner and its slice ends earlier: no such
        // promise then.
        c.bfq.max_budget = None;
        let mut more = s.clone();
        let last = more.vms.len() - 1;
        if last > 0 {
            c.vms[0].cap = cap.map(Iops);
        }
        for t in &mut more.vms[last].tasks {
            t.rate = t.rate.map(|r| Iops(r.0 * factor));
        }
        let (a, b) = (run(&measured(), &s, &c), run(&measured(), &more, &c));
        let mine: usize = s.vms[..last].iter().map(|vm| vm.tasks.len()).sum();
        for (a, b) in a.iter().zip(&b).take(mine) {
            no_better(a, b)?;
        }
    }

    #[test]
    fn a_heavier_weight_never_hurts_its_vm((s, c) in any_case(), heavier in 1u32..=1000) {
        let mut up = c.clone();
        up.vms[0].weight = up.vms[0].weight.max(heavier);
        let (a, b) = (run(&measured(), &s, &c), run(&measured(), &s, &up));
        for (a, b) in a.iter().zip(&b).take(s.vms[0].tasks.len()) {
            no_better(b, a)?;
        }
        for (a, b) in a.iter().zip(&b).skip(s.vms[0].tasks.len()) {
            no_better(a, b)?;
        }
    }

    #[test]
    fn a_longer_timeout_never_shortens_the_tail((s, c) in any_case(), more in 0u64..300) {
        let mut up = c.clone();
        up.bfq.timeout_sync = Nanos(c.bfq.timeout_sync.0 + more * 1_000_000);
        for (a, b) in run(&measured(), &s, &c).iter().zip(&run(&measured(), &s, &up)) {
            no_better(a, b)?;
        }
    }

    #[test]
    fn longer_idling_never_shortens_the_tail((s, mut c) in any_case(), more in 0u64..20) {
        // Among idling configurations; to stop idling is another regime, where a flood takes the
        // rate instead.
        c.bfq.slice_idle = Nanos(c.bfq.slice_idle.0.max(1));
        let mut up = c.clone();
        up.bfq.slice_idle = Nanos(c.bfq.slice_idle.0 + more * 1_000_000);
        for (a, b) in run(&measured(), &s, &c).iter().zip(&run(&measured(), &s, &up)) {
            no_better(a, b)?;
        }
    }

    #[test]
    fn a_looser_cap_on_another_vm_never_helps((s, c) in any_case(), cap in 1.0f64..20_000.0, more in 0.0f64..20_000.0) {
        let last = s.vms.len() - 1;
        // A VM below its rates always has a request waiting: its allowance comes at once, and not
        // spread as declared.
        let declared: f64 = s.vms[last].tasks.iter().filter_map(|t| t.rate).map(|r| r.0).sum();
        let looser = if cap < declared { (cap + more).min(0.999 * declared).max(cap) } else { cap + more };
        let (mut tight, mut loose) = (c.clone(), c);
        tight.bfq.max_budget = None;
        loose.bfq.max_budget = None;
        tight.vms[last].cap = Some(Iops(cap));
        loose.vms[last].cap = Some(Iops(looser));
        let (a, b) = (run(&measured(), &s, &tight), run(&measured(), &s, &loose));
        let mine: usize = s.vms[..last].iter().map(|vm| vm.tasks.len()).sum();
        for (a, b) in a.iter().zip(&b).take(mine) {
            no_better(a, b)?;
        }
    }

    #[test]
    fn extreme_input_stays_finite(rate in prop_oneof![Just(0.0), Just(1e-9), Just(1e12), Just(f64::MAX)],
                                  depth in prop_oneof![Just(1u32), Just(1024)], block in prop_oneof![Just(512u64), Just(16 << 20)],
                                  weight in prop_oneof![Just(1u32), Just(1000)], e in any_elevator(), b in any_bfq()) {
        let mut t = task("t", rate, 300);
        t.depth = depth;
        t.block = Bytes(block);
        let s = spec(LabKind::Qemu, &[vec![t.clone(), flood(1024)], vec![t]]);
        let mut c = config(&s, e, b);
        c.vms[0].weight = weight;
        for f in run(&measured(), &s, &c) {
            prop_assert!(f.latency_ns.0 < u64::MAX / 4 && f.rate_kept.is_finite());
            if rate > 1e9 && f.rate_kept < 1.0 {
                prop_assert!(ms(&f) > 1_000.0);
            }
        }
        let f = run(&measured(), &s, &c);
        if rate > 1e9 {
            prop_assert!(f[0].rate_kept < 1.0 && f[2].rate_kept < 1.0);
        }
    }
}
