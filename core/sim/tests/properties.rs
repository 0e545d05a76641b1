//! Invariants of the scheduler under random loads.

mod common;

use std::collections::HashMap;

use common::{COST, SIZE, config, device};
use proptest::prelude::*;
use rtvirtio_sched::{
    Cap, Class, CompletedRequest, Direction, Next, Piece, Policy, Priority, Request, Scheduler, Tspec,
    VmConfig, VmId,
};
use rtvirtio_sim::{Arrival, Load, Observer, Sim};
use rtvirtio_units::Nanos;

const SECOND: Nanos = Nanos(1_000_000_000);

/// Accounts for requests and pieces.
#[derive(Default)]
struct Ledger {
    open: HashMap<(VmId, u64), u64>,
    /// Bytes of each request that are not completed.
    mistakes: Vec<String>,
    at_device: u32,
    most_at_device: u32,
    finished: u64,
}

impl Observer for Ledger {
    fn on_submit(&mut self, _: Nanos, vm: VmId, r: &Request) {
        if self.open.insert((vm, r.tag), r.len).is_some() {
            self.mistakes.push(format!("{} twice", r.tag));
        }
    }
    fn on_dispatch(&mut self, _: Nanos, _: &Piece) {
        self.at_device += 1;
        self.most_at_device = self.most_at_device.max(self.at_device);
    }
    fn on_piece_complete(&mut self, _: Nanos, p: &Piece) {
        self.at_device -= 1;
        match self.open.get_mut(&(p.vm, p.tag)) {
            Some(left) if *left >= p.len => *left -= p.len,
            other => self.mistakes.push(format!("{p:?} of {other:?}")),
        }
    }
    fn on_complete(&mut self, _: Nanos, f: &CompletedRequest) {
        self.finished += 1;
        if self.open.remove(&(f.vm, f.request.tag)) != Some(0) {
            self.mistakes.push(format!("{f:?} finished too early"));
        }
    }
    fn on_idle(&mut self, now: Nanos, next: &Next, s: &Scheduler) {
        let right = match next {
            Next::Idle => s.backlog() == 0,
            Next::Full => s.inflight() >= s.window(),
            Next::Wait(at) => *at > now && s.backlog() > 0,
            Next::Piece(_) => false,
        };
        if !right {
            self.mistakes.push(format!("{next:?} at {now} with {} waiting", s.backlog()));
        }
    }
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(Policy::ALL.to_vec())
}

fn any_load(vms: usize) -> impl Strategy<Value = Load> {
    let arrival = prop_oneof![
        (1u32..64).prop_map(|depth| Arrival::Closed { depth }),
        (100.0..20_000.0f64).prop_map(|rate| Arrival::Poisson { rate }),
        (1u32..40, 1_000_000u64..50_000_000)
            .prop_map(|(count, period)| Arrival::Bursts { count, period: Nanos(period) }),
        (1u32..32, 1_000_000u64..50_000_000, 1_000_000u64..50_000_000)
            .prop_map(|(depth, on, off)| Arrival::OnOff { depth, on: Nanos(on), off: Nanos(off) }),
    ];
    let class = prop::sample::select(vec![Class::RealTime, Class::BestEffort, Class::Idle]);
    (0..vms, arrival, 0.0..1.0f64, 1u64..2_000_000, class, 0u8..8).prop_map(
        |(vm, arrival, writes, len, class, level)| Load {
            writes,
            len,
            priority: Priority { class, level },
            ..Load::reads(vm, arrival)
        },
    )
}

