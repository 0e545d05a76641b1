//! Bounds against simulated worst cases, and isolation from a flood.

mod common;

use common::{COST, SIZE, config, device, known};
use proptest::prelude::*;
use rtvirtio_sched::bound::{Flow, admit, bounds};
use rtvirtio_sched::{Op, Policy, Reservation, VmConfig};
use rtvirtio_sim::{Arrival, Load, Sim};
use rtvirtio_units::Nanos;

/// A VM that submits `count` requests at once every `period`.
#[derive(Clone, Debug)]
struct BurstyVm {
    count: u32,
    period: Nanos,
    len: u64,
    deadline: Nanos,
    weight: u32,
}

impl BurstyVm {
    fn cost(&self) -> f64 {
        COST.time_of(Op::Read, self.len) as f64
    }

    /// Its demand: a burst at once, then the next after a period.
    fn flow(&self, vm: usize, promised: bool) -> Flow {
        let burst = f64::from(self.count) * self.cost();
        Flow {
            vm,
            rate: burst / self.period.0 as f64,
            burst,
            piece: self.cost(),
            outstanding: None,
            deadline: promised.then_some(self.deadline),
            weight: self.weight,
        }
    }

    fn vm(&self) -> VmConfig {
        let burst = u64::from(self.count) * self.cost() as u64;
        let rate = (burst as u128 * 1_000_000_000).div_ceil(self.period.0.into()) as u64;
        VmConfig {
            depth: 4_096,
            weight: self.weight,
            normal: Some(Reservation { rate, burst, deadline: self.deadline }),
            ..VmConfig::default()
        }
    }

    fn load(&self, vm: usize) -> Load {
        let arrival = Arrival::Bursts { count: self.count, period: self.period };
        Load { len: self.len, deadline: Some(self.deadline), ..Load::reads(vm, arrival) }
    }
}

fn any_bursty_vm() -> impl Strategy<Value = BurstyVm> {
    (
        1u32..12,
        2_000_000u64..40_000_000,
        prop::sample::select(vec![4_096u64, 16_384, 65_536]),
        300_000u64..20_000_000,
        1u32..8,
    )
        .prop_map(|(count, period, len, deadline, weight)| BurstyVm {
            count,
            period: Nanos(period),
            len,
            deadline: Nanos(deadline),
            weight,
        })
}

fn worst(policy: Policy, channels: u32, window: u32, bursty: &[BurstyVm], flood: bool) -> Vec<Nanos> {
    let mut vms: Vec<VmConfig> = bursty.iter().map(BurstyVm::vm).collect();
    let mut loads: Vec<Load> = bursty.iter().enumerate().map(|(vm, a)| a.load(vm)).collect();
    if flood {
        vms.push(VmConfig { weight: 1, ..VmConfig::default() });
        loads.push(Load { len: 65_536, ..Load::reads(bursty.len(), Arrival::Closed { depth: 32 }) });
    }
    let mut sim = Sim::new(&config(policy, window, vms), device(channels), SIZE, &loads, 1).unwrap();
    sim.run(Nanos(2_000_000_000)).unwrap();
    let result = sim.result();
    result.loads.iter().map(|l| l.max).collect()
}

