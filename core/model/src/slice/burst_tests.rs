//! Requests that come at once, against the same by event simulation.

use rtvirtio_sched::{Config as Scheduler, Cost, Line, VmConfig, WindowConfig};
use rtvirtio_sim::{Arrival as Arrivals, Load, Sim};
use rtvirtio_spec::{Arrival, Burst, LabKind, Task};
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::{Nanos, Percentile};

use super::*;
use crate::testkit::{config, disk, quick, spec, task, twin};
use crate::types::{Bfq, Elevator};

fn at_once(n: u32, rate: f64) -> Task {
    let burst = (n > 1).then_some(Burst::Requests { requests: n });
    Task { burst, depth: n.max(64), arrival: Arrival::Open, ..task("batch", rate, 300) }
}

fn predicted(profile: &Profile, vms: &[Vec<Task>], elevator: Elevator, bfq: Bfq) -> Vec<f64> {
    let spec = spec(LabKind::Process, vms);
    let config = config(&spec, elevator, bfq);
    let all = Slice.forecast(profile, &spec, &config).unwrap();
    all.iter().map(|of| of.latency_ns.as_secs_f64()).collect()
}

/// The longest latencies of loads on the testkit's twin: one channel, 60 us and 1 ns a byte.
fn simulated(loads: &[(usize, Arrivals)]) -> Vec<f64> {
    let text = "description = \"test\"\nchannels = 1\nread = { base = \"60us\", per_byte_ns = 1.0 }\nwrite = { base = \"60us\", per_byte_ns = 1.0 }";
    let device = TwinProfile::parse("test", text).unwrap();
    let line = Line { base_ns: 60_000, per_mib_ns: 1 << 20 };
    let vms = loads.iter().map(|(vm, _)| *vm).max().unwrap() + 1;
    let scheduler = Scheduler {
        cost: Cost { read: line, write: line, flush_ns: 1_000, discard_ns: 60_000 },
        window: WindowConfig::fixed(1_024),
        vms: vec![VmConfig::default(); vms],
        ..Scheduler::default()
    };
    let loads: Vec<Load> = loads.iter().map(|(vm, arrival)| Load::reads(*vm, *arrival)).collect();
    let mut sim = Sim::new(&scheduler, device, 1 << 30, &loads, 1).unwrap();
    sim.run(Nanos::from_millis(20_000)).unwrap();
    sim.result().loads.iter().map(|of| of.max.as_secs_f64()).collect()
}

#[test]
fn a_burst_waits_for_itself_as_in_simulation() {
    for (n, rate) in [(8, 200.0), (32, 200.0), (100, 1_000.0), (256, 2_000.0)] {
        let one = predicted(&twin(), &[vec![at_once(1, rate)]], Elevator::None, quick())[0];
        let many = predicted(&twin(), &[vec![at_once(n, rate)]], Elevator::None, quick())[0];
        let period = Nanos::from_secs_f64(f64::from(n) / rate);
        let seen = simulated(&[(0, Arrivals::Bursts { count: n, period })])[0];
        assert!(many >= one, "{n} at once: {many} s, evenly: {one} s");
        // The profile's tail of the device itself, 1.8 ms, is not in the simulation.
        let queued = many - one;
        assert!(
            many >= seen && queued <= seen * 1.1,
            "{n} at once: {many} s, of it {queued}; simulated {seen} s"
        );
    }
}

#[test]
fn a_neighbour_waits_for_a_whole_burst_as_in_simulation() {
    let even = task("even", 100.0, 300);
    let vms = |n| [vec![even.clone()], vec![at_once(n, 500.0)]];
    let latency = |n| predicted(&twin(), &vms(n), Elevator::None, quick())[0];
    let seen = simulated(&[
        (0, Arrivals::Periodic { period: Nanos::from_millis(10), phase: Nanos(1_000) }),
        (0, Arrivals::Bursts { count: 64, period: Nanos::from_millis(128) }),
    ])[0];
    assert!(
        latency(64) >= seen && latency(64) - latency(1) <= seen * 1.1,
        "{} {} {seen}",
        latency(64),
        latency(1)
    );
}

#[test]
fn more_at_once_is_never_predicted_to_take_less() {
    for profile in [twin(), disk()] {
        for (elevator, bfq) in [
            (Elevator::None, quick()),
            (Elevator::MqDeadline, quick()),
            (Elevator::Kyber, quick()),
            (Elevator::Bfq, quick()),
            (Elevator::Bfq, Bfq::default()),
        ] {
            let latencies = |n| {
                let vms = [vec![at_once(n, 400.0), task("even", 50.0, 300)], vec![task("other", 50.0, 300)]];
                predicted(&profile, &vms, elevator, bfq)
            };
            let mut before = latencies(1);
            for n in [2, 7, 30, 64] {
                let now = latencies(n);
                let own = (now[0], before[0]);
                assert!(own.0 > own.1, "{elevator:?} {n}: {own:?}");
                assert!(
                    now.iter().zip(&before).all(|(now, before)| now >= before),
                    "{elevator:?} {n}: {now:?}"
                );
                before = now;
            }
        }
    }
}

#[test]
fn models_of_even_requests_refuse_bursts() {
    let spec = spec(LabKind::Process, &[vec![at_once(8, 200.0)]]);
    let config = config(&spec, Elevator::Bfq, Bfq::default());
    let refused = crate::Analytical::default().forecast(&twin(), &spec, &config).unwrap_err();
    assert!(matches!(refused, ModelError::NotCovered { model: "analytical", .. }), "{refused}");
}

#[test]
fn the_middle_of_a_burst_waits_for_half_of_it() {
    let half = |n| {
        let mut of = at_once(n, 200.0);
        of.targets[0].percentile = Percentile(50.0);
        predicted(&twin(), &[vec![of]], Elevator::None, quick())[0]
    };
    let whole = |n| predicted(&twin(), &[vec![at_once(n, 200.0)]], Elevator::None, quick())[0];
    let (half, whole) = (half(100) - half(1), whole(100) - whole(1));
    assert!((half / whole - 49.0 / 99.0).abs() < 0.01, "{half} {whole}");
}