fn any_cap() -> impl Strategy<Value = Cap> {
    let spec = |rates: std::ops::Range<u64>, least: u64| {
        prop::option::of((rates, 0..least * 8, prop::option::of(1u64..4)).prop_map(
            move |(rate, more, peak)| Tspec {
                rate,
                burst: least + more,
                peak: peak.map(|times| rate * times),
            },
        ))
    };
    (spec(10..20_000, 1), spec(1 << 20..1 << 30, 64 << 10), spec(10_000_000..900_000_000, 200_000))
        .prop_map(|(requests, bytes, time)| Cap { requests, bytes, time, per_request: 1 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Every request completes once and whole, the device never holds more than the window, and the
    /// scheduler is idle only for a valid reason.
    #[test]
    fn no_request_is_lost_or_completed_twice(
        policy in any_policy(),
        window in 1u32..16,
        channels in 1u32..5,
        caps in prop::collection::vec((any_cap(), any_cap()), 3),
        loads in prop::collection::vec(any_load(3), 1..5),
        seed in 0u64..1_000,
    ) {
        let vms = caps.into_iter().map(|(r, w)| VmConfig { caps: [r, w], ..VmConfig::default() }).collect();
        let config = config(policy, window, vms);
        let mut sim = Sim::with_observer(&config, device(channels), SIZE, &loads, seed, Ledger::default()).unwrap();
        sim.run(Nanos(200_000_000)).unwrap();
        let result = sim.result();
        let ledger = sim.into_observer();
        prop_assert!(ledger.mistakes.is_empty(), "{:?}", &ledger.mistakes[..ledger.mistakes.len().min(3)]);
        prop_assert!(ledger.most_at_device <= window);
        prop_assert_eq!(ledger.finished, result.requests);
        prop_assert_eq!(ledger.finished, result.loads.iter().map(|l| l.n).sum::<u64>());
    }

    /// In any interval a capped VM gets at most `min(M + p t, b + r t)`, and a throttled piece goes
    /// at the first moment that this allows.
    #[test]
    fn caps_hold_and_do_not_idle(cap in any_cap(), len in 1u64..300_000, depth in 1u32..8) {
        let vm = VmConfig { caps: [cap, Cap::default()], ..VmConfig::default() };
        let config = config(Policy::Drr, 64, vec![vm]);
        let loads = [Load { len, ..Load::reads(0, Arrival::Closed { depth }) }];
        let mut sim = Sim::with_observer(&config, device(64), SIZE, &loads, 1, PieceLog::default()).unwrap();
        sim.run(Nanos(300_000_000)).unwrap();
        let PieceLog { given, waits } = sim.into_observer();
        let limits = [(cap.requests, 0, 1), (cap.bytes, 1, config.quantum), (cap.time, 2, COST.max_cost(Direction::Read, config.quantum))];
        for (spec, which, most) in limits {
            let Some(spec) = spec else { continue };
            for (rate, burst) in [Some((spec.rate, spec.burst)), spec.peak.map(|p| (p, most))].into_iter().flatten() {
                for i in 0..given.len().min(300) {
                    let mut sum = 0u128;
                    for (at, tokens) in &given[i..given.len().min(i + 300)] {
                        sum += u128::from(tokens[which]);
                        prop_assert!(
                            sum * 1_000_000_000 <= u128::from(rate) * u128::from(at.0 - given[i].0.0) + u128::from(burst) * 1_000_000_000
                        );
                    }
                }
            }
        }
        // After the announced wake-up, without other events, the next piece goes.
        for (at, until) in waits.iter().take(300) {
            let next = given.iter().map(|g| g.0).find(|t| t > at);
            prop_assert!(next.is_none_or(|t| t <= *until || depth > 1), "{next:?} after {until}");
        }
    }

    /// Backlogged VMs get equal numbers of pieces by round robin, and device time by weight under
    /// `drr`, to within a quantum each.
    #[test]
    fn turns_are_fair_within_a_quantum(
        lens in prop::collection::vec(1u64..200_000, 2..6),
        weights in prop::collection::vec(1u32..50, 6),
        window in 1u32..8,
    ) {
        for policy in [Policy::RoundRobin, Policy::Drr] {
            let vms: Vec<VmConfig> =
                weights.iter().take(lens.len()).map(|w| VmConfig { weight: *w, ..VmConfig::default() }).collect();
            let config = config(policy, window, vms);
            let loads: Vec<Load> = lens
                .iter()
                .enumerate()
                .map(|(vm, len)| Load { len: *len, ..Load::reads(vm, Arrival::Closed { depth: 64 }) })
                .collect();
            let mut sim = Sim::with_observer(&config, device(1), SIZE, &loads, 1, PieceLog::default()).unwrap();
            sim.run(SECOND).unwrap();
            let result = sim.result();
            let pieces: Vec<u64> = result.vms.iter().map(|c| c.shared).collect();
            if policy == Policy::RoundRobin {
                let (least, most) = (pieces.iter().min().unwrap(), pieces.iter().max().unwrap());
                prop_assert!(most - least <= 1, "{pieces:?}");
                continue;
            }
            // Shreedhar and Varghese, theorem 4: |S_i/q_i - S_j/q_j| <= 1 + L/q_i + L/q_j with
            // quanta of at least L; the log holds all VMs' pieces in order, so time is the sum of
            // their costs.
            let most = COST.max_cost(Direction::Read, config.quantum).max(COST.max_cost(Direction::Write, config.quantum));
            let lightest = *weights.iter().take(lens.len()).min().unwrap();
            let quanta: Vec<f64> =
                weights.iter().take(lens.len()).map(|w| (most * u64::from(*w) / u64::from(lightest)) as f64).collect();
            let log = sim.into_observer();
            let time = |vm: usize| log.given.iter().filter(|g| g.1[3] == vm as u64).map(|g| g.1[2] as f64).sum::<f64>();
            let rounds: Vec<f64> = (0..lens.len()).map(|vm| time(vm) / quanta[vm]).collect();
            for i in 0..rounds.len() {
                for j in 0..rounds.len() {
                    let allowed = 1.0 + most as f64 / quanta[i] + most as f64 / quanta[j];
                    prop_assert!((rounds[i] - rounds[j]).abs() <= allowed + 1e-6, "{rounds:?}");
                }
            }
        }
    }
}

/// Each piece at its submission: requests, bytes, time and VM.
#[derive(Default)]
struct PieceLog {
    given: Vec<(Nanos, [u64; 4])>,
    waits: Vec<(Nanos, Nanos)>,
}

impl Observer for PieceLog {
    fn on_dispatch(&mut self, now: Nanos, p: &Piece) {
        self.given.push((now, [u64::from(p.offset == 0), p.len, p.cost, p.vm.0.into()]));
    }
    fn on_idle(&mut self, now: Nanos, next: &Next, _: &Scheduler) {
        if let Next::Wait(at) = next {
            self.waits.push((now, *at));
        }
    }
}

/// A real-time request passes other requests of its own VM only; an idle one is not starved.
#[test]
fn priorities_order_one_vm_only() {
    let vms = vec![VmConfig::default(), VmConfig::default()];
    let config = config(Policy::RoundRobin, 1, vms);
    let urgent = Load {
        name: "urgent".into(),
        priority: Priority::URGENT,
        ..Load::reads(0, Arrival::Periodic { period: Nanos(10_000_000), phase: Nanos(0) })
    };
    let flood = Load { name: "flood".into(), ..Load::reads(0, Arrival::Closed { depth: 32 }) };
    let idle = Load {
        name: "idle".into(),
        priority: Priority { class: Class::Idle, level: 0 },
        ..Load::reads(0, Arrival::Closed { depth: 1 })
    };
    let other = Load { name: "other".into(), ..Load::reads(1, Arrival::Closed { depth: 32 }) };
    let mut sim = Sim::new(&config, device(1), SIZE, &[urgent, flood, idle, other], 1).unwrap();
    sim.run(Nanos(20_000_000_000)).unwrap();
    let r = sim.result();
    // At most the piece at the device, one of the other VM, and itself; and once a second the aged
    // idle request, with one more of the other VM.
    assert!(r.loads[0].max.0 <= 5 * 64_096, "{}", r.loads[0].max);
    assert!(r.loads[0].p99.0 <= 3 * 64_096 + 200, "{}", r.loads[0].max);
    assert!(r.loads[1].p50 > r.loads[0].max);
    // Half of the device each, whatever priorities VM 0 uses.
    let share = r.loads[3].rate / r.loads.iter().map(|l| l.rate).sum::<f64>();
    assert!((share - 0.5).abs() < 0.01, "{share}");
    // At least once a second.
    assert!((18..=40).contains(&r.loads[2].n), "{}", r.loads[2].n);
}