/// While one of two servers is idle, a flow's burst is replenished faster than the device serves:
/// the piece that runs counts beside the burst.
#[test]
fn a_piece_at_the_device_counts_beside_the_bursts() {
    let (large, fast) = (COST.time_of(Op::Read, 65_536), 1.9);
    // The second piece begins when the bucket holds it, and ends with the first.
    let second = COST.time_of(Op::Read, 21_504);
    let begin = large - second;
    assert!(second as f64 <= fast * begin as f64, "within rate and burst");
    let small = COST.time_of(Op::Read, 512);
    let period = Nanos::from_millis(1_000);
    let load = |vm: usize, phase: u64, len: u64| Load {
        len,
        ..Load::reads(vm, Arrival::Periodic { period, phase: Nanos(phase) })
    };
    let loads = [load(0, 0, 65_536), load(0, begin, 21_504), load(1, begin + 1, 512)];
    let config = config(Policy::Fifo, 2, vec![VmConfig::default(); 2]);
    let mut sim = Sim::new(&config, device(2), SIZE, &loads, 1).unwrap();
    sim.run(Nanos::from_millis(2_500)).unwrap();
    let waited = sim.result().loads[2].max;
    assert_eq!(waited, Nanos(large - begin - 1 + small));
    let flow = |vm: usize, rate: f64, burst: u64| Flow {
        vm,
        rate,
        burst: burst as f64,
        piece: burst as f64,
        outstanding: None,
        deadline: None,
        weight: 1,
    };
    let flows = [flow(0, fast, large), flow(1, 1e-3, small)];
    let bound = bounds(Policy::Fifo, &known(2, 2), &flows)[1];
    assert!(bound.is_some_and(|bound| waited <= bound), "{waited} {bound:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// No request exceeds its bound, under any policy.
    #[test]
    fn no_request_takes_longer_than_its_bound(
        bursty in prop::collection::vec(any_bursty_vm(), 1..5),
        channels in 1u32..4,
        more in 0u32..4,
    ) {
        let window = channels + more;
        for policy in Policy::ALL {
            let flows: Vec<Flow> =
                bursty.iter().enumerate().map(|(vm, a)| a.flow(vm, policy == Policy::Edf)).collect();
            let bounds = bounds(policy, &known(channels, window), &flows);
            let worst = worst(policy, channels, window, &bursty, false);
            for (bound, worst) in bounds.iter().zip(&worst) {
                prop_assert!(bound.is_none_or(|b| *worst <= b), "{}: {worst} > {bound:?} of {bursty:?}", policy.name());
            }
        }
    }

    /// An admitted VM meets its deadline and its bound, also with a flood of 64 KiB requests.
    #[test]
    fn no_deadline_is_missed_when_admitted(
        bursty in prop::collection::vec(any_bursty_vm(), 1..5),
        channels in 1u32..4,
        more in 0u32..4,
    ) {
        let window = channels + more;
        let mut flows: Vec<Flow> = bursty.iter().enumerate().map(|(vm, a)| a.flow(vm, true)).collect();
        let flood = COST.time_of(Op::Read, 65_536) as f64;
        flows.push(Flow { vm: bursty.len(), rate: f64::INFINITY, burst: f64::INFINITY, piece: flood, outstanding: None, deadline: None, weight: 1 });
        let device = known(channels, window);
        prop_assume!(admit(&device, &flows).is_ok());
        let bounds = bounds(Policy::Edf, &device, &flows);
        let worst = worst(Policy::Edf, channels, window, &bursty, true);
        for (i, bursty) in bursty.iter().enumerate() {
            prop_assert!(worst[i] <= bursty.deadline);
            prop_assert!(bounds[i].is_some_and(|b| worst[i] <= b), "{} > {:?}", worst[i], bounds[i]);
        }
    }
}

/// The base case of the I/O domain: three VMs with 100 + 500 + 1500 requests per second, and a
/// fourth that floods.
#[test]
fn a_flood_takes_only_unreserved_time() {
    let rates = [100.0, 500.0, 1_500.0];
    let deadline = Nanos::from_micros(1_500);
    let read = COST.time_of(Op::Read, 4_096);
    let mut vms: Vec<VmConfig> = (0..3)
        .map(|_| {
            let rate = (rates.iter().sum::<f64>() * read as f64 * 1.05) as u64;
            VmConfig { normal: Some(Reservation { rate, burst: 4 * read, deadline }), ..VmConfig::default() }
        })
        .collect();
    vms.push(VmConfig::default());
    let mut loads = Vec::new();
    for vm in 0..3 {
        for rate in rates {
            let period = Nanos((1e9 / rate) as u64);
            let phase = Nanos(loads.len() as u64 * 13_577);
            loads.push(Load {
                deadline: Some(deadline),
                ..Load::reads(vm, Arrival::Periodic { period, phase })
            });
        }
    }
    loads.push(Load::reads(3, Arrival::Closed { depth: 32 }));
    let run = |policy| {
        let mut sim = Sim::new(&config(policy, 2, vms.clone()), device(1), SIZE, &loads, 1).unwrap();
        sim.run(Nanos(30_000_000_000)).unwrap();
        sim.result()
    };
    let edf = run(Policy::Edf);
    for (l, rate) in edf.loads.iter().zip(rates.iter().cycle()).take(9) {
        assert_eq!(l.late, 0, "{l:?}");
        assert!((l.rate / rate - 1.0).abs() < 0.01, "{l:?}");
    }
    // The device serves 15 602 of these per second.
    let left = 1e9 / read as f64 - 3.0 * 2_100.0;
    assert!(edf.loads[9].rate > 0.99 * left, "{} of {left}", edf.loads[9].rate);
    // FIFO: all requests wait behind the flood.
    let fifo = run(Policy::Fifo);
    assert!(fifo.loads[0].p50 > edf.loads[0].max, "{} {}", fifo.loads[0].p50, edf.loads[0].max);
}

/// A VM that floods beyond its reservation gets the reservation and its share of the rest, and no
/// reserved time of others.
#[test]
fn beyond_a_reservation_a_vm_gets_only_its_share() {
    let read = COST.time_of(Op::Read, 4_096);
    let reserved = |share: f64, deadline: u64| VmConfig {
        normal: Some(Reservation {
            rate: (share * 1e9) as u64,
            burst: 4 * read,
            deadline: Nanos::from_micros(deadline),
        }),
        ..VmConfig::default()
    };
    // The first floods with the shortest deadline of all; the second stays within its reservation;
    // the third has none.
    let vms = vec![reserved(0.2, 500), reserved(0.2, 2_000), VmConfig::default()];
    let period = Nanos(read * 10);
    let loads = [
        Load::reads(0, Arrival::Closed { depth: 32 }),
        Load {
            deadline: Some(Nanos::from_micros(2_000)),
            ..Load::reads(1, Arrival::Bursts { count: 2, period })
        },
        Load::reads(2, Arrival::Closed { depth: 32 }),
    ];
    let mut sim = Sim::new(&config(Policy::Edf, 1, vms), device(1), SIZE, &loads, 1).unwrap();
    sim.run(Nanos(10_000_000_000)).unwrap();
    let r = sim.result();
    let share = |i: usize| r.loads[i].rate * read as f64 / 1e9;
    assert_eq!(r.loads[1].late, 0, "{}", r.loads[1].max);
    // 20 % each reserved, and the other 60 % in halves.
    for (i, expected) in [(0, 0.5), (1, 0.2), (2, 0.3)] {
        assert!((share(i) - expected).abs() < 0.01, "{i}: {}", share(i));
    }
}
