use proptest::prelude::*;
use rtvirtio_spec::Criticality;

use super::super::effect::Change;
use super::super::unplanned::LONGEST_WAIT;
use super::*;

const SECOND: u64 = 1_000;
const TIMING: Timing =
    Timing { every: 3_600_000, confirm: 300_000, confirm_miss: 600_000, horizon: 86_400_000 };

fn vms(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn outline(changes: usize) -> Outline {
    Outline { changes, effects: Vec::new(), given_up: BTreeSet::new() }
}

fn load(ratio: f64) -> Observations {
    Observations { loads: [("plc read".to_owned(), ratio)].into(), ..Observations::default() }
}

fn missed(missed: bool) -> Observations {
    Observations { missed: [("plc/cycle".to_owned(), missed)].into(), ..Observations::default() }
}

/// A machine under a virtual clock, with a ready plan for every request.
struct Bench {
    replan: Replan,
    now: u64,
    running: BTreeSet<String>,
    policy: Policy,
    requests: Vec<(u64, Request)>,
    applied: Vec<(u64, Input)>,
}

impl Bench {
    fn new(policy: Policy) -> Self {
        let (requests, applied) = (Vec::new(), Vec::new());
        Self { replan: Replan::new(TIMING), now: 0, running: vms(&["plc"]), policy, requests, applied }
    }

    fn tick(&mut self, sight: &Observations, made: impl Fn(&Request) -> Outline) {
        self.replan.see(self.now, sight);
        if let Some(request) = self.replan.next(self.now, Some("c"), &self.running) {
            let outline = made(&request);
            self.requests.push((self.now, request.clone()));
            self.replan.planned(self.now, request.number, Ok(outline));
        }
        if let Some(proposal) = self.replan.to_apply(self.now, self.policy, |_| false) {
            self.applied.push((self.now, proposal.request.input.clone()));
            self.replan.applied(self.now);
        }
        self.now += 10 * SECOND;
    }

    fn run(&mut self, seconds: u64, sight: &Observations) {
        for _ in 0..seconds / 10 {
            self.tick(sight, |_| outline(1));
        }
    }
}

#[test]
fn the_first_plan_is_made_at_once_and_only_once() {
    let mut bench = Bench::new(Policy::Auto);
    bench.run(3_600, &load(1.0));
    assert_eq!((bench.applied.len(), bench.applied[0].0), (1, 10 * SECOND), "one look after they came");
    // Without running VMs no plan is requested.
    let mut bench = Bench::new(Policy::Auto);
    bench.running.clear();
    bench.run(3_600, &Observations::default());
    assert_eq!(bench.requests, []);
}

#[test]
fn more_load_a_slower_device_and_misses_are_planned_for_after_a_while() {
    let mut bench = Bench::new(Policy::Auto);
    bench.run(4_000, &load(1.0));
    bench.run(200, &load(2.0));
    bench.run(4_000, &load(1.0));
    assert_eq!(bench.applied.len(), 1, "too short");
    bench.run(400, &load(2.0));
    assert_eq!((bench.applied.len(), bench.applied[1].1.loads["plc read"]), (2, 3));
    assert!(bench.requests[1].1.reason.contains("1.95 times"), "{}", bench.requests[1].1.reason);
    let slow = Observations { slow: [("/dev/a".to_owned(), 2.0)].into(), ..load(2.0) };
    bench.run(3_000, &slow);
    assert_eq!(bench.applied.len(), 2, "within the hour of the last change");
    bench.run(1_000, &slow);
    assert_eq!((bench.applied.len(), bench.applied[2].1.slow["/dev/a"]), (3, 1));
    // A miss with another known cause is none of the plan's.
    let mut bench = Bench::new(Policy::Auto);
    bench.run(4_000, &missed(false));
    bench.run(590, &missed(true));
    assert_eq!(bench.applied.len(), 1);
    bench.run(40, &missed(true));
    assert_eq!((bench.applied.len(), bench.applied[1].1.caution), (2, 1));
    bench.run(40_000, &missed(true));
    assert_eq!((bench.applied.len(), bench.applied[3].1.caution), (4, MOST_CAUTION), "and no further");
    let mut bench = Bench::new(Policy::Auto);
    let given_up = Outline { given_up: vms(&["plc/cycle"]), ..outline(1) };
    for _ in 0..2_000 {
        bench.tick(&missed(true), |_| given_up.clone());
    }
    assert_eq!(bench.applied.len(), 1, "it was predicted");
}

#[test]
fn contracts_and_vms_that_come_do_not_wait_and_one_that_goes_changes_nothing() {
    let mut bench = Bench::new(Policy::Auto);
    bench.run(60, &load(1.0));
    bench.running = vms(&["hist", "plc"]);
    bench.run(60, &load(1.0));
    assert_eq!((bench.applied.len(), bench.applied[1].1.vms.len()), (2, 2));
    for running in [&["plc"][..], &["hist"], &["hist", "plc"], &["plc"]] {
        bench.running = vms(running);
        bench.run(4_000, &load(1.0));
    }
    assert_eq!(bench.applied.len(), 2);
    let changed = bench.replan.next(bench.now, Some("d"), &bench.running).unwrap();
    assert_eq!(changed.reason, "the contracts were changed");
}

#[test]
fn each_policy() {
    let mut bench = Bench::new(Policy::Ask);
    bench.run(60, &load(1.0));
    assert!(bench.applied.is_empty() && bench.requests.len() == 1);
    let proposal = bench.replan.proposal().unwrap().clone();
    assert!(proposal.waits(Policy::Ask, false).is_some() && proposal.waits(Policy::Ask, true).is_none());
    assert!(proposal.waits(Policy::Observe, true).is_some());
    // After a refusal the same plan is not made again; another one is.
    assert!(bench.replan.refuse() && !bench.replan.refuse());
    bench.run(4_000, &load(1.0));
    assert_eq!(bench.requests.len(), 1);
    bench.run(4_000, &load(2.0));
    assert_eq!(bench.requests.len(), 2);

    let hurts = |_: &Request| Outline {
        effects: vec![
            Effect { vm: "a".to_owned(), criticality: Criticality::Low, change: Change::Better },
            Effect { vm: "b".to_owned(), criticality: Criticality::High, change: Change::Worse },
        ],
        ..outline(1)
    };
    let mut bench = Bench::new(Policy::Auto);
    for _ in 0..10 {
        bench.tick(&load(1.0), hurts);
    }
    assert!(bench.applied.is_empty());
    let why = bench.replan.proposal().unwrap().waits(Policy::Auto, false).unwrap();
    assert!(why.contains("b (high)"), "{why}");
    // An accepted plan is applied.
    assert!(bench.replan.to_apply(bench.now, Policy::Auto, |_| true).is_some());
}

#[test]
fn a_proposal_is_withdrawn_when_its_cause_is_gone() {
    let mut bench = Bench::new(Policy::Auto);
    bench.run(4_000, &load(1.0));
    bench.policy = Policy::Ask;
    bench.run(400, &load(2.0));
    assert!(bench.replan.proposal().is_some());
    bench.run(86_000, &load(1.0));
    assert!(bench.replan.proposal().is_some(), "not before the horizon");
    bench.run(1_000, &load(1.0));
    assert!(bench.replan.proposal().is_none());
    assert_eq!(bench.requests.len(), 2, "no new one");
}

#[test]
fn a_failure_waits_longer_each_time_and_an_old_answer_is_none() {
    let mut replan = Replan::new(TIMING);
    let (running, mut times) = (vms(&["plc"]), Vec::new());
    for now in (0..3_000_000).step_by(1_000) {
        if let Some(request) = replan.next(now, Some("c"), &running) {
            replan.planned(now, request.number, Err(NoPlan::Whole("no host".to_owned())));
            times.push(now);
        }
    }
    assert_eq!(&times[..4], [2_000, 12_000, 32_000, 72_000]);
    assert!(times.windows(2).all(|w| w[1] - w[0] <= LONGEST_WAIT) && times.len() < 16, "{times:?}");
    assert_eq!(replan.failure(), Some("no host"));
    let mut replan = Replan::new(TIMING);
    assert_eq!(replan.next(0, Some("c"), &running), None);
    let first = replan.next(2_000, Some("c"), &running).unwrap();
    let second = replan.next(3_000, Some("d"), &running).unwrap();
    replan.planned(3_000, first.number, Ok(outline(1)));
    assert!(replan.proposal().is_none() && replan.is_planning());
    replan.planned(3_000, second.number, Ok(outline(1)));
    assert_eq!(replan.proposal().unwrap().request.contract, "d");
}

fn lacking(devices: &[&str]) -> BTreeMap<String, Unplanned> {
    let why = || Unplanned { why: "no profile".to_owned(), remedy: Some("rtvirtio profile".to_owned()) };
    devices.iter().map(|device| ((*device).to_owned(), why())).collect()
}

#[test]
fn a_device_that_cannot_be_planned_is_left_out_and_comes_back_without_a_wait() {
    let mut bench = Bench::new(Policy::Auto);
    bench.replan.lack(0, lacking(&["/dev/b"]));
    bench.run(60, &load(1.0));
    assert_eq!((bench.applied.len(), &bench.applied[0].1.without), (1, &vms(&["/dev/b"])));
    assert_eq!(bench.replan.unplanned(), lacking(&["/dev/b"]));
    // The profile arrives: planned without waiting for an hour.
    bench.replan.lack(bench.now, BTreeMap::new());
    assert_eq!(bench.replan.unplanned().len(), 1, "not before it is in force");
    bench.run(20, &load(1.0));
    assert_eq!((bench.applied.len(), bench.applied[1].1.without.len()), (2, 0));
    assert!(bench.replan.unplanned().is_empty());
    assert_eq!(bench.requests[1].1.reason, "/dev/b is planned for too");
    // And is removed again.
    bench.replan.lack(bench.now, lacking(&["/dev/b"]));
    bench.run(20, &load(1.0));
    assert_eq!((bench.applied.len(), &bench.applied[2].1.without), (3, &vms(&["/dev/b"])));
    bench.run(8_000, &load(1.0));
    assert_eq!(bench.requests.len(), 3, "it is not tried again and again");
}

#[test]
fn a_device_in_the_way_of_a_plan_is_left_out_at_once_and_tried_again_later() {
    let mut replan = Replan::new(TIMING);
    let running = vms(&["plc"]);
    let (mut tried, mut applied) = (Vec::new(), 0);
    for now in (0..400_000).step_by(1_000) {
        if let Some(request) = replan.next(now, Some("c"), &running) {
            if request.input.without.is_empty() && now < 300_000 {
                tried.push(now);
                replan.planned(now, request.number, Err(NoPlan::Devices(lacking(&["/dev/b"]))));
                let without = replan.next(now, Some("c"), &running);
                let Some(request) = without else { continue };
                replan.planned(now, request.number, Ok(outline(1)));
            } else {
                replan.planned(now, request.number, Ok(outline(1)));
            }
            applied += usize::from(replan.to_apply(now, Policy::Auto, |_| false).is_some());
            replan.applied(now);
        }
        let is_planned = tried.is_empty() || now >= 312_000;
        assert_eq!(replan.unplanned().is_empty(), is_planned, "{now}");
    }
    assert_eq!(tried, [2_000, 12_000, 32_000, 72_000, 152_000]);
    assert_eq!(applied, 2, "without it, and with it");
    assert!(replan.basis().unwrap().input.without.is_empty());
}

#[test]
fn a_service_that_begins_goes_on_from_what_is_in_force() {
    let mut bench = Bench::new(Policy::Auto);
    bench.run(4_000, &load(1.0));
    bench.run(400, &load(2.0));
    let basis = bench.replan.basis().cloned();
    let mut anew = Bench { now: bench.now, ..Bench::new(Policy::Auto) };
    anew.replan.found(basis, bench.now);
    anew.run(80_000, &load(1.0));
    assert_eq!(anew.requests, []);
    anew.run(10_000, &load(1.0));
    assert_eq!(anew.applied.len(), 1, "a day without the load");
}

#[test]
fn what_was_learned_of_a_load_outlives_the_service() {
    let mut bench = Bench::new(Policy::Auto);
    let days = |bench: &mut Bench, days: u64, ratio: f64| {
        for _ in 0..days * 288 {
            bench.tick(&load(ratio), |_| outline(1));
            bench.now += 290 * SECOND;
        }
    };
    // Up, down after a day, and up again: now the level stays for four days.
    for ratio in [3.0, 1.0, 3.0] {
        days(&mut bench, 2, ratio);
    }
    let basis = bench.replan.basis().cloned().unwrap();
    assert_eq!(basis.patience["plc read"], super::super::hysteresis::Backoff { growth: 4, fell: false });
    let changes = |bench: &Bench| bench.applied.len();
    let mut anew = Bench { now: bench.now, ..Bench::new(Policy::Auto) };
    anew.replan.found(Some(basis), bench.now);
    days(&mut anew, 3, 1.0);
    assert_eq!(changes(&anew), 0);
    days(&mut anew, 2, 1.0);
    assert_eq!(changes(&anew), 1);
    // Left, and needed again after another start.
    let basis = anew.replan.basis().cloned().unwrap();
    assert!(basis.patience["plc read"].fell && basis.input.loads.is_empty());
    let mut third = Bench { now: anew.now, ..Bench::new(Policy::Auto) };
    third.replan.found(Some(basis), anew.now);
    days(&mut third, 1, 3.0);
    assert_eq!(third.replan.basis().unwrap().patience["plc read"].growth, 16);
}

/// An observation, and for how many looks it stays.
fn any_sight() -> impl Strategy<Value = (u64, Observations)> {
    let load = 0.2f64..6.0;
    (1u64..1_500, load, 0.5f64..5.0, proptest::bool::ANY).prop_map(|(looks, load, slow, missed)| {
        let sight = Observations {
            loads: [("plc read".to_owned(), load)].into(),
            slow: [("/dev/a".to_owned(), slow)].into(),
            missed: [("plc/cycle".to_owned(), missed)].into(),
        };
        (looks, sight)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn changes_are_seldom_and_what_lasts_settles(
        all in proptest::collection::vec(any_sight(), 1..8),
    ) {
        let mut bench = Bench::new(Policy::Auto);
        for (looks, sight) in &all {
            for _ in 0..*looks {
                bench.tick(sight, |_| outline(1));
            }
        }
        // Whatever was seen: at most once in so long.
        prop_assert!(bench.applied.windows(2).all(|w| w[1].0 - w[0].0 >= TIMING.every));
        // The last lasts: after the longest horizon that regrets can have made nothing moves any
        // more, and the last load is planned for.
        let (_, last) = &all[all.len() - 1];
        let mut days = |days: u64| {
            for _ in 0..days * 288 {
                bench.tick(last, |_| outline(1));
                bench.now += 290 * SECOND;
            }
            bench.applied.len()
        };
        let settled = days(18);
        prop_assert_eq!(days(18), settled);
        let planned = bench.replan.basis().unwrap().input.loads.get("plc read").copied().unwrap_or(0);
        prop_assert!(planned >= load_level(last.loads["plc read"]));
    }

    #[test]
    fn a_load_that_comes_and_goes_settles(period in 2u64..120, busy in 1u64..60, ratio in 1.2f64..8.0) {
        let busy = busy.min(period - 1);
        let mut bench = Bench::new(Policy::Auto);
        // Hours, for 60 days, one look in five minutes.
        for look in 0..(60 * 24 * 12) {
            let is_busy = (look / 12) % period < busy;
            bench.tick(&load(if is_busy { ratio } else { 1.0 }), |_| outline(1));
            bench.now += 290 * SECOND;
        }
        let late = bench.applied.iter().filter(|(at, _)| *at > 40 * TIMING.horizon).count();
        prop_assert_eq!(late, 0, "{:?}", bench.applied);
        prop_assert!(bench.applied.len() <= 10);
    }
}
