use rtvirtio_spec::LabKind;
use rtvirtio_units::{Iops, Nanos};

use super::*;
use crate::testkit::{config, paper_mix, point, quick, spec, task, twin};
use crate::types::Forecast;

/// The paper's host: T_agg = 245 MB/s. 4 KiB at the best depth: 245e6 / 4096 requests per second.
fn paper_profile() -> Profile {
    let mut p = twin();
    p.read = vec![point(1, 20_000.0, [50, 60, 100, 200]), point(32, 245e6 / 4096.0, [500, 600, 900, 1_000])];
    p.read_bfq = Vec::new();
    p.write.clone_from(&p.read);
    p
}

fn term(f: &Forecast, side: Side, name: &str) -> f64 {
    f.terms.iter().find(|t| t.side == side && t.name == name).unwrap().latency_ns.as_secs_f64()
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-8 + 1e-6 * b.abs(), "{a} is not {b}");
}

#[test]
fn equations_by_hand_with_the_papers_numbers() {
    // 4 VMs, each one task of 1500/s x 4 KiB, guest and host BFQ, SI = 4 ms, TS = 64 ms.
    let s = spec(LabKind::Qemu, &vec![vec![task("heavy", 1500.0, 900)]; 4]);
    let bfq =
        Bfq { slice_idle: Nanos::from_millis(4), timeout_sync: Nanos::from_millis(64), ..Bfq::default() };
    let mut c = config(&s, Elevator::Bfq, bfq);
    for vm in &mut c.vms {
        vm.guest_elevator = Elevator::Bfq;
        vm.guest_bfq = bfq;
    }
    let f = &Analytical::default().forecast(&paper_profile(), &s, &c).unwrap()[0];

    // T_H = 245e6 / 1024 KiB/s = 239257.8125; A = 1500 * 4 = 6000 KiB; phi = 1/4. (3): T_G = 0.36 *
    // 0.25 * T_H = 21533.203125 KiB/s. (5): T_tau = 0.36 * 1 * T_G = 7751.953125 KiB/s. E(SI_H) = 1
    // - 0.5 * 4/8 = 0.75; E(SI_G) = 1 - 1e-6 / 2 = 0.9999995.
    close(term(f, Side::Host, "switch"), 4.0 * 1.9e-6);
    close(term(f, Side::Host, "own-service"), (6000.0 + 8192.0 - 4.0) / (0.75 * 21_533.203_125));
    close(term(f, Side::Host, "own-service"), 0.878_519_3);
    close(term(f, Side::Host, "other-vms"), (18_000.0 + 8192.0) / (0.75 * 239_257.812_5));
    close(term(f, Side::Host, "timeout-sync"), 0.7 * 64.0 / 1000.0);
    close(term(f, Side::Guest, "switch"), 1.9e-6);
    close(term(f, Side::Guest, "own-service"), (6000.0 + 8188.0) / (0.999_999_5 * 7_751.953_125));
    close(term(f, Side::Guest, "other-tasks"), 8192.0 / (0.999_999_5 * 21_533.203_125));
    close(term(f, Side::Guest, "timeout-sync"), 1e-6 * 0.064);
    // (1): the sum.
    let sum: f64 = f.terms.iter().map(|t| t.latency_ns.as_secs_f64()).sum();
    close(f.latency_ns.as_secs_f64(), sum);
    close(f.latency_ns.as_secs_f64(), 3.279_976_6);
    assert!((f.rate_kept - 1.0).abs() < 1e-12);
}

#[test]
fn the_printed_slice_idle_effect_contradicts_the_papers_text() {
    // The text: reducing slice_idle raises throughput and lowers latency, and lambda near 0 means
    // "minimal impact".
    let s = paper_mix(LabKind::Process, 4);
    let at = |effect, ms| {
        let bfq = Bfq { slice_idle: Nanos::from_millis(ms), ..Bfq::default() };
        let m = Analytical { slice_idle_effect: effect, ..Analytical::default() };
        m.forecast(&paper_profile(), &s, &config(&s, Elevator::Bfq, bfq)).unwrap()[0].latency_ns
    };
    assert_eq!(at(SliceIdleEffect::AsPrinted, 8), at(SliceIdleEffect::Corrected, 8), "equal at the default");
    assert!(at(SliceIdleEffect::Corrected, 1) < at(SliceIdleEffect::Corrected, 8));
    // As printed, 1 ms is predicted more than seven times worse than 8 ms.
    assert!(at(SliceIdleEffect::AsPrinted, 1).0 > 7 * at(SliceIdleEffect::AsPrinted, 8).0);

    let m = Analytical { slice_idle_effect: SliceIdleEffect::AsPrinted, ..Analytical::default() };
    let one = Bfq { slice_idle: Nanos::from_millis(1), ..Bfq::default() };
    close(m.idle_effect(1e-6, &one), (1.0 - 1e-6) / 8.0);
    close(Analytical::default().idle_effect(1e-6, &one), 1.0 - 1e-6 / 8.0);
}

#[test]
fn a_guest_without_bfq_has_only_its_measured_overhead() {
    let s = paper_mix(LabKind::Qemu, 2);
    let p = crate::testkit::with_guest(paper_profile(), "qemu-kvm", [120, 300, 1_100, 4_000], 0.0);
    let f = &Analytical::default().forecast(&p, &s, &config(&s, Elevator::Bfq, Bfq::default())).unwrap()[0];
    let guest: Vec<_> = f.terms.iter().filter(|t| t.side == Side::Guest).collect();
    assert_eq!(guest.len(), 1);
    // The guest's p99.99 above the device's median of 50 us.
    close(guest[0].latency_ns.as_secs_f64(), 1.1e-3 - 0.05e-3);
}

#[test]
fn what_the_paper_has_no_formula_for_is_refused() {
    let s = paper_mix(LabKind::Process, 2);
    for elevator in [Elevator::None, Elevator::MqDeadline, Elevator::Kyber] {
        let e = Analytical::default().forecast(&twin(), &s, &config(&s, elevator, quick())).unwrap_err();
        assert!(matches!(e, ModelError::NotCovered { .. }), "{e}");
        assert!(e.to_string().contains("bfq"));
    }
}

#[test]
fn weights_budgets_and_timeouts_act_in_the_right_direction() {
    let s = paper_mix(LabKind::Process, 4);
    let base = config(&s, Elevator::Bfq, Bfq::default());
    let at = |c: &Config, i: usize| Analytical::default().forecast(&twin(), &s, c).unwrap()[i].latency_ns;
    let mut heavier = base.clone();
    heavier.vms[0].weight = 700;
    assert!(at(&heavier, 0) < at(&base, 0));
    assert!(at(&heavier, 3) > at(&base, 3));
    let mut smaller = base.clone();
    smaller.bfq.max_budget = Some(Bytes::from_kib(512));
    assert!(at(&smaller, 0) < at(&base, 0));
    let mut shorter = base.clone();
    shorter.bfq.timeout_sync = Nanos::from_millis(32);
    assert!(at(&shorter, 0) < at(&base, 0));
    let mut capped = base.clone();
    capped.vms[3].cap = Some(Iops(500.0));
    assert!(at(&capped, 0) < at(&base, 0));
}

#[test]
fn demand_beyond_the_device_loses_rate() {
    let s = paper_mix(LabKind::Process, 20);
    let f = Analytical::default().forecast(&twin(), &s, &config(&s, Elevator::Bfq, Bfq::default())).unwrap();
    close(f[0].rate_kept, 15_500.0 / 42_000.0);
}
